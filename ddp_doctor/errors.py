"""The errors of the two commands. Each is a mistake in what they were given: exit status 2."""


class DoctorError(Exception):
    """What was given can't be used: what was found, and the next step."""

    def __init__(self, message: str, *, fix: str) -> None:
        super().__init__(message)
        self.message, self.fix = message, fix

    def __str__(self) -> str:
        return f"{self.message}\n  next: {self.fix}"


class UsageError(DoctorError):
    """An option is wrong, or the program or file that it names can't be used."""


class UnreadableLogError(DoctorError):
    """A log can't be read."""

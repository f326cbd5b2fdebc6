"""What the commands say: text that can't steer a terminal, and what is wrong with what they got."""

import re
from collections.abc import Mapping
from typing import Any, TextIO

# The control characters, and those that change the direction of a text or end its line.
_CONTROLS = re.compile(
    "[\\x00-\\x08\\x0b-\\x1f\\x7f-\\x9f\\u061c\\u200e\\u200f\\u2028-\\u202e\\u2066-\\u2069]"
)


def printable(text: str) -> str:
    """Escape what would steer a terminal or turn the text around; line breaks and tabs stay.

    WHY as JSON does it: JSON stays valid.
    """
    text = text.replace("\r\n", "\n")
    return text if text.isprintable() else _CONTROLS.sub(lambda m: f"\\u{ord(m[0]):04x}", text)


class PrintableOutput:
    """A stream that gets only such text."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._stream.write(printable(text))

    def __getattr__(self, name: str) -> Any:  # Any: whatever else a stream has
        return getattr(self._stream, name)


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


def whole_number(options: Mapping[str, str], name: str, *, least: int = 1) -> int:
    """Read the number that an option has. Raises UsageError."""
    if (text := options[name]).isdecimal() and int(text) >= least:
        return int(text)
    told = f"--{name}: found {text!r}, needs a whole number from {least}"
    raise UsageError(told, fix=options["usage"])

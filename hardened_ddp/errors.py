"""The failures that a user, a file or a machine can cause.

Owns the tree of exceptions. A class says what kind of failure it is (code, exit status, whether a
restart can help); the message of an instance says what was found, where, and why that matters;
`fix` says what to type next. Each code is a section of DDP_TROUBLESHOOTING.md.

Does not own: printing (ddp_training.py prints one of these, without a traceback).
Imports the standard library only, so that every layer can use it.
"""

from typing import ClassVar

# What the user's code may raise. WHY SystemExit: sys.exit(0) in it would end a rank or a worker
# without a word, with status 0.
ANY_FAILURE = (Exception, SystemExit)


class HardenedError(Exception):
    """Base of all our errors: a failure that has a known cause and a next step."""

    code: ClassVar[str] = "DDP-X01"
    exit_status: ClassVar[int] = 1
    is_retryable: ClassVar[bool] = False

    def __init_subclass__(
        cls, *, code: str, exit_status: int = 1, is_retryable: bool = False
    ) -> None:
        cls.code, cls.exit_status, cls.is_retryable = code, exit_status, is_retryable

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        text = f"[{self.code}] {self.message}"
        return f"{text}\n  next: {self.fix}" if self.fix else text


class ConfigError(HardenedError, code="DDP-C01", exit_status=2):
    """A setting is unknown, of the wrong type, out of range, or contradicts another one."""


class OwnLoopError(HardenedError, code="DDP-C02", exit_status=2):
    """A loop of the user's own does what protect could not make good after a fault."""


class LaunchError(HardenedError, code="DDP-L01", exit_status=2):
    """The environment that the launcher left is incomplete or contradicts itself."""


class GroupError(HardenedError, code="DDP-G01", is_retryable=True):
    """The process group could not be formed: a rank is missing, a port is taken, no route."""


class RankMismatchError(HardenedError, code="DDP-G02", exit_status=2):
    """Ranks run other code, other settings or other data than rank 0."""


class MainRankError(HardenedError, code="DDP-G03"):
    """Work that one rank does for all of them failed there."""


# WHY 75, EX_TEMPFAIL of sysexits.h: it is not this rank's fault; the last step is saved, try again
class PeerLostError(HardenedError, code="DDP-G04", exit_status=75, is_retryable=True):
    """Another rank died, or did not answer within the timeout."""


class HangError(HardenedError, code="DDP-G05", exit_status=75, is_retryable=True):
    """One rank, or all ranks, made no progress for longer than the phase may take."""


class DataError(HardenedError, code="DDP-D01", exit_status=2):
    """The dataset is unknown, missing, unreadable or empty."""


class SampleError(HardenedError, code="DDP-D02"):
    """A sample could not be read or has a value that the model can't take."""


class LoaderError(HardenedError, code="DDP-D03", is_retryable=True):
    """A DataLoader worker died, hung or ran out of shared memory."""


class TooManyErrors(HardenedError, code="DDP-D04"):
    """More samples or steps were left out than max_errors allows."""


class ModelError(HardenedError, code="DDP-M01", exit_status=2):
    """The model is unknown, can't be built, or does not fit the data."""


class UnusedParameterError(HardenedError, code="DDP-M02"):
    """Parameters got no gradient on some rank, so the gradient all-reduce can't finish."""


class OptimizerError(HardenedError, code="DDP-M03", exit_status=2):
    """The optimizer, its parameter groups or its schedule can't be used."""


class StepError(HardenedError, code="DDP-S01"):
    """Forward, loss or backward raised on this rank."""

    def __init__(self, message: str, *, fix: str = "", is_undone: bool = True) -> None:
        super().__init__(message, fix=fix)
        # False, on all ranks: what the step changed can't be put back; a checkpoint can be.
        self.is_undone = is_undone


class OutOfMemoryError(HardenedError, code="DDP-S02"):
    """The GPU or the host ran out of memory in this step."""


class NonFiniteError(HardenedError, code="DDP-S03"):
    """The loss or the gradient is NaN or infinite."""

    def __init__(self, message: str, *, fix: str = "", reached_weights: bool = True) -> None:
        super().__init__(message, fix=fix)
        # The weights were already updated with it, so they must not be saved.
        self.reached_weights = reached_weights


class CrashLoopError(HardenedError, code="DDP-S04", exit_status=2):
    """The last attempts all failed at the same step, so another attempt would fail there too."""


class DivergenceError(HardenedError, code="DDP-S05"):
    """The ranks' weights differ, and no known good state can replace them."""


class CheckpointError(HardenedError, code="DDP-K01"):
    """No checkpoint can be used, or one can't be written."""


class CheckpointMismatchError(HardenedError, code="DDP-K02", exit_status=2):
    """The checkpoint belongs to another model, optimizer or dataset."""


class RunFolderError(HardenedError, code="DDP-K03", exit_status=2):
    """The run folder can't be made, written or used."""


class MissingPackageError(HardenedError, code="DDP-X02", exit_status=2):
    """A package that only this command needs is not installed."""


class UnreadableLogError(HardenedError, code="DDP-X03", exit_status=2):
    """A log that explain was given can't be read."""


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its class name if that is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

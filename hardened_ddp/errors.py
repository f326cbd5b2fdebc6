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

    def __init__(self, message: str, *, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        text = f"[{self.code}] {self.message}"
        return f"{text}\n  next: {self.fix}" if self.fix else text


class ConfigError(HardenedError):
    """A setting is unknown, of the wrong type, out of range, or contradicts another one."""

    code = "DDP-C01"
    exit_status = 2


class OwnLoopError(HardenedError):
    """A loop of the user's own does what protect could not make good after a fault."""

    code = "DDP-C02"
    exit_status = 2


class LaunchError(HardenedError):
    """The environment that the launcher left is incomplete or contradicts itself."""

    code = "DDP-L01"
    exit_status = 2


class GroupError(HardenedError):
    """The process group could not be formed: a rank is missing, a port is taken, no route."""

    code = "DDP-G01"
    is_retryable = True


class RankMismatchError(HardenedError):
    """Ranks run other code, other settings or other data than rank 0."""

    code = "DDP-G02"
    exit_status = 2


class MainRankError(HardenedError):
    """Work that one rank does for all of them failed there."""

    code = "DDP-G03"


class PeerLostError(HardenedError):
    """Another rank died, or did not answer within the timeout."""

    code = "DDP-G04"
    exit_status = 75  # EX_TEMPFAIL of sysexits.h: not this rank's fault, try again
    is_retryable = True


class HangError(HardenedError):
    """One rank, or all ranks, made no progress for longer than the phase may take."""

    code = "DDP-G05"
    exit_status = 75  # as PeerLostError: the last step is saved, try again
    is_retryable = True


class DataError(HardenedError):
    """The dataset is unknown, missing, unreadable or empty."""

    code = "DDP-D01"
    exit_status = 2


class SampleError(HardenedError):
    """A sample could not be read or has a value that the model can't take."""

    code = "DDP-D02"


class LoaderError(HardenedError):
    """A DataLoader worker died, hung or ran out of shared memory."""

    code = "DDP-D03"
    is_retryable = True


class TooManyErrors(HardenedError):
    """More samples or steps were left out than max_errors allows."""

    code = "DDP-D04"


class ModelError(HardenedError):
    """The model is unknown, can't be built, or does not fit the data."""

    code = "DDP-M01"
    exit_status = 2


class UnusedParameterError(HardenedError):
    """Parameters got no gradient on some rank, so the gradient all-reduce can't finish."""

    code = "DDP-M02"


class OptimizerError(HardenedError):
    """The optimizer, its parameter groups or its schedule can't be used."""

    code = "DDP-M03"
    exit_status = 2


class StepError(HardenedError):
    """Forward, loss or backward raised on this rank."""

    code = "DDP-S01"

    def __init__(self, message: str, *, fix: str = "", is_undone: bool = True) -> None:
        super().__init__(message, fix=fix)
        # False, on all ranks: what the step changed can't be put back; a checkpoint can be.
        self.is_undone = is_undone


class OutOfMemoryError(HardenedError):
    """The GPU or the host ran out of memory in this step."""

    code = "DDP-S02"


class NonFiniteError(HardenedError):
    """The loss or the gradient is NaN or infinite."""

    code = "DDP-S03"

    def __init__(self, message: str, *, fix: str = "", reached_weights: bool = True) -> None:
        super().__init__(message, fix=fix)
        # The weights were already updated with it, so they must not be saved.
        self.reached_weights = reached_weights


class CrashLoopError(HardenedError):
    """The last attempts all failed at the same step, so another attempt would fail there too."""

    code = "DDP-S04"
    exit_status = 2


class DivergenceError(HardenedError):
    """The ranks' weights differ, and no known good state can replace them."""

    code = "DDP-S05"


class CheckpointError(HardenedError):
    """No checkpoint can be used, or one can't be written."""

    code = "DDP-K01"


class CheckpointMismatchError(HardenedError):
    """The checkpoint belongs to another model, optimizer or dataset."""

    code = "DDP-K02"
    exit_status = 2


class RunFolderError(HardenedError):
    """The run folder can't be made, written or used."""

    code = "DDP-K03"
    exit_status = 2


class MissingPackageError(HardenedError):
    """A package that only this command needs is not installed."""

    code = "DDP-X02"
    exit_status = 2


class UnreadableLogError(HardenedError):
    """A log that explain was given can't be read."""

    code = "DDP-X03"
    exit_status = 2


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its class name if that is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

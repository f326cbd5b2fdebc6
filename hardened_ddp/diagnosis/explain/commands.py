"""How commands of the trainer are typed where the user stands: given by who runs explain."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


def _own(*arguments: str | Path) -> str:
    return shlex.join(["python", "ddp_training.py", *map(str, arguments)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Commands:
    """The defaults are for a shell in the trainer's folder."""

    own: Callable[..., str] = _own
    """Types a command of the trainer, from its arguments."""

    resume: Callable[[Path], str] = lambda run: _own("--resume", run)
    """Types the command that continues the run in a folder."""

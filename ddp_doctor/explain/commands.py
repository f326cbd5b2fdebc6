"""How commands of the trainer are typed where the user stands: given by who runs explain."""

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


def _own(*arguments: str | Path) -> str:
    return shlex.join(["python", "ddp_training.py", *map(str, arguments)])


def _resume(run: Path, num_ranks: int) -> str:
    start = ["torchrun", "--standalone", f"--nproc_per_node={num_ranks}"]
    words = start if num_ranks > 1 else ["python"]
    return shlex.join([*words, "ddp_training.py", "--resume", str(run)])


@dataclass(frozen=True, kw_only=True, slots=True)
class Commands:
    """The defaults are for a shell in the trainer's folder."""

    own: Callable[..., str] = _own
    """Types a command of the trainer, from its arguments."""

    resume: Callable[[Path, int], str] = _resume
    """Types the command that continues the run in a folder, on so many ranks."""

"""What to tell if a package that every run needs is missing, as in a shell without .venv.

Does not own: packages that only some commands need (data/extras.py).
"""

import sys
from pathlib import Path

from hardened_ddp.errors import MissingPackageError

NEEDED = ("torch", "numpy", "yaml", "psutil", "tqdm", "safetensors")
"""The packages of requirements.txt without which no run starts, by the names to import."""

ROOT = Path(__file__).parents[2]


def missing_package(error: ModuleNotFoundError) -> MissingPackageError | None:
    """Return the error to report, or None if the missing package is another one."""
    if error.name not in NEEDED:
        return None
    activate = ROOT / ".venv" / "bin" / "activate"
    fix = "source .venv/bin/activate, then the same command again"
    if not activate.is_file():
        fix = "./setup.sh, then: source .venv/bin/activate"
    return MissingPackageError(
        f"{sys.executable} has no package {error.name}, without which nothing can be trained",
        fix=fix,
    )

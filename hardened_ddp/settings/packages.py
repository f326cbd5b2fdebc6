"""What to tell if a package that every run needs is missing, as in a shell without .venv.

Does not own: packages that only some commands need (data/foreign_code.py).
"""

import sys

from hardened_ddp.errors import MissingPackageError
from hardened_ddp.settings.typed_command import ROOT, shell_command

NEEDED = ("torch", "numpy", "yaml", "psutil", "tqdm", "safetensors")
"""The packages of requirements.txt without which no run starts, by the names to import."""


def missing_package(error: ModuleNotFoundError) -> MissingPackageError | None:
    """Return the error to report, or None if the missing package is another one."""
    if error.name not in NEEDED:
        return None
    activate = shell_command("source", ROOT / ".venv" / "bin" / "activate")
    fix = f"after this the same command again: {activate}"
    if not (ROOT / ".venv" / "bin" / "activate").is_file():
        fix = f"after this the same command again: {shell_command(ROOT / 'setup.sh')} && {activate}"
    return MissingPackageError(
        f"{sys.executable} has no package {error.name}, without which nothing can be trained",
        fix=fix,
    )

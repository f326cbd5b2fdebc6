"""Packages that only some commands need, imported when they are needed.

Owns the import, and the error message when a package is missing. transformers imports torchvision
if it is there, so torchvision's import is repaired first where necessary (vision.py).
"""

import contextlib
import importlib
import importlib.util
from types import ModuleType

from hardened_ddp.data.vision import import_torchvision
from hardened_ddp.errors import DataError, MissingPackageError
from hardened_ddp.settings.typed_command import pip_command


def import_extra(name: str, *, what: str) -> ModuleType:
    """Import a package of requirements-extras.txt. what: what the user asked for that needs it.

    Raises MissingPackageError.
    """
    install = pip_command("requirements-extras.txt")
    if importlib.util.find_spec(name) is not None:
        if name == "transformers":
            with contextlib.suppress(DataError):
                import_torchvision()
        try:
            return importlib.import_module(name)
        except ImportError as error:
            reason = f"which can't be imported: {error}"
            raise MissingPackageError(f"{what} needs {name}, {reason}", fix=install) from error
    raise MissingPackageError(f"{what} needs {name}, which is not installed", fix=install)

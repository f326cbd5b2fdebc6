"""Packages that only some commands need, imported when they are needed.

Owns the import, and the one message when a package is not there. transformers looks at torchvision
while it is imported, so that one is mended first where it has to be (vision.py).
"""

import contextlib
import importlib
import importlib.util
from types import ModuleType

from hardened_ddp.data.vision import import_torchvision
from hardened_ddp.errors import DataError, MissingPackageError

INSTALL = "pip install -r requirements-extras.txt"


def import_extra(name: str, *, what: str) -> ModuleType:
    """Import a package of requirements-extras.txt. what: what the user asked for that needs it.

    Raises MissingPackageError.
    """
    if importlib.util.find_spec(name) is not None:
        if name == "transformers":
            with contextlib.suppress(DataError):
                import_torchvision()
        try:
            return importlib.import_module(name)
        except ImportError as error:
            reason = f"which can't be imported: {error}"
            raise MissingPackageError(f"{what} needs {name}, {reason}", fix=INSTALL) from error
    raise MissingPackageError(f"{what} needs {name}, which is not installed", fix=INSTALL)

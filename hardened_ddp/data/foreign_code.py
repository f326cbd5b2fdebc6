"""Code of others: importing a package or the user's module, and describing the errors it raises.

torchvision's wheel from the package index is built for CUDA: with a CPU build of torch its compiled
operators don't load, and then its import fails when it registers their shapes. Datasets, transforms
and classifiers need none of them: it is enough to declare the two that the import needs.
An error in the user's module itself is reported with its file and line.
Does not own: the call of what was imported.
"""

import contextlib
import importlib
import importlib.util
import inspect
import logging
import os
import sys
import traceback
from collections.abc import Callable
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from hardened_ddp.errors import DataError, HardenedError, MissingPackageError
from hardened_ddp.settings.typed_command import pip_command

log = logging.getLogger(__name__)

_FIX = (
    "start in the folder that holds the package, or install it, and write package.module:callable"
)
_MAX_TEXT = 400  # characters of a foreign error, which may quote a whole file
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_OPERATORS = ("torchvision::nms", "torchvision::qnms")
WITHOUT_OPERATORS = (
    f"not built for torch {torch.__version__}; datasets, transforms and classifiers work, its "
    "compiled operators (nms, roi pooling) do not"
)


def import_callable(path: str, *, setting: str, error: type[HardenedError]) -> Callable[..., Any]:
    """Import what a setting names as package.module:callable. Rank-local. Raises error."""
    module_name, _, name = path.partition(":")
    told = f"--{setting} {path}"
    if not all(map(str.isidentifier, [*module_name.split("."), name])):
        meant = meant_path(path)
        raise error(
            f"{told} is no import path: it has the form package.module:callable, of names with "
            "dots between them",
            fix=f"did you mean {meant}?" if meant else _FIX,
        )
    try:
        found = getattr(_import_module(module_name, told, error), name)
    except AttributeError as missing:
        near = get_close_matches(name, dir(sys.modules.get(module_name)), n=1)
        fix = (
            f"did you mean {module_name}:{near[0]}?" if near else f"define {name} in {module_name}"
        )
        raise error(f"{told} can't be imported: {missing}", fix=fix) from missing
    if not callable(found):
        raise error(f"{told} is of type {type(found).__name__}, not a class or function", fix=_FIX)
    try:
        inspect.signature(found)
    except (ValueError, TypeError) as unknown:  # some of those written in C
        raise error(
            f"{told} has no signature, so its arguments are unknown",
            fix="name your own function that calls it",
        ) from unknown
    return found  # type: ignore[no-any-return]  # callable() proves what getattr can't


def meant_path(name: str) -> str:
    """Return the import path that was meant by my_model.Net or dir/my_model.py:Net; else empty."""
    module_name, has_colon, attribute = name.partition(":")
    if not has_colon:
        module_name, _, attribute = name.rpartition(".")
    module_name = module_name.removesuffix(".py").removeprefix("./").replace("/", ".")
    meant = f"{module_name}:{attribute}"
    parts = [*module_name.split("."), attribute]
    return meant if meant != name and all(map(str.isidentifier, parts)) else ""


def import_extra(name: str, *, what: str) -> ModuleType:
    """Import a package of requirements-extras.txt. what: what the user asked for that needs it.

    Raises MissingPackageError.
    """
    install = pip_command("requirements-extras.txt")
    if importlib.util.find_spec(name) is None:
        raise MissingPackageError(f"{what} needs {name}, which is not installed", fix=install)
    if name in ("transformers", "peft"):  # peft imports transformers
        with contextlib.suppress(DataError):
            import_torchvision()
    try:
        return importlib.import_module(name)
    except ImportError as error:
        reason = f"which can't be imported: {error}"
        raise MissingPackageError(f"{what} needs {name}, {reason}", fix=install) from error


@cache
def import_torchvision() -> ModuleType:
    """Import torchvision with its models, datasets and transforms. Raises DataError if absent."""
    try:
        try:
            return _import_parts()
        except RuntimeError as error:
            if not lacks_operators(error):
                raise
        for name in _OPERATORS:
            torch.library.define(name, _SCHEMA)
        module = _import_parts()
    except ModuleNotFoundError as error:
        raise DataError(
            f"torchvision is not installed ({error})", fix=pip_command("requirements.txt")
        ) from error
    except (RuntimeError, ImportError, AttributeError, OSError) as error:
        raise DataError(
            f"torchvision does not fit torch {torch.__version__}: {error}",
            fix=f"versions that fit together: {pip_command('requirements.txt')}",
        ) from error
    # WHY no warning: nothing needs to be done, and torchvision tells whoever calls an operator.
    log.debug("torchvision %s: %s", module.__version__, WITHOUT_OPERATORS)
    return module


def lacks_operators(error: BaseException) -> bool:
    """Return whether an import failed because torchvision's binary is one for another torch."""
    return "operator torchvision::" in str(error)


def describe(error: BaseException, *, most: int | None = _MAX_TEXT) -> str:
    """Return type and shortened text of an exception, even if its __str__ raises.

    most: of its characters; None: all.
    """
    try:
        text = str(error)
    except Exception as second:  # WHY broad: the user's code, and it must not hide the first error
        text = f"(its text is not available: {type(second).__name__})"
    return f"{type(error).__name__}: {text}"[:most]


def line_of_user(error: BaseException) -> str:
    """Return " (file:line)" of the user's code that raised an error; empty if there is none.

    That is the innermost line outside of torch, unless it is in this package.
    """
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((_TORCH, "<frozen")):  # such as exit()
            is_ours = frame.filename.startswith(_PACKAGE)
            return "" if is_ours else f" ({frame.filename}:{frame.lineno})"
    return ""


def _import_module(name: str, told: str, error: type[HardenedError]) -> Any:  # Any: a module
    try:
        return _load(name)
    except SystemExit as problem:  # a script that reads its own arguments, for example
        line = line_of_user(problem)
        raise error(
            f"{told} can't be imported: it ends the program, by SystemExit({problem.code}){line}",
            fix="put what only a script does below: if __name__ == '__main__':",
        ) from problem
    except Exception as problem:  # WHY broad: an import runs the user's code
        frame = traceback.extract_tb(problem.__traceback__)[-1]
        is_inside = not frame.filename.startswith("<frozen importlib")
        if not (is_inside or isinstance(problem, SyntaxError)):  # the module does not exist
            meant = meant_path(told.partition(" ")[2])
            fix = f"did you mean {meant}?" if meant else _FIX
            raise error(f"{told} can't be imported: {problem}", fix=fix) from problem
        log.debug("%s can't be imported", told, exc_info=True)
        where = f" ({frame.filename}:{frame.lineno})" if is_inside else ""  # else the text has it
        raise error(
            f"{told} can't be imported: {describe(problem)}{where}{_root_of(problem)}",
            fix="fix it; --debug shows the whole traceback",
        ) from problem


def _load(name: str) -> Any:  # Any: a module
    """Import a module, if need be after a repair of torchvision, which it imports."""
    try:
        return importlib.import_module(name)
    except RuntimeError as problem:
        if not lacks_operators(problem):
            raise
        import_torchvision()
        return importlib.import_module(name)


def _root_of(problem: BaseException) -> str:
    """Return "; caused by ..." of the error at the start; empty if it is this one.

    WHY: transformers reports each failed import as a missing module.
    """
    root, seen = problem, {id(problem)}
    while (cause := root.__cause__) is not None and id(cause) not in seen:
        root = cause
        seen.add(id(root))
    return "" if root is problem else f"; caused by {describe(root)}"


def _import_parts() -> ModuleType:
    importlib.invalidate_caches()
    module = importlib.import_module("torchvision")
    for part in ("models", "datasets", "transforms.v2"):
        importlib.import_module(f"torchvision.{part}")
    return module

"""Code of others: importing a package or the user's module, and what the errors it raises become.

torchvision's wheel from the package index is built for CUDA: with a CPU build of torch its compiled
operators don't load, and then its import fails when it registers their shapes. Datasets, transforms
and classifiers need none of them: it is enough to declare the two that the import needs.
"""

import contextlib
import importlib
import importlib.util
import inspect
import logging
import os
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from hardened_ddp.errors import ANY_FAILURE, DataError, HardenedError, MissingPackageError
from hardened_ddp.settings.typed_command import pip_command

log = logging.getLogger(__name__)

_FIX = (
    "start in the folder that holds the package, or install it, and write package.module:callable"
)
_MAX_TEXT = 400  # characters of a foreign error, which may quote a whole file
_MOST_CAUSES = 8  # of an error, one of another
_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_PACKAGE = f"{Path(__file__).parents[1]}{os.sep}"
_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_OPERATORS = ("torchvision::nms", "torchvision::qnms")


def import_callable(path: str, *, setting: str, error: type[HardenedError]) -> Callable[..., Any]:
    """Import what a setting names as package.module:callable. Rank-local. Raises error."""

    def refused(what: str, fix: str) -> HardenedError:
        return error(f"--{setting} {path} {what}", fix=fix)

    module_name, _, name = path.partition(":")
    if not all(map(str.isidentifier, [*module_name.split("."), name])):
        what = "is no import path: it has the form package.module:callable, of names with dots "
        raise refused(what + "between them", _FIX)
    try:
        module = _load(module_name)
    except SystemExit as ended:  # a script that reads its own arguments, for example
        how = f"by SystemExit({ended.code}){line_of_user(ended)}"
        fix = "put what only a script does below: if __name__ == '__main__':"
        raise refused(f"can't be imported: it ends the program, {how}", fix) from ended
    except Exception as problem:  # WHY broad: an import runs the user's code
        frame = traceback.extract_tb(problem.__traceback__)[-1]
        is_inside = not frame.filename.startswith("<frozen importlib")
        if not (is_inside or isinstance(problem, SyntaxError)):  # the module does not exist
            raise refused(f"can't be imported: {problem}", _FIX) from problem
        log.debug("%s can't be imported", path, exc_info=True)
        where = f" ({frame.filename}:{frame.lineno})" if is_inside else ""  # else the text has it
        what = f"can't be imported: {describe(problem)}{where}{_root_of(problem)}"
        raise refused(what, "fix it; --debug shows the whole traceback") from problem
    if not hasattr(module, name):
        what = f"can't be imported: {module_name} has no attribute {name!r}"
        raise refused(what, f"define {name} in it, or correct the name")
    found = getattr(module, name)
    if not callable(found):
        raise refused(f"is of type {type(found).__name__}, not a class or function", _FIX)
    try:
        inspect.signature(found)
    except (ValueError, TypeError) as unknown:  # some of those written in C
        what = "has no signature, so its arguments are unknown"
        raise refused(what, "name your own function that calls it") from unknown
    return found  # type: ignore[no-any-return]  # callable() proves what getattr can't


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
    """Import torchvision with its models, datasets and transforms. Raises DataError if absent.

    WHY no warning where its operators are missing: it tells whoever calls one.
    """
    try:
        return _load("torchvision", ".models", ".datasets", ".transforms.v2")
    except (RuntimeError, ImportError, AttributeError, OSError) as error:
        what = f"torchvision does not fit torch {torch.__version__}: {error}"
        if isinstance(error, ModuleNotFoundError):
            what = f"torchvision is not installed ({error})"
        fix = f"versions that fit together: {pip_command('requirements.txt')}"
        raise DataError(what, fix=fix) from error


def _load(name: str, *parts: str) -> ModuleType:
    """Import a module and parts of it, if need be after a repair of torchvision.

    WHY for any: a module of the user may be the first to import it.
    """
    try:
        module = importlib.import_module(name)
        for part in parts:
            importlib.import_module(name + part)
        return module
    except RuntimeError as error:
        if "operator torchvision::" not in str(error):  # its binary is one for another torch
            raise
    for operator in _OPERATORS:
        torch.library.define(operator, _SCHEMA)
    importlib.invalidate_caches()
    return _load(name, *parts)


@contextlib.contextmanager
def told_as(
    error: type[HardenedError], what: str, *, fix: str, passes: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Raise error for whatever the code inside raises: what failed, how, and in which line.

    Errors of ours pass as they are, and those of the types in passes.
    """
    try:
        yield
    except ANY_FAILURE as failure:  # WHY broad: it is the user's code
        if isinstance(failure, (HardenedError, *passes)):
            raise
        log.debug("%s", what, exc_info=True)
        raise error(f"{what}: {describe(failure)}{line_of_user(failure)}", fix=fix) from failure


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


def is_stream(dataset: Any) -> bool:  # Any: what a user's callable returned
    """Return whether a dataset keeps the contract of a stream (streams/contract.py)."""
    return hasattr(dataset, "num_shards") and callable(getattr(dataset, "open", None))


def _root_of(problem: BaseException) -> str:
    """Return "; caused by ..." of the error at the start; empty if it is this one.

    WHY: transformers reports each failed import as a missing module.
    """
    root = problem
    for _ in range(_MOST_CAUSES):
        root = root.__cause__ or root
    return "" if root is problem else f"; caused by {describe(root)}"

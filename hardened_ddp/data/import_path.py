"""A user's dataset or model by its import path, package.module:callable.

What goes wrong here: a wrong path, the wrong folder, a name that is not a class or function, and an
error in the user's module itself; that error is reported with its file and line.
Does not own: the call (datasets.py, model/zoo.py).
"""

import importlib
import inspect
import logging
import sys
import traceback
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from hardened_ddp.data.read_errors import describe, line_of_user
from hardened_ddp.data.vision import import_torchvision, lacks_operators
from hardened_ddp.errors import HardenedError

log = logging.getLogger(__name__)

_FIX = (
    "start in the folder that holds the package, or install it, and write package.module:callable"
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
        found = getattr(_import(module_name, told, error), name)
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


def _import(name: str, told: str, error: type[HardenedError]) -> Any:  # Any: a module
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

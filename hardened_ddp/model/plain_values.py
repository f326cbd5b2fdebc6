"""Copies of plain values and generators, that can be put back and written as JSON.

Owns which values these are: real numbers, text, None, generators of random, numpy and torch,
arrays, and lists, tuples, dicts, sets and deques of them; and objects of the user's classes, by
their attributes. Anything else is kept: its copy is the object itself, and in JSON it is not there.
Values are put back in place: whoever else holds a list or a generator sees it too. What is read
from JSON can only become one of these; a class is never looked up by a name in a file.
"""

import base64
import enum
import json
import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import nn

from hardened_ddp.model.reach import attributes_of, has_attributes, version_of

GENERATORS = ("random", "numpy generator", "numpy state", "torch generator")

_MOST_PARTS = 20_000  # Of one value. WHY a limit: a model may hold its dataset, or a cache.
_MOST_BYTES = 2**20  # of an array

_KINDS: dict[type, str] = {
    **{kind: kind.__name__ for kind in (bool, int, str, float)},
    **{kind: kind.__name__ for kind in (list, tuple, set, frozenset, deque)},
    **dict.fromkeys((dict, OrderedDict, Counter, defaultdict), "dict"),
    type(None): "None",
    random.Random: "random",
    np.random.Generator: "numpy generator",
    np.random.RandomState: "numpy state",
    torch.Generator: "torch generator",
}
_AS_THEY_ARE = ("None", "bool", "int", "str")
_IN_PLACE = ("list", "deque", "set", "dict", "object", "array", *GENERATORS)
_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
_NOT_USERS = {*sys.stdlib_module_names, "torch", "numpy", "hardened_ddp"}


@dataclass(slots=True)
class Copy:
    """A value as it was. Two are equal if nothing has changed."""

    kind: str
    content: Any  # Any: by kind: numbers, text, or copies of the parts
    original: Any = field(compare=False, default=None)


ABSENT = Copy("absent", None)  # of an attribute that is not there


def kind_of(value: Any) -> str:
    """Name the kind of a value; "kept": it can't be copied."""
    if (kind := _KINDS.get(type(value))) is not None:
        return kind
    if isinstance(value, np.ndarray | np.generic):
        is_plain = value.dtype.kind in "biufc" and value.nbytes <= _MOST_BYTES
        return "kept" if not is_plain else "array" if isinstance(value, np.ndarray) else "number"
    if isinstance(value, enum.Enum):
        return "enum"
    for cls, kind in _KINDS.items():
        if kind in _IN_PLACE and isinstance(value, cls):  # such as a Random of the user's
            return kind
    is_opaque = isinstance(value, nn.Module | torch.Tensor | type) or not has_attributes(value)
    found: Any = type(value)  # Any: mypy takes a type for no key
    return "kept" if is_opaque or not is_users(found.__module__) else "object"


@cache
def is_users(name: str) -> bool:
    """Return whether a module is of the user's own code: not of an installed package."""
    # WHY not its attributes: a lazy module would import
    file = getattr(sys.modules.get(name), "__dict__", {}).get("__file__")
    is_installed = {"site-packages", "dist-packages"}.intersection(str(file).split("/"))
    return not is_installed and name.partition(".")[0] not in _NOT_USERS


def copy_of(value: Any) -> Copy:
    """Copy a value, as far as it can be copied."""
    try:
        return _copy(value, [_MOST_PARTS])
    except (RuntimeError, OverflowError):  # too deep, or another thread changes it
        return Copy("kept", _mark(value), value)


def _copy(value: Any, room: list[int]) -> Copy:
    """room: how many parts may still come. Raises OverflowError."""
    room[0] -= 1
    if room[0] < 0:
        raise OverflowError
    kind = kind_of(value)
    content: Any = value
    match kind:
        case "enum":
            content = value.name
        case "float":
            content = value.hex()  # WHY: NaN is equal to itself, and 0.0 not to -0.0
        case "array" | "number":
            content = [value.dtype.str, list(value.shape), _as_text(value.tobytes())]
        case "list" | "tuple":
            content = [_copy(part, room) for part in list(value)]
        case "deque":
            content = [_copy(value.maxlen, room), _copy(list(value), room)]
        case "set" | "frozenset":
            parts = [_copy(part, room) for part in list(value)]
            content = sorted(parts, key=lambda part: json.dumps(as_json(part)))
        case "dict" | "object":
            pairs = value if kind == "dict" else attributes_of(value)
            content = [[_copy_key(k, room), _copy(part, room)] for k, part in list(pairs.items())]
        case "random":
            content = _copy(value.getstate(), room)
        case "numpy generator":
            content = _copy(value.bit_generator.state, room)
        case "numpy state":
            content = _copy(value.get_state(legacy=False), room)
        case "torch generator":
            content = _as_text(value.get_state().numpy().tobytes())
        case "kept":
            content = _mark(value)
    return Copy(kind, content, value)


def _copy_key(key: Any, room: list[int]) -> Copy:
    """Copy a key; one that JSON does not give back is kept. An enum, for one: its class is not."""
    copy = _copy(key, room)
    return copy if from_json(as_json(copy), None) == key else Copy("kept", _mark(key), key)


def put_back(copy: Copy) -> Any:
    """Give a value its content of before, in place, and return it."""
    return _fill(copy.kind, copy.original, _each(put_back, copy.content))


def _fill(kind: str, target: Any, content: Any) -> Any:
    """Give target its content, if it is of a kind that can change; return it."""
    match kind:
        case "list":
            target[:] = content
        case "deque":
            target.clear()
            target.extend(content[1])
        case "set" | "dict" | "object":
            store = attributes_of(target) if kind == "object" else target
            store.clear()
            store.update(content if kind == "set" else dict(content))
        case "array":
            target[...] = _array_of(content)
        case "random":
            target.setstate(content)
        case "numpy generator":
            target.bit_generator.state = content
        case "numpy state":
            target.set_state(content)
        case "torch generator":
            state = bytearray(base64.b64decode(content))
            target.set_state(torch.frombuffer(state, dtype=torch.uint8))
    return target


def as_json(copy: Copy, built: Copy | None = None) -> Any:
    """Write a copy as JSON; from_json reads it.

    built: the value as its process has built it. What an object still has as in it is not written:
    it may be right in that process only, such as a file descriptor.
    """
    if copy == built:
        return ["kept", None]
    if copy.kind in _AS_THEY_ARE:
        return copy.content
    if built is not None and copy.kind == built.kind == "object":
        old = {key.content: part for key, part in built.content}
        pairs = [(key, as_json(part, old.get(key.content))) for key, part in copy.content]
        return ["object", [[as_json(key), part] for key, part in pairs]]
    return [copy.kind, None if copy.kind == "kept" else _each(as_json, copy.content)]


def from_json(data: Any, live: Any) -> Any:
    """Return the value that data says; in place in live, and in its parts, if of the same kind.

    Raises ValueError, KeyError, TypeError or AttributeError if as_json can't have written data.
    """
    if not isinstance(data, list):
        return data
    kind, content = data
    is_same = kind_of(live) == kind
    match kind:
        case "kept":
            return live
        case "object" if not is_same:
            return live  # a class is not looked up by its name
        case "enum":
            return type(live)[content] if isinstance(live, enum.Enum) else live
        case "list" | "tuple":
            olds = [*live] if is_same else []
            olds += [None] * (len(content) - len(olds))
            content = [from_json(part, old) for part, old in zip(content, olds, strict=False)]
        case "set" | "frozenset":
            content = [from_json(part, None) for part in content]
        case "deque":
            content = [content[0], from_json(content[1], [*live] if is_same else None)]
        case "dict" | "object":
            old = {} if not is_same else live if kind == "dict" else attributes_of(live)
            keys = dict(enumerate(old))  # KeyError: a key was added, and can't be read
            pairs = [
                (keys[place] if key == ["kept", None] else from_json(key, None), part)
                for place, (key, part) in enumerate(content)
            ]
            content = [(key, from_json(part, old.get(key))) for key, part in pairs]
        case "random" | "numpy state" | "numpy generator":
            content = from_json(content, None)
        case "array":
            is_same = is_same and [live.dtype.str, [*live.shape]] == content[:2]
    is_live = is_same and kind in _IN_PLACE
    return _fill(kind, live if is_live else _NEW[kind](content), content)


def _new_generator(state: Any) -> np.random.Generator:
    if (name := state["bit_generator"]) not in _BIT_GENERATORS:
        raise ValueError(f"there is no bit generator {name!r}")
    return np.random.Generator(getattr(np.random, name)())


# Makes a value of its content.
_NEW: dict[str, Callable[[Any], Any]] = {
    "float": float.fromhex,
    "number": lambda content: _array_of(content)[()],
    "array": lambda content: _array_of(content).copy(),
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": lambda content: deque(maxlen=content[0]),
    "dict": dict,
    "random": lambda _: random.Random(),
    "numpy generator": _new_generator,
    "numpy state": lambda _: np.random.RandomState(),
    "torch generator": lambda _: torch.Generator(),
}


def kept_parts(copy: Copy) -> list[Any]:
    """Return marks of the parts that could not be copied: they differ if these change."""
    found: list[Any] = [copy.content] if copy.kind == "kept" else []
    _each(lambda part: found.extend(kept_parts(part)), copy.content)
    return found


def _each(call: Callable[[Copy], Any], content: Any) -> Any:
    """Replace the copies in content by what call returns for them."""
    if isinstance(content, Copy):
        return call(content)
    return [_each(call, part) for part in content] if isinstance(content, list) else content


def _mark(value: Any) -> tuple[Any, ...]:
    """Return what changes as soon as another object stands there, or a tensor is written to."""
    if isinstance(value, torch.device | torch.dtype | torch.Size):
        return (repr(value),)
    if isinstance(value, torch.Tensor):
        return (id(value), version_of(value))
    return (id(value), len(value) if isinstance(value, list | dict | set | deque) else 0)


def _as_text(data: Any) -> str:
    return base64.b64encode(data).decode("ascii")


def _array_of(content: Any) -> Any:
    dtype, shape, text = content
    return np.frombuffer(base64.b64decode(text), dtype=np.dtype(dtype)).reshape(shape)

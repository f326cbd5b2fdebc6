"""Copies of plain values and generators, that can be put back and written as JSON.

Owns which values these are: numbers, text, None, generators of random, numpy and torch, arrays, and
lists, tuples, dicts, sets and deques of them; and objects of the user's classes, by their
attributes. Anything else is kept: its copy is the object itself, and in JSON it is not there.
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
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

MOST_PARTS = 20_000
"""Of one value. WHY a limit: a model may hold its dataset, or a cache."""

_MOST_BYTES = 2**20  # of an array

_KINDS: dict[type, str] = {
    **{kind: kind.__name__ for kind in (bool, int, str, float, complex, bytes)},
    **{kind: kind.__name__ for kind in (list, tuple, set, frozenset, deque)},
    **dict.fromkeys((dict, OrderedDict, Counter, defaultdict), "dict"),
    type(None): "None",
    random.Random: "random",
    np.random.Generator: "numpy generator",
    np.random.RandomState: "numpy state",
    torch.Generator: "torch generator",
}
_AS_THEY_ARE = ("None", "bool", "int", "str")
_GENERATORS = ("random", "numpy generator", "numpy state", "torch generator")
_BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
_FOREIGN = ("torch", "numpy", "hardened_ddp")


@dataclass(slots=True)
class Copy:
    """A value as it was. Two are equal if nothing has changed."""

    kind: str
    content: Any  # Any: by kind: numbers, text, or copies of the parts
    original: Any = field(compare=False, default=None)


ABSENT = Copy("absent", None)
"""Of an attribute that is not there."""


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
        if kind in _EMPTY and isinstance(value, cls):  # such as a Random of the user's
            return kind
    is_opaque = isinstance(value, nn.Module | torch.Tensor | type) or not hasattr(value, "__dict__")
    found: Any = type(value)  # Any: mypy takes a type for no key
    return "kept" if is_opaque or not is_users(found) else "object"


@cache
def is_users(cls: type) -> bool:
    """Return whether a class is of the user's own code: not of an installed package."""
    name = cls.__module__
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    is_installed = {"site-packages", "dist-packages"}.intersection(Path(file).parts)
    return not is_installed and name.partition(".")[0] not in {*sys.stdlib_module_names, *_FOREIGN}


def is_generator(value: Any) -> bool:
    """Return whether a value is a generator of random numbers."""
    return kind_of(value) in _GENERATORS


def copy_of(value: Any) -> Copy:
    """Copy a value, as far as it can be copied."""
    try:
        return _copy(value, [MOST_PARTS])
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
        case "complex":
            content = [value.real.hex(), value.imag.hex()]
        case "bytes":
            content = _as_text(value)
        case "array" | "number":
            content = [value.dtype.str, list(value.shape), _as_text(value.tobytes())]
        case "list" | "tuple":
            content = [_copy(part, room) for part in list(value)]
        case "deque":
            content = [_copy(value.maxlen, room), _copy(list(value), room)]
        case "set" | "frozenset":
            content = sorted((_copy(part, room) for part in list(value)), key=_sort_key)
        case "dict" | "object":
            pairs = value if kind == "dict" else vars(value)
            content = [[_copy(k, room), _copy(part, room)] for k, part in list(pairs.items())]
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


def put_back(copy: Copy) -> Any:
    """Give a value its content of before, in place, and return it."""
    target, content = copy.original, _each(put_back, copy.content)
    match copy.kind:
        case "list":
            target[:] = content
        case "deque":
            target.clear()
            target.extend(content[1])
        case "set" | "dict" | "object":
            store = vars(target) if copy.kind == "object" else target
            store.clear()
            store.update(content if copy.kind == "set" else dict(content))
        case "array":
            target[...] = _array_of(content)
        case "random":
            target.setstate(content)
        case "numpy generator":
            target.bit_generator.state = content
        case "numpy state":
            target.set_state(content)
        case "torch generator":
            target.set_state(torch.frombuffer(bytearray(_from_text(content)), dtype=torch.uint8))
    return target


def as_json(copy: Copy) -> Any:
    """Write a copy as JSON; read_json reads it."""
    if copy.kind in _AS_THEY_ARE:
        return copy.content
    return [copy.kind, None if copy.kind == "kept" else _each(as_json, copy.content)]


def read_json(data: Any, live: Any) -> Copy:
    """Return the copy that data says, to be put back into live if that is of its kind.

    Raises ValueError, KeyError or TypeError if as_json can't have written data.
    """
    if not isinstance(data, list):
        return Copy(_KINDS[type(data)], data, data)
    kind, content = data
    is_same = kind_of(live) == kind
    if kind in _FRESH:
        return Copy(kind, content, _FRESH[kind](content, live))
    target = live if is_same else _EMPTY[kind]() if kind in _EMPTY else live
    match kind:
        case "list" | "tuple" | "set" | "frozenset":
            olds = list(live) if is_same and "set" not in kind else []
            olds += [None] * (len(content) - len(olds))
            content = [read_json(part, old) for part, old in zip(content, olds, strict=False)]
            if kind in ("tuple", "frozenset"):
                target = {"tuple": tuple, "frozenset": frozenset}[kind](map(put_back, content))
        case "deque":
            most, parts = content
            content = [read_json(most, None), read_json(parts, list(live) if is_same else None)]
            target = live if is_same else deque(maxlen=most)
        case "dict" | "object":
            if kind == "object" and not is_same:
                return Copy("kept", None, live)  # a class is not looked up by its name
            old = {} if not is_same else live if kind == "dict" else vars(live)
            keys = [read_json(key, None) for key, _ in content]
            content = [
                [key, read_json(part, old.get(put_back(key)))]
                for key, (_, part) in zip(keys, content, strict=True)
            ]
        case "random" | "numpy state" | "numpy generator":
            content = read_json(content, None)
            if kind == "numpy generator":
                name = put_back(content)["bit_generator"]
                if name not in _BIT_GENERATORS:
                    raise ValueError(f"there is no bit generator {name!r}")
                if not is_same or live.bit_generator.state["bit_generator"] != name:
                    target = np.random.Generator(getattr(np.random, name)())
        case "array":
            made = _array_of(content)
            has_room = is_same and (live.dtype, live.shape) == (made.dtype, made.shape)
            target = live if has_room else made.copy()
        case "kept" | "torch generator":
            pass
        case _:
            raise ValueError(f"there is no kind {kind!r}")
    return Copy(kind, content, target)


_EMPTY: dict[str, Any] = {
    "list": list,
    "deque": deque,
    "set": set,
    "dict": dict,
    "random": random.Random,
    "numpy state": np.random.RandomState,
    "torch generator": torch.Generator,
}
_FRESH: dict[str, Any] = {  # what can't change in place
    "float": lambda content, _: float.fromhex(content),
    "complex": lambda content, _: complex(*map(float.fromhex, content)),
    "bytes": lambda content, _: _from_text(content),
    "number": lambda content, _: _array_of(content)[()],
    "enum": lambda content, live: type(live)[content] if isinstance(live, enum.Enum) else live,
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
        is_counted = not value.is_inference() and hasattr(value, "_version")
        return (id(value), value._version if is_counted else -1)
    return (id(value), len(value) if isinstance(value, list | dict | set | deque) else 0)


def _sort_key(copy: Copy) -> str:
    return json.dumps(as_json(copy))


def _as_text(data: Any) -> str:
    return base64.b64encode(data).decode("ascii")


def _from_text(text: str) -> bytes:
    return base64.b64decode(text)


def _array_of(content: Any) -> Any:
    dtype, shape, text = content
    return np.frombuffer(_from_text(text), dtype=np.dtype(dtype)).reshape(shape)

"""The tensors that a module can reach, by name, and the places that hold them.

Its parameters and buffers, and those that only an attribute holds: a tensor, a list or dict of
them, a teacher in a list, an object of the user's own classes with copies of the weights.
Does not own: attributes that are no tensors. What only a closure or a class holds is not found.
"""

import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

_OF_MODULES = frozenset(vars(nn.Module()))
_FOREIGN = sys.stdlib_module_names | {"torch", "numpy"}
"""Objects of their classes are not entered."""

_MOST_PARTS, _DEEPEST = 10_000, 50
"""Larger lists and dicts are not entered: they hold a vocabulary, not weights."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is held: Any: a dict, a list or a tuple, and its key there."""

    holder: Any
    key: Any
    home: torch.Tensor
    """The tensor that was found there."""

    owner: nn.Module | None = None
    """The module whose parameter or buffer it is."""

    @property
    def is_relocated(self) -> bool:
        """A forward may move it in memory: flatten_parameters does, called in forward."""
        return self.home.is_cuda and is_trained(self.home) and isinstance(self.owner, nn.RNNBase)

    def get(self) -> torch.Tensor | None:
        """Return the tensor that is there now; None: there is none."""
        try:
            found = self.holder[self.key]
        except LookupError:
            return None
        return found if isinstance(found, torch.Tensor) else None

    def put(self, tensor: torch.Tensor | None) -> None:
        """Let the place hold tensor; a tuple can't, and holds what it held."""
        if not isinstance(self.holder, tuple) and (tensor is not None or self.get() is not None):
            self.holder[self.key] = tensor


def places_of(module: nn.Module, seen: dict[int, Any] | None = None) -> dict[str, Place]:
    """Return the place of each tensor that module reaches, by name; in order, alike on all ranks.

    The names of parameters and buffers are those of torch; the others are such as teacher[0].bias.
    seen: gets all that was looked at, by id. Any: whatever attributes hold.
    """
    seen = {} if seen is None else seen
    found = dict(_registered(module, "", seen))
    return found | dict(_in_attributes(module, "", seen))


def holders_of(module: nn.Module) -> list[Any]:
    """Return the dicts and lists that hold what module reaches. Any: whatever attributes hold."""
    seen: dict[int, Any] = {}
    places_of(module, seen)
    found = [value for value in seen.values() if isinstance(value, dict | list)]
    others = [value for value in seen.values() if hasattr(value, "__dict__")]
    found += [vars(value) for value in others if not isinstance(value, torch.Tensor)]
    return found + [vars(part)["_buffers"] for part in others if isinstance(part, nn.Module)]


def is_trained(tensor: torch.Tensor) -> bool:
    """Return whether it is a parameter with a gradient: the optimizer changes it, too."""
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def version_of(tensor: torch.Tensor) -> int:
    """Return a number that grows with each write in place; not by .data, numpy and the like."""
    return 0 if tensor.is_inference() else int(getattr(tensor, "_version", 0))


def _registered(
    module: nn.Module, prefix: str, seen: dict[int, Any]
) -> Iterator[tuple[str, Place]]:
    for path, part in module.named_modules(prefix=prefix):
        seen[id(part)] = part
        for held in (vars(part)["_parameters"], vars(part)["_buffers"]):
            for name, tensor in held.items():
                if tensor is not None and id(tensor) not in seen and not is_lazy(tensor):
                    seen[id(tensor)] = tensor
                    yield _joined(path, name), Place(held, name, tensor, part)


def _in_attributes(
    module: nn.Module, prefix: str, seen: dict[int, Any]
) -> Iterator[tuple[str, Place]]:
    for path, part in module.named_modules(prefix=prefix):
        for name in [name for name in vars(part) if name not in _OF_MODULES]:
            yield from _walk(vars(part), name, _joined(path, name), seen)


def _walk(
    holder: Any, key: Any, path: str, seen: dict[int, Any], depth: int = 0
) -> Iterator[tuple[str, Place]]:
    """Yield what is in holder[key]. Any: whatever an attribute holds."""
    value = holder[key]
    if id(value) in seen or depth > _DEEPEST:
        return
    seen[id(value)] = value  # held, so that no other object gets its id meanwhile
    if isinstance(value, torch.Tensor):
        if not is_lazy(value):
            yield path, Place(holder, key, value)
    elif isinstance(value, nn.Module):
        yield from _registered(value, path, seen)
        yield from _in_attributes(value, path, seen)
    elif isinstance(value, dict | list | tuple | deque):
        if len(value) <= _MOST_PARTS:
            for part in list(value) if isinstance(value, dict) else range(len(value)):
                yield from _walk(value, part, f"{path}[{part!r}]", seen, depth + 1)
    elif _is_of_user(value):
        for name in list(vars(value)):
            yield from _walk(vars(value), name, f"{path}.{name}", seen, depth + 1)


def _is_of_user(value: object) -> bool:
    """Return whether value is an object with attributes, of a class of the user's own."""
    package = type(value).__module__.partition(".")[0]
    return hasattr(value, "__dict__") and not isinstance(value, type) and package not in _FOREIGN


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name

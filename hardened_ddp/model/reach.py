"""The tensors that a module can reach, by name, and the places that hold them.

Its parameters and buffers, and those that only an attribute holds: a tensor, a list or dict of
them, a teacher in a list, an object of the user's own classes with copies of the weights.
Does not own: attributes that are no tensors. What only a closure or a class holds is not found.
"""

import copyreg
import sys
from collections import deque
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

# The attributes that torch gives to each module.
OF_MODULES = frozenset({*vars(nn.Module()), "_compiled_call_impl"})
_FOREIGN = sys.stdlib_module_names | {"torch", "numpy"}  # objects of their classes are not entered

# Larger lists and dicts are not entered: they hold a vocabulary, not weights.
_MOST_PARTS, _DEEPEST = 10_000, 50

# With more bytes of frozen parameters for each byte of trained ones, they don't move: a teacher is
# as large as its student. WHY not more: a trial would copy a frozen base of billions.
_MOST_FROZEN = 2.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is held. Any: a dict, a list or a tuple, and its key there."""

    holder: Any
    key: Any
    home: torch.Tensor  # the tensor that was found there
    owner: nn.Module | None = None  # the module whose parameter or buffer it is

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


class Reach:
    """What a module reaches at one time."""

    def __init__(self, module: nn.Module) -> None:
        # The place of each tensor by name; in order, alike on all ranks. The names of parameters
        # and buffers are those of torch; the others are such as teacher[0].bias.
        self.places: dict[str, Place] = {}
        self._seen: dict[int, Any] = {}
        self._add_module(module, "")

    def holders(self) -> list[Any]:
        """Return the dicts and lists that hold it. Any: whatever attributes hold."""
        found = [value for value in self._seen.values() if isinstance(value, dict | list)]
        others = [value for value in self._seen.values() if hasattr(value, "__dict__")]
        found += [vars(value) for value in others if not isinstance(value, torch.Tensor)]
        return found + [vars(part)["_buffers"] for part in others if isinstance(part, nn.Module)]

    def may_move(self) -> dict[str, Place]:
        """Return what forward may change: no trained parameters, frozen ones if they are few."""
        parameters = [p.home for p in self.places.values() if isinstance(p.home, nn.Parameter)]
        num_trained = sum(parameter.nbytes for parameter in parameters if is_trained(parameter))
        num_frozen = sum(parameter.nbytes for parameter in parameters) - num_trained
        has_few = num_frozen <= _MOST_FROZEN * num_trained
        return {
            name: place
            for name, place in self.places.items()
            if not is_trained(place.home) and (has_few or not isinstance(place.home, nn.Parameter))
        }

    def _add_module(self, module: nn.Module, prefix: str) -> None:
        parts = list(module.named_modules(prefix=prefix))
        for path, part in parts:
            self._seen[id(part)] = part
            for held in (vars(part)["_parameters"], vars(part)["_buffers"]):
                for name in list(held):
                    self._add(held, name, _joined(path, name), owner=part)
        for path, part in parts:
            for name in [name for name in vars(part) if name not in OF_MODULES]:
                self._add(vars(part), name, _joined(path, name))

    def _add(
        self, holder: Any, key: Any, path: str, depth: int = 0, owner: nn.Module | None = None
    ) -> None:
        """Add what is in holder[key]. Any: whatever an attribute holds."""
        value = holder[key]
        if id(value) in self._seen or depth > _DEEPEST:
            return
        self._seen[id(value)] = value  # held, so that no other object gets its id meanwhile
        if isinstance(value, torch.Tensor):
            self.places[path] = Place(holder, key, value, owner)
        elif isinstance(value, nn.Module):
            self._add_module(value, path)
        elif isinstance(value, dict | list | tuple | deque):
            if len(value) <= _MOST_PARTS:
                for part in list(value) if isinstance(value, dict) else range(len(value)):
                    self._add(value, part, f"{path}[{part!r}]", depth + 1)
        elif _is_of_user(value):
            held = attributes_of(value)
            for name in list(held):
                self._add(held, name, f"{path}.{name}", depth + 1)


def is_trained(tensor: torch.Tensor) -> bool:
    """Return whether it is a parameter with a gradient: the optimizer changes it, too."""
    return isinstance(tensor, nn.Parameter) and tensor.requires_grad


def version_of(tensor: torch.Tensor) -> int:
    """Return a number that grows with each write in place; not by .data, numpy and the like."""
    return 0 if tensor.is_inference() else int(getattr(tensor, "_version", 0))


def has_attributes(value: object) -> bool:
    """Return whether attributes_of works for value."""
    return hasattr(value, "__dict__") or bool(_slots_of(value))


def attributes_of(value: object) -> MutableMapping[str, Any]:
    """Return the attributes of an object, as vars does, also those in __slots__."""
    return _Attributes(value) if _slots_of(value) else vars(value)


class _Attributes(MutableMapping[str, Any]):
    """The attributes of an object with __slots__."""

    def __init__(self, owner: object) -> None:
        self._owner = owner

    def __getitem__(self, name: str) -> Any:
        try:
            return object.__getattribute__(self._owner, name)
        except AttributeError:
            raise KeyError(name) from None

    def __setitem__(self, name: str, value: Any) -> None:
        object.__setattr__(self._owner, name, value)

    def __delitem__(self, name: str) -> None:
        object.__delattr__(self._owner, name)

    def __iter__(self) -> Iterator[str]:
        names = [*_slots_of(self._owner), *getattr(self._owner, "__dict__", ())]
        return iter([name for name in names if name in self])

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _slots_of(value: object) -> list[str]:
    """Name what an object holds without a dict, as pickle and copy find it."""
    found: list[str] = copyreg._slotnames(type(value))  # type: ignore[attr-defined]  # in no stub
    return found


def _is_of_user(value: object) -> bool:
    """Return whether value is an object with attributes, of a class of the user's own."""
    package = type(value).__module__.partition(".")[0]
    return has_attributes(value) and not isinstance(value, type) and package not in _FOREIGN


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name

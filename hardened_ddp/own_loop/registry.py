"""The objects that a loop registers by name, as JSON and tensors, and back into them, in place.

WHY no pickle: reading a checkpoint must not run code. So an object is a module, an optimizer or
another one with state_dict and load_state_dict, a generator, or a dict or list of tensors, arrays,
numbers, text and None. All else is refused, with its name, when the loop begins.
"""

import json
from collections.abc import Mapping
from itertools import chain, repeat
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from hardened_ddp.errors import CheckpointMismatchError, OwnLoopError
from hardened_ddp.model.effects import has_same_bits
from hardened_ddp.model.state_tree import MAPPINGS, Tree, pack, unpack

Tensors = dict[str, torch.Tensor]

_IN_PLACE = (dict, list, torch.Tensor, np.ndarray)
_GENERATORS = (np.random.Generator, torch.Generator)


class Registry:
    """The registered objects, by name."""

    def __init__(self, things: Mapping[str, Any]) -> None:  # Any: the user's
        """Raises OwnLoopError for what can't be saved, or not put back."""
        self.things = {name: _inner(thing) for name, thing in things.items()}
        self.modules = {n: t for n, t in self.things.items() if isinstance(t, nn.Module)}
        self.optimizers = {n: t for n, t in self.things.items() if isinstance(t, Optimizer)}
        for name, thing in self.things.items():
            can_load = hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict")
            if not (can_load or isinstance(thing, (*_IN_PLACE, *_GENERATORS))):
                raise OwnLoopError(
                    f"{name}={thing!r:.40}: protect can't set your variable on resume",
                    fix="put it in a dict, or give its class state_dict and load_state_dict",
                )
        for name, module in self.modules.items():
            kinds = (kind for each in module.modules() for kind in type(each).__mro__)
            # WHY by its module: fully_shard makes a class for each module that it is given
            if any(kind.__module__.startswith("torch.distributed.fsdp") for kind in kinds):
                raise OwnLoopError(
                    f"{name} is wrapped by FSDP: protect needs all of each tensor on each rank",
                    fix="wrap it in DistributedDataParallel, or save it by "
                    "torch.distributed.checkpoint without protect",
                )
        if not things:
            raise OwnLoopError("protect was given no object: nothing would be saved")
        known = {id(tensor) for tensor in self.pack()[1].values()}
        for name, optimizer in self.optimizers.items():
            updated = (p for group in optimizer.param_groups for p in group["params"])
            if lost := sum(id(p) not in known for p in updated):
                raise OwnLoopError(
                    f"{name} updates {lost} tensors of no registered model: register it, too"
                )

    def pack(self) -> tuple[Tree, Tensors]:
        """Return the state of all: JSON, and the tensors that it names, by name. Nothing is copied.

        What is not a tensor in the object is one here, and belongs to nobody else.
        """
        tensors: Tensors = {}
        tree = {name: _packed(t, name, tensors) for name, t in self.things.items()}
        return tree, tensors

    def buffers(self) -> dict[int, torch.Tensor]:
        """Return the buffers of all modules by id, in one order on all ranks."""
        return {id(b): b for module in self.modules.values() for b in module.buffers()}

    def is_wrapped(self, module: nn.Module | None, by: nn.Module) -> bool:
        inner = getattr(module, "_orig_mod", module)  # what torch.compile was given
        return isinstance(by, DistributedDataParallel) and inner in self.modules.values()

    def load(self, name: str, tree: Tree, tensors: Mapping[str, torch.Tensor]) -> None:
        """Put the state of one object into it. Raises CheckpointMismatchError if it can't."""
        thing, state, now = self.things[name], unpack(tree, tensors), Tensors()
        try:
            if isinstance(thing, np.random.Generator):
                thing.bit_generator.state = state
            elif isinstance(thing, torch.Generator):
                thing.set_state(state)
            elif isinstance(thing, _IN_PLACE):
                _put(thing, state)
            else:
                thing.load_state_dict(state)
            # WHY: what its load_state_dict left out, a resumed run would go on without
            is_same = _sorted(_packed(thing, name, now)) == _sorted(tree)
            pairs = [(tensor.cpu(), tensors[part]) for part, tensor in now.items()]
            if not is_same or not all(a.dtype == b.dtype and has_same_bits(a, b) for a, b in pairs):
                raise ValueError("it has other content after loading")
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointMismatchError(
                f"the checkpoint does not fit the objects of this loop: {name}: {error}",
                fix="build them as in the run that wrote it, or give protect another folder",
            ) from error


def _sorted(tree: Tree) -> str:
    """Write a tree without the order of its dicts. WHY text: NaN is not equal to itself."""

    def without_order(node: dict[str, Any]) -> dict[str, Any]:  # Any: JSON
        return {k: sorted(map(json.dumps, v)) if k in MAPPINGS else v for k, v in node.items()}

    return json.dumps(json.loads(json.dumps(tree), object_hook=without_order))


def _inner(thing: Any) -> Any:  # Any: the user's
    """Unwrap what DDP and torch.compile make of a module: its names don't depend on them."""
    thing = getattr(thing, "_orig_mod", thing)
    if isinstance(thing, DistributedDataParallel):
        thing = thing.module
    return getattr(thing, "_orig_mod", thing)


def _packed(thing: Any, name: str, tensors: Tensors) -> Tree:  # Any: the user's
    state = thing
    if isinstance(thing, nn.Module):
        state = thing.state_dict(keep_vars=True)  # WHY: p.data = x shows in the parameter only
    elif isinstance(thing, np.random.Generator):
        state = thing.bit_generator.state
    elif isinstance(thing, torch.Generator):
        state = thing.get_state()
    elif hasattr(thing, "state_dict"):
        state = thing.state_dict()
    elif isinstance(thing, dict) and type(thing) not in MAPPINGS.values():  # a class of one's own
        state = dict(thing)
    return pack(state, name, tensors, error=OwnLoopError)


@torch.no_grad()
def _put(old: Any, new: Any) -> Any:  # Any: the user's
    """Return new; where old has its kind and shape, in the object that old is."""
    is_tensor = isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor)
    if is_tensor or (isinstance(old, np.ndarray) and isinstance(new, np.ndarray)):
        if (old.shape, old.dtype) != (new.shape, new.dtype):
            return new
        old[...] = new
        return old
    if isinstance(old, dict) and isinstance(new, dict):
        kept = {key: _put(old.get(key), value) for key, value in new.items()}
        old.clear()
        old.update(kept)
        return old
    if isinstance(old, list) and isinstance(new, list):
        before = chain(old, repeat(None))
        old[:] = [_put(was, value) for was, value in zip(before, new, strict=False)]
        return old
    return new

"""Nested states as JSON, in which a tensor or an array is its name in the checkpoint. No pickle.

Owns what can be saved so: tensors, arrays, numbers, text, None; lists, tuples and dicts of them.
Of optimizers and schedulers (schedule.py), and of what own loops register (own_loop/registry.py).
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from hardened_ddp.errors import HardenedError

Tree = Any  # JSON: a number, text or null as it is; anything else as {kind: content}
MAPPINGS: Mapping[str, type[dict[Any, Any]]] = {  # Any: keys and values of any kind
    "dict": dict,
    "ordered dict": OrderedDict,
    "counter": Counter,  # torch's MultiStepLR has one
}
_DTYPES = frozenset(map(np.dtype, "?bBhHiIlLefdFD"))  # those of numbers that torch has, too


def pack(
    value: Any,  # Any: a foreign state
    name: str,
    tensors: dict[str, torch.Tensor],
    *,
    error: type[HardenedError],
) -> Tree:
    """Return value as JSON; its tensors go to tensors, under names that begin with name.

    No tensor is copied. Raises error for a value that can't be saved.
    """
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        name = _free(name, tensors)
        tensors[name] = value
        return {"tensor": name, "is_on_device": not value.is_cpu}
    if kind is np.ndarray and value.dtype in _DTYPES:
        name = _free(name, tensors)
        tensors[name] = torch.from_numpy(np.array(value))  # WHY a copy: it has no version
        return {"array": name}
    if isinstance(value, np.generic) and value.dtype.kind in "biuf":
        return {"scalar": [value.dtype.str, value.item()]}
    if kind in (list, tuple):
        items = enumerate(value)
        return {kind.__name__: [pack(v, f"{name}.{i}", tensors, error=error) for i, v in items]}
    mapping = next((word for word, cls in MAPPINGS.items() if kind is cls), "")
    if mapping and all(key is None or type(key) in (bool, int, float, str) for key in value):
        # WHY pairs: JSON would turn a number as a key into text
        pairs = value.items()
        return {mapping: [[k, pack(v, f"{name}.{k}", tensors, error=error)] for k, v in pairs]}
    keys = " with keys that are not text or numbers" if mapping else ""
    raise error(
        f"{name} is a {kind.__name__}{keys}: it can't be saved without pickle, so a resumed run "
        "would differ",
        fix="keep it as tensors, arrays, numbers or text, in dicts, lists and tuples; or give its "
        "object the methods state_dict and load_state_dict that return and take such (to protect, "
        "each object with these is given by a name of its own: G=G, D=D)",
    )


def unpack(tree: Tree, tensors: Mapping[str, torch.Tensor]) -> Any:  # Any: as it was packed
    if not isinstance(tree, dict):
        return tree
    kind, content = next(iter(tree.items()))
    if kind == "tensor":
        found = tensors[content].detach().clone()
        return found.cuda() if tree["is_on_device"] and torch.cuda.is_available() else found
    if kind == "array":
        return tensors[content].numpy().copy()
    if kind == "scalar":
        return np.dtype(content[0]).type(content[1])
    if kind in ("list", "tuple"):
        parts = [unpack(part, tensors) for part in content]
        return parts if kind == "list" else tuple(parts)
    return MAPPINGS[kind]({key: unpack(part, tensors) for key, part in content})


def _free(name: str, tensors: Mapping[str, torch.Tensor]) -> str:
    """Return a name that no tensor has: {1: a, "1": b} gives the same one twice."""
    while name in tensors:
        name += "'"
    return name

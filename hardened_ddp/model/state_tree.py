"""Nested states as JSON, in which a tensor or an array is its name in the checkpoint. No pickle.

Owns what can be saved so: tensors, arrays, numbers, text, None; lists, tuples and dicts of them.
Of optimizers and schedulers (schedule.py), and of what own loops register (own_loop/registry.py).
"""

import ast
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.lib.format import descr_to_dtype, dtype_to_descr

from hardened_ddp.errors import HardenedError

Tree = Any  # JSON: a number, text or null as it is; anything else as {kind: content}
MAPPINGS: Mapping[str, type[dict[Any, Any]]] = {  # Any: keys and values of any kind
    "dict": dict,
    "ordered dict": OrderedDict,
    "counter": Counter,  # torch's MultiStepLR has one
}


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
    is_array = isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray)
    if is_array and not value.dtype.hasobject:
        name, dtype = _free(name, tensors), value.dtype
        if dtype.kind in "biufc" and dtype.isnative and dtype.char not in "gG":
            tensors[name] = torch.from_numpy(np.array(value))  # WHY a copy: it has no version
            return {"array": name}
        # Of records, dates, text, foreign numbers the bytes. WHY zeros: padding is not copied
        copy = np.zeros(value.shape, dtype)
        copy[...] = value
        tensors[name] = torch.from_numpy(copy.reshape(-1).view(np.uint8))
        return {"records": [name, repr(dtype_to_descr(dtype)), value.shape]}
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
        "object the methods state_dict and load_state_dict that return and take such",
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
    if kind == "records":
        name, dtype, shape = content
        values = np.zeros(shape, descr_to_dtype(ast.literal_eval(dtype)))
        values.reshape(-1).view(np.uint8)[:] = tensors[name].numpy()
        return values
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

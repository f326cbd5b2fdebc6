"""A GPU that is none: tensors in the host's memory that say that they are on cuda:0.

It has a GPU's rules about memory, so code that breaks them is found without one:

- an operation of a tensor on it with one on the host raises, as on a GPU (Mix);
- whatever lets the host wait for the device is noted, with its line (PretendedGpu.waits): reading a
  value, an operation whose result has a size that the device computes, a copy that blocks.

Values are computed by the CPU: so results can be compared with those of a run on the CPU.
Which tensors are on it is known by their memory. What it can't show is in docs/GPU.md.
"""

import contextlib
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

ROOT = Path(__file__).resolve().parents[1]
GPU, CPU = torch.device("cuda", 0), torch.device("cpu")

READS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2")
SIZED_BY_VALUES = ("bincount", "repeat_interleave")
"""Operations of which CUDA's kernels ask the device how large their result is."""
ASSERT = "CUDA error: device-side assert triggered"


class Mix(RuntimeError):
    """An operation has tensors on two devices."""


class PretendedGpu(TorchDispatchMode):
    """The device. Everything inside of `with gpu.on():` may use it."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        """What waited, and where."""

        self.is_lost = False
        """A kernel has met a number out of range: as on a GPU, nothing runs any more."""

        self._on_gpu: dict[int, StorageWeakRef] = {}
        self._pinned: dict[int, StorageWeakRef] = {}

    @contextlib.contextmanager
    def on(self) -> Iterator["PretendedGpu"]:
        """Let this process have the device, and let its tensors say where they are."""
        stand_ins = {
            "Tensor.device": property(lambda tensor: GPU if self.has(tensor) else CPU),
            "Tensor.is_cuda": property(self.has),
            "Tensor.is_cpu": property(lambda tensor: not self.has(tensor)),
            "cuda.Event": lambda *_, **__: _Event(self),
            "cuda.Stream": lambda *_, **__: None,
            "cuda.stream": lambda stream: contextlib.nullcontext(),
            "cuda.manual_seed": lambda seed: None,
            "cuda.is_bf16_supported": lambda **_: True,
            "cuda.amp.common.amp_definitely_not_available": lambda: False,
            "autocast": _autocast,
            "_C._group_tensors_by_device_and_dtype": _grouped,
        }
        with contextlib.ExitStack() as stack:
            for name, stand_in in stand_ins.items():
                stack.enter_context(mock.patch(f"torch.{name}", stand_in))
            stack.enter_context(_Arguments(self))
            yield stack.enter_context(self)

    def has(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is on the device."""
        return _key(tensor) in self._on_gpu

    def take(self, value: Any) -> Any:  # Any: nested tensors
        """Note that tensors are on the device, and return them."""
        _note(value, self._on_gpu)
        return value

    def pin(self, value: Any) -> Any:  # Any: nested tensors
        """Note that tensors are in pinned memory, and return them."""
        _note(value, self._pinned)
        return value

    def wait(self, what: str) -> None:
        """Note that the host waits."""
        where = "?"
        for frame in reversed(traceback.extract_stack()):
            path = Path(frame.filename)
            # WHY sys.prefix: a virtual environment may lie in the checkout.
            is_ours = path.is_relative_to(ROOT) and not path.is_relative_to(sys.prefix)
            if is_ours and frame.filename != __file__:
                where = f"{path.relative_to(ROOT)}:{frame.lineno}"
                break
        self.waits.append(f"{what} at {where}")

    # Any: torch's own signature
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        on_gpu = [tensor for tensor in tensors if self.has(tensor)]
        if not on_gpu:
            return func(*args, **kwargs)
        if self.is_lost:
            raise RuntimeError(ASSERT)
        if name == "copy_":
            self._copy(*args, **kwargs)
            return args[0]
        on_host = [tensor for tensor in tensors if not self.has(tensor)]
        if on_host:
            self._judge_mix(func, name, on_host, args)
        masks = args[1] if name == "index" else ()
        is_masked = any(mask is not None and mask.dtype == torch.bool for mask in masks)
        if name in (*READS, *SIZED_BY_VALUES) or is_masked:
            self.wait(name)
        try:
            return self.take(func(*args, **kwargs))
        except (IndexError, RuntimeError) as error:
            if not any(sign in str(error) for sign in ("out of bounds", "out of range")):
                raise
            self.is_lost = True
            raise RuntimeError(ASSERT) from error

    def _judge_mix(self, func: Any, name: str, on_host: list[torch.Tensor], args: Any) -> None:
        """Raise Mix unless a GPU allows it: single numbers, and indices, which it fetches."""
        if name in ("index", "index_put", "index_put_") and self.has(args[0]):
            self.wait(f"{name} by numbers on the host")
            return
        takes_numbers = torch.Tag.pointwise in func.tags or name.startswith(("_foreach_", "fill_"))
        if not takes_numbers or any(tensor.dim() for tensor in on_host):
            devices = f"{GPU} and {CPU}"
            raise Mix(f"{func}: expected all tensors to be on the same device, found {devices}")

    def _copy(self, target: Any, source: Any, non_blocking: bool = False) -> None:
        """Copy between the devices, or on this one."""
        ends = [self.has(target), self.has(source)]
        host = source if ends[0] else target
        if not all(ends) and not (non_blocking and _key(host) in self._pinned):
            self.wait("copy_")
        torch.ops.aten.copy_(target, source)


class _Arguments(TorchFunctionMode):
    """Calls torch's functions with the host for the device, of which this torch knows nothing."""

    def __init__(self, gpu: PretendedGpu) -> None:
        super().__init__()
        self._gpu = gpu

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        gpu, kwargs = self._gpu, dict(kwargs or {})
        name = getattr(func, "__name__", "")
        tensor = args[0] if args and isinstance(args[0], torch.Tensor) else None
        if name == "pin_memory" and tensor is not None:
            return gpu.pin(tensor.clone())
        if name == "is_pinned" and tensor is not None:
            return _key(tensor) in gpu._pinned
        is_pinned = bool(kwargs.pop("pin_memory", False))
        if name in ("tolist", "numpy", "__array__") and tensor is not None and gpu.has(tensor):
            if name != "tolist":
                raise TypeError(f"can't convert {GPU} device type tensor to numpy")
            gpu.wait(name)
        if name in ("to", "cpu", "cuda") and tensor is not None:
            return self._move(name, tensor, args[1:], kwargs)
        choices = [p for p in args[1:] if isinstance(p, torch.Tensor)] if name == "where" else []
        if tensor is not None and not tensor.is_cuda and any(map(gpu.has, choices)):
            gpu.wait("where by a condition on the host")
        wanted = [_device_of(leaf) for leaf in tree_leaves((args, kwargs))]
        only_names_it = func is torch.device or name == "_parse_to"  # the arguments of Module.to
        if GPU not in wanted or only_names_it:
            found = func(*args, **kwargs)
            return gpu.pin(found) if is_pinned else found
        args, kwargs = tree_map(_as_host, (args, kwargs))
        if name in ("tensor", "as_tensor", "asarray"):
            data = args[0]
            if isinstance(data, torch.Tensor):
                return self._move("to", data, (GPU, kwargs.get("dtype") or data.dtype), {})
            gpu.wait(name)
        return gpu.take(func(*args, **kwargs))

    def _move(self, name: str, tensor: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
        """Do what Tensor.to, cpu or cuda do."""
        gpu, is_here = self._gpu, self._gpu.has(tensor)
        ends = [_device_of(leaf) for leaf in (*args, *kwargs.values())]
        ends += [end for leaf in args if isinstance(leaf, torch.Tensor) for end in [leaf.device]]
        is_wanted_here = name == "cuda" or (name == "to" and GPU in ends)
        is_wanted_on_host = name == "cpu" or (name == "to" and CPU in ends)
        args, kwargs = tree_map(_as_host, (args, kwargs))
        is_blocking = not (kwargs.get("non_blocking") or (name == "to" and True in args))
        changes = (is_wanted_here and not is_here) or (is_wanted_on_host and is_here)
        # WHY of pageable memory too: the driver stages it behind the work that is queued
        if changes and (is_blocking or (is_wanted_here and _key(tensor) not in gpu._pinned)):
            gpu.wait(name)
        moved = tensor.to(*args, **kwargs) if name == "to" else tensor
        if not changes:
            return moved
        with torch._C._DisableTorchDispatch():  # type: ignore[attr-defined]  # torch's
            copied = moved.clone() if moved is tensor or _key(moved) == _key(tensor) else moved
        if is_wanted_here:
            return gpu.take(copied)
        gpu._on_gpu.pop(_key(copied), None)
        return copied


class _Event:
    """torch.cuda.Event: the host waits for all work before it."""

    def __init__(self, gpu: PretendedGpu) -> None:
        self._gpu = gpu

    def record(self, *_: object) -> None:
        """Nothing: all work is done at once."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._gpu.wait("event")


def _autocast(device_type: str, **named: Any) -> Any:  # Any: torch's context
    return torch.amp.autocast_mode.autocast("cpu", **named)


def _grouped(lists: Any, with_indices: bool = False) -> Any:  # Any: torch's own
    """Group tensors by what they say is their device: torch's function asks its own part in C."""
    found = _group(lists, with_indices)
    return {(parts[0][0][0].device, key[1]): parts for key, parts in found.items()}


_group = torch._C._group_tensors_by_device_and_dtype


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _note(value: Any, known: dict[int, StorageWeakRef]) -> None:
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            storage = StorageWeakRef(leaf.untyped_storage())
            # WHY kept: as long as it is, no other memory gets this number.
            known[storage.cdata] = storage


def _device_of(value: object) -> torch.device | None:
    """Return the device that an argument names; None: it names none."""
    if isinstance(value, torch.device):
        return GPU if value.type == "cuda" else CPU if value.type == "cpu" else value
    if isinstance(value, str) and value.partition(":")[0] in ("cuda", "cpu"):
        return GPU if value.startswith("cuda") else CPU
    return None


def _as_host(value: Any) -> Any:  # Any: an argument
    return CPU if _device_of(value) == GPU else value

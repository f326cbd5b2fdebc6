"""The file of tensors: the safetensors format, written by us and read by its library.

Owns: the layout of a file (plan_file), writing and reading one, the shape and dtype of tensors; and
HostArena, the host memory for a copy of the data of a file.
The format, from https://github.com/huggingface/safetensors#format: 8 bytes, the length of the
header, little-endian; the header, JSON, {name: {dtype, shape, data_offsets: [begin, end]}}, padded
with spaces; then the bytes of the tensors, little-endian, row-major, without holes. No code in it.
"""

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from psutil import virtual_memory
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hardened_ddp.errors import CheckpointError

# The format's names of torch's dtypes.
DTYPE_CODES: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.bfloat16: "BF16",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    **{getattr(torch, f"uint{bits}"): f"U{bits}" for bits in (8, 16, 32, 64)},
    **{getattr(torch, f"int{bits}"): f"I{bits}" for bits in (8, 16, 32, 64)},
    **{getattr(torch, f"float{bits}"): f"F{bits}" for bits in (16, 32, 64)},
}
# The limit of the safetensors library; a larger header can't be read back.
_MAX_HEADER_BYTES = 100_000_000
_MAX_NAMED = 10  # differences between two states
# WHY blocks: the allocator of pinned memory rounds up to a power of two, so a single block of
# 1.2 GB would pin 2 GiB.
_BLOCK_BYTES = 64 * 2**20


class TensorSpec(NamedTuple):
    """What must be equal so that one tensor can be loaded from another."""

    shape: tuple[int, ...]
    dtype: str  # as torch prints it, without "torch.": "float32"

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape)) or 'scalar'} {self.dtype}"


@dataclass(frozen=True, kw_only=True, slots=True)
class FilePlan:
    """The layout of a file of tensors, made before any tensor is read."""

    header: bytes
    # Where each tensor begins and ends in the bytes after the header, in this order.
    spans: dict[str, tuple[int, int]]
    specs: dict[str, TensorSpec]
    data_bytes: int
    size_bytes: int  # of the whole file: the header and the data


def spec_of(tensor: Tensor) -> TensorSpec:
    return TensorSpec(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))


def specs_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    return {name: spec_of(tensor) for name, tensor in tensors.items()}


def plan_file(tensors: Mapping[str, Tensor]) -> FilePlan:
    """Lay out a file for tensors. Raises CheckpointError for one that the format can't hold."""
    # WHY widest first: each tensor then starts at a multiple of its element size, as readers want
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    spans = {}
    begin = 0
    for name in order:
        tensor = tensors[name]
        is_dense = tensor.layout is torch.strided and not tensor.is_meta
        if name == "__metadata__" or tensor.dtype not in DTYPE_CODES or not is_dense:
            raise CheckpointError(
                f"tensor {name!r} ({spec_of(tensor)}, {tensor.layout}, {tensor.device}) can't be "
                "stored in a safetensors file, which holds dense tensors of the usual dtypes",
                fix="keep it out of state_dict (persistent=False), or convert it before saving",
            )
        end = begin + tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": DTYPE_CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
        spans[name] = begin, end
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER_BYTES:
        raise CheckpointError(f"{len(tensors)} tensors need a header of {len(text)} bytes")
    whole_header = struct.pack("<Q", len(text)) + text
    return FilePlan(
        header=whole_header,
        spans=spans,
        specs=specs_of(tensors),
        data_bytes=begin,
        size_bytes=len(whole_header) + begin,
    )


def read_tensors(path: Path, *, names: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Read tensors of a verified file; each owns its memory. Raises CheckpointError.

    names: which; None: all.
    """
    found: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys() if names is None else names:
                # WHY clone: a view of the mapped file raises SIGBUS once that is truncated
                found[name] = file.get_tensor(name).clone()
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read as safetensors: {error}") from error
    return found


def differences(expected: Mapping[str, TensorSpec], found: Mapping[str, TensorSpec]) -> list[str]:
    """Return lines that say where a checkpoint's tensors differ from those of this run.

    expected, found: from specs_of or a manifest. Empty if they agree. Of many, the first few.
    """
    lines = [f"missing in the checkpoint: {n} ({expected[n]})" for n in expected if n not in found]
    lines += [f"only in the checkpoint: {n} ({found[n]})" for n in found if n not in expected]
    lines += [
        f"differs: {name} is {found[name]} in the checkpoint, {spec} in this run"
        for name, spec in expected.items()
        if tuple(found.get(name, spec)) != tuple(spec)
    ]
    left_out = len(lines) - _MAX_NAMED
    return lines if left_out <= 0 else [*lines[:_MAX_NAMED], f"and {left_out} more"]


class HostArena:
    """Host memory for a copy of the file's data, reused from one checkpoint to the next."""

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []

    def reserve(self, size_bytes: int, *, pinned: bool) -> None:
        """Allocate size_bytes. Raises RuntimeError if that much can't, or must not, be pinned."""
        missing = max(0, -(-size_bytes // _BLOCK_BYTES) - len(self._blocks))
        if pinned and missing * _BLOCK_BYTES > (free := virtual_memory().available) // 2:
            raise RuntimeError(f"{free} bytes of host memory are free, of which half may be pinned")
        for _ in range(missing):
            self._blocks.append(
                torch.empty(_BLOCK_BYTES, dtype=torch.uint8, pin_memory=True)
                if pinned
                # WHY numpy: it raises MemoryError where there is none
                else torch.from_numpy(np.empty(_BLOCK_BYTES, dtype=np.uint8))
            )

    def pieces(self, begin: int, end: int) -> Iterator[Tensor]:
        """Yield the memory of the bytes from begin to end, in order."""
        while begin < end:
            index, offset = divmod(begin, _BLOCK_BYTES)
            size = min(_BLOCK_BYTES - offset, end - begin)
            yield self._blocks[index][offset : offset + size]
            begin += size

    def read(self, size_bytes: int) -> Iterator[memoryview]:
        return (piece.numpy().data for piece in self.pieces(0, size_bytes))

    def copy(self, tensor: Tensor, begin: int) -> None:
        """Copy the bytes of a tensor to begin; from a GPU in its current stream, without a wait."""
        data = bytes_of(tensor)
        for piece in self.pieces(begin, begin + data.numel()):
            piece.copy_(data[: piece.numel()], non_blocking=data.is_cuda)
            data = data[piece.numel() :]


@dataclass(frozen=True, slots=True)
class Content:
    """What is written to a file of tensors."""

    plan: FilePlan
    data: Callable[[], Iterable[memoryview]]  # the bytes after the header; called for each try

    def parts(self) -> Iterable[memoryview]:
        return chain([memoryview(self.plan.header)], self.data())


def live_content(tensors: Mapping[str, Tensor]) -> Content:
    """Give the file of tensors that don't change before it is written. Nothing is copied ahead."""
    plan = plan_file(tensors)
    return Content(plan, lambda: (bytes_of(tensors[n]).cpu().numpy().data for n in plan.spans))


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor in the order of the file: a view of it if possible."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)

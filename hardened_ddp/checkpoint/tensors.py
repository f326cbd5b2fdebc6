"""The file of tensors: the safetensors format, written by us and read by its library.

Owns: the layout of a file (plan_file), reading one back (read_tensors), and the shape and dtype of
tensors (TensorSpec, specs_of, differences).
The format, from https://github.com/huggingface/safetensors#format: 8 bytes, the length of the
header, little-endian; the header, JSON, {name: {dtype, shape, data_offsets: [begin, end]}}, padded
with spaces; then the bytes of the tensors, little-endian, row-major, without holes. No code in it.
Does not own: in which order bytes are read from live tensors (stream.py), hashes (verify.py).
What goes wrong here: the library's tensors are views of the mapped file, and reading them raises
SIGBUS when the file is truncated; so each one is copied.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hardened_ddp.errors import CheckpointError

# The format's names of torch's dtypes.
DTYPE_CODES: Mapping[torch.dtype, str] = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
_PREFIX_BYTES = 8
# The limit of the safetensors library; a larger header can't be read back.
_MAX_HEADER_BYTES = 100_000_000


class TensorSpec(NamedTuple):
    """What must be equal so that one tensor can be loaded from another."""

    shape: tuple[int, ...]
    dtype: str
    """As torch prints it, without "torch.": "float32"."""

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape)) or 'scalar'} {self.dtype}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Slot:
    """The position of one tensor in the bytes after the header."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True, slots=True)
class FilePlan:
    """The layout of a file of tensors, made before any tensor is read."""

    header: bytes
    slots: tuple[Slot, ...]
    specs: dict[str, TensorSpec]
    data_bytes: int
    size_bytes: int
    """Of the whole file: the header and the data."""


def spec_of(tensor: Tensor) -> TensorSpec:
    """Describe a tensor."""
    return TensorSpec(tuple(tensor.shape), _dtype_name(tensor.dtype))


def specs_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorSpec]:
    """Describe tensors by name."""
    return {name: spec_of(tensor) for name, tensor in tensors.items()}


def plan_file(tensors: Mapping[str, Tensor]) -> FilePlan:
    """Lay out a file for tensors. Raises CheckpointError for one that the format can't hold."""
    # WHY widest first: each tensor then starts at a multiple of its element size, as readers want
    order = sorted(tensors, key=lambda name: -tensors[name].element_size())
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    slots = []
    begin = 0
    for name in order:
        tensor = tensors[name]
        if name == "__metadata__" or tensor.dtype not in DTYPE_CODES or not _is_plain(tensor):
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
        slots.append(Slot(name=name, begin=begin, end=end))
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > _MAX_HEADER_BYTES:
        raise CheckpointError(f"{len(tensors)} tensors need a header of {len(text)} bytes")
    whole_header = struct.pack("<Q", len(text)) + text
    return FilePlan(
        header=whole_header,
        slots=tuple(slots),
        specs=specs_of(tensors),
        data_bytes=begin,
        size_bytes=len(whole_header) + begin,
    )


def read_tensors(
    path: Path, *, device: torch.device | str = "cpu", names: Sequence[str] | None = None
) -> dict[str, Tensor]:
    """Read tensors of a verified file; each owns its memory. Raises CheckpointError.

    names: which; None: all.
    """
    on_cpu = torch.device(device).type == "cpu"
    found: dict[str, Tensor] = {}
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            for name in file.keys() if names is None else names:
                mapped: Tensor = file.get_tensor(name)
                found[name] = mapped.clone() if on_cpu else mapped.to(device)
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read as safetensors: {error}") from error
    return found


def differences(
    expected: Mapping[str, TensorSpec], found: Mapping[str, TensorSpec], *, limit: int = 10
) -> list[str]:
    """Return lines that say where a checkpoint's tensors differ from those of this run.

    expected, found: from specs_of or a manifest. Empty if they agree; at most limit lines, then one
    with the number of the others.
    """
    lines = [
        f"missing in the checkpoint: {name} ({expected[name]})"
        for name in expected
        if name not in found
    ]
    lines += [
        f"only in the checkpoint: {name} ({found[name]})" for name in found if name not in expected
    ]
    lines += [
        f"differs: {name} is {found[name]} in the checkpoint, {expected[name]} in this run"
        for name in expected
        if name in found and tuple(found[name]) != tuple(expected[name])
    ]
    left_out = len(lines) - limit
    return lines if left_out <= 0 else [*lines[:limit], f"and {left_out} more"]


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.layout is torch.strided and tensor.device.type != "meta" and not tensor.is_quantized
    )

"""The file of tensors: the safetensors format, written by us and read by its library.

Owns: the layout of a file (plan_file), reading one back, the shape and dtype of tensors; and
TensorReader, which reads live tensors in the order of the file, in place, and copies them only if
they are about to change (freeze), to the memory of HostArena.
The format, from https://github.com/huggingface/safetensors#format: 8 bytes, the length of the
header, little-endian; the header, JSON, {name: {dtype, shape, data_offsets: [begin, end]}}, padded
with spaces; then the bytes of the tensors, little-endian, row-major, without holes. No code in it.
What goes wrong here: reading a tensor while the optimizer changes it gives a file with a correct
hash and a state that never existed. The rule that prevents it: bytes before `position` are read,
those after it are live or in the arena, and both sides move under one lock, held for the copy of
one chunk and never while the disk works.
"""

import json
import struct
import threading
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from psutil import virtual_memory
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hardened_ddp.checkpoint.disk import Disk, HashedFile
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
# The limit of the safetensors library; a larger header can't be read back.
_MAX_HEADER_BYTES = 100_000_000
_MAX_NAMED = 10  # differences between two states
# How much the reader copies at once. Large enough that the writer thread rarely takes the GIL,
# small enough that a training step waits only a millisecond or two for the copy of a chunk.
CHUNK_BYTES = 8 * 2**20
# WHY blocks: the allocator of pinned memory rounds up to a power of two, so a single block of
# 1.2 GB would pin 2 GiB. WHY this size: above 32 MiB malloc leaves pages untouched.
_BLOCK_BYTES = 64 * 2**20
# By size: numpy has integers of each, but no bfloat16 or float8.
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Bytes = NDArray[np.uint8]


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
    left_out = len(lines) - _MAX_NAMED
    return lines if left_out <= 0 else [*lines[:_MAX_NAMED], f"and {left_out} more"]


class HostArena:
    """Host memory for an image of the file's data, reused from one checkpoint to the next.

    Unpinned memory takes no physical pages until it is written, so nothing if nothing is copied.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []

    def reserve(self, size_bytes: int, *, pinned: bool) -> None:
        """Allocate size_bytes. Raises RuntimeError if that much can't, or must not, be pinned."""
        sizes = [min(_BLOCK_BYTES, size_bytes - at) for at in range(0, size_bytes, _BLOCK_BYTES)]
        here = [block.numel() for block in self._blocks] + [0] * len(sizes)
        missing = {i: wanted for i, wanted in enumerate(sizes) if wanted > here[i]}
        if pinned and sum(missing.values()) > (free := virtual_memory().available) // 2:
            raise RuntimeError(f"{free} bytes of host memory are free, of which half may be pinned")
        for index, wanted in missing.items():
            # WHY numpy: with deterministic algorithms on, torch.empty would fill every page
            block = (
                torch.empty(wanted, dtype=torch.uint8, pin_memory=True)
                if pinned
                else torch.from_numpy(np.empty(wanted, dtype=np.uint8))
            )
            self._blocks[index : index + 1] = [block]

    def pieces(self, begin: int, end: int) -> Iterator[Tensor]:
        """Yield the memory of the bytes from begin to end, in order."""
        while begin < end:
            index, offset = divmod(begin, _BLOCK_BYTES)
            size = min(_BLOCK_BYTES - offset, end - begin)
            yield self._blocks[index][offset : offset + size]
            begin += size


class TensorReader:
    """The data of a file of tensors, read from front to back exactly once."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        plan: FilePlan | None = None,
        arena: HostArena | None = None,
    ) -> None:
        self.plan = plan_file(tensors) if plan is None else plan
        # The tensors that are not read yet, and whose bytes are not in the arena.
        self._live = {name: _as_words(tensor) for name, tensor in tensors.items()}
        self._unread = deque(self.plan.spans.items())
        # Of the live tensor that is being read: a view of it, or a copy.
        self._bytes: Bytes | None = None
        self._position = 0
        self._arena = HostArena() if arena is None else arena
        self._lock = threading.Lock()

    def read_into(self, buffer: Bytes) -> int:
        """Copy the next bytes into buffer and return their number; 0 at the end."""
        with self._lock:
            wanted = min(buffer.size, self.plan.data_bytes - self._position)
            filled = 0
            while filled < wanted:
                name, (begin, end) = self._unread[0]
                size = min(end - self._position, wanted - filled)
                self._read(name, begin, buffer[filled : filled + size])
                filled += size
                self._position += size
                if self._position == end:
                    self._unread.popleft()
                    self._live.pop(name, None)
                    self._bytes = None
            return filled

    def freeze(self) -> None:
        """Copy what is not read yet, so that the tensors may change. Waits for one chunk."""
        with self._lock:
            if self._position < self.plan.data_bytes:
                self.freeze_only(list(self._live))

    def freeze_only(self, names: Collection[str]) -> None:
        """Copy the tensors of these names now. Call before anything is read."""
        live = [name for name in names if name in self._live]
        if live:
            self._arena.reserve(self.plan.data_bytes, pinned=False)
        for name in live:
            self._fill_arena(name, torch.from_numpy(_row_major_bytes(self._live.pop(name))))

    def start_copy(self, name: str, tensor: Tensor) -> None:
        """Start to copy a tensor of a GPU; its bytes are read from the arena from now on."""
        del self._live[name]
        source = tensor.detach().resolve_conj().resolve_neg().contiguous()
        self._fill_arena(name, source.reshape(-1).view(torch.uint8), non_blocking=True)

    def _fill_arena(self, name: str, data: Tensor, *, non_blocking: bool = False) -> None:
        """Copy the unread bytes of a tensor, of which data are all bytes."""
        begin, end = self.plan.spans[name]
        start = max(self._position, begin)
        for piece in self._arena.pieces(start, end):
            taken = start - begin
            piece.copy_(data[taken : taken + piece.numel()], non_blocking=non_blocking)
            start += piece.numel()

    def _read(self, name: str, begin: int, out: Bytes) -> None:
        """Fill out with the bytes from `position` on, of the tensor that begins at begin."""
        if name in self._live:
            if self._bytes is None:
                self._bytes = _row_major_bytes(self._live[name])
            offset = self._position - begin
            # WHY numpy: it copies without the GIL, and starts no extra threads
            np.copyto(out, self._bytes[offset : offset + out.size])
            return
        filled = 0
        for piece in self._arena.pieces(self._position, self._position + out.size):
            np.copyto(out[filled : filled + piece.numel()], piece.numpy())
            filled += piece.numel()


def write_tensors(path: Path, reader: TensorReader, *, disk: Disk) -> str:
    """Write and sync a new file of tensors, and return its sha256. Raises OSError."""
    file = HashedFile(path, disk=disk)
    try:
        file.write(memoryview(reader.plan.header))
        buffer = np.empty(CHUNK_BYTES, dtype=np.uint8)
        while size := reader.read_into(buffer):
            file.write(buffer.data[:size])
            file.flush_early()
        return file.sync_and_close()
    finally:
        file.close()


def _as_words(tensor: Tensor) -> Tensor:
    """Return a view of a tensor in a dtype that numpy has."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain.view(_WORDS[plain.element_size()])


def _row_major_bytes(words: Tensor) -> Bytes:
    """Return the bytes of words on the host: a view of them if possible."""
    # WHY numpy and not torch: each call of torch releases the GIL, and the writer thread waits
    # milliseconds to get it back. The file is row-major, whatever the memory layout is.
    array = words.numpy() if words.is_cpu else words.cpu().numpy()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)

"""The bytes of live tensors, in the order of the file, read once while training continues.

Owns: TensorStream, which reads tensors in place and copies them only if they are about to change
(freeze), HostArena, the memory for such copies, and write_stream_to.
Does not own: threads and streams of a GPU (snapshot.py), what a checkpoint is (files.py).
What goes wrong here: reading a tensor while the optimizer changes it gives a file with a correct
hash and a state that never existed. The rule that prevents it: bytes before `position` are read,
those after it are live or in the arena, and both sides move under one lock, held for the copy of
one chunk and never while the disk works.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hardened_ddp.checkpoint.disk import Disk, HashedFile, Retry, run_once
from hardened_ddp.checkpoint.tensors import FilePlan, Slot

# How much the reader copies at once. Large enough that the writer thread rarely takes the GIL,
# small enough that a training step waits only a millisecond or two for the copy of a chunk.
CHUNK_BYTES = 8 * 2**20
# WHY blocks: the allocator of pinned memory rounds up to a power of two, so a single block of
# 1.2 GB would pin 2 GiB. WHY this size: above 32 MiB malloc leaves pages untouched.
_BLOCK_BYTES = 64 * 2**20
# Dtypes that numpy has. The others (bfloat16, float8) are viewed as integers of the same size.
_NUMPY_DTYPES = frozenset(
    {
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.float16, torch.float32, torch.float64, torch.complex64),
    }
)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

Bytes = NDArray[np.uint8]


class HostArena:
    """Host memory for an image of the file's data, reused from one checkpoint to the next.

    Unpinned memory takes no physical pages until it is written, so nothing if nothing is copied.
    """

    def __init__(self) -> None:
        self._blocks: list[Tensor] = []

    def reserve(self, size_bytes: int, *, pinned: bool) -> None:
        """Allocate size_bytes. Raises RuntimeError if the driver can't pin that much."""
        for index in range(-(-size_bytes // _BLOCK_BYTES)):
            wanted = min(_BLOCK_BYTES, size_bytes - index * _BLOCK_BYTES)
            if index < len(self._blocks) and self._blocks[index].numel() >= wanted:
                continue
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


class _Source:
    """Where the bytes of one tensor are: in the tensor, in a copy of it, or in the arena."""

    __slots__ = ("data", "slot", "tensor")

    def __init__(self, slot: Slot, tensor: Tensor) -> None:
        self.slot = slot
        self.tensor: Tensor | None = tensor
        """None if the arena has the bytes, or if they were read."""
        self.data: Bytes | None = None
        """The bytes of `tensor`, after the first bytes_of: a view of it, or a copy."""

    def bytes_of(self, tensor: Tensor) -> Bytes:
        if self.data is None:
            self.data = _row_major_bytes(tensor)
        return self.data

    def release(self) -> None:
        self.tensor = None
        self.data = None


class TensorStream:
    """The data of a file of tensors, read from front to back exactly once."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        *,
        plan: FilePlan,
        arena: HostArena | None = None,
        lock: AbstractContextManager[object] | None = None,
    ) -> None:
        self._sources = [_Source(slot, _as_words(tensors[slot.name])) for slot in plan.slots]
        self._by_name = {source.slot.name: source for source in self._sources}
        self.plan = plan
        self._data_bytes = plan.data_bytes
        self._position = 0
        self._next = 0
        self._arena = HostArena() if arena is None else arena
        self._lock = nullcontext() if lock is None else lock

    def read_into(self, buffer: Bytes) -> int:
        """Copy the next bytes into buffer and return their number; 0 at the end."""
        with self._lock:
            wanted = min(buffer.size, self._data_bytes - self._position)
            filled = 0
            while filled < wanted:
                source = self._sources[self._next]
                size = min(source.slot.end - self._position, wanted - filled)
                self._read_source(source, buffer[filled : filled + size])
                filled += size
                self._position += size
                if self._position == source.slot.end:
                    source.release()
                    self._next += 1
            return filled

    def freeze(self) -> None:
        """Copy what is not read yet, so that the tensors may change. Waits for one chunk."""
        with self._lock:
            unread = self._data_bytes - self._position
            if unread and any(source.tensor is not None for source in self._sources[self._next :]):
                self._arena.reserve(self._data_bytes, pinned=False)
                self._store(self._sources[self._next :])

    def freeze_only(self, names: Collection[str]) -> None:
        """Copy the tensors of these names now. Call before anything is read."""
        chosen = [self._by_name[name] for name in names if name in self._by_name]
        if chosen:
            self._arena.reserve(self._data_bytes, pinned=False)
            self._store(chosen)

    def hand_over(self, name: str) -> Iterator[Tensor]:
        """Read the tensor's bytes from the arena from now on; yield the memory to copy them to."""
        source = self._by_name[name]
        source.release()
        return self._arena.pieces(source.slot.begin, source.slot.end)

    def _read_source(self, source: _Source, out: Bytes) -> None:
        """Fill out with the bytes from `position` on."""
        if source.tensor is not None:
            offset = self._position - source.slot.begin
            # WHY numpy: it copies without the GIL, and starts no extra threads
            np.copyto(out, source.bytes_of(source.tensor)[offset : offset + out.size])
            return
        filled = 0
        for piece in self._arena.pieces(self._position, self._position + out.size):
            np.copyto(out[filled : filled + piece.numel()], piece.numpy())
            filled += piece.numel()

    def _store(self, sources: list[_Source]) -> None:
        for source in sources:
            if source.tensor is None:
                continue
            begin = max(self._position, source.slot.begin)
            data = torch.from_numpy(source.bytes_of(source.tensor)[begin - source.slot.begin :])
            taken = 0
            for piece in self._arena.pieces(begin, source.slot.end):
                piece.copy_(data[taken : taken + piece.numel()])
                taken += piece.numel()
            source.release()


def write_stream_to(
    path: Path, stream: TensorStream, *, disk: Disk, retry: Retry = run_once
) -> str:
    """Write and sync a new file of tensors, and return its sha256. Raises OSError."""
    file = HashedFile(path, disk=disk, retry=retry)
    try:
        file.write(memoryview(stream.plan.header))
        buffer = np.empty(CHUNK_BYTES, dtype=np.uint8)
        while size := stream.read_into(buffer):
            file.write(buffer.data[:size])
            file.flush_early()
        return file.sync_and_close()
    finally:
        file.close()


def flat_bytes(tensor: Tensor) -> Bytes:
    """Return a tensor's bytes on the host, row-major: a view of it if possible."""
    return _row_major_bytes(_as_words(tensor))


def _as_words(tensor: Tensor) -> Tensor:
    """Return a view of a tensor in a dtype that numpy has."""
    plain = tensor.detach()
    if plain.is_conj() or plain.is_neg():
        plain = plain.resolve_conj().resolve_neg()
    return plain if plain.dtype in _NUMPY_DTYPES else plain.view(_WORDS[plain.element_size()])


def _row_major_bytes(words: Tensor) -> Bytes:
    # WHY numpy and not torch: each call of torch releases the GIL, and the writer thread waits
    # milliseconds to get it back. The file is row-major, whatever the memory layout is.
    array = words.numpy() if words.is_cpu else words.cpu().numpy()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)

"""Files as a stream: what text, parquet and tar shards have in common.

Owns the pieces of a set of files, how they make shards, and the reader that goes through the pieces
of one shard. With fewer files than shards a file is cut into several pieces; with more, a shard has
several files. The number of shards does not depend on the ranks, so neither does the order.
Does not own: reading one piece (formats.py).
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

# Shards where --dataset_args does not say how many. For balance, 8 x ranks or more.
NUM_SHARDS = 64

# As torch.tensor chooses for Python's numbers, by how the type's name begins.
_DTYPES = {
    "int": torch.int64,
    "uint": torch.int64,
    "float": torch.float32,
    "double": torch.float32,
    "halffloat": torch.float32,
    "bool": torch.bool,
}

# Makes a sample of what a file holds: a line, a row, the members of a tar. Any: that.
Change = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a file: bytes or rows first to last - 1, as its format counts them."""

    file: str
    first: int
    last: int


class Format(Protocol):
    """One format of files. Picklable."""

    can_cut: bool  # whether a file can be cut into pieces
    is_counted: bool  # whether to count the samples of all pieces costs little

    def measure(self, file: str) -> int:
        """Return the length of a file in the unit of Piece."""

    def read(self, piece: Piece, at: int) -> Iterator[tuple[Any, int]]:
        """Yield what the piece holds from position at on, each with the position after it."""

    def count(self, piece: Piece) -> int:
        """Return the number of samples of a piece."""


class FileStream:
    """Files as a stream (contract.py)."""

    def __init__(
        self, files: Sequence[str], form: Format, *, num_shards: int, change: Change | None
    ) -> None:
        self.files = list(files)
        self.form = form
        self.change = change
        self.uses_randomness = change is not None
        num_pieces = -(-num_shards // len(self.files)) if form.can_cut else 1
        pieces = []
        for file in self.files:
            length = form.measure(file)
            edges = [length * part // num_pieces for part in range(num_pieces + 1)]
            pieces += [Piece(file, *edge) for edge in itertools.pairwise(edges)]
        self.num_shards = min(num_shards, len(pieces))
        self.shards = [pieces[shard :: self.num_shards] for shard in range(self.num_shards)]
        if form.is_counted:
            self.sizes = [sum(map(form.count, shard)) for shard in self.shards]

    def open(self, shard: int, *, epoch: int, state: Any) -> "PieceReader":
        """Read a shard from its start, or from (piece, position)."""
        return PieceReader(self.form, self.shards[shard], self.change, state or (0, -1))


class PieceReader:
    """Goes through the pieces of a shard. A sample that can't be made is given as its error."""

    def __init__(
        self, form: Format, pieces: Sequence[Piece], change: Change | None, state: Sequence[int]
    ) -> None:
        self._form, self._pieces, self._change = form, pieces, change
        self._number, self._at = state
        self._open: Iterator[tuple[Any, int]] | None = None

    def __iter__(self) -> "PieceReader":
        return self

    def __next__(self) -> Any:  # Any: what the format holds, or a sample made of it
        content = self._take()
        if self._change is None or isinstance(content, Exception):
            return content
        try:
            return self._change(content)
        except Exception as error:  # WHY given and not raised: the reader goes on behind it
            return error

    def skip(self) -> None:
        """Pass over a sample that can't be made of what the file holds."""
        self._take()

    def _take(self) -> Any:  # Any: what the format holds
        """Take what the file holds for the next sample. Raises StopIteration at the end."""
        while self._number < len(self._pieces):
            if self._open is None:
                piece = self._pieces[self._number]
                self._at = max(self._at, piece.first)
                self._open = self._form.read(piece, self._at)
            found = next(self._open, None)
            if found is None:
                self._number, self._at, self._open = self._number + 1, -1, None
                continue
            content, self._at = found
            return content
        raise StopIteration

    def state_dict(self) -> list[int]:
        """Return where the next sample is: the piece, and the position in it."""
        return [self._number, self._at]


def as_sample(row: dict[str, Any], kinds: Mapping[str, str]) -> Any:  # Any: as below
    """Make tensors of the numbers of a row; two columns, one of them the label, become a pair.

    kinds: of columns that hold lists, the type of what is in them, such as int64.
    """
    made = {name: _tensor(value, kinds.get(name, "")) for name, value in row.items()}
    for label in ("label", "labels", "target", "targets"):
        if label in made and len(made) == 2:
            [other] = [name for name in made if name != label]
            return made[other], made[label]
    return made


def _tensor(value: Any, kind: str) -> Any:  # Any: a cell
    """Convert nested lists of numbers to a tensor; return anything else as it is."""
    if value == []:  # WHY by kind: the lists of other rows become tensors
        dtype = next((dtype for name, dtype in _DTYPES.items() if kind.startswith(name)), None)
        return value if dtype is None else torch.empty(0, dtype=dtype)
    first = value
    while isinstance(first, list) and first:
        first = first[0]
    if isinstance(value, list) and isinstance(first, int | float):
        try:
            return torch.tensor(value)
        except (TypeError, ValueError, RuntimeError):  # lists of several lengths, or a null
            return value
    return value

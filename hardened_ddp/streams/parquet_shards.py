"""Parquet files as a stream of rows: --dataset 'parquet:GLOB'. Needs the package pyarrow.

A piece is a range of rows. A row is a mapping of its columns, with lists of numbers as tensors.
"""

import importlib
from collections.abc import Iterator, Sequence
from typing import Any

from hardened_ddp.data.foreign_code import import_extra
from hardened_ddp.errors import DataError
from hardened_ddp.streams.shard_files import Piece, as_sample


class ParquetFormat:
    """Rows of parquet files."""

    can_cut = True

    def __init__(self, columns: Sequence[str] = ()) -> None:
        """columns: only these; all by default."""
        import_extra("pyarrow", what="--dataset parquet:...")
        self.columns = list(columns) or None

    def measure(self, file: str) -> int:
        """Return the rows of a file."""
        return int(_open(file).metadata.num_rows)

    def read(self, piece: Piece, at: int) -> Iterator[tuple[Any, int]]:
        """Yield rows, each with the number of the next one."""
        with _open(piece.file) as file:
            begin = 0
            for group in range(file.metadata.num_row_groups):
                end = begin + file.metadata.row_group(group).num_rows
                if end > at and begin < piece.last:
                    table = file.read_row_group(group, columns=self.columns)
                    kinds = {
                        field.name: str(getattr(field.type, "value_type", ""))
                        for field in table.schema
                    }
                    first, last = max(at, begin), min(end, piece.last)
                    for row in table.slice(first - begin, last - first).to_pylist():
                        first += 1
                        yield as_sample(row, kinds), first
                begin = end

    def count(self, piece: Piece) -> int:
        """Return the rows of a piece."""
        return piece.last - piece.first


def _open(file: str) -> Any:  # Any: pyarrow has no types
    """Open a parquet file. Raises DataError."""
    parquet = importlib.import_module("pyarrow.parquet")
    try:
        return parquet.ParquetFile(file)
    except Exception as error:  # WHY broad: pyarrow's own classes, and OSError
        raise DataError(
            f"{file} can't be read as parquet: {str(error)[:200]}",
            fix="check or leave out the file",
        ) from error

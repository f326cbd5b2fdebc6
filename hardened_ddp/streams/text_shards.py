"""Text files as a stream of lines: --dataset 'text:GLOB'. A line is a sample."""

import os
from collections.abc import Iterator

from hardened_ddp.streams.shard_files import COUNTED_BYTES, Piece


class TextFormat:
    """Lines of UTF-8 text; a piece has the lines that begin in its bytes."""

    can_cut = True

    def __init__(self, total_bytes: int) -> None:
        self.counts = total_bytes <= COUNTED_BYTES

    def measure(self, file: str) -> int:
        """Return the bytes of a file."""
        return os.path.getsize(file)

    def read(self, piece: Piece, at: int) -> Iterator[tuple[str | Exception, int]]:
        """Yield lines without their end, each with the byte after it."""
        with open(piece.file, "rb") as file:
            if at == piece.first and at > 0:
                file.seek(at - 1)
                file.readline()  # the end of a line that began before
                at = file.tell()
            else:
                file.seek(at)
            while at < piece.last and (line := file.readline()):
                at += len(line)
                try:
                    yield line.decode("utf-8").rstrip("\r\n"), at
                except UnicodeDecodeError as error:
                    yield error, at

    def count(self, piece: Piece) -> int | None:
        """Return the number of lines of a piece, unless the files are large."""
        return sum(1 for _ in self.read(piece, piece.first)) if self.counts else None

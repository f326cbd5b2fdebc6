"""Formats of files that are read as a stream: --dataset text:GLOB, parquet:GLOB, tar:GLOB.

Owns reading a piece of a file, and the --dataset_args.
What goes wrong here: a file that was cut off, a line or an image that can't be decoded.
Does not own: what the formats have in common (files.py).
"""

import glob
import importlib
import io
import json
import os
import tarfile
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hardened_ddp.data.batches.images import pixels_of
from hardened_ddp.data.foreign_code import import_callable, import_extra
from hardened_ddp.errors import DataError
from hardened_ddp.streams.files import NUM_SHARDS, FileStream, Format, Piece, as_sample

# Sets of files up to this size are counted before training, so that their length is known.
COUNTED_BYTES = 64 << 20

_COMPRESSED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ\x00")  # gzip, zstd, xz begin so


class TextFormat:
    """Lines of UTF-8 text, each a sample; a piece has the lines that begin in its bytes."""

    can_cut = True
    measure = staticmethod(os.path.getsize)

    def __init__(self, total_bytes: int) -> None:
        self.is_counted = total_bytes <= COUNTED_BYTES

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

    def count(self, piece: Piece) -> int:
        return sum(1 for _ in self.read(piece, piece.first))


class ParquetFormat:
    """Rows of parquet files: mappings of their columns, with lists of numbers as tensors."""

    can_cut = is_counted = True

    def __init__(self, columns: Sequence[str] = ()) -> None:
        """columns: only these; all by default."""
        import_extra("pyarrow", what="--dataset parquet:...")
        self.columns = list(columns) or None

    def measure(self, file: str) -> int:
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


_IMAGES = ("png", "jpg", "jpeg", "webp", "bmp", "ppm", "gif")


class TarFormat:
    """Samples in tar files, in the layout of WebDataset.

    Members that follow each other and have the same name up to the first dot are one sample:
    0001.png and 0001.cls. Known endings are decoded; an image or array with .cls becomes (tensor,
    label), any other sample a mapping from ending to content, with its name as __key__.
    A file is one piece: its members can only be found in order.
    """

    can_cut = False
    measure = staticmethod(os.path.getsize)

    def __init__(self, total_bytes: int, *, image_size: int = 0) -> None:
        """image_size: scale images to this height and width; 0: don't scale."""
        self.is_counted = total_bytes <= COUNTED_BYTES
        self.image_size = image_size

    def read(self, piece: Piece, at: int) -> Iterator[tuple[Any, int]]:
        """Yield samples, each with the byte where the next one begins."""
        for parts, begin in self._groups(piece, at):
            try:
                yield self._decoded(parts), begin
            except Exception as error:  # WHY broad: of any decoder; the reader goes on behind it
                yield error, begin

    def count(self, piece: Piece) -> int:
        return sum(1 for _ in self._groups(piece, piece.first))

    def _groups(self, piece: Piece, at: int) -> Iterator[tuple[dict[str, bytes], int]]:
        """Yield the contents of each sample by ending, and the byte where the next one begins."""
        with open(piece.file, "rb") as file:
            file.seek(at)
            if not file.read(1):
                return
            file.seek(at)
            key, parts = "", dict[str, bytes]()
            # WHY from there: a tar file has no index; any member's header can begin one
            with tarfile.open(fileobj=file, mode="r:") as archive:
                for member in archive:
                    archive.members = []  # type: ignore[attr-defined]  # else it keeps them all
                    if not member.isfile():
                        continue
                    folder, base = os.path.split(member.name)
                    stem, _, ending = base.partition(".")
                    name = os.path.join(folder, stem)
                    if parts and name != key:
                        yield parts, member.offset
                        parts = {}
                    key = name
                    content = archive.extractfile(member)
                    parts["__key__"] = name.encode()
                    parts[ending.lower()] = b"" if content is None else content.read()
                if parts:
                    yield parts, piece.last

    def _decoded(self, parts: dict[str, bytes]) -> Any:  # Any: a sample
        found = {ending: self._content(ending, raw) for ending, raw in parts.items()}
        tensors = [value for value in found.values() if isinstance(value, torch.Tensor)]
        if "cls" in found and len(tensors) == 1 and len(found) == 3:
            return tensors[0], found["cls"]
        return found

    def _content(self, ending: str, raw: bytes) -> Any:
        last = ending.rsplit(".", 1)[-1]
        if last in _IMAGES:
            from PIL import Image  # WHY here: only samples with images need it

            return pixels_of(Image.open(io.BytesIO(raw)), self.image_size)
        if last in ("cls", "cls2", "index"):
            return int(raw.decode("ascii"))
        if last in ("txt", "text", "transcript", "__key__"):
            return raw.decode("utf-8")
        if last == "json":
            return json.loads(raw)
        if last == "npy":  # never a pickle: what a file holds is not executed
            return torch.from_numpy(np.load(io.BytesIO(raw), allow_pickle=False))
        return raw


def open_files(
    name: str,
    *,
    train: bool,
    test: str = "",
    transform: str = "",
    num_shards: int = NUM_SHARDS,
    num_classes: int = 0,
    columns: Sequence[str] = (),
    image_size: int = 0,
) -> FileStream | None:
    """Open the files of --dataset text:GLOB and the like; for the test part those of test.

    transform: package.module:callable, makes a sample of what a file holds. columns: of parquet,
    image_size: of tar, see there. Raises DataError.
    """
    kind, _, pattern = name.partition(":")
    if (columns and kind != "parquet") or (image_size and kind != "tar"):
        raise DataError(
            f"--dataset_args {'columns' if columns else 'image_size'}: --dataset {kind}: has none",
            fix="columns are of parquet files, and image_size is of tar files",
        )
    if not train and not test:
        return None
    pattern = pattern if train else test
    files = sorted(glob.glob(pattern, recursive=True))
    if not files:
        raise DataError(
            f"--dataset {kind}:{pattern}: no file matches",
            fix="give a pattern in quotes, such as 'text:corpus/*.txt'; ** matches folders",
        )
    if num_shards < 1:
        raise DataError(
            f"--dataset_args num_shards is {num_shards}; need 1 or more",
            fix="leave it out, or give 8 x ranks or more",
        )
    what = "dataset_args transform"
    change = import_callable(transform, setting=what, error=DataError) if transform else None
    total_bytes = sum(map(_size, files))
    form: Format = TextFormat(total_bytes)
    if kind == "parquet":
        form = ParquetFormat(columns)
    elif kind == "tar":
        form = TarFormat(total_bytes, image_size=image_size)
    stream = FileStream(files, form, num_shards=num_shards, change=change)
    if num_classes:
        stream.num_classes = num_classes  # type: ignore[attr-defined]  # only if there are classes
    return stream


def _size(file: str) -> int:
    """Return the bytes of a file. Raises DataError if it can't be read, or is compressed."""
    try:
        with open(file, "rb") as opened:
            start, size = opened.read(8), opened.seek(0, 2)
    except OSError as error:
        raise DataError(
            f"{file} can't be read: {error}", fix="check the path and its permissions"
        ) from error
    # WHY refused: no reader can go on in the middle of it without reading all that is before.
    if start.startswith(_COMPRESSED):
        raise DataError(
            f"{file} is compressed: it can't be read from its middle",
            fix="unpack it; or read it by a class of your own, with num_shards and open()",
        )
    return size

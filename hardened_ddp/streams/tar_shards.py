"""Tar files as a stream, in the layout of WebDataset: --dataset 'tar:GLOB'.

Members that follow each other and have the same name up to the first dot are one sample: 0001.png
and 0001.cls. Known endings are decoded; an image or array with .cls becomes (tensor, label), any
other sample a mapping from ending to content, with its name as __key__.
What goes wrong here: a file that was cut off, an image that can't be decoded.
"""

import io
import json
import os
import tarfile
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from hardened_ddp.data.batches.memory import pixels_of
from hardened_ddp.streams.shard_files import COUNTED_BYTES, Piece

_IMAGES = ("png", "jpg", "jpeg", "webp", "bmp", "ppm", "gif")


class TarFormat:
    """Samples in tar files. A file is one piece: its members can only be found in order."""

    can_cut = False

    def __init__(self, total_bytes: int, *, image_size: int = 0) -> None:
        """image_size: scale images to this height and width; 0: don't scale."""
        self.counts = total_bytes <= COUNTED_BYTES
        self.image_size = image_size

    def measure(self, file: str) -> int:
        """Return the bytes of a file."""
        return os.path.getsize(file)

    def read(self, piece: Piece, at: int) -> Iterator[tuple[Any, int]]:
        """Yield samples, each with the byte where the next one begins."""
        for parts, begin in self._groups(piece, at):
            try:
                yield self._decoded(parts), begin
            except Exception as error:  # WHY broad: of any decoder; the reader goes on behind it
                yield error, begin

    def count(self, piece: Piece) -> int | None:
        """Return the number of samples of a file, unless the files are large."""
        return sum(1 for _ in self._groups(piece, piece.first)) if self.counts else None

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

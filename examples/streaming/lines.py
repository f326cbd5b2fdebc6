"""Train on a stream: lines of text in 16 shards, written from texts that come with Python itself.

    torchrun --standalone --nproc_per_node=2 ddp_training.py --config examples/streaming/config.yaml

Is a line prose (the help topics), code (the package unittest), or the name of a character? 93 % of
the test lines are right after 4 epochs. A stream is read in order, so they are mixed when written.
"""

import pydoc_data.topics
import random
import unicodedata
import unittest
from pathlib import Path
from typing import Any

import torch
from torch import nn

LENGTH = 48  # bytes of a line that the model sees


def write_shards(folder: Path) -> None:
    """Write each line as its class, a tab, and its text; every ninth one to test.txt."""
    code = [path.read_text("utf-8") for path in sorted(Path(unittest.__file__).parent.glob("*.py"))]
    names = [unicodedata.name(chr(number), "") for number in range(0x20, 0x3000)]
    parts = (pydoc_data.topics.topics.values(), code, names)
    texts = ["\n".join(part).splitlines() for part in parts]
    pairs = [(label, line.strip()) for label, lines in enumerate(texts) for line in lines]
    rows = [f"{label}\t{line}\n" for label, line in pairs if len(line) >= 20]
    random.Random(0).shuffle(rows)
    folder.mkdir(parents=True, exist_ok=True)
    train = [row for number, row in enumerate(rows) if number % 9]
    for shard in range(16):
        path = folder / f"train-{shard:02d}.txt"
        path.write_text("".join(train[shard::16]), encoding="utf-8")
    (folder / "test.txt").write_text("".join(rows[::9]), encoding="utf-8")


class Lines:
    """The stream: how many shards, and how to open one."""

    num_classes, uses_randomness = 3, False  # reading a line draws no random number

    def __init__(self, *, train: bool, data_dir: str, download: bool) -> None:
        folder = Path(data_dir) / "lines"
        if download and not (folder / "test.txt").exists():  # one rank of each node, at first
            write_shards(folder)
        self.files = sorted(map(str, folder.glob("train-*.txt" if train else "test.txt")))
        self.num_shards = len(self.files)

    def open(self, shard: int, *, epoch: int, state: Any) -> "Reader":
        return Reader(self.files[shard], state or 0)


class Reader:
    """Reads a shard. state_dict says where it goes on: a resume then reads nothing twice."""

    def __init__(self, file: str, position: int) -> None:
        self.raw, self.position = Path(file).read_bytes(), position  # a large one: open and seek

    def __iter__(self) -> "Reader":
        return self

    def __next__(self) -> tuple[torch.Tensor, int]:
        if self.position >= len(self.raw):
            raise StopIteration
        first, self.position = self.position, self.raw.index(b"\n", self.position) + 1
        label, line = self.raw[first : self.position - 1].split(b"\t", 1)
        return torch.tensor(list(line[:LENGTH].ljust(LENGTH))), int(label)

    def state_dict(self) -> int:
        return self.position


class ByteClassifier(nn.Sequential):
    """The mean of the embedded bytes, then two layers: (N, LENGTH) int64 -> (N, num_classes)."""

    def __init__(self, *, num_classes: int, width: int = 64) -> None:
        bag = nn.EmbeddingBag(256, width, mode="mean")
        super().__init__(bag, nn.Linear(width, width), nn.ReLU(), nn.Linear(width, num_classes))

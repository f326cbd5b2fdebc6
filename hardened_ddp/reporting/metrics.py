"""Metrics on disk: metrics.jsonl and TensorBoard. A write that fails never stops training.

Owns both formats. TensorBoard is imported at the first write, because it takes 0.15 s that the
first step need not wait for; its writer has a thread of its own for the disk.
"""

import json
import logging
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import torch

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

log = logging.getLogger(__name__)

_FLUSH_S = 60
"""TensorBoard's file is at most this far behind."""


class MetricsLog:
    """Writes the numbers of one run. On ranks other than 0 every call does nothing."""

    def __init__(self, folder: Path, *, tensorboard: bool, is_main: bool) -> None:
        self._folder = folder
        self._is_main = is_main
        self._wants_tensorboard = tensorboard and is_main
        self._file: TextIO | None = None
        self._board: SummaryWriter | None = None
        self._num_failed = 0

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Write values at step: one line of metrics.jsonl, one curve each in TensorBoard."""
        if not self._is_main:
            return
        finite = {
            name: number if math.isfinite(number) else None for name, number in values.items()
        }
        line = json.dumps({"step": step, "time": round(time.time(), 3), **finite})
        try:
            if self._file is None:
                self._file = (self._folder / "metrics.jsonl").open("a", encoding="utf-8")
            self._file.write(line + "\n")
            self._file.flush()
            if (board := self._open_board()) is not None:
                for name, number in values.items():
                    board.add_scalar(name, number, step)
        except OSError as error:
            self._failed(error)

    def images(self, step: int, tag: str, images: torch.Tensor, titles: Sequence[str]) -> None:
        """Write images (N, C, H, W) of any range, scaled to [0, 1], with a title for each."""
        try:
            if (board := self._open_board()) is None:
                return
            flat = images.detach().float().cpu().flatten(1)
            low, high = flat.min(dim=1).values, flat.max(dim=1).values
            scaled = (flat - low[:, None]) / (high - low).clamp_min(1e-6)[:, None]
            pictures = scaled.view_as(images)
            if pictures.shape[1] not in (1, 3):
                pictures = pictures[:, :1]
            board.add_images(tag, pictures, step)
            listing = "\n".join(f"{number}. {title}" for number, title in enumerate(titles, 1))
            board.add_text(f"{tag}/titles", listing, step)
        except OSError as error:
            self._failed(error)

    def text(self, tag: str, text: str) -> None:
        """Write a text, shown as it is."""
        try:
            if (board := self._open_board()) is not None:
                board.add_text(tag, "```\n" + text + "\n```", 0)
        except OSError as error:
            self._failed(error)

    def close(self) -> None:
        """Write what is left and close."""
        try:
            if self._file is not None:
                self._file.close()
            if self._board is not None:
                self._board.close()
        except OSError as error:
            self._failed(error)
        self._file = self._board = None

    def _open_board(self) -> "SummaryWriter | None":
        if self._board is None and self._wants_tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            folder = str(self._folder / "tensorboard")
            self._board = SummaryWriter(folder, flush_secs=_FLUSH_S)
        return self._board

    def _failed(self, error: OSError) -> None:
        """Say it once; later failures are only counted."""
        self._num_failed += 1
        if self._num_failed == 1:
            log.warning("metrics can't be written, training goes on: %s", error)

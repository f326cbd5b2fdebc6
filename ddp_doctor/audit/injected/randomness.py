"""Observes seeds, dropout, BatchNorm's mode, and random numbers that a dataset draws.

Ranks whose generators are in one state draw one augmentation. The states are hashed before the
first draws; the draws themselves are untouched.
"""

import random
import sys
import zlib
from typing import Any

from ddp_doctor.audit.injected.loaders import Loaders, place_of
from ddp_doctor.audit.injected.recorder import (
    Foreign,
    Hook,
    Recorder,
    is_called_by_user,
    is_called_from,
    model_line,
    user_frames,
    user_line,
)

MAX_SEEDS, MAX_FETCHES = 20, 4


class Randomness:
    """Modes and generators of one process."""

    def __init__(self, recorder: Recorder, loaders: Loaders) -> None:
        self._recorder, self._loaders = recorder, loaders
        self._num_seeds = self._num_fetches = 0
        self._seen: set[tuple[Foreign, ...]] = set()

    def hooks(self) -> list[Hook]:
        fetch = ("torch.utils.data._utils.fetch", "_MapDatasetFetcher.fetch")
        return [
            Hook("torch.random", "manual_seed", self._note_seed),
            Hook("torch.nn.functional", "dropout", self._note_dropout),
            Hook("torch.nn.functional", "batch_norm", self._note_batch_norm),
            Hook(*fetch, self._begin_fetch, self._end_fetch),
        ]

    def _note_seed(self, seed: Foreign, *args: Any, **kwargs: Any) -> None:
        self._num_seeds += 1
        if self._num_seeds <= MAX_SEEDS and (self._recorder.is_rank or self._num_seeds < 4):
            self._recorder.emit(
                "seed",
                value=int(seed),
                line=user_line(),
                lines=[line for line, _, _ in user_frames()],
                by_user=is_called_by_user(),
            )

    def _note_dropout(
        self, input: Foreign, p: float = 0.5, training: bool = True, *a: Any, **k: Any
    ) -> None:
        if training and 0 < p < 1:
            self._note_mode("dropout")

    def _note_batch_norm(self, input: Foreign, *rest: Any, **named: Any) -> None:
        """Take batch_norm(input, running_mean, running_var, weight, bias, training, ...)."""
        training = named.get("training", rest[4] if len(rest) > 4 else False)
        mean = named.get("running_mean", rest[0] if rest else None)
        if training and mean is not None:
            self._note_mode("batch_norm")

    def _note_mode(self, name: str) -> None:
        """Record a layer in train mode: the first of each pass."""
        torch = sys.modules["torch"]
        key = (name, self._loaders.current, bool(torch.is_grad_enabled()))
        if key in self._seen or not self._recorder.is_rank:
            return
        self._seen.add(key)
        if not is_called_from("swa_utils.py"):  # it gathers statistics for averaged weights
            self._recorder.emit("mode", op=name, of=key[1], has_grad=key[2], line=model_line())

    def _begin_fetch(self, fetcher: Foreign, *args: Any) -> Foreign:
        self._num_fetches += 1
        return _states() if self._num_fetches <= MAX_FETCHES else None

    def _end_fetch(self, before: Foreign, result: Foreign, fetcher: Foreign) -> None:
        if before is None:
            return
        after = _states()
        drawn = {name: before[name] for name in before if after[name] != before[name]}
        if drawn:
            worker = sys.modules["torch"].utils.data.get_worker_info()
            self._recorder.emit(
                "augment",
                drawn=drawn,
                dataset=type(fetcher.dataset).__name__,
                worker=None if worker is None else worker.id,
                number=self._num_fetches,
                line=place_of(type(fetcher.dataset), "__getitem__"),
            )

    def forget(self) -> None:
        self._num_fetches = 0


def _states() -> dict[str, str]:
    """Hash the states of the generators that a dataset may use."""
    states = {"random": f"{zlib.crc32(repr(random.getstate()).encode()):08x}"}
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    if torch is not None:
        states["torch"] = f"{zlib.crc32(torch.get_rng_state().numpy()):08x}"
    if numpy is not None:
        _, keys, *place = numpy.random.get_state()
        states["numpy"] = f"{zlib.crc32(keys.tobytes() + repr(place).encode()):08x}"
    return states

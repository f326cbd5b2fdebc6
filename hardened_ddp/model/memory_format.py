"""Channels last or not: measured on the model itself, because no rule predicts the gain.

Owns the setting channels_last and its measurement. With channels last, convolutions are 1.3 times
as fast for one model and half as fast for the next; it depends on device, library and batch. So a
few samples go forward and backward both ways, for at most 1 % of the time that the run will take;
a run too short for that keeps the usual order.
A resumed run keeps the order that it began with: another one changes the order of additions, and
the run would not be bitwise equal.
"""

import logging
import time
from dataclasses import dataclass

import torch
from torch import nn

from hardened_ddp.data.batch import Batch, take
from hardened_ddp.model.precision import Precision
from hardened_ddp.model.probe import untouched_buffers
from hardened_ddp.ranks.group import Group
from hardened_ddp.settings.config import Config
from hardened_ddp.settings.data import AUTO_BATCH_SIZE
from hardened_ddp.task.task import Task

log = logging.getLogger(__name__)

_SHORTEST_RUN_S = 600.0
"""WHY: a shorter run gains little, and short runs of the same seed should always agree bit for bit.
Small batches are slow per sample, so an estimate of ten minutes may mean two."""

_BUDGET_SHARE = 0.01
_LONGEST_S = 10.0
_NUM_PAIRS = 3
"""The first pair is warm-up."""

_FEWEST_SAMPLES = 4
_NEEDED_GAIN = 1.1
"""WHY not 1.0: near the threshold, noise would decide, differently in each run."""


def choose_channels_last(
    trial: "Trial",
    sample: Batch,
    group: Group,
    *,
    config: Config,
    began_with: bool | None,
    samples_to_train: int,
) -> bool:
    """Decide how images are stored, and store the weights so. Collective: the same on all ranks.

    began_with: the choice of the run that is resumed. samples_to_train: how many samples this rank
    trains on in the whole run.
    """
    is_chosen = config.model.channels_last
    if is_chosen is None:
        is_chosen = began_with
    if is_chosen is None:
        is_chosen = _measure(trial, sample, group, config, samples_to_train)  # collective
    if is_chosen:
        _store(trial.model, torch.channels_last)
    return is_chosen


def _measure(
    trial: "Trial", sample: Batch, group: Group, config: Config, samples_to_train: int
) -> bool:
    """Return whether channels last is faster. Collective: the same on all ranks."""
    # WHY not when compiled: the trial runs as without, and the compiler chooses orders itself
    if config.device.deterministic or config.model.compile or not trial.is_possible(sample):
        return False
    mine_s = trial.seconds(sample) / sample.num_samples
    sample_s = max(group.gather_json(mine_s))  # collective
    run_s = samples_to_train * sample_s
    budget_s = min(_LONGEST_S, _BUDGET_SHARE * run_s)
    most = config.data.batch_size or AUTO_BATCH_SIZE
    num_samples = min(most, int(budget_s / (2 * _NUM_PAIRS * sample_s)))
    if run_s < _SHORTEST_RUN_S or num_samples < _FEWEST_SAMPLES:
        return False
    # The smallest gain decides: the other ranks wait for that one.
    gain = min(group.gather_json(trial.gain(sample, num_samples)))  # collective
    is_worth_it = bool(gain >= _NEEDED_GAIN)
    log.info("channels_last: %s, measured %.2f x", "on" if is_worth_it else "off", gain)
    return is_worth_it


@dataclass(frozen=True, slots=True)
class Trial:
    """The model, and what its forward and backward need."""

    model: nn.Module
    task: Task
    precision: Precision

    def is_possible(self, sample: Batch) -> bool:
        """Return whether there are images and convolutions. The same on all ranks."""
        has_images = isinstance(sample.inputs, torch.Tensor) and sample.inputs.dim() == 4
        return has_images and any(isinstance(m, nn.Conv2d) for m in self.model.modules())

    def gain(self, sample: Batch, num_samples: int) -> float:
        """Return the speed with channels last relative to that without; 0 if it fails.

        Weights, buffers and gradients do not change.
        """
        device = sample.inputs.device
        usual = take(sample, [i % sample.num_samples for i in range(num_samples)]).to(device)
        last = usual.to(device, channels_last=True)
        times: dict[bool, list[float]] = {False: [], True: []}
        try:
            for _ in range(_NUM_PAIRS):
                for is_last, batch in ((False, usual), (True, last)):
                    _store(self.model, torch.channels_last if is_last else torch.contiguous_format)
                    times[is_last].append(self.seconds(batch))
        except Exception:  # WHY broad: the user's model; one with view() in it fails here
            log.debug("this model does not work with channels last", exc_info=True)
            return 0.0
        finally:
            _store(self.model, torch.contiguous_format)
        return min(times[False][1:]) / min(times[True][1:])

    def seconds(self, batch: Batch) -> float:
        """Time one forward and backward; discard the gradients."""
        try:
            with untouched_buffers(self.model):
                _wait_for(batch.inputs.device)
                started_at = time.perf_counter()
                with self.precision.autocast():
                    score = self.task.score(self.task.forward(self.model, batch), batch)
                score.loss_sum.backward()  # type: ignore[no-untyped-call]  # torch
                _wait_for(batch.inputs.device)
                return time.perf_counter() - started_at
        finally:
            self.model.zero_grad(set_to_none=True)


def _store(model: nn.Module, memory_format: torch.memory_format) -> None:
    model.to(memory_format=memory_format)  # type: ignore[call-overload]  # torch


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

"""Whether micro-batches come in two parts of similar lengths: the setting split_by_length.

auto: only where a trial shows that the collate pads, and that a sample's loss and gradient are the
same however much it is padded. Not so with a mean or a normalization over the padding, or with a
loss that compares the samples of a batch. WHY a rule, not a measurement of time: two runs of one
seed should agree bit for bit. A resumed run keeps its choice, for the same reason.
Where a micro-batch is cut is in data/batches/length_split.py.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from hardened_ddp.data.batches.batch import Batch, take
from hardened_ddp.data.batches.length_split import FEWEST_SAMPLES, LengthSplit
from hardened_ddp.data.batches.nesting import tensors_of
from hardened_ddp.model.effects import Effects
from hardened_ddp.preflight.probe import Findings
from hardened_ddp.preflight.trial import Trial, hooked, try_on_all_ranks
from hardened_ddp.settings.config import AUTO_BATCH_SIZE, Config

log = logging.getLogger(__name__)

_LEAST_OUTPUT = 30_000
"""Values that a module's output must lose on average to pay for calling it a second time. Measured
with 45 models and batches on a CPU (docs/BENCHMARKS.md): 1.0 to 1.9 times as fast from there on,
down to 0.6 times as fast below."""

_TOLERANCE = 1e-4  # of fp32 sums; padding that matters changes them by 1e-2 and more


def choose_split(
    trial: Trial,
    samples: Sequence[Batch],
    findings: Findings,
    *,
    config: Config,
    saved: Mapping[str, Any] | None,  # Any: the numbers of a checkpoint
) -> LengthSplit | None:
    """Decide whether and where micro-batches are cut. Collective: the same on all ranks.

    samples: small batches as the loader makes them. saved: of the run that is resumed.
    """
    asked = config.data.split_by_length
    if asked and samples[0].read_part is None:
        log.warning("split_by_length: off, because without a collate all samples have one shape")
    if asked is False or samples[0].read_part is None:
        return None
    if asked:
        return LengthSplit(least_values=0)
    if saved is not None:
        least = saved.get("split_by_length")
        return None if least is None else LengthSplit(least)
    if not _may_pay(trial, findings, config):
        return None

    def compare(batch: Batch, effects: Effects) -> list[int | None]:
        """Return what must be saved for a cut to pay; None: never cut; nothing: no padding."""
        alone = [take(batch, [place]) for place in range(batch.num_samples)]
        if sum(map(_num_values, alone)) >= _num_values(batch):
            return []
        whole, parts = _run(trial, [batch]), _run(trial, alone)
        if not _are_equal(whole, parts) or not whole.outputs:
            return [None]
        return [-(-_LEAST_OUTPUT * len(whole.outputs) * _num_values(batch) // sum(whole.outputs))]

    # WHY as in an evaluation: dropout would differ between two forwards
    everyone = try_on_all_ranks(trial, samples, compare, evaluates=True)  # collective
    found = [least for rank in everyone for batch in rank or [[None]] for least in batch]
    is_exact = bool(found) and None not in found
    return LengthSplit(max(found)) if is_exact else None


def _may_pay(trial: Trial, findings: Findings, config: Config) -> bool:
    """Say whether a trial is worth it. The same on all ranks."""
    # WHY no recurrent ones: they go through time step by step, or know the lengths already.
    is_recurrent = any(isinstance(module, nn.RNNBase) for module in trial.model.modules())
    is_small = (config.data.batch_size or AUTO_BATCH_SIZE) < FEWEST_SAMPLES
    # WHY not on a GPU: small parts may not fill it. WHY nothing that moves: statistics of a batch.
    moves = findings.moving_buffers or findings.own_tensors or findings.moves_attributes
    depends = trial.group.device.type != "cpu" or moves
    # WHY both: the trial is as in an evaluation, on each rank by itself
    calls = findings.collectives or findings.collectives.in_evaluation
    is_fixed = config.model.compile or config.ddp.static_graph
    return not (
        is_recurrent or is_small or depends or calls or is_fixed or trial.task.name == "own"
    )


def _num_values(batch: Batch) -> int:
    """Count the values of inputs and labels, padding included."""
    return sum(tensor.numel() for tensor in tensors_of((batch.inputs, batch.targets)))


class _Sums(NamedTuple):
    """What forward and backward gave."""

    loss: float
    num_counted: float
    norms: list[float]
    """Of the gradient of each parameter."""

    outputs: list[int]
    """The values that each call of a module without parts returned."""


def _are_equal(one: _Sums, other: _Sums) -> bool:
    """Return whether loss, count and gradients are equal up to rounding."""
    least = 0.01 * max(one.norms, default=0.0)
    pairs = zip(one.norms, other.norms, strict=True)
    return (
        abs(one.loss - other.loss) <= _TOLERANCE * abs(one.loss)
        and one.num_counted == other.num_counted
        and all(abs(norm - its) <= _TOLERANCE * max(norm, least) for norm, its in pairs)
    )


def _run(trial: Trial, batches: Sequence[Batch]) -> _Sums:
    """Go forward and backward in fp32; discard the gradients."""
    loss, count = 0.0, 0.0
    outputs: list[int] = []

    def note(module: nn.Module, inputs: Any, output: Any) -> None:  # Any: the model's own
        outputs.extend(tensor.numel() for tensor in tensors_of(output))

    trial.model.zero_grad(set_to_none=True)
    with hooked([module for module in trial.model.modules() if not any(module.children())], note):
        for batch in [batch.copied() for batch in batches]:
            score = trial.task.score(trial.task.forward(trial.model, batch), batch)
            score.loss_sum.backward()  # type: ignore[no-untyped-call]  # torch
            loss, count = loss + score.loss_sum.item(), count + float(score.count)
    norms = [float(p.grad.norm()) for p in trial.model.parameters() if p.grad is not None]
    return _Sums(loss, count, norms, outputs)

"""Whether the loss of a micro-batch is the sum of its samples' losses: tried on pairs of samples.

Owns a warning where it is not, as with a contrastive loss, a ranking, or attention over the wrong
dimension. WHY: such a loss depends on which samples share a micro-batch, so training and evaluation
give other numbers with another batch size or number of ranks, and nothing else would show it.
Does not own: BatchNorm, which is as in its evaluation here; what differs by padding (padding.py).
"""

import copy
import logging
from collections.abc import Sequence

import torch

from hardened_ddp.data.batches.batch import Batch, take
from hardened_ddp.data.batches.nesting import tensors_of
from hardened_ddp.model.effects import Effects
from hardened_ddp.preflight.forward_collectives import watching
from hardened_ddp.preflight.trial import Trial, try_on_all_ranks
from hardened_ddp.reporting.log import ON_EVERY_RANK

log = logging.getLogger(__name__)

_TOLERANCE = 0.05  # of the rounding of weights of 16 bits; a shared loss differs by far more


def warn_of_shared_loss(trial: Trial, samples: Sequence[Batch]) -> None:
    """Warn if samples have another loss together than each alone. Collective: all ranks.

    Without gradients, and as in an evaluation: dropout would differ too.
    """
    # WHY a copy: a task learns from what it scores, and each rank sees something else.
    model, task = trial.model, copy.copy(trial.task)

    def loss_of(batch: Batch) -> float:
        batch = batch.copied()
        return task.score(task.forward(model, batch), batch).loss_sum.item()

    def compare(batch: Batch, effects: Effects) -> list[float]:
        alone = [take(batch, [place]) for place in range(batch.num_samples)]
        if len(alone) < 2 or not _has_same_values(batch, alone):
            return []
        with torch.no_grad(), watching(model, trial.group, refuses=True):
            together, apart = loss_of(batch), sum(map(loss_of, alone))
            # WHY once more: a model that draws random numbers gives another loss each time
            is_shared = not _is_near(together, apart) and _is_near(together, loss_of(batch))
        return [together, apart] if is_shared else []

    everyone = try_on_all_ranks(trial, samples, compare, evaluates=True)  # collective
    if found := next((pair for pairs in everyone for pair in pairs or () if pair), None):
        log.warning(
            "the losses of two samples add up to %.5g in one micro-batch, and to %.5g in one each: "
            "the loss depends on which samples share a micro-batch, so on --batch_size and the "
            "number of ranks. So it is with a contrastive or ranking loss, which compares the "
            "samples of a micro-batch on one rank; else check that forward keeps samples apart%s",
            *found,
            ", and that the loss is a mean over samples, or over what it returns as 'count'"
            if trial.task.name == "own"
            else "",
            extra=ON_EVERY_RANK,
        )


def _is_near(one: float, other: float) -> bool:
    return abs(one - other) <= _TOLERANCE * max(abs(one), abs(other), 1e-3)


def _has_same_values(batch: Batch, alone: list[Batch]) -> bool:
    """Return whether each sample alone has the values that it has in the batch, but for padding.

    WHY: a collate may draw random numbers, or join the samples.
    """
    if batch.read_part is None:
        return True
    whole = list(tensors_of((batch.inputs, batch.targets)))
    for place, part in enumerate(alone):
        for tensor, own in zip(whole, tensors_of((part.inputs, part.targets)), strict=True):
            is_row = len(tensor) == len(alone) and len(own) == 1 and tensor.dim() == own.dim()
            region = tuple(slice(size) for size in own.shape[1:])
            if not is_row or not torch.equal(tensor[place][region], own[0]):
                return False
    return True

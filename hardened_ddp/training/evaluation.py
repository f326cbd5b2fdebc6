"""Evaluation: every test sample once, over all ranks, whatever the sizes.

Owns the sums behind test loss and accuracy. Runs the plain module, never the DDP wrapper: ranks may
do different numbers of batches, and only the sums at the end are exchanged.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from hardened_ddp.data.loader import Batch, EvalLoader
from hardened_ddp.errors import HardenedError, SampleError
from hardened_ddp.ranks.heartbeat import EVALUATION
from hardened_ddp.step.failure import explain_evaluation
from hardened_ddp.step.parts import Parts
from hardened_ddp.step.totals import Totals

log = logging.getLogger(__name__)

MAX_PICTURES = 16


@dataclass(frozen=True, slots=True)
class Mistake:
    """A test sample that the model got wrong, for the report."""

    image: torch.Tensor
    label: int
    prediction: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The outcome over the whole test set."""

    loss: float
    accuracy: float
    num_samples: int
    mistakes: tuple[Mistake, ...]
    """The first few of this rank's share."""

    left_out: tuple[str, ...] = ()
    """Under --continue_on_error: the samples that can't be used, of all ranks, each with why."""


@torch.no_grad()
def evaluate(
    parts: Parts, loader: EvalLoader, *, should_stop: Callable[[], object] = lambda: False
) -> Evaluation | None:
    """Measure loss and accuracy on the test set. Collective: all ranks.

    should_stop is asked between batches, on all ranks equally often; None: it said so.
    """
    module = parts.replica.module
    module.eval()
    totals = Totals(parts.task, parts.device)
    mistakes: list[Mistake] = []
    left_out: list[str] = []
    leaves_out = parts.config.loop.continue_on_error
    try:
        batches = iter(loader)
        for _ in range(loader.most_batches):
            parts.group.heartbeat.enter(EVALUATION)
            if should_stop():  # collective
                return None
            batch = next(batches, None)
            if batch is None:
                continue
            left_out += [f"{bad.name}: {bad.error}" for bad in batch.bad]
            if batch.bad and not leaves_out:
                raise SampleError(
                    f"test sample {batch.bad[0].name} can't be read: {batch.bad[0].error}",
                    fix="mend it, or leave such samples out with --continue_on_error",
                )
            if batch.num_samples:
                _score(parts, batch, totals, mistakes)
        sums = totals.read(parts.group)  # collective
        everyone = parts.group.gather_json(left_out) if leaves_out else []  # collective
    except HardenedError:
        raise
    except Exception as error:  # WHY broad: the model and the test set are the user's code
        raise explain_evaluation(error, parts.group) from error
    finally:
        module.train()
    return Evaluation(
        sums["loss"],
        sums["accuracy"],
        int(sums["samples"]),
        tuple(mistakes),
        tuple(text for part in everyone for text in part),
    )


def _score(parts: Parts, batch: Batch, totals: Totals, mistakes: list[Mistake]) -> None:
    batch = batch.to(parts.device, channels_last=parts.replica.channels_last)
    with parts.precision.autocast():
        score = parts.task.score(parts.replica.module, batch.inputs, batch.targets)
    totals.add(score)
    if len(mistakes) < MAX_PICTURES and isinstance(batch.inputs, torch.Tensor):
        predictions = score.predictions
        wrong = predictions.ne(batch.targets).nonzero().flatten()[: MAX_PICTURES - len(mistakes)]
        mistakes += [
            Mistake(batch.inputs[i].cpu(), int(batch.targets[i]), int(predictions[i]))
            for i in wrong.tolist()
        ]

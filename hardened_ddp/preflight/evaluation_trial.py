"""The trial of the test set before training: a few of its samples, scored as in an evaluation.

WHY at the start: the first evaluation may be hours away, and labels of another form than those of
the training part would end the run there.
"""

import copy
import logging
from dataclasses import replace

import torch

from hardened_ddp.data.batches.loader import EvalLoader
from hardened_ddp.errors import ANY_FAILURE, ModelError
from hardened_ddp.model.effects import Effects
from hardened_ddp.preflight.forward_collectives import (
    CANT_EVALUATE,
    check_equal_evaluation,
    watching,
)
from hardened_ddp.preflight.trial import Trial, try_on_all_ranks
from hardened_ddp.reporting.log import ON_EVERY_RANK
from hardened_ddp.step.parts import Parts
from hardened_ddp.task.first_batch import check_score

log = logging.getLogger(__name__)


def check_evaluation(parts: Parts) -> None:
    """Raise if the test set can't be measured. Collective: all ranks.

    Scores the first samples of each rank's share; nothing changes. Raises ModelError on every rank
    if the trial failed on any, or if the model runs collectives in evaluation and the ranks would
    run unequal forwards.
    """
    config, loader, replica = parts.config, parts.eval_loader, parts.replica
    if loader is None or not config.loop.eval_every:
        return
    if replica.collectives.in_evaluation:
        return  # a rank whose sample can't be read would leave the others waiting in forward
    # WHY a copy: a check learns from what it sees, and each rank sees something else.
    task, leaves_out = copy.copy(parts.task), config.loop.continue_on_error
    trial = Trial(replica.module, task, parts.precision, parts.group)

    def score(loader: EvalLoader, effects: Effects) -> str:
        """Score the first samples; return the collective that was called, if one was."""
        batch = loader.first_samples()
        if batch.bad and not leaves_out:
            bad = batch.bad[0]
            raise ModelError(
                f"test sample {bad.name} can't be read: {bad.error}",
                fix="fix it, or leave such samples out with --continue_on_error",
            )
        if not batch.num_samples:
            return ""
        batch = batch.to(parts.group.device, channels_last=replica.inputs.channels_last)
        # WHY refuse: a rank without such a sample would leave the others waiting.
        with (
            watching(trial.model, trial.group, calls_forward=True, refuses=True) as watch,
            torch.no_grad(),
            trial.precision.autocast(),
        ):
            try:
                # WHY its forward: a compiled model would be compiled for this size, too.
                output = task.forward(trial.model.forward, batch)
                task.check(output, batch)
                check_score(task, task.score(output, batch))
            except ANY_FAILURE:  # WHY broad: what comes of the refusal does not matter
                if not watch.calls:
                    raise
        return watch.calls[0] if watch.calls else ""

    refusal = replace(CANT_EVALUATE, also="; --eval_every 0 trains without evaluations")
    everyone = try_on_all_ranks(trial, [loader], score, refusal, evaluates=True)  # collective
    if calls := [found[0] for found in everyone if found and found[0]]:
        check_equal_evaluation(  # collective
            trial,
            loader,
            channels_last=replica.inputs.channels_last,
            leaves_out=leaves_out,
            instead="--eval_every 0",
        )
        log.warning(
            "the model's forward runs collectives in evaluation (%s): the test set is not tried "
            "before training, and a sample of one rank that can't be read ends the attempt",
            calls[0],
            extra=ON_EVERY_RANK,
        )

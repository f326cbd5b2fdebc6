"""The trial of the test set before training: a few of its samples, scored as in an evaluation.

Owns finding a test set that can't be measured. WHY at the start: the first evaluation may be hours
away, and labels of another form than those of the training part would end the run there.
Does not own: the evaluation (training/evaluation.py), the probe of the training part (probe.py).
"""

import copy
import logging

import torch

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.batches.fetch import preserved_rng
from hardened_ddp.data.batches.loader import EvalLoader
from hardened_ddp.data.foreign_code import describe, line_of_user
from hardened_ddp.errors import ANY_FAILURE, HardenedError, ModelError
from hardened_ddp.preflight.equal_forwards import check_equal_evaluation
from hardened_ddp.preflight.forward_collectives import watching
from hardened_ddp.preflight.memory_format import Trial
from hardened_ddp.reporting.log import ON_EVERY_RANK
from hardened_ddp.step.parts import Parts
from hardened_ddp.task.first_batch import check_score
from hardened_ddp.task.output import fix_for_gradients

log = logging.getLogger(__name__)


def check_evaluation(parts: Parts) -> None:
    """Raise if the test set can't be measured. Collective: all ranks.

    Scores the first samples of each rank's share; nothing changes. Raises ModelError on every rank
    if the trial failed on any, or if the model runs collectives in evaluation and the ranks would
    run unequal forwards.
    """
    config, loader, group = parts.config, parts.eval_loader, parts.group
    if loader is None or not config.loop.eval_every:
        return
    if parts.replica.collectives.in_evaluation:
        return  # a rank whose sample can't be read would leave the others waiting in forward
    module, leaves_out = parts.replica.module, config.loop.continue_on_error
    mine: dict[str, str] = {}
    calls: list[str] = []
    was_training = module.training
    module.eval()
    try:
        with preserved_rng(), torch.no_grad():
            batch = loader.first_samples()
            if batch.bad and not leaves_out:
                bad = batch.bad[0]
                raise ModelError(
                    f"test sample {bad.name} can't be read: {bad.error}",
                    fix="fix it, or leave such samples out with --continue_on_error",
                )
            if batch.num_samples:
                batch = batch.to(group.device, channels_last=parts.replica.channels_last)
                # WHY refuse: a rank without such a sample would leave the others waiting.
                with watching(module, group, calls_forward=True, refuses=True) as watch:
                    calls = watch.calls
                    _score(parts, batch)
    except HardenedError as error:
        mine = {"error": error.message, "fix": error.fix}
    except ANY_FAILURE as error:  # WHY broad: it is the user's code, and the other ranks wait
        log.debug("the trial of the test set failed", exc_info=True)
        mine = {
            "error": f"{describe(error)}{line_of_user(error)}",
            "fix": fix_for_gradients(error) or "the whole traceback is in this rank's log",
        }
    finally:
        module.train(was_training)
    everyone = group.gather_json({"calls": calls[0]} if calls else mine)  # collective
    for rank, found in enumerate(everyone):
        if "error" in found:
            raise ModelError(
                f"the test set can't be evaluated, rank {rank}: {found['error']}",
                fix=found["fix"] + "; --eval_every 0 trains without evaluations",
            )
    if found := [found["calls"] for found in everyone if found]:
        _check_collectives(parts, loader, found[0])  # collective


def _check_collectives(parts: Parts, loader: EvalLoader, call: str) -> None:
    """Raise ModelError if the ranks would run unequal forwards. Collective: all ranks."""
    module = parts.replica.module
    was_training = module.training
    module.eval()
    try:
        with preserved_rng():
            check_equal_evaluation(  # collective
                Trial(module, parts.task, parts.precision),
                loader,
                parts.group,
                channels_last=parts.replica.channels_last,
                leaves_out=parts.config.loop.continue_on_error,
                instead="--eval_every 0",
            )
    finally:
        module.train(was_training)
    log.warning(
        "the model's forward runs collectives in evaluation (%s): the test set is not tried before "
        "training, and a sample of one rank that can't be read ends the attempt",
        call,
        extra=ON_EVERY_RANK,
    )


def _score(parts: Parts, batch: Batch) -> None:
    # WHY of a copy: a check learns from what it sees, and each rank sees something else.
    task = copy.copy(parts.task)
    with parts.precision.autocast():
        # WHY its forward: a compiled model would be compiled for this size, too.
        output = task.forward(parts.replica.module.forward, batch)
        task.check(output, batch)
        check_score(task, task.score(output, batch))

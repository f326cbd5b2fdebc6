"""The model of a run: built, given its task, tried without DDP, and wrapped in it.

Owns the order of these steps, of which each is a collective of all ranks.
Does not own: how a model is built (model/zoo.py), what a trial finds (preflight/), the sum of the
gradients (gradients/), the task's choice (task/build.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.loader_setup import AnyLoader
from hardened_ddp.data.sources.datasets import TaskData
from hardened_ddp.gradients.choose import sum_gradients_of
from hardened_ddp.gradients.sums import GradientSum
from hardened_ddp.model.effects import untouched
from hardened_ddp.model.moving_attributes import MovingAttributes
from hardened_ddp.model.replica import Replica, check_same_model
from hardened_ddp.model.zoo import build_model, place_model
from hardened_ddp.preflight.lazy import shape_by_forward
from hardened_ddp.preflight.memory_format import Trial, choose_channels_last
from hardened_ddp.preflight.padding import choose_split
from hardened_ddp.preflight.probe import choose_find_unused, probe
from hardened_ddp.preflight.shared_loss import warn_of_shared_loss
from hardened_ddp.ranks.group import Group
from hardened_ddp.settings.config import Config
from hardened_ddp.task.build import choose_task
from hardened_ddp.task.task import Task
from hardened_ddp.training.initial_weights import load_initial_weights


def model_and_task(
    config: Config,
    group: Group,
    data: TaskData,
    loader: AnyLoader,
    *,
    saved: Mapping[str, Any] | None,
) -> tuple[nn.Module, Task, Sequence[Batch]]:
    """Build the model, and the task that scores its output. Collective: all ranks.

    Also returns two small batches, to try both on.
    """
    # The same model on every rank: seeded alike, and DDP sends rank 0's weights to all.
    model = build_model(
        config.model,
        num_classes=data.num_classes,
        input_shape=data.input_shape,
        task=config.task.task,
    )
    samples = loader.sample_batches(group.device)
    as_built = MovingAttributes(model)
    shape_by_forward(model, samples[0], group, seed=config.device.seed)  # collective
    load_initial_weights(model, "" if saved else config.model.init_from, group)  # collective
    model = place_model(model, config.model, device=group.device, world_size=group.world_size)
    # The task makes a loss and metrics of the output. auto: the first batch says which task it is.
    task = choose_task(model, samples[0], data, config.task, group, saved=saved)  # collective
    as_built.reset()
    return model, task, samples


def build_replica(
    config: Config,
    group: Group,
    trial: Trial,
    samples: Sequence[Batch],
    loader: AnyLoader,
    *,
    saved: Mapping[str, Any] | None,
) -> tuple[Replica, GradientSum]:
    """Try the model, and wrap it in DDP. Collective: all ranks.

    loader: learns how it cuts the micro-batches for this model.
    """
    model, task, precision = trial.model, trial.task, trial.precision
    attributes = MovingAttributes(model, task)
    check_same_model(model, group)  # collective
    # Try it on a few samples without DDP: which parameters get no gradient, and on which rank?
    # DDP would wait for those for ever, unless find_unused_parameters is on.
    findings = probe(model, samples, task=task, precision=precision, group=group)  # collective
    # Also step counters and private generators: which change, and can they be resumed?
    findings = replace(findings, moves_attributes=attributes.agree(group))  # collective
    find_unused = choose_find_unused(config.ddp.find_unused_parameters, findings)
    # WHY no condition around it: one rank alone may have found collectives in its forward
    warn_of_shared_loss(trial, () if findings.collectives else samples, group)  # collective
    # Samples of different lengths: in two parts, with less padding, if that changes nothing else.
    split = choose_split(trial, samples, findings, group, config=config, saved=saved)  # collective
    loader.split_by_length(split)
    # Images with channels last: as asked, as the run began, or by a rule.
    channels_last = choose_channels_last(  # collective
        trial,
        samples[0],
        group,
        config=config,
        began_with=None if saved is None else saved["channels_last"],
    )
    replica = Replica(
        model,
        moving_buffers=findings.moving_buffers,
        channels_last=channels_last,
        collectives=findings.collectives,
    )
    replica.note_effects(
        own=findings.own_tensors,
        outputs=findings.outputs,
        changes_inputs=findings.changes_inputs,
    )
    replica.note_attributes(attributes)
    # DDP sends gradients while backward runs; CPU ranks of one machine add them up after it.
    sums = sum_gradients_of(  # collective
        model,
        group,
        config,
        finds_unused=find_unused,
        counts=not task.counts_samples,
        calls_collectives=bool(findings.collectives),
    )
    sums.warm_up(lambda call: _run_once(call, trial, samples[0].copied()))  # collective
    if config.model.compile:
        replica.compile()  # after the trials, which have other sizes
    return replica, sums


def _run_once(call: nn.Module, trial: Trial, sample: Batch) -> None:
    """Run forward and backward of a sample; discard what they change. Collective if call is DDP."""
    with untouched(trial.model):
        with trial.precision.autocast():
            score = trial.task.score(trial.task.forward(call, sample), sample)
        score.loss_sum.backward()  # type: ignore[no-untyped-call]  # collective
    trial.model.zero_grad(set_to_none=True)

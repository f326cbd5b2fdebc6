"""Lazy modules, such as LazyLinear: their parameters get a shape before anything asks for it.

By a forward on a first batch when a run starts; by the weights of a checkpoint where a model is
built again.
"""

import itertools
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.errors import ModelError
from hardened_ddp.model.effects import Effects
from hardened_ddp.model.precision import Precision
from hardened_ddp.preflight.trial import Refusal, Trial, fix_by, try_on_all_ranks
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.seeding import seed_update
from hardened_ddp.task.task import Task

Lazy = UninitializedParameter | UninitializedBuffer


def shape_by_forward(model: nn.Module, sample: Batch, group: Group, *, seed: int) -> None:
    """Give parameters without a shape theirs, by a forward on sample. Collective: all ranks.

    Raises ModelError on all ranks if that fails on one. The model is then on the group's device.
    """
    if not any(_lazy_tensors(model)):  # the same on all ranks
        return
    model.to(group.device)
    caller = Task()
    caller.attach(model)

    def run(batch: Batch, effects: Effects) -> None:
        # WHY: how many random numbers were drawn so far depends on the launch.
        seed_update(seed, step=0, device_type=group.device.type)
        with torch.no_grad():
            caller.forward(model, batch)
        if left := [name for name, _ in _lazy_tensors(model)]:
            raise ModelError(
                f"lazy parameters have no shape after a forward: {', '.join(left[:8])}",
                fix="call their modules in forward, also in eval mode; or build them with sizes, "
                "such as nn.Linear instead of nn.LazyLinear",
            )

    trial = Trial(model, caller, Precision("off", group.device), group)
    refusal = Refusal(what="the model failed on a first batch", fix=fix_by(sample))
    try_on_all_ranks(trial, [sample], run, refusal, evaluates=True)  # collective


def shape_by_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Give parameters without a shape that of the weights of the same name. Rank-local."""
    for name, tensor in list(_lazy_tensors(model)):
        # WHY a shape for those that have no weights: then the comparison of both names them
        tensor.materialize(weights[name].shape if name in weights else (0,))


def _lazy_tensors(model: nn.Module) -> Iterator[tuple[str, Lazy]]:
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return ((name, tensor) for name, tensor in named if is_lazy(tensor))

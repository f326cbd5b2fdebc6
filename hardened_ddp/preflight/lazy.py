"""Lazy modules, such as LazyLinear and LazyConv2d: their parameters get a shape in a first forward.

Owns giving them one before anything asks for it: by a forward on a first batch when a run starts,
and by the weights of a checkpoint where a model is built again.
What goes wrong here: a part that this forward does not reach stays without a shape.
"""

import itertools
import logging
from collections.abc import Iterator, Mapping

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter, is_lazy

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.foreign_code import describe, line_of_user
from hardened_ddp.errors import ANY_FAILURE, ModelError
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.seeding import seed_update
from hardened_ddp.task.output import fix_for
from hardened_ddp.task.task import Task

Lazy = UninitializedParameter | UninitializedBuffer
log = logging.getLogger(__name__)


def shape_by_forward(model: nn.Module, sample: Batch, group: Group, *, seed: int) -> None:
    """Give parameters without a shape theirs, by a forward on sample. Collective: all ranks.

    Raises ModelError on all ranks if that fails on one. The model is then on the group's device.
    """
    if not any(_lazy_tensors(model)):  # the same on all ranks
        return
    model.to(group.device)
    # WHY: how many random numbers were drawn so far depends on the launch.
    seed_update(seed, step=0, device_type=group.device.type)
    caller = Task()
    caller.attach(model)
    problem = None
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            caller.forward(model, sample)
    except ANY_FAILURE as error:  # WHY broad: it is the user's model, and the other ranks wait
        log.debug("the first forward failed", exc_info=True)
        problem = {
            "message": f"the model failed on a first batch: {describe(error)}{line_of_user(error)}",
            "fix": fix_for(error, sample.inputs, has_labels=sample.targets is not None),
        }
    finally:
        model.train(was_training)
    if problem is None and (left := [name for name, _ in _lazy_tensors(model)]):
        problem = {
            "message": f"lazy parameters have no shape after a forward: {', '.join(left[:8])}",
            "fix": "call their modules in forward, also in eval mode; or build them with sizes, "
            "such as nn.Linear instead of nn.LazyLinear",
        }
    everyone = group.gather_json(problem)  # collective
    failed = [(rank, found) for rank, found in enumerate(everyone) if found]
    if failed:
        rank, found = failed[0]
        raise ModelError(f"rank {rank}: {found['message']}", fix=found["fix"])


def shape_by_weights(model: nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
    """Give parameters without a shape that of the weights of the same name. Rank-local."""
    for name, tensor in list(_lazy_tensors(model)):
        # WHY a shape for those that have no weights: then the comparison of both names them
        tensor.materialize(weights[name].shape if name in weights else (0,))


def _lazy_tensors(model: nn.Module) -> Iterator[tuple[str, Lazy]]:
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return ((name, tensor) for name, tensor in named if is_lazy(tensor))

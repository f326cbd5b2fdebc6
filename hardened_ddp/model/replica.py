"""The model on this rank: one of world_size replicas, which DDP's sum of the gradients keeps equal.

Owns the buffers that a forward changes (BatchNorm statistics), averaged before each update (of
integers, rank 0's count), so that the state of any one surviving rank is complete. WHY not DDP's
own broadcast: it is a collective inside forward, where an exception leaves other ranks waiting.

Evaluate and save replica.module: a DDP object must not be called on one rank alone, or it hangs.
Does not own: the sum of the gradients (gradients/).
Read next: preflight/probe.py (what is learned about the model), step/step.py (the caller).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.batches.checks import Limit
from hardened_ddp.errors import ModelError, RankMismatchError
from hardened_ddp.model.moving_attributes import MovingAttributes
from hardened_ddp.model.moving_buffers import MovingBuffers
from hardened_ddp.ranks.group import Group


@dataclass(frozen=True, slots=True)
class ForwardCollectives:
    """The collectives of one forward; none is the usual case."""

    # Each with its place in the model's code: allgather in my_model.py:12.
    calls: tuple[str, ...] = ()
    in_evaluation: tuple[str, ...] = ()  # the same of a forward in evaluation mode
    fit_batch: bool = False  # the sizes of their tensors follow from the size of the batch

    def __bool__(self) -> bool:
        return bool(self.calls)


NO_COLLECTIVES = ForwardCollectives()


@dataclass(frozen=True, slots=True)
class Inputs:
    """How the model gets its batches."""

    channels_last: bool = False  # images are stored with channels last

    # Forward or loss change a batch in place: they get a copy, so that a retry has it.
    are_copied: bool = False

    # Of numbers that choose a row or a class, where the device would not survive a wrong one.
    limits: Sequence[Limit] = ()

    least_padding: int = 0  # what a cut by length leaves out, see preflight/padding.py; 0: no cuts

    def send(self, batch: Batch, device: torch.device) -> Batch:
        """Return a batch on device, as the model gets it. Raises IndexError: see limits."""
        for limit in self.limits:
            limit.check(batch)
        batch = batch.to(device, channels_last=self.channels_last)
        return batch.copied() if self.are_copied else batch


DEFAULT_INPUTS = Inputs()


@dataclass(eq=False)
class Replica:
    """A module, and what of it changes in a forward."""

    module: nn.Module
    buffers: MovingBuffers
    attributes: MovingAttributes  # what forward changes besides tensors
    inputs: Inputs = DEFAULT_INPUTS
    # Those that the model calls in its forward, such as those of SyncBatchNorm.
    collectives: ForwardCollectives = NO_COLLECTIVES


def compile_model(model: nn.Module, *, backend: Any = "inductor") -> None:  # Any: as torch.compile
    """Compile the model from its next forward on, in place. Rank-local.

    WHY after the trials (probe, task, memory): their batches have other sizes and run without DDP,
    so each would be compiled, and then compiled again for training.
    """
    if type(model).forward.__module__.startswith("torch.nn."):
        # WHY: torch does not compile what calls a class of its own, such as nn.Sequential
        model.forward = torch.compile(model.forward, backend=backend)
    else:
        # WHY not torch.compile(model): that would rename all parameters
        model.compile(backend=backend)


def refuse_new_parameters(module: nn.Module, known: Mapping[str, nn.Parameter]) -> None:
    """Raise ModelError if a parameter became trainable, or was made anew. Rank-local.

    known: those that are trained. WHY refused: neither the optimizer nor the sums over the ranks
    would know of another one.
    """
    named = module.named_parameters()
    if new := [n for n, p in named if p.requires_grad and known.get(n) is not p]:
        raise ModelError(
            f"after the first step parameters became trainable, or were made anew: "
            f"{', '.join(new[:8])}. They would never be trained",
            fix="let them be trainable from the start, with a learning rate of their own "
            "(parameter_groups of the model), which is 0 at first; or begin a new run with "
            "them, from this one's weights: --init_from CHECKPOINT",
        )


def check_same_model(module: nn.Module, group: Group) -> None:
    """Raise RankMismatchError if ranks have built different models. Collective: all ranks."""
    if group.world_size == 1:
        return
    parts = {n: f"{tuple(b.shape)} {b.dtype}" for n, b in module.named_buffers()}
    for name, parameter in module.named_parameters():
        frozen = "" if parameter.requires_grad else ", frozen"
        parts[name] = f"{tuple(parameter.shape)} {parameter.dtype}{frozen}"
    everyone = group.gather_json(list(parts.items()))  # collective
    for rank, theirs in enumerate(everyone):
        # WHY in order: gradients are summed in it
        for its, first in zip_longest(theirs, everyone[0], fillvalue=("nothing", "")):
            if its != first:
                raise RankMismatchError(
                    f"the ranks have built different models: where rank {rank} has "
                    f"{' '.join(its)}, rank 0 has {' '.join(first)}",
                    fix="build the same model on every rank: nothing of it may depend on the rank, "
                    "on os.environ or on the order of a set",
                )

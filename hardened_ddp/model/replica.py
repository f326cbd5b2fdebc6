"""The model on this rank: one of world_size equal replicas, kept equal by DDP.

Owns the DDP wrapper, the choice of find_unused_parameters, and the buffers that a forward changes
(BatchNorm statistics), which are averaged after each step, so that the state of any one surviving
rank is complete. WHY not DDP's own buffer broadcast: it is a collective inside forward, where one
rank's exception would leave the others waiting.

CPU ranks of one machine don't use DDP's hooks: these overlap sending with backward, which gains
nothing where every core computes. Their gradients are summed after backward, through shared memory
(ranks/shared_sum.py), which is many times as fast.

Evaluate and save replica.module: the DDP object must not be called on one rank alone, or it hangs.
Read next: probe.py (what is learned before wrapping), step/step.py (the caller).
"""

import contextlib
import hashlib
import inspect
import math
import operator
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hardened_ddp.data.batch import Batch
from hardened_ddp.data.nesting import tensors_of
from hardened_ddp.errors import ModelError, RankMismatchError
from hardened_ddp.model.buckets import Buckets, count_on, flag_of, forget_used
from hardened_ddp.model.compiling import Compilations, compile_model
from hardened_ddp.model.forward_collectives import NO_COLLECTIVES, ForwardCollectives
from hardened_ddp.model.moving_attributes import MovingAttributes
from hardened_ddp.model.moving_buffers import MovingBuffers
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.phase import Phase
from hardened_ddp.settings.ddp import DdpConfig

INPUTS = "the batch"
_VERSION = operator.attrgetter("_version")  # of a tensor: it grows with each write in place


class Replica:
    """A module, and its DDP wrapper where DDP's hooks send the gradients."""

    def __init__(
        self,
        module: nn.Module,
        group: Group,
        *,
        ddp: DistributedDataParallel | None,
        moving_buffers: Sequence[str],
        looks_for_unused: bool = True,
        channels_last: bool = False,
    ) -> None:
        self.module = module
        self.ddp = ddp
        """Its hooks send gradients within backward. None: only sum_gradients adds them up."""

        self.buckets: Buckets | None = None
        """Our communication hook in ddp; None: DDP's own, or torch's for PowerSGD."""

        self.group = group
        self.trainable = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self._parameters = list(self.trainable.values())
        self._has_complex = any(parameter.is_complex() for parameter in self._parameters)
        self.buffers = MovingBuffers(module, moving_buffers)
        self.attributes = MovingAttributes()
        """What forward changes besides tensors."""

        self.channels_last = channels_last
        """Whether images are stored with channels last."""

        self.looks_for_unused = looks_for_unused
        """A parameter may get no gradient on some rank: sum_gradients counts it as zero there."""

        self.copies_inputs = False
        """Forward or loss change a batch in place: they get a copy, so that a retry has it."""

        self._watched: Sequence[torch.Tensor] = ()
        self._versions: list[int] = []
        self._unsafe: deque[list[str]] = deque([[], []], maxlen=2)
        """What the last two forwards were the first to write: nothing can put it back."""

        self.collectives = NO_COLLECTIVES
        """Those that the model calls in its forward."""

        self.compilations: Compilations | None = None
        """What torch has compiled; None: the model is not compiled."""

        self.can_overlap = ddp is not None
        """Gradients can be sent within backward: DDP finds unused parameters if there are any."""

        self.call: nn.Module = module if ddp is None else ddp
        """What training calls for a forward: DDP's prepares its hooks."""

        self._sums_are_finite = False  # False: not known

    def release(self) -> None:
        """Drop the DDP wrapper; the module stays.

        WHY: if DDP holds the last reference to the process group, its destructor waits for gloo's
        thread while it holds the GIL, which that thread may need: the process would never end.
        """
        self.ddp, self.call = None, self.module

    @property
    def averages(self) -> bool:
        """DDP divides the sum of the gradients by world_size. Our hook does not."""
        return self.ddp is not None and self.buckets is None

    @property
    def can_stand_in(self) -> bool:
        """A rank whose backward failed can take part in the all-reduces of the others."""
        return self.buckets is not None and self.buckets.can_stand_in

    def note_collectives(self, found: ForwardCollectives) -> None:
        """Note that the model calls collectives in its forward. Rank-local: all ranks call it."""
        self.collectives = found

    def note_effects(
        self, *, own: Sequence[str], outputs: Sequence[str], changes_inputs: bool
    ) -> None:
        """Note what a trial found beside the moving buffers. Rank-local: all ranks call it."""
        names = self.buffers.names
        self.buffers = MovingBuffers(self.module, names, own=own, outputs=outputs)
        self.copies_inputs = changes_inputs

    def note_attributes(self, found: MovingAttributes) -> None:
        """Note what forward changes besides tensors. Rank-local: all ranks call it."""
        self.attributes = found

    def use_hook(self, buckets: Buckets) -> None:
        """Let our communication hook send the gradients. Rank-local."""
        self.buckets = buckets

    def compile(self) -> None:
        """Compile the model from its next forward on. Rank-local."""
        self.compilations = compile_model(self.module)

    def look_for_unused(self) -> None:
        """Allow from now on that a parameter gets no gradient. Rank-local: all ranks call it."""
        self.looks_for_unused = True
        # DDP takes this setting only when it is built; else it waits for every parameter.
        self.can_overlap = self.ddp is not None and self.ddp.find_unused_parameters

    def no_sync(self) -> AbstractContextManager[Any]:
        """Keep gradients on this rank inside. WHY around forward too: DDP decides there."""
        return self.ddp.no_sync() if self.ddp is not None else contextlib.nullcontext()

    def parameters_without_gradient(self) -> list[str]:
        """Name the parameters without a gradient after the last backward. Rank-local."""
        if all(parameter.grad is not None for parameter in self._parameters):
            return []
        return [name for name, parameter in self.trainable.items() if parameter.grad is None]

    def refuse_new_parameters(self) -> None:
        """Raise ModelError if one became trainable, or was made anew, since. Rank-local.

        WHY refused: neither the optimizer nor the sums over the ranks would know of it.
        """
        known = self.trainable
        named = self.module.named_parameters()
        if new := [n for n, p in named if p.requires_grad and known.get(n) is not p]:
            raise ModelError(
                f"after the first step parameters became trainable, or were made anew: "
                f"{', '.join(new[:8])}. They would never be trained",
                fix="let them be trainable from the start, with a learning rate of their own "
                "(parameter_groups of the model), which is 0 at first; or begin a new run with "
                "them, from this one's weights: --init_from CHECKPOINT",
            )

    def has_finite_gradients(self) -> bool:
        """Return whether all gradients are finite. Rank-local; waits for the device.

        WHY sums: NaN and inf persist in them, and a sum is the fastest check that torch has
        (isfinite takes five times as long). A sum of large numbers may overflow too, so if it is
        not finite, each gradient is checked.
        """
        gradients = self._real_gradients()
        if self.group.device.type == "cpu":
            sums = [gradient.sum().item() for gradient in gradients]
        else:  # one wait for all of them
            sums = torch.stack([g.sum().double() for g in gradients]).tolist() if gradients else []
        return math.isfinite(sum(sums)) or all(bool(g.isfinite().all()) for g in gradients)

    def is_gradient_bad(self, failed_here: bool) -> torch.Tensor:
        """Return 1.0 if some rank failed or the gradient is not finite, else 0.0, on the device.

        Of shape (), the same on all ranks.
        """
        if failed_here:
            return torch.ones((), device=self.group.device)
        if self.buckets is not None:
            return self.buckets.are_bad()
        return flag_of(self._real_gradients()).to(self.group.device)

    def has_finite_sums(self) -> bool:
        """Return whether the gradient over all ranks is finite. The same on all ranks."""
        is_known = self._sums_are_finite or (self.buckets is not None and self.buckets.are_finite)
        return is_known or self.has_finite_gradients()

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiply all gradients by factor; on a GPU by one kernel. Rank-local."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if isinstance(factor, float) and factor == 1.0:
            return
        if gradients and hasattr(torch, "_foreach_mul_"):
            if isinstance(factor, torch.Tensor) and len({g.dtype for g in gradients}) == 1:
                # WHY: with a factor of another dtype, CUDA launches a kernel for each gradient
                factor = factor.to(gradients[0].dtype)
            torch._foreach_mul_(gradients, factor)
            return
        for gradient in gradients:
            gradient.mul_(factor)

    def total_count(self, count: float | torch.Tensor) -> torch.Tensor:
        """Return what counts in a step over all ranks, on the device, of shape (), float64.

        count: of this rank. It was sent with the gradients of the last backward.
        """
        if self.buckets is not None:
            return self.buckets.total()
        return count_on(self.group.device, count)

    def sum_count(self, count: float | torch.Tensor) -> float:
        """Add up count over the ranks, where no hook of ours sends it. Collective: all ranks."""
        total = torch.as_tensor(count, dtype=torch.float64, device=self.group.device).clone()
        return float(self.group.sum_(total))  # collective

    def sum_gradients(self, marks: Sequence[float] = ()) -> list[float]:
        """Add up local gradients over the ranks; add up marks too and return them. Collective.

        Replaces DDP's all-reduces: no hook waits for a backward that never comes, so a rank
        without samples, or one that failed, takes part with zeros. As with DDP, a parameter that
        no rank used keeps no gradient if looks_for_unused. marks: small integers.
        """
        self._sums_are_finite = False
        if self.group.world_size == 1:
            return list(marks)
        parameters = self._parameters
        if self.looks_for_unused:
            is_used = torch.tensor([float(p.grad is not None) for p in parameters])
            uses = self.group.sum_(is_used).tolist()  # collective
            parameters = [p for p, count in zip(parameters, uses, strict=True) if count]
        by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
        if self.buckets is not None:
            self.buckets.sum_local(parameters)  # collective
        else:
            for parameter in parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                gradient = _real(parameter.grad) if self._has_complex else parameter.grad
                by_dtype.setdefault(gradient.dtype, []).append(gradient)
        sums = torch.tensor(marks, device=self.group.device)
        if marks:  # WHY among the gradients: saves an all-reduce
            by_dtype.setdefault(sums.dtype, []).append(sums)
        before = self.group.tracker.enter(Phase.ALL_REDUCE)
        are_finite = self.group.shared is not None and self.buckets is None
        # WHY no early exit: every sum is a collective, also after one that is not finite
        for each in by_dtype.values():
            if self.group.shared is not None:
                are_finite &= self.group.shared.sum_(each, checks=True)  # collective
            else:
                self.group.sum_each_(each)  # collective
        self._sums_are_finite = are_finite
        if self.ddp is not None:
            forget_used(self.ddp)
        self.group.tracker.enter(before)
        found: list[float] = sums.tolist()
        return found

    def _real_gradients(self) -> list[torch.Tensor]:
        """Return the gradients that there are, of complex parameters as pairs of real numbers."""
        found = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        return [_real(gradient) for gradient in found] if self._has_complex else found

    def copy_buffers(self, batches: Sequence[Batch] = ()) -> list[torch.Tensor | None]:
        """Copy the moving buffers, for put_back_buffers, before a forward of batches.

        Notes the versions of all else, for note_written.
        """
        inputs = [part for batch in batches for part in (batch.inputs, batch.targets)]
        if not all([isinstance(part, torch.Tensor) for part in inputs]):
            inputs = list(tensors_of(inputs))
        if self.copies_inputs:
            inputs = []
        still = self.buffers.watched
        self._watched = [*still, *[part for part in inputs if not part.is_inference()]]
        self._versions = list(map(_VERSION, self._watched))
        self._unsafe.append([])
        return self.buffers.copies() if self.buffers.known else []

    def note_written(self, *, reads_bits: bool = False) -> None:
        """Take up what was written since copy_buffers, and was not known to be. Rank-local.

        Call it before the update, which writes the weights. reads_bits: look also at the values of
        what is believed still, some of which was perhaps written long ago; waits for the device.
        """
        now = list(map(_VERSION, self._watched))
        if now != self._versions:
            pairs = zip(self._watched, now, self._versions, strict=True)
            written = [tensor for tensor, new, old in pairs if new != old]
            in_model = {id(tensor) for tensor in self.buffers.watched}
            if not all(id(tensor) in in_model for tensor in written):
                self.copies_inputs = True
                self._unsafe[-1].append(INPUTS)
            self._unsafe[-1] += self.buffers.take_up_written(written)
            self._watched, self._versions = (), []
        if reads_bits:
            self._unsafe[-1] += self.buffers.changed_bits()

    def unsafe(self, *, num_forwards: int) -> list[str]:
        """Name what the last forwards wrote, and nothing can put back. Rank-local."""
        last = list(self._unsafe)[len(self._unsafe) - num_forwards :]
        return [name for names in last for name in names]

    def put_back_buffers(self, copies: Sequence[torch.Tensor | None]) -> None:
        """Restore the moving buffers from copies."""
        self.buffers.put_back(copies)

    def sync_buffers(self) -> None:
        """Make the moving buffers equal on all ranks. Collective: all ranks."""
        group = self.group
        if group.world_size > 1:
            self.buffers.equalize(  # collective
                group.sum_, world_size=group.world_size, is_main=group.launch.is_main
            )


def check_same_model(module: nn.Module, group: Group) -> None:
    """Raise RankMismatchError if ranks have built different models. Collective: all ranks."""
    if group.world_size == 1:
        return
    parts = {n: f"{tuple(b.shape)} {b.dtype}" for n, b in module.named_buffers()}
    for name, parameter in module.named_parameters():
        frozen = "" if parameter.requires_grad else ", frozen"
        parts[name] = f"{tuple(parameter.shape)} {parameter.dtype}{frozen}"
    digest = hashlib.sha256(repr(parts).encode()).hexdigest()
    if len(set(group.gather_json(digest))) == 1:  # collective
        return
    everyone = group.gather_json(parts)  # collective
    first = everyone[0]
    problems = []
    for rank, theirs in enumerate(everyone):
        names = [n for n in {**first, **theirs} if theirs.get(n) != first.get(n)][:2]
        # WHY the order too: gradients are summed in it
        names = names or ([] if list(theirs) == list(first) else [next(iter(theirs))])
        problems += [
            f"rank {rank}: {n} is {theirs.get(n, 'not there')}, rank 0 has "
            f"{first.get(n, 'none')}"
            + ("" if theirs.get(n) != first.get(n) else " in another place")
            for n in names
        ]
    raise RankMismatchError(
        "the ranks have built different models: " + "; ".join(problems[:4]),
        fix="build the same model on every rank: nothing of it may depend on the rank, on "
        "os.environ or on the order of a set",
    )


def wrap(
    module: nn.Module,
    group: Group,
    config: DdpConfig,
    *,
    find_unused: bool,
    moving_buffers: Sequence[str],
    channels_last: bool = False,
) -> Replica:
    """Wrap module in DDP, which also gives every rank rank 0's weights. Collective: all ranks."""
    ddp = None
    if group.world_size > 1:
        ddp = _build_ddp(module, group, config, find_unused=find_unused)  # collective
        if group.shared is not None and config.comm_hook == "none":
            ddp = None  # the weights are equal now, and its hooks are not used
    return Replica(
        module,
        group,
        ddp=ddp,
        moving_buffers=moving_buffers,
        looks_for_unused=find_unused or group.world_size == 1,
        channels_last=channels_last,
    )


def _build_ddp(
    module: nn.Module, group: Group, config: DdpConfig, *, find_unused: bool
) -> DistributedDataParallel:
    # torch 2.13 renamed the argument; the module docstring says why it is off.
    known = inspect.signature(DistributedDataParallel.__init__).parameters
    renamed = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    arguments: dict[str, Any] = {renamed: False}  # Any: mypy knows one of the names
    return DistributedDataParallel(  # collective
        module,
        device_ids=[group.device.index] if group.device.type == "cuda" else None,
        find_unused_parameters=find_unused,
        static_graph=config.static_graph,
        gradient_as_bucket_view=config.gradient_as_bucket_view,
        bucket_cap_mb=config.bucket_cap_mb,
        **arguments,
    )


def _real(gradient: torch.Tensor) -> torch.Tensor:
    """Return complex numbers as pairs of real ones, in the same memory; others as they are."""
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient

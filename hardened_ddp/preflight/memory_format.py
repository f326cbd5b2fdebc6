"""Channels last or not: a rule about the model's convolutions and its micro-batch.

Owns the setting channels_last. Images are stored as (N, C, H, W) either channel by channel or,
with channels last, pixel by pixel; the numbers are the same, the order of additions is not.
WHY a rule, not a measurement: two runs of one seed should agree bit for bit, and a measurement near
its threshold decides differently each time.
A resumed run keeps the order that it began with, or it would not be bitwise equal.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.batches.fetch import preserved_rng
from hardened_ddp.data.batches.nesting import tensors_of
from hardened_ddp.data.foreign_code import describe, line_of_user
from hardened_ddp.errors import ANY_FAILURE, ModelError
from hardened_ddp.model.effects import untouched
from hardened_ddp.model.precision import Precision
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.seeding import seed_step
from hardened_ddp.settings.config import AUTO_BATCH_SIZE, Config
from hardened_ddp.task.task import Task

log = logging.getLogger(__name__)

_ROUNDING = 0.01
"""WHY so much: layers add up rounding. A wrong order of memory changes a number as a whole."""


def choose_channels_last(
    trial: "Trial",
    sample: Batch,
    group: Group,
    *,
    config: Config,
    began_with: bool | None,
) -> bool:
    """Decide how images are stored, and store the weights so. Collective: the same on all ranks.

    began_with: the choice of the run that is resumed. Raises ModelError on all ranks if channels
    last is asked for and the model fails with it.
    """
    is_chosen = config.model.channels_last
    if is_chosen is None:
        is_chosen = began_with
    if is_chosen is None:
        # WHY not when compiled: the compiler chooses orders itself.
        num_samples = config.data.batch_size or AUTO_BATCH_SIZE
        is_faster = not config.model.compile and trial.is_faster(sample, num_samples, group.device)
        is_chosen = all(group.gather_json(is_faster))  # collective
    if is_chosen:
        _store(trial.model, torch.channels_last)
    if config.model.channels_last:
        trial.check(sample, group)  # collective
    return is_chosen


@dataclass(frozen=True, slots=True)
class Trial:
    """The model, and what its forward and backward need."""

    model: nn.Module
    task: Task
    precision: Precision

    def is_faster(self, sample: Batch, num_samples: int, device: torch.device) -> bool:
        """Return whether micro-batches of num_samples should be faster with channels last.

        CPU: each step reorders the kernels' weights, which pays if the convolutions read and write
        at least as many values as their kernels have. Measured with 24 models and
        batches (docs/BENCHMARKS.md): 1.0 to 1.6 times as fast then, down to 0.75 times otherwise.
        CUDA: tensor cores want channels last in bf16 and fp16, says
        https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html
        """
        num_weights, num_values = self.count(sample, device)
        if device.type == "cuda":
            return num_values > 0 and self.precision.name != "off"
        return num_values > 0 and num_weights * sample.num_samples <= num_values * num_samples

    def count(self, sample: Batch, device: torch.device) -> tuple[int, int]:
        """Try channels last; count the weights of kernels, and the values of their images.

        A 1x1 kernel does not count: it is the same in both orders. Both are 0 if there are no
        convolutions, or if the model fails or gives other outputs. Weights, buffers and gradients
        do not change.
        """
        convolutions = [m for m in self.model.modules() if isinstance(m, nn.Conv2d)]
        num_weights = num_values = 0

        def count(kernel: nn.Conv2d, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
            nonlocal num_weights, num_values
            num_weights += kernel.weight.numel() if max(kernel.kernel_size) > 1 else 0
            num_values += inputs[0].numel() + output.numel()

        if not convolutions:
            return 0, 0
        hooks = []
        try:
            usual = self._outputs(sample)
            _store(self.model, torch.channels_last)
            stored = sample.to(device, channels_last=True)
            # WHY all of it, whatever comes out: if the model has collectives, the other ranks call
            # it as often.
            last, drawn_again = self._outputs(stored), self._outputs(stored, draw=1)
            hooks = [kernel.register_forward_hook(count) for kernel in convolutions]
            self._run(stored)
            # Where random numbers change the outputs, their order in memory does too.
            if not _are_alike(usual, last) and _are_alike(last, drawn_again):
                raise ModelError("the outputs differ: is the order of memory used, by strides?")
        except ANY_FAILURE:  # WHY broad: the user's model; one with view() in it fails here
            log.debug("this model does not work with channels last", exc_info=True)
            num_weights = num_values = 0
        finally:
            _store(self.model, torch.contiguous_format)
            for hook in hooks:
                hook.remove()
        return num_weights, num_values

    def check(self, sample: Batch, group: Group) -> None:
        """Try the model as it is stored now. Collective: ModelError on all ranks if it fails."""
        problem = ""
        try:
            self._run(sample.to(group.device, channels_last=True))
        except ANY_FAILURE as error:  # WHY broad: it is the user's model, and the other ranks wait
            log.debug("the model fails with channels last", exc_info=True)
            problem = f"{describe(error)}{line_of_user(error)}"
        if problems := [found for found in group.gather_json(problem) if found]:  # collective
            raise ModelError(
                f"the model fails with channels_last: {problems[0]}",
                fix="--channels_last auto, or use reshape() and flatten() in place of view()",
            )

    def _outputs(self, batch: Batch, *, draw: int = 0) -> list[torch.Tensor]:
        """Return what the model returns in eval mode. draw: another one, other random numbers."""
        was_training = self.model.training
        self.model.eval()
        try:
            with torch.no_grad(), preserved_rng(), untouched(self.model):
                seed_step(0, step=draw, rank=0, device_type=batch.indices.device.type)
                return [
                    t.clone() for t in tensors_of(self.task.forward(self.model, batch.copied()))
                ]
        finally:
            self.model.train(was_training)

    def _run(self, batch: Batch) -> None:
        """Go forward and backward once; discard the gradients."""
        batch = batch.copied()
        try:
            with untouched(self.model):
                with self.precision.autocast():
                    score = self.task.score(self.task.forward(self.model, batch), batch)
                score.loss_sum.backward()  # type: ignore[no-untyped-call]  # torch
        finally:
            self.model.zero_grad(set_to_none=True)


def _are_alike(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> bool:
    """Return whether numbers are equal up to rounding, relative to the largest of their tensor."""
    for one, other in zip(some, others, strict=True):
        if one.is_floating_point() and one.numel():
            largest = float(one.abs().amax())
            if not float((one - other).abs().amax()) <= _ROUNDING * largest:
                return False
    return True


def _store(model: nn.Module, memory_format: torch.memory_format) -> None:
    model.to(memory_format=memory_format)  # type: ignore[call-overload]  # torch

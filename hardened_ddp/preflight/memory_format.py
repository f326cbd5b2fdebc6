"""Channels last or not: a rule about the model's convolutions and its micro-batch.

Images are stored as (N, C, H, W) either channel by channel or, with channels last, pixel by pixel;
the numbers are the same, the order of additions is not. WHY a rule, not a measurement: two runs of
one seed should agree bit for bit, and a measurement near its threshold decides differently each
time. A resumed run keeps the order that it began with, or it would not be bitwise equal.
"""

import contextlib
from collections.abc import Iterable

import torch
from torch import nn

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.batches.nesting import tensors_of
from hardened_ddp.model.effects import Effects
from hardened_ddp.preflight.trial import Trial, try_on_all_ranks
from hardened_ddp.settings.config import Config

# WHY so much: layers add up rounding. A wrong order of memory changes a number as a whole.
_ROUNDING = 0.01


def choose_channels_last(
    trial: Trial, sample: Batch, *, config: Config, began_with: bool | None
) -> bool:
    """Decide how images are stored, and store the weights so. Collective: the same on all ranks.

    began_with: the choice of the run that is resumed.
    """
    asked = config.model.channels_last
    is_chosen = began_with if asked is None else asked
    if is_chosen is None:
        # WHY not where it is compiled: the compiler chooses orders itself
        is_chosen = not config.model.compile and all(
            pays(trial, num_weights * sample.num_samples, num_values * config.data.batch_size)
            for num_weights, num_values in count_values(trial, sample)  # collective
        )
    if is_chosen:
        trial.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch
    return is_chosen


def pays(trial: Trial, num_weights: int, num_values: int) -> bool:
    """Return whether channels last should be faster: by the sizes of kernels and images.

    CPU: each step reorders the kernels' weights, which pays if the convolutions read and write
    at least as many values as their kernels have. Measured with 24 models and
    batches (docs/BENCHMARKS.md): 1.0 to 1.6 times as fast then, down to 0.75 times otherwise.
    CUDA: tensor cores want channels last in bf16 and fp16, says
    https://docs.pytorch.org/tutorials/intermediate/memory_format_tutorial.html
    """
    if trial.group.device.type == "cuda":
        return num_values > 0 and trial.precision.name != "off"
    return num_values > 0 and num_weights <= num_values


def count_values(trial: Trial, sample: Batch) -> list[tuple[int, int]]:
    """Try channels last; return the weights of kernels and values of images on each rank.

    Collective. A 1x1 kernel does not count: it is the same in both orders. Only (0, 0) if there are
    no convolutions, or if the model fails or gives other outputs on some rank; so does a model that
    draws random numbers in evaluation, whose order in memory changes too.
    """
    model, device = trial.model, trial.group.device
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    if not convolutions:
        return [(0, 0)]
    counts = [0, 0]

    def note(kernel: nn.Conv2d, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
        counts[0] += kernel.weight.numel() if max(kernel.kernel_size) > 1 else 0
        counts[1] += inputs[0].numel() + output.numel()

    def compare(sample: Batch, effects: Effects) -> bool:
        with torch.no_grad():
            usual, _ = trial.score(sample.copied().to(device))
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch
            found, _ = trial.score(sample.copied().to(device, channels_last=True))
        return _are_alike(tensors_of(usual), tensors_of(found))

    def train(sample: Batch, effects: Effects) -> list[int]:
        with contextlib.ExitStack() as hooks:
            for kernel in convolutions:
                hooks.enter_context(kernel.register_forward_hook(note))
            _, score = trial.score(sample.copied().to(device, channels_last=True))
        score.loss_sum.backward()  # type: ignore[no-untyped-call]  # torch
        return counts

    try:
        tried = try_on_all_ranks(trial, [sample], compare, evaluates=True)  # collective
        if tried != [[True]] * trial.group.world_size:
            return [(0, 0)]
        # WHY too: a model may do in training alone what needs the usual order
        found = try_on_all_ranks(trial, [sample], train)  # collective
    finally:
        model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]  # torch
    return [(each[0][0], each[0][1]) if each else (0, 0) for each in found]


def _are_alike(some: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> bool:
    """Return whether numbers are equal up to rounding, relative to the largest of their tensor."""
    return all(
        torch.allclose(one, other, rtol=0.0, atol=_ROUNDING * float(one.abs().amax()))
        for one, other in zip(some, others, strict=True)
        if one.is_floating_point() and one.numel()
    )

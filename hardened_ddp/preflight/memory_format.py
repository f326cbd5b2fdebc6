"""Channels last or not: a rule about the model's convolutions and its micro-batch.

Images are stored as (N, C, H, W) either channel by channel or, with channels last, pixel by pixel;
the numbers are the same, the order of additions is not. WHY a rule, not a measurement: two runs of
one seed should agree bit for bit, and a measurement near its threshold decides differently each
time. A resumed run keeps the order that it began with, or it would not be bitwise equal.
"""

from collections.abc import Sequence

import torch
from torch import nn

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.batches.nesting import tensors_of
from hardened_ddp.model.effects import Effects
from hardened_ddp.preflight.trial import Refusal, Trial, try_on_all_ranks
from hardened_ddp.ranks.seeding import seed_step
from hardened_ddp.settings.config import AUTO_BATCH_SIZE, Config

_ROUNDING = 0.01
"""WHY so much: layers add up rounding. A wrong order of memory changes a number as a whole."""

_FAILS = Refusal(
    what="the model fails with channels_last",
    fix=lambda _: "--channels_last auto, or use reshape() and flatten() in place of view()",
)


def choose_channels_last(
    trial: Trial, sample: Batch, *, config: Config, began_with: bool | None
) -> bool:
    """Decide how images are stored, and store the weights so. Collective: the same on all ranks.

    began_with: the choice of the run that is resumed. Raises ModelError on all ranks if channels
    last is asked for and the model fails with it.
    """
    asked = config.model.channels_last
    is_chosen = began_with if asked is None else asked
    if is_chosen is None and config.model.compile:
        is_chosen = False  # WHY: the compiler chooses orders itself
    if is_chosen is None:
        num_samples = config.data.batch_size or AUTO_BATCH_SIZE
        is_chosen = all(
            pays(trial, num_weights * sample.num_samples, num_values * num_samples)
            for num_weights, num_values in count_values(trial, sample)  # collective
        )
    if is_chosen:
        _store(trial.model, torch.channels_last)
    if asked:
        stored = sample.to(trial.group.device, channels_last=True)

        def run(batch: Batch, effects: Effects) -> None:
            trial.train(batch.copied())

        try_on_all_ranks(trial, [stored], run, _FAILS)  # collective
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

    Collective. A 1x1 kernel does not count: it is the same in both orders. Both are 0 if there are
    no convolutions, or if the model fails or gives other outputs on some rank.
    """
    model, group, device = trial.model, trial.group, trial.group.device
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    nothing = [(0, 0)] * group.world_size
    if not convolutions:
        return nothing
    outputs: list[list[torch.Tensor]] = []

    def run(draw: int, effects: Effects) -> bool:
        """Note what the model returns, from the 2nd call on with channels last."""
        seed_step(0, step=draw, rank=0, device_type=device.type)
        if outputs:
            _store(model, torch.channels_last)
        batch = sample.to(device, channels_last=bool(outputs)).copied()
        with torch.no_grad():
            outputs.append([t.clone() for t in tensors_of(trial.task.forward(model, batch))])
        if len(outputs) < 3:
            return True
        usual, last, drawn_again = outputs
        # Where random numbers change the outputs, their order in memory does too.
        return _are_alike(usual, last) or not _are_alike(last, drawn_again)

    def count(batch: Batch, effects: Effects) -> tuple[int, int]:
        num_weights = num_values = 0

        def note(kernel: nn.Conv2d, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
            nonlocal num_weights, num_values
            num_weights += kernel.weight.numel() if max(kernel.kernel_size) > 1 else 0
            num_values += inputs[0].numel() + output.numel()

        hooks = [kernel.register_forward_hook(note) for kernel in convolutions]
        try:
            trial.train(batch.copied())
        finally:
            for hook in hooks:
                hook.remove()
        return num_weights, num_values

    try:
        # the same random numbers twice, then others
        tried = try_on_all_ranks(trial, (0, 0, 1), run, evaluates=True)  # collective
        if not all(found is not None and all(found) for found in tried):
            return nothing
        stored = sample.to(device, channels_last=True)
        counts = try_on_all_ranks(trial, [stored], count)  # collective
    finally:
        _store(model, torch.contiguous_format)
    return [(0, 0) if found is None else (found[0][0], found[0][1]) for found in counts]


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

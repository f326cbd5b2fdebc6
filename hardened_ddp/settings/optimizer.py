"""Settings of the optimizer, its learning rate, and precision."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hardened_ddp.settings.declare import (
    COUNT,
    COUNT_OR_ZERO,
    FRACTION,
    NOT_NEGATIVE,
    ImportPath,
    setting,
)

OptimizerName = Literal["adamw", "adam", "sgd"]
LrSchedule = Literal["auto", "constant", "cosine", "linear", "step"]
Amp = Literal["auto", "off", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    optimizer: OptimizerName | ImportPath = setting(
        "adamw",
        "Which optimizer updates the weights. Or any torch.optim.Optimizer, such as "
        "torch.optim:RAdam; it gets learning_rate as lr, and weight_decay, if it takes them.",
        path="package.module:Class",
    )
    # Any: the arguments are those of a callable that we don't know
    optimizer_args: Mapping[str, Any] = setting(
        {},
        "More arguments of the optimizer, as a mapping: {betas: [0.9, 0.95]}. They override "
        "learning_rate, weight_decay and momentum.",
    )
    learning_rate: float = setting(
        3e-3,
        "Peak learning rate. Too high: the loss becomes NaN. Too low: the loss hardly falls.",
        bounds=NOT_NEGATIVE,
    )
    weight_decay: float = setting(
        0.01,
        "Weight decay: decoupled from the gradient in adamw, added to the gradient in the others.",
        bounds=NOT_NEGATIVE,
    )
    no_weight_decay: bool = setting(
        False,
        "No weight decay for norms, biases and other vectors. Parameter groups with a weight_decay "
        "of their own keep it.",
    )
    momentum: float = setting(
        0.9, "Momentum of sgd. The other optimizers don't use it.", bounds=FRACTION
    )
    lr_schedule: LrSchedule | ImportPath = setting(
        "auto",
        "Learning rate after the warm-up. auto: cosine, and constant for a stream of unknown "
        "length without max_steps. cosine, linear: down to 0 at the end. step: divided by "
        "10 after one third, and again after two thirds. Or a scheduler, such as "
        "torch.optim.lr_scheduler:OneCycleLR, stepped after each optimizer step; or your own "
        "function (step, total_steps), which returns the share of learning_rate.",
        path="package.module:callable",
    )
    # Any: as in optimizer_args
    lr_schedule_args: Mapping[str, Any] = setting(
        {}, "Arguments of a schedule of your own, as a mapping: {name: value, ...}."
    )
    warmup_steps: int = setting(
        0, "Steps in which the learning rate rises linearly to its peak.", bounds=COUNT_OR_ZERO
    )
    accumulation_steps: int = setting(
        1,
        "Micro-batches per optimizer step: a larger global batch in the same memory.",
        bounds=COUNT,
    )
    clip_grad_norm: float = setting(
        0.0, "Clip gradients to this norm. 0: no clipping.", bounds=NOT_NEGATIVE
    )
    label_smoothing: float = setting(
        0.0, "Share of each target that is spread evenly over all classes.", bounds=FRACTION
    )
    amp: Amp = setting(
        "auto",
        "Mixed precision. auto: bf16, or fp16 on a GPU without bf16; off on the CPU. fp16 scales "
        "the loss, because small gradients underflow in it.",
    )

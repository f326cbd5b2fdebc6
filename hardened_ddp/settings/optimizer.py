"""Settings of the optimizer, its learning rate, and precision."""

from dataclasses import dataclass
from typing import Literal

from hardened_ddp.settings.declare import COUNT, COUNT_OR_ZERO, FRACTION, NOT_NEGATIVE, setting

OptimizerName = Literal["adamw", "adam", "sgd"]
LrSchedule = Literal["constant", "cosine", "linear", "step"]
Amp = Literal["auto", "off", "bf16", "fp16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    optimizer: OptimizerName = setting("adamw", "Which optimizer updates the weights.")
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
    momentum: float = setting(
        0.9, "Momentum of sgd. The other optimizers don't use it.", bounds=FRACTION
    )
    lr_schedule: LrSchedule = setting(
        "cosine",
        "Learning rate after the warm-up. cosine, linear: down to 0 at the end. step: divided by "
        "10 after one third, and again after two thirds.",
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

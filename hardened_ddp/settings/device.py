"""Settings of the device and of the process group."""

from dataclasses import dataclass
from typing import Literal

from hardened_ddp.settings.declare import SECONDS, Bounds, setting

Backend = Literal["auto", "nccl", "gloo"]
SEED = Bounds(low=0, high=2**63 - 1)  # torch takes a signed 64-bit int


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceConfig:
    single_gpu: bool = setting(
        False, "Train on one GPU in this one process, without a process group."
    )
    cpu_only: bool = setting(
        False, "Train on the CPU even if there are GPUs. Several ranks then talk over gloo."
    )
    backend: Backend = setting(
        "auto", "What carries the collectives. auto: nccl between GPUs, gloo between CPUs."
    )
    timeout_s: float = setting(
        600.0,
        "Seconds that a collective waits for the other ranks. Too low: a slow disk ends the run; "
        "too high: a dead rank is noticed late.",
        bounds=SECONDS,
    )
    seed: int = setting(
        0,
        "Fixes initial weights, sample order, augmentation and dropout. The same seed gives the "
        "same run.",
        bounds=SEED,
    )
    deterministic: bool = setting(
        False,
        "Ask torch for deterministic kernels, so that two GPU runs agree bit for bit. Slower; "
        "a kernel that has no such form is named in a warning.",
    )

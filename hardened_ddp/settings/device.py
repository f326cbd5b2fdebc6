"""Settings of the device and of the process group."""

from dataclasses import dataclass
from typing import Literal

from hardened_ddp.settings.declare import SECONDS, Bounds, setting

Backend = Literal["auto", "nccl", "gloo"]
SEED = Bounds(low=0, high=2**63 - 1)  # torch takes a signed 64-bit int


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceConfig:
    single_gpu: bool = setting(
        False, "Train on one GPU in this single process, without a process group."
    )
    cpu_only: bool = setting(
        False, "Train on the CPU even if there are GPUs. Several ranks then communicate over gloo."
    )
    backend: Backend = setting(
        "auto", "Backend of the process group. auto: nccl between GPUs, gloo between CPUs."
    )
    timeout_s: float = setting(
        600.0,
        "Seconds that a collective waits for the other ranks. Too low: a slow disk ends the run. "
        "Too high: a dead rank is noticed late.",
        bounds=SECONDS,
    )
    seed: int = setting(
        0,
        "Seed of the initial weights, the sample order, augmentation and dropout. The same seed "
        "gives the same run.",
        bounds=SEED,
    )
    deterministic: bool = setting(
        False,
        "Use deterministic kernels, so that two runs on GPUs agree bit for bit. Slower. A kernel "
        "without a deterministic version is named in a warning.",
    )

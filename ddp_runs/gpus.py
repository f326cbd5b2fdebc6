"""Checks of GPUs, their driver, and the communication backends."""

import re
import warnings
from pathlib import Path

from ddp_runs.check import GIB, Check
from hardened_ddp.settings.typed_command import python_command

_DRIVER = Path("/proc/driver/nvidia/version")
_DEVICES = Path("/dev")
_LEAST_FREE_SHARE = 0.5


def check_gpus(driver: Path = _DRIVER, devices: Path = _DEVICES) -> Check:
    """Check that each GPU of the machine can be used by torch, and is free."""
    import torch

    found = f"driver {read_driver(driver)}" if driver.exists() else ""
    found = found or ("/dev/nvidia*" if any(devices.glob("nvidia[0-9]*")) else "")
    if torch.version.cuda is None and torch.version.hip is None:
        if found:
            advice = "install the torch build for CUDA: see https://pytorch.org/get-started/locally"
            return Check("gpus", "warn", f"{found}, but this torch is built for CPUs", advice)
        return Check("gpus", "ok", "none; training runs on the CPU")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        is_available = torch.cuda.is_available()
    if is_available:
        return _try_gpus(found)
    reason = str(caught[0].message).partition("\n")[0] if caught else "torch sees no GPU"
    if found:
        advice = "run nvidia-smi; the driver must be as new as CUDA " + str(torch.version.cuda)
        return Check("gpus", "FAIL", f"{found}, but {reason}", advice)
    return Check("gpus", "ok", "none, though torch is built for them; training runs on the CPU")


def check_backends() -> Check:
    """Check the communication backends: gloo for CPUs, NCCL for GPUs."""
    import torch
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_gloo_available():
        install = python_command("-m", "pip", "install", "torch")
        advice = f"install a torch build with torch.distributed and gloo: {install}"
        return Check("backends", "FAIL", "this torch has no gloo: one process only", advice)
    has_nccl = dist.is_nccl_available()
    version = ".".join(map(str, torch.cuda.nccl.version())) if has_nccl else ""  # type: ignore[no-untyped-call]  # torch's
    names = ["gloo", *([f"NCCL {version}"] if has_nccl else [])]
    if torch.cuda.device_count() > 1 and not has_nccl:
        advice = "install a torch build with NCCL: gloo between GPUs is several times slower"
        return Check("backends", "warn", "gloo, no NCCL beside several GPUs", advice)
    return Check("backends", "ok", ", ".join(names))


def read_driver(path: Path) -> str:
    """Read the version of NVIDIA's kernel driver, or "unknown"."""
    found = re.search(r"Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", path.read_text(errors="replace"))
    return found[1] if found else "unknown"


def _try_gpus(found: str) -> Check:
    """Add two numbers on each GPU, to find broken GPUs and kernels for other architectures."""
    import torch

    names: list[str] = []
    busy: list[str] = []
    for index in range(torch.cuda.device_count()):
        try:
            torch.ones(2, device=f"cuda:{index}").sum().item()
            free, total = torch.cuda.mem_get_info(index)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            advice = f"leave it out with CUDA_VISIBLE_DEVICES, and see nvidia-smi -i {index} -q"
            return Check("gpus", "FAIL", f"GPU {index} can't add two numbers: {reason}", advice)
        names.append(f"{index}: {torch.cuda.get_device_name(index)} {total / GIB:.0f} GiB")
        if free < _LEAST_FREE_SHARE * total:
            busy.append(f"{index} ({free / GIB:.1f} of {total / GIB:.0f} GiB free)")
    detail = f"{'; '.join(names)}; {found or 'no NVIDIA driver'}; CUDA {torch.version.cuda}"
    if busy:
        advice = "nvidia-smi shows whose processes these are; wait for them or choose other GPUs"
        return Check("gpus", "warn", f"{detail}; in use: {', '.join(busy)}", advice)
    return Check("gpus", "ok", detail)

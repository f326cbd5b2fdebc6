"""The device of this rank (its own GPU, else the CPU) and the backend of its collectives."""

import ctypes
import faulthandler
from functools import cache
from typing import Literal

import torch
import torch.distributed as dist

from hardened_ddp.errors import LaunchError
from hardened_ddp.ranks.launch import Launch
from hardened_ddp.ranks.launchers_env import command_words, with_arguments
from hardened_ddp.settings.config import Backend

_SUCCESS, _NOT_READY = 0, 600  # CUresult of <cuda.h>


def pick_device(launch: Launch, *, cpu_only: bool, backend: str) -> torch.device:
    """Choose this rank's device: its own GPU, else the CPU. Rank-local.

    WHY by what is visible: variables don't say for sure whether all ranks see the same GPUs. The
    rendezvous refuses two ranks with one GPU (gpu_id).
    Raises LaunchError if the node has fewer GPUs than ranks (but gloo ranks may share a GPU).
    """
    if cpu_only or not torch.cuda.is_available():
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count()
    index = launch.local_rank
    if index >= num_gpus and launch.has_own_gpus:
        index = 0
    if index >= num_gpus and backend != "gloo":
        num_ranks = num_gpus * launch.num_nodes
        fewer = command_words(launch.launcher, num_ranks, num_nodes=launch.num_nodes, env={})
        raise LaunchError(
            f"local rank {launch.local_rank} has no GPU: this node has {num_gpus} and was given "
            f"{launch.local_world_size} ranks",
            fix=f"add --backend gloo, or start one rank for each GPU: {with_arguments(fewer)}",
        )
    device = torch.device("cuda", index % num_gpus)
    # WHY first: NCCL and every .cuda() without an index use the current device.
    torch.cuda.set_device(device)
    return device


def gpu_id(device: torch.device) -> str:
    """Return the GPU's own id, by which ranks see that they share one; empty: it is unknown."""
    if device.type != "cuda":
        return ""
    return str(getattr(torch.cuda.get_device_properties(device), "uuid", ""))


def is_reached(event: torch.cuda.Event) -> bool:
    """Return whether the GPU is past a recorded event. Any thread; never waits for the GPU's work.

    WHY not torch's query: it keeps the GIL, and where another thread is stuck in the driver, behind
    a full queue of launches for instance, it may wait for that one. Then no thread goes on.
    """
    driver = _driver()
    if driver is not None:
        status = driver.cuEventQuery(ctypes.c_void_p(event.cuda_event))
        if status in (_SUCCESS, _NOT_READY):
            return bool(status == _SUCCESS)
    is_past: bool = event.query()  # type: ignore[no-untyped-call]  # raises what torch says
    return is_past


@cache
def _driver() -> ctypes.CDLL | None:
    """Return CUDA's driver, whose functions are called without the GIL; None: there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:  # a build for another kind of device
        return None


def choose_backend(device: torch.device, backend: Backend) -> Literal["nccl", "gloo"]:
    if backend == "auto":
        return "nccl" if device.type == "cuda" and dist.is_nccl_available() else "gloo"
    if backend == "nccl" and device.type != "cuda":
        raise LaunchError(
            "backend nccl needs a GPU on every rank, and this rank has none",
            fix="leave --backend out: gloo is chosen on the CPU",
        )
    return backend


def name_lines_of_failures() -> None:
    """Let an error in backward name its line of forward, and a crash the lines of all threads."""
    torch.autograd.set_detect_anomaly(True, check_nan=False)
    faulthandler.enable()

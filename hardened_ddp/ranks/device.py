"""The device of this rank: its own GPU, else the CPU."""

import torch

from hardened_ddp.errors import LaunchError
from hardened_ddp.ranks.launch import Launch


def pick_device(launch: Launch, *, cpu_only: bool, backend: str) -> torch.device:
    """Choose this rank's device: its own GPU, else the CPU. Rank-local.

    Raises LaunchError if the node has fewer GPUs than ranks (but gloo ranks may share a GPU).
    """
    if cpu_only or not torch.cuda.is_available():
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count()
    if launch.local_rank >= num_gpus and backend != "gloo":
        raise LaunchError(
            f"local rank {launch.local_rank} has no GPU: this node has {num_gpus} and was given "
            f"{launch.local_world_size} ranks",
            fix=f"torchrun --nproc_per_node={num_gpus} ddp_training.py   (or add --backend gloo)",
        )
    device = torch.device("cuda", launch.local_rank % num_gpus)
    # WHY first: NCCL and every .cuda() without an index use the current device.
    torch.cuda.set_device(device)
    return device

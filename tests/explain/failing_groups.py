"""Programs whose ranks do not agree, or lose each other."""

import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from tests.explain.reproducers import reproduces, throw


@reproduces("lost-peer", num_ranks=2)
def lost_peer() -> None:
    rank = dist.get_rank()
    dist.barrier()  # WHY: else rank 0 may still connect, which fails with other words
    if rank == 1:
        os._exit(0)
    dist.all_reduce(torch.ones(4))


@reproduces("gloo-timeout", num_ranks=2)
def gloo_timeout() -> None:
    group = dist.new_group(timeout=timedelta(seconds=1), backend="gloo")
    if dist.get_rank() == 1:
        time.sleep(1.6)
        os._exit(0)
    dist.all_reduce(torch.ones(4), group=group)


@reproduces("gloo-barrier", num_ranks=2, guilty=1)
def gloo_barrier() -> None:
    if dist.get_rank() == 0:
        dist.monitored_barrier(timeout=timedelta(seconds=1))
    else:
        time.sleep(1.5)
        os._exit(0)


@reproduces("collective-mismatch", num_ranks=2)
def collective_mismatch() -> None:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    group = dist.new_group(backend="gloo")
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(4), group=group)
    else:
        dist.broadcast(torch.ones(4), src=0, group=group)


@reproduces("gloo-interface")
def gloo_interface() -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "eth77"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


@reproduces("launch-ranks-missing")
def launch_ranks_missing_file() -> None:
    store = dist.FileStore("store", 2)
    dist.init_process_group("gloo", store=store, rank=0, world_size=2, timeout=timedelta(seconds=1))


@reproduces("nccl-wrong-device-tensor")
def nccl_wrong_device_tensor() -> None:
    dist.init_process_group("cuda:gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.ones(4))


reproduces("collective-mismatch", num_ranks=2)(
    lambda: dist.all_reduce(torch.ones(4 + 4 * dist.get_rank()))
)
reproduces("gloo-unsupported", num_ranks=2)(
    lambda: dist.all_reduce(torch.ones(4, dtype=torch.int16))
)
reproduces("group-shapes", num_ranks=2)(
    lambda: dist.all_gather_into_tensor(torch.ones(7), torch.ones(4))
)
reproduces("group-shapes", num_ranks=2)(
    lambda: dist.all_gather([torch.ones(2), torch.ones(3)], torch.ones(2))
)
reproduces("group-rank", num_ranks=2)(lambda: dist.broadcast(torch.ones(4), src=5))
reproduces("nccl-missing")(
    lambda: dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
)
reproduces("launch-route")(lambda: throw(OSError(113, os.strerror(113))))

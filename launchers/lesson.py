"""The lesson of the launchers: it shows the ranks, and what each collective does.

Data parallel training in four sentences. Every process (rank) holds the whole model. Each one gets
a different part of every batch, and computes gradients from it. All-reduce averages these
gradients, so that every rank has those of the whole batch. Each rank then makes the same update,
so the models stay equal without being sent again. The launcher tells each rank:

    rank          its index among all processes of the run, from 0; rank 0 also writes the files
    local rank    its index on its own machine: it takes the GPU with that index
    world size    how many ranks there are

The ranks find each other at MASTER_ADDR:MASTER_PORT (the rendezvous), where rank 0 or torchrun's
agent serves a small key-value store. After that they communicate directly.
"""

import socket
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

from hardened_ddp.ranks.device import pick_device
from hardened_ddp.ranks.launch import Launch
from hardened_ddp.ranks.rendezvous import open_store, rendezvous

TIMEOUT_S = 60.0


def give_lesson(launch: Launch, *, cpu_only: bool) -> None:
    """Show all ranks in order, and one example of each collective. Collective: all ranks."""
    device = pick_device(launch, cpu_only=cpu_only, backend="auto")
    if launch.world_size == 1:
        print(describe(launch, device), flush=True)
        return
    # The process group. NCCL moves tensors between GPUs, gloo between CPUs.
    timeout = timedelta(seconds=TIMEOUT_S)
    store = rendezvous(open_store(launch, timeout), launch, TIMEOUT_S)  # collective
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timeout,
    )
    try:
        lines = [*show_ranks(launch, device), *show_collectives(launch, device)]
        # WHY only rank 0 prints: lines of several processes would be mixed, in any order.
        if launch.is_main:
            print("\n".join(lines), flush=True)
    finally:
        dist.destroy_process_group()


def describe(launch: Launch, device: torch.device) -> str:
    """Return one line with the host, ranks and device of this process."""
    return (
        f"host {socket.gethostname()}  rank {launch.rank}  local rank {launch.local_rank}  "
        f"world size {launch.world_size}  device {device}"
    )


def show_ranks(launch: Launch, device: torch.device) -> list[str]:
    """Gather the line of each rank, in rank order. Collective: all ranks."""
    lines: list[str] = [""] * launch.world_size
    dist.all_gather_object(lines, describe(launch, device))  # all-gather, of any Python object
    where = f"{launch.master_addr}:{launch.master_port}"
    return [
        f"{launch.world_size} ranks, started by {launch.launcher}; rendezvous at {where}",
        *lines,
    ]


def show_collectives(launch: Launch, device: torch.device) -> list[str]:
    """Call each collective once, with numbers that show what it does. Collective: all ranks.

    A collective is a call that all ranks make, in the same order. If one rank does not make it,
    the others wait until the timeout: most hangs of DDP programs have this cause.
    """
    rank, world_size = launch.rank, launch.world_size
    mine = torch.tensor([rank + 1.0], device=device)

    # All-reduce: every rank gives a tensor, every rank gets the sum. DDP does this with the
    # gradients in each step (and divides by the number of ranks).
    total = mine.clone()
    dist.all_reduce(total)
    wanted = world_size * (world_size + 1) / 2

    # All-gather: every rank gives a tensor, every rank gets all of them.
    parts = [torch.zeros_like(mine) for _ in range(world_size)]
    dist.all_gather(parts, mine)

    # Broadcast: every rank gets the tensor of one of them. DDP does this once with the weights,
    # so that all ranks start with the model of rank 0.
    first = mine.clone()
    dist.broadcast(first, src=0)

    # Reduce: like all-reduce, but only one rank gets the sum; on the others it is undefined.
    reduced = mine.clone()
    dist.reduce(reduced, dst=0)

    if total.item() != wanted:
        # If this sum is wrong, gradients would be wrong in the same way.
        sys.exit(f"rank {rank}: all-reduce gave {total.item():g} instead of {wanted:g}")
    return [
        "each rank gives its rank + 1:",
        f"  all-reduce  gives every rank the sum:        {total.item():g} (checked)",
        f"  all-gather  gives every rank all of them:    {[int(p.item()) for p in parts]}",
        f"  broadcast   gives every rank that of rank 0: {first.item():g}",
        f"  reduce      gives rank 0 alone the sum:      {reduced.item():g}",
    ]

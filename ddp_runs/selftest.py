"""An all-reduce of two ranks: the shortest test that training can work here.

The ranks are processes of a pool, with the code of a real run (ranks/group.py), with gloo on this
machine's loopback address.
"""

import multiprocessing
import os
import time
from collections.abc import Mapping
from functools import partial

from ddp_runs.machine import Check
from hardened_ddp.ranks.launch import Launch, environment, prepare_environment
from hardened_ddp.ranks.launchers_env import hold_port

_LIMIT_S, _GROUP_LIMIT_S = 60.0, 45.0


def check_all_reduce(env: Mapping[str, str], *, limit_s: float = _LIMIT_S) -> Check:
    """Have two processes add up a number over gloo, within limit_s."""
    start = time.monotonic()
    with hold_port() as holder, multiprocessing.get_context("spawn").Pool(2) as pool:
        add = partial(add_up, holder.getsockname()[1], dict(env))
        ends = pool.imap_unordered(add, range(2))  # WHY: one that fails leaves the other waiting
        try:
            for _ in range(2):
                if problem := ends.next(max(0.0, start + limit_s - time.monotonic())):
                    advice = "see the checks above first: torch, variables"
                    return Check("all-reduce", "FAIL", problem, advice)
        except multiprocessing.TimeoutError:
            advice = "a firewall on lo, or a machine that is far too busy: see top, then try again"
            detail = f"2 ranks did not finish within {limit_s:g} s"
            return Check("all-reduce", "FAIL", detail, advice)
    took_s = time.monotonic() - start
    return Check("all-reduce", "ok", f"2 ranks over gloo, {took_s:.1f} s with start")


def add_up(port: int, env: Mapping[str, str], rank: int) -> str:
    """Be one of the two ranks; return what went wrong, or nothing. Collective: all ranks."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # what gloo warns of stands in the error, too
    variables = environment()
    variables.update({**env, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""})
    launch = Launch(rank=rank, local_rank=rank, world_size=2, local_world_size=2, master_port=port)
    prepare_environment(launch, variables)
    try:
        # WHY here: the doctor itself may have no torch.
        import torch

        from hardened_ddp.ranks.group import open_group

        group = open_group(  # collective
            launch, device=torch.device("cpu"), backend="gloo", timeout_s=_GROUP_LIMIT_S
        )
        total = group.sum_(torch.tensor([rank + 1.0])).item()  # collective
        group.close()
        return "" if total == 3 else f"the sum over 2 ranks is {total}, not 3"
    except Exception as error:  # WHY broad: all that it may be is told
        return f"rank {rank} of 2: {type(error).__name__}: {error}"

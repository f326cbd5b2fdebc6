"""An all-reduce of two ranks: the shortest test that training can work here.

Owns the two child processes: their environment, their time limit and their output. They use the
code of a real run (ranks/launch.py, ranks/group.py) with gloo on this machine's loopback address.
"""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from ddp_runs.machine import Check
from hardened_ddp.ranks.launch import environment, prepare_environment, read_launch
from hardened_ddp.ranks.launchers_env import hold_port

_LIMIT_S, _GROUP_LIMIT_S = 60.0, 45.0
_POLL_S = 0.05
_ROOT = Path(__file__).resolve().parents[1]
_LAUNCHERS = ("TORCHELASTIC_", "SLURM_", "GROUP_", "ROLE_", "MASTER_")


def check_all_reduce(env: Mapping[str, str], *, limit_s: float = _LIMIT_S) -> Check:
    """Have two processes add up a number over gloo, within limit_s."""
    start = time.monotonic()
    ranks: list[subprocess.Popen[bytes]] = []
    with hold_port() as holder, tempfile.TemporaryFile() as one, tempfile.TemporaryFile() as two:
        outputs = (one, two)
        try:
            for rank, output in enumerate(outputs):
                ranks.append(_start(rank, holder.getsockname()[1], env, output))
            statuses: list[int | None] = [None]
            while None in statuses and not any(statuses) and time.monotonic() < start + limit_s:
                time.sleep(_POLL_S)
                statuses = [process.poll() for process in ranks]
        finally:
            for process in ranks:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        said = [_last_line(output) for output in outputs]
    took_s = time.monotonic() - start
    if failed := [rank for rank, status in enumerate(statuses) if status]:
        why = said[failed[0]] or f"ended with status {statuses[failed[0]]} and printed nothing"
        advice = "see the checks above first: torch, variables"
        return Check("all-reduce", "FAIL", f"rank {failed[0]} of 2: {why}", advice)
    if None in statuses:
        advice = "a firewall on lo, or a machine that is far too busy: see top, then try again"
        return Check("all-reduce", "FAIL", f"2 ranks did not finish within {limit_s:g} s", advice)
    return Check("all-reduce", "ok", f"2 ranks over gloo, {took_s:.1f} s with start")


def add_up() -> None:
    """Run one of the two ranks. Raises if the sum is wrong. Collective: all ranks."""
    # WHY here: this runs in the child; the doctor itself may have no torch.
    import torch

    from hardened_ddp.ranks.group import open_group

    launch = read_launch(environment())
    prepare_environment(launch, environment())
    group = open_group(  # collective
        launch, device=torch.device("cpu"), backend="gloo", timeout_s=_GROUP_LIMIT_S
    )
    try:
        total = group.sum_(torch.tensor([launch.rank + 1.0])).item()  # collective
    finally:
        group.close()
    wanted = launch.world_size * (launch.world_size + 1) / 2
    if total != wanted:
        raise RuntimeError(f"the sum over {launch.world_size} ranks is {total}, not {wanted}")


def _start(
    rank: int, port: int, env: Mapping[str, str], output: IO[bytes]
) -> "subprocess.Popen[bytes]":
    """Start one rank, in its own session, with the environment that torchrun would set."""
    own = {name: value for name, value in env.items() if not name.startswith(_LAUNCHERS)}
    paths = [str(_ROOT), *filter(None, [own.get("PYTHONPATH", "")])]
    own |= dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    own |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "2")
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    own |= {"PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""}
    words, null, both = [sys.executable, "-m", __name__], subprocess.DEVNULL, subprocess.STDOUT
    return subprocess.Popen(
        words, env=own, stdin=null, stdout=output, stderr=both, start_new_session=True
    )


def _last_line(output: IO[bytes]) -> str:
    """Return the last output line of a failed process, without the `next:` line of our errors."""
    output.seek(0)
    text = output.read().decode(errors="replace")
    lines = [line for line in map(str.strip, text.splitlines()) if line]
    return next((line for line in reversed(lines) if not line.startswith("next: ")), "")


if __name__ == "__main__":
    add_up()

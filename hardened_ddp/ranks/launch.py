"""Who launched this process, and its place among the ranks.

Owns the environment: the only module that reads or sets environment variables. A launcher is
recognised once, its variables are checked against each other, and everybody else gets the frozen
Launch. Half an environment is an error: guessing rank 0 would train N separate models.

Does not own: the process group (group.py).
Read next: group.py, which turns a Launch into a process group.
"""

import ctypes
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hardened_ddp.errors import LaunchError

TORCHRUN_COMMAND = "torchrun --standalone --nproc_per_node=2 ddp_training.py"
_NEEDED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
MODELS_FOLDER = Path("models")  # made by setup.sh
_PR_SET_PDEATHSIG = 1  # of <linux/prctl.h>
# Set by people and by container images for other reasons: alone they say nothing of a launcher.
_NOT_TELLING = ("MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Who launched this process, and its place among the ranks."""

    launcher: Literal["none", "torchrun"] = "none"
    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    num_nodes: int = 1
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    attempt: int = 0
    """How often the launcher has restarted the ranks."""

    agent_owns_store: bool = False
    """torchrun's agent already serves a TCPStore on the master port; rank 0 must not."""

    job_key: str = ""
    """The same over all restarts of one job, different for every other job; empty: unknown."""

    agent_key: str = ""
    """The same over all attempts that one launcher on one node starts; empty: unknown."""

    started_at: float = field(default_factory=time.time, compare=False)
    """When this process read its environment, in seconds since the epoch."""

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        return self.local_rank == 0

    @property
    def is_restart(self) -> bool:
        return self.attempt > 0


def read_launch(env: Mapping[str, str]) -> Launch:
    """Tell from the environment who launched this process. Rank-local.

    Raises LaunchError if the variables are incomplete, not numbers, or contradict each other.
    """
    present = [name for name in _NEEDED if name in env]
    if not set(present) - set(_NOT_TELLING):
        return Launch(job_key=_slurm_key(env), attempt=_slurm_restarts(env))
    missing = [name for name in _NEEDED if name not in env]
    if missing:
        raise LaunchError(
            f"{', '.join(present)} set, but not {', '.join(missing)}: this process got only a part "
            "of a launcher's environment, so it can't know the other ranks",
            fix=f"{TORCHRUN_COMMAND}   (or, for one process: unset {' '.join(present)})",
        )
    numbers = {name: _whole_number(env, name) for name in _NEEDED if name != "MASTER_ADDR"}
    _check_ranks(numbers)
    agent_key = _agent_key(env.get("TORCHELASTIC_RUN_ID", ""))
    return Launch(
        launcher="torchrun",
        rank=numbers["RANK"],
        local_rank=numbers["LOCAL_RANK"],
        world_size=numbers["WORLD_SIZE"],
        local_world_size=numbers["LOCAL_WORLD_SIZE"],
        num_nodes=int(env.get("GROUP_WORLD_SIZE", "0"))
        or -(-numbers["WORLD_SIZE"] // numbers["LOCAL_WORLD_SIZE"]),
        master_addr=env["MASTER_ADDR"],
        master_port=numbers["MASTER_PORT"],
        attempt=int(env.get("TORCHELASTIC_RESTART_COUNT", "0")) + _slurm_restarts(env),
        agent_owns_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        job_key=_slurm_key(env) or agent_key,
        agent_key=agent_key,
    )


def prepare_environment(
    launch: Launch, env: MutableMapping[str, str], *, debug: bool = False
) -> None:
    """Set what torch reads later, where the user has not set it. Rank-local, before torch."""
    if debug:
        # WHY not DETAIL: on torch 2.13 with gloo, DDP's constructor crashes under it.
        env.setdefault("TORCH_DISTRIBUTED_DEBUG", "INFO")
    if (MODELS_FOLDER / "hub").is_dir():
        # Where download.py puts published weights, and torch looks for them.
        env.setdefault("TORCH_HOME", str(MODELS_FOLDER.absolute()))
    if launch.num_nodes == 1 and launch.world_size > 1:
        # WHY: ranks of one node need no network card; loopback also keeps the sockets private.
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        env.setdefault("NCCL_SOCKET_IFNAME", "lo")


def end_with_launcher(launch: Launch) -> None:
    """Have the kernel send SIGTERM when the launcher dies. Rank-local, on Linux.

    WHY: ranks of a killed torchrun would train on as orphans, beside the restarted job. SIGTERM
    makes them save and leave.
    """
    if launch.launcher == "torchrun" and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def stop_launcher(launch: Launch) -> None:
    """Tell torchrun to restart no more. Rank-local, on one rank of each node."""
    if launch.launcher == "torchrun" and launch.is_local_main:
        os.kill(os.getppid(), signal.SIGTERM)


def environment() -> MutableMapping[str, str]:
    """Give this process's environment. The one place that touches os.environ."""
    return os.environ


def _whole_number(env: Mapping[str, str], name: str) -> int:
    try:
        value = int(env[name])
    except ValueError:
        value = -1
    if value < 0:
        raise LaunchError(
            f"{name}={env[name]!r} in the environment is not a whole number >= 0",
            fix=f"let a launcher set it: {TORCHRUN_COMMAND}",
        )
    return value


def _check_ranks(numbers: Mapping[str, int]) -> None:
    """Raise LaunchError if a rank lies outside its world."""
    problems = [
        f"{small}={numbers[small]} must be below {large}={numbers[large]}"
        for small, large in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        if numbers[small] >= numbers[large]
    ]
    if numbers["LOCAL_WORLD_SIZE"] > numbers["WORLD_SIZE"]:
        problems.append(
            f"LOCAL_WORLD_SIZE={numbers['LOCAL_WORLD_SIZE']} can't be above "
            f"WORLD_SIZE={numbers['WORLD_SIZE']}"
        )
    if not 0 < numbers["MASTER_PORT"] < 65536:
        problems.append(f"MASTER_PORT={numbers['MASTER_PORT']} is not a port (1 to 65535)")
    if problems:
        raise LaunchError(
            "the launcher's environment contradicts itself: " + "; ".join(problems),
            fix=TORCHRUN_COMMAND,
        )


def _slurm_restarts(env: Mapping[str, str]) -> int:
    """How often Slurm has requeued this job; its variable exists only after a requeue."""
    return int(env.get("SLURM_RESTART_COUNT", "0"))


def _slurm_key(env: Mapping[str, str]) -> str:
    """Name the Slurm job; empty outside of one."""
    return f"slurm-{env['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in env else ""


def _agent_key(launcher_id: str) -> str:
    """Name torchrun's agent on this node, so that its restarts find their run folder again.

    WHY the parent's pid and start time: torchrun's run id is "none" for static rendezvous, but its
    agent is one process over all restarts and the parent of every local rank.
    """
    if not launcher_id:
        return ""
    parent = os.getppid()
    try:
        with open(f"/proc/{parent}/stat", encoding="utf-8") as stat:
            started = stat.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        started = "0"
    return f"{socket.gethostname()}-{launcher_id}-{parent}-{started}"

"""Who launched this process, and its place among the ranks.

Owns the environment: the only module that reads or sets environment variables. A launcher is
recognised once, its variables are checked against each other, and all other modules get the frozen
Launch. An incomplete environment is an error: guessing rank 0 would train N separate models.

Does not own: what each launcher's variables mean (launchers_env.py, slurm_env.py), the process
group (group.py).
Read next: group.py, which turns a Launch into a process group.
"""

import os
import signal
import socket
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from pathlib import Path

from hardened_ddp.ranks import slurm_env
from hardened_ddp.ranks.launchers_env import (
    TORCHRUN,
    is_of_operator,
    names_of_mpi,
    read_mpi,
    read_operator,
    read_torchrun,
    refuse_missing_torchrun,
)
from hardened_ddp.ranks.parent import end_with_parent
from hardened_ddp.ranks.place import Launch, whole_number
from hardened_ddp.ranks.start_command import find_start_command

__all__ = [
    "SAVE_REQUESTS",
    "Launch",
    "end_with_launcher",
    "environment",
    "keep_nccl_from_exiting",
    "prepare_environment",
    "prepare_signals",
    "read_launch",
    "stop_launcher",
]

MODELS_FOLDER = Path("models")  # made by setup.sh
SAVE_REQUESTS = (signal.SIGUSR1, signal.SIGUSR2)
"""Signals with which clusters ask a job to save. Without a handler they would kill it."""

# They leave a process only some GPUs: those of its rank if a wrapper sets them for each rank.
_GPU_MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


def read_launch(env: Mapping[str, str]) -> Launch:
    """Find out from the environment who launched this process. Rank-local.

    WHY this order: torchrun may run under srun or mpirun, and mpirun inside a Slurm job; only the
    innermost one knows this process. MASTER_ADDR and MASTER_PORT alone mean nothing: people and
    container images set them for other reasons.

    Raises LaunchError if the variables are incomplete, not numbers, or contradict each other.
    """
    if is_of_operator(env):
        launch = read_operator(env)
    elif any(name in env for name in TORCHRUN):
        launch = read_torchrun(env)
    elif (names := names_of_mpi(env)) is not None:
        launch = read_mpi(env, names)
    elif slurm_env.is_step(env):
        launch = slurm_env.read_step(env)
    else:
        slurm_env.refuse_missing_srun(env)
        refuse_missing_torchrun(env)
        launch = Launch()
    # Slurm's variable exists only after a requeue.
    requeues = whole_number(env, "SLURM_RESTART_COUNT", default=0)
    run_id = env.get("TORCHELASTIC_RUN_ID", "")
    agent_key = _agent_key(run_id)
    job_key = f"slurm-{env['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in env else agent_key
    attempt = launch.attempt + requeues
    return replace(
        launch,
        start=find_start_command(env, launch),
        attempt=attempt,
        job_key=job_key,
        agent_key=agent_key,
        has_own_gpus=launch.has_own_gpus or any(name in env for name in _GPU_MASKS),
        run_id="" if run_id == "none" else run_id,  # torchrun's default for all jobs
    )


def prepare_environment(
    launch: Launch,
    env: MutableMapping[str, str],
    *,
    debug: bool = False,
    deterministic: bool = False,
) -> None:
    """Set variables that torch reads, unless the user set them. Rank-local, before torch."""
    if debug:
        # WHY not DETAIL: on torch 2.13 with gloo, DDP's constructor crashes under it.
        env.setdefault("TORCH_DISTRIBUTED_DEBUG", "INFO")
    if deterministic:
        # WHY: cuBLAS reads it once, and without it matrix products on two streams may round
        # differently from run to run. The value is the one that torch's error message names.
        env.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if (MODELS_FOLDER / "hub").is_dir():
        # Where download.py puts published weights, and torch looks for them.
        env.setdefault("TORCH_HOME", str(MODELS_FOLDER.absolute()))
    if launch.world_size > 1:
        # WHY: torchrun does the same. Otherwise each rank starts as many threads as the machine has
        # CPUs; and with another number of threads sums round differently.
        env.setdefault("OMP_NUM_THREADS", "1")
    if launch.num_nodes == 1 and launch.world_size > 1:
        # WHY: ranks of one node need no network card; loopback also keeps the sockets private.
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
        env.setdefault("NCCL_SOCKET_IFNAME", "lo")


def keep_nccl_from_exiting(launch: Launch, env: MutableMapping[str, str]) -> None:
    """Leave it to this program to end a run that lost a rank. Rank-local, before torch.

    WHY: with 1, which torchrun sets, the watchdog of torch's NCCL aborts an all-reduce that lost a
    rank and ends the process: before a surviving rank has saved, and an update that waited for the
    all-reduce may run with a part of the gradient. Call it only where guard/hang.py ends the run.
    """
    if launch.world_size > 1 and env.get(_NCCL_ERRORS, "1") == "1":
        env[_NCCL_ERRORS] = "0"


def prepare_signals(launch: Launch) -> None:
    """Block save requests until the run can save, and end with the launcher. Rank-local.

    WHY block: on a busy machine torch's import may take longer than the time from a job's start to
    the signal before its time limit. guard/stop.py unblocks them.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SAVE_REQUESTS)
    end_with_launcher(launch)


def end_with_launcher(launch: Launch) -> None:
    """Send this process SIGTERM when its launcher has ended. Rank-local, on Linux.

    WHY: ranks of a killed torchrun would train on as orphans, beside the restarted job. SIGTERM
    makes them save and leave.
    """
    if launch.launcher not in ("none", "operator"):
        end_with_parent()


def stop_launcher(launch: Launch) -> None:
    """Stop torchrun, so that it does not restart. Rank-local, on one rank of each node."""
    if launch.launcher == "torchrun" and launch.is_local_main:
        os.kill(os.getppid(), signal.SIGTERM)


def environment() -> MutableMapping[str, str]:
    """Return this process's environment. The one place that touches os.environ."""
    return os.environ


def _agent_key(launcher_id: str) -> str:
    """Return a key for torchrun's agent on this node, by which restarts find their run folder.

    WHY the parent's pid and start time: torchrun's run id is "none" for static rendezvous, but its
    agent stays the same process over all restarts and is the parent of every local rank.
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

"""Who launched this process, and how it ends with its launcher.

All others get the frozen Launch, or ask environment(), and read no variables themselves. An
incomplete environment is an error: guessing rank 0 would train N separate models.

Also finds the command that started this run: a variable names it, or it is that of an ancestor of
this process, or it is composed.
"""

import logging
import os
import select
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path

from hardened_ddp.errors import HardenedError
from hardened_ddp.ranks.launchers_env import (
    COMMAND,
    command_words,
    is_step,
    read_variables,
    srun_words,
    whole_number,
)
from hardened_ddp.ranks.launchers_env import Launch as Launch  # for those who are launched
from hardened_ddp.ranks.process import START_FIELD, ancestors, stat_fields
from hardened_ddp.ranks.threads import HelperThread
from hardened_ddp.settings.typed_command import StartCommand, working_folder

log = logging.getLogger(__name__)

MODELS_FOLDER = Path("models")  # made by setup.sh
# Signals with which clusters ask a job to save. Without a handler they would kill it.
SAVE_REQUESTS = (signal.SIGUSR1, signal.SIGUSR2)

# They leave a process only some GPUs: those of its rank if a wrapper sets them for each rank.
_GPU_MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_NCCL_SETTINGS = {
    # Its watchdog would rethrow an error of CUDA: SIGABRT, without a word of which rank and step.
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    # Its monitor would abort the process 8 minutes after a collective took longer than its limit
    # by the clock, as in a job that was suspended; on all ranks, and again in the next attempt.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    # After an error it sleeps four times this, with a lock that the next collective takes.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "100",
}
# Set before the SIGTERM that tells this process so: see end_with_launcher.
launcher_has_died = threading.Event()
_MPI = ("mpirun", "mpiexec", "orterun", "prterun", "prun")


def read_launch(env: Mapping[str, str]) -> Launch:
    """Find out who launched this process. Raises LaunchError if its variables contradict."""
    launch = read_variables(env)
    run_id = env.get("TORCHELASTIC_RUN_ID", "")
    agent_key = _agent_key(run_id)
    job_key = f"slurm-{env['SLURM_JOB_ID']}" if "SLURM_JOB_ID" in env else agent_key
    return replace(
        launch,
        start=_find_start_command(env, launch),
        attempt=launch.attempt + whole_number(env, "SLURM_RESTART_COUNT", default=0),  # requeues
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
    # WHY: else one step of a large model fills the queue of launches, see step/async_device.py.
    env.setdefault("CUDA_SCALE_LAUNCH_QUEUES", "4x")
    if (MODELS_FOLDER / "hub").is_dir():
        # Where download.py puts published weights, and torch looks for them.
        env.setdefault("TORCH_HOME", str(MODELS_FOLDER.absolute()))
    if launch.world_size > 1:
        # WHY: as torchrun. Else each rank starts as many threads as the machine has CPUs; and with
        # another number of threads sums round differently.
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
    What else of it would end a process or hold it up is off, too (_NCCL_SETTINGS).
    """
    if launch.world_size > 1:
        for name, value in _NCCL_SETTINGS.items():
            env.setdefault(name, value)
        if env.get(_NCCL_ERRORS, "1") == "1":
            env[_NCCL_ERRORS] = "0"


def prepare_signals(launch: Launch) -> None:
    """Block save requests until the run can save, and end with the launcher. Rank-local.

    WHY block: on a busy machine torch's import may take longer than the time from a job's start to
    the signal before its time limit. guard/stop.py unblocks them.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SAVE_REQUESTS)
    end_with_launcher(launch)


def end_with_launcher(launch: Launch) -> None:
    """Send this process SIGTERM when its launcher has ended. Rank-local.

    WHY: ranks of a killed torchrun would train on as orphans, beside the restarted job. SIGTERM
    makes them save and leave. WHY not PR_SET_PDEATHSIG: it acts when the thread that started the
    process ends, and a thread pool, a notebook or Ray starts processes from threads that end early.
    """
    if launch.launcher in ("none", "operator"):
        return
    try:
        parent = os.pidfd_open(os.getppid())
    except OSError:  # not visible from this container, or not supported: then nothing is sent
        return

    def wait() -> None:
        poller = select.poll()
        poller.register(parent, select.POLLIN)
        poller.poll()
        os.close(parent)
        launcher_has_died.set()
        os.kill(os.getpid(), signal.SIGTERM)

    HelperThread(wait, name="parent-watch").start()


def environment() -> MutableMapping[str, str]:
    """Return this process's environment. The one place that touches os.environ."""
    return os.environ


def log_failure(error: Exception) -> None:
    """Log why this rank ends: in a few lines, or with a traceback if that is not known."""
    if not isinstance(error, HardenedError):
        log.error("[DDP-X01] an unexpected error; its traceback:", exc_info=error)
        return
    log.error("%s", error)
    for raised in (error, error.__cause__):
        for note in getattr(raised, "__notes__", ()):
            log.error("%s", note)


def _agent_key(launcher_id: str) -> str:
    """Return a key for torchrun's agent on this node, by which restarts find their run folder.

    WHY the parent's pid and start time: torchrun's run id is "none" for static rendezvous, but its
    agent stays the same process over all restarts and is the parent of every local rank.
    """
    if not launcher_id:
        return ""
    parent = os.getppid()
    started = stat_fields(parent)[START_FIELD:][:1] or ["0"]
    return f"{socket.gethostname()}-{launcher_id}-{parent}-{started[0]}"


def _find_start_command(env: Mapping[str, str], launch: Launch) -> StartCommand:
    """Find how all ranks of this run are started again. Rank-local."""
    if told := env.get(COMMAND):
        return StartCommand(tuple(shlex.split(told)), working_folder())
    found: Sequence[str] = ()
    if launch.launcher == "mpi":
        found = _words_of_ancestor(lambda words: Path(words[0]).name.startswith(_MPI))
    elif launch.launcher == "spawn" or "TORCHELASTIC_RUN_ID" in env:
        found = _words_of_ancestor(lambda words: True)
    if not found:
        found = command_words(
            launch.launcher, launch.world_size, num_nodes=launch.num_nodes, env=env
        )
    note = ""
    if launch.launcher == "operator":
        note = f"in each of the {launch.num_nodes} pods"
    elif launch.launcher == "torchrun":
        # Where torchrun is configured by variables, its command line does not have all of it.
        by_variable = [f"{name}={value}" for name, value in env.items() if name.startswith("PET_")]
        found = [*(["env", *sorted(by_variable)] if by_variable else []), *found]
        if is_step(env):
            found = [*srun_words(env, launch.num_nodes, num_nodes=launch.num_nodes), *found]
        elif launch.num_nodes > 1:
            note = (
                f"on each of the {launch.num_nodes} nodes, with its own --node_rank if it has one"
            )
    return StartCommand(tuple(found), working_folder(), note)


def _words_of_ancestor(is_launcher: Callable[[list[str]], bool]) -> list[str]:
    """Give the command line of the nearest such ancestor, without the script's own arguments.

    Empty if there is none, or if these arguments are not what it ends with.
    """
    given = sys.argv[1:]
    for pid in ancestors():
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            break
        words = words[:-1]
        if words and is_launcher(words):
            first = len(words) - len(given)
            if first < 1 or words[first:] != given:
                break
            # WHY: ranks run in the Python of their launcher, which may be typed as any name of it.
            if Path(words[0]).name.startswith("python"):
                words[0] = sys.executable
                # Who types torchrun is shown as `python /env/bin/torchrun`.
                if first > 1 and os.path.dirname(words[1]) == os.path.dirname(sys.executable):
                    return words[1:first]
            return words[:first]
    return []

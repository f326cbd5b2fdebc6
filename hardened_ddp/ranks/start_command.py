"""The commands that start ranks: the one that was typed, and the right one for a launcher.

Owns how each launcher starts so many ranks, written with the arguments that the script was given.
Does not own: how a command is written for a shell (settings/typed_command.py), which command
started this run (launch.py). Nothing here reads os.environ or imports torch.
"""

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from hardened_ddp.settings.typed_command import (
    ROOT,
    SCRIPT,
    StartCommand,
    torchrun_words,
    working_folder,
)

COMMAND = "HARDENED_DDP_LAUNCHER_COMMAND"
"""Set by launchers/launch.py and train.slurm: what the user typed, quoted for a shell."""

MASTER = ("MASTER_ADDR", "MASTER_PORT")
LauncherName = Literal["none", "torchrun", "slurm", "mpi", "spawn", "operator"]


def command_words(
    launcher: LauncherName, num_ranks: int, *, num_nodes: int = 1, env: Mapping[str, str]
) -> tuple[str, ...]:
    """Compose what starts so many ranks, up to the script. num_nodes: 0 if it is unknown."""
    given = Path(os.path.abspath(sys.argv[0]))  # it may be a launcher of ours that runs the script
    script = str(given if given.is_relative_to(ROOT) and given.suffix == ".py" else SCRIPT)
    num_local = -(-num_ranks // max(1, num_nodes))
    match launcher:
        case "torchrun":
            where = ["--standalone"]
            if num_nodes > 1:
                names = {"node_rank": "GROUP_RANK", "master_addr": MASTER[0]}
                names["master_port"] = MASTER[1]
                where = [f"--{ours}={env[name]}" for ours, name in names.items() if name in env]
                where.insert(0, f"--nnodes={num_nodes}")
            return (*torchrun_words(), *where, f"--nproc_per_node={num_local}", script)
        case "slurm":
            return (*srun_words(env, num_ranks, num_nodes), sys.executable, script)
        case "mpi":
            # On several hosts its ranks have to agree on an address first.
            agrees = [str(ROOT / "launchers/run_with_mpirun.py")] * (num_nodes > 1)
            return ("mpirun", "-np", str(num_ranks), sys.executable, *agrees, script)
        case "spawn":
            start = str(ROOT / "launchers/run_with_python.py")
            return (sys.executable, start, "--nproc", str(num_ranks), script)
        case _:
            return (sys.executable, script)


def srun_words(env: Mapping[str, str], num_tasks: int, num_nodes: int) -> tuple[str, ...]:
    """Compose the srun of a job like this one; it works within the job, and after it."""
    asked = {"ntasks": str(num_tasks)}
    if num_nodes:
        asked |= {"nodes": str(num_nodes), "ntasks-per-node": str(-(-num_tasks // num_nodes))}
    names = {"cpus-per-task": "SLURM_CPUS_PER_TASK", "gpus-per-node": "SLURM_GPUS_ON_NODE"}
    names["partition"] = "SLURM_JOB_PARTITION"
    asked |= {ours: env[name] for ours, name in names.items() if name in env}
    return ("srun", *(f"--{name}={value}" for name, value in asked.items()))


def right_command(env: Mapping[str, str], *, unset: Iterable[str] = ()) -> str:
    """Write the right command for the launcher of this process, with the script's arguments.

    unset: variables that it must not see.
    """
    launcher: LauncherName = "torchrun"
    names, num_nodes = ("LOCAL_WORLD_SIZE", "WORLD_SIZE"), 1
    is_job = "SLURM_JOB_ID" in env
    is_open_mpi = any(name.startswith("OMPI_COMM_WORLD_") for name in env)
    if is_open_mpi or "MPI_LOCALRANKID" in env or ("PMI_RANK" in env and not is_job):
        launcher, names = "mpi", ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    elif is_job:
        launcher, names = "slurm", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
        num_nodes = _first_number(env, ("SLURM_STEP_NUM_NODES", "SLURM_JOB_NUM_NODES"), 0)
    num_ranks = _first_number(env, names, 2)
    words = command_words(launcher, num_ranks, num_nodes=num_nodes, env=env)
    return with_arguments(words, unset=unset)


def with_arguments(words: Sequence[str], *, unset: Iterable[str] = ()) -> str:
    """Write a command with the arguments that the script was given.

    unset: variables that it must not see.
    """
    without = [word for name in unset for word in ("-u", name)]
    words = [*(["env", *without] if without else []), *words]
    return StartCommand(tuple(words), working_folder()).typed(*sys.argv[1:])


def one_process(unset: Iterable[str]) -> str:
    """Write the command for one process, which must not see some variables."""
    return with_arguments(command_words("none", 1, env={}), unset=unset)


def _first_number(env: Mapping[str, str], names: Iterable[str], default: int) -> int:
    """Return the first of these variables that is a number above 0."""
    found = (env[name] for name in names if name in env)
    return next((int(text) for text in found if text.isdecimal() and int(text) > 0), default)

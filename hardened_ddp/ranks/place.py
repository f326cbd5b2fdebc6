"""The place of this process among the ranks, and the checks common to all launchers' variables.

Owns: Launch, how each launcher starts so many ranks, and reading numbers, ports and whole sets of
variables from an environment.
Does not own: which variables a launcher sets (launchers_env.py, slurm_env.py), and who launched us
(launch.py). Nothing here reads os.environ or imports torch.
"""

import os
import sys
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from hardened_ddp.errors import LaunchError
from hardened_ddp.settings.typed_command import (
    ROOT,
    SCRIPT,
    StartCommand,
    own_command,
    torchrun_words,
    working_folder,
)

# Below the kernel's range of ephemeral ports (32768 and up on Linux).
_FIRST_PORT, _NUM_PORTS = 15000, 16000

MASTER = ("MASTER_ADDR", "MASTER_PORT")
LauncherName = Literal["none", "torchrun", "slurm", "mpi", "spawn", "operator"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Who launched this process, and its place among the ranks."""

    launcher: LauncherName = "none"
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

    has_own_gpus: bool = False
    """This rank may see only its own GPUs; then it takes the first one."""

    job_key: str = ""
    """The same over all restarts of one job, different between jobs; empty: unknown."""

    agent_key: str = ""
    """The same over all attempts that one launcher on one node starts; empty: unknown."""

    run_id: str = ""
    """torchrun's --rdzv_id, the same on all nodes of a job; empty: none was given."""

    start: StartCommand = field(default=StartCommand((), ""), compare=False)
    """What starts all ranks again."""

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

    def command(self, *arguments: str | Path) -> str:
        """Write the command that starts all ranks again, with these arguments of the script."""
        return self.start.typed(*arguments) if self.start.words else own_command(*arguments)


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


def need(env: Mapping[str, str], names: Iterable[str]) -> None:
    """Raise LaunchError unless all names are set: some of them don't identify the other ranks."""
    wanted = list(names)
    present = [name for name in wanted if name in env]
    missing = [name for name in wanted if name not in env]
    if missing:
        # WHY not of Slurm: its other variables say, too, that this is one of several tasks.
        is_job = "SLURM_JOB_ID" in wanted
        alone = "" if is_job else f"\n  or in one process: {one_process(present)}"
        raise LaunchError(
            f"{', '.join(present)} set, but not {', '.join(missing)}: this process got only a part "
            "of a launcher's environment, so it can't find the other ranks",
            fix=right_command(env) + alone,
        )


def read_numbers(env: Mapping[str, str], names: Mapping[str, str]) -> dict[str, int]:
    """Read numbers; names maps ours to the launcher's. Check that each rank is in its world."""
    numbers = {ours: whole_number(env, theirs) for ours, theirs in names.items()}
    check_ranks(numbers, names, env)
    return numbers


def check_ranks(
    numbers: Mapping[str, int], names: Mapping[str, str], env: Mapping[str, str]
) -> None:
    """Raise LaunchError if a rank is outside its world. names maps ours to the launcher's."""
    said = {ours: f"{theirs}={numbers[ours]}" for ours, theirs in names.items()}
    problems = [
        f"{said[small]} must be below {said[large]}"
        for small, large in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
        if numbers[small] >= numbers[large]
    ]
    if numbers["LOCAL_WORLD_SIZE"] > numbers["WORLD_SIZE"]:
        problems.append(f"{said['LOCAL_WORLD_SIZE']} can't be above {said['WORLD_SIZE']}")
    refuse(problems, env)


def refuse(problems: Sequence[str], env: Mapping[str, str]) -> None:
    """Raise LaunchError with all problems, if there are any."""
    if problems:
        raise LaunchError(
            "the launcher's environment contradicts itself: " + "; ".join(problems),
            fix=right_command(env),
        )


def whole_number(env: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    """Read a whole number >= 0. Raises LaunchError if the value is something else."""
    if name not in env and default is not None:
        return default
    try:
        value = int(env[name])
    except ValueError:
        value = -1
    if value < 0:
        raise LaunchError(
            f"{name}={env[name]!r} in the environment is not a whole number >= 0",
            fix=f"let a launcher set it: {right_command(env)}",
        )
    return value


def read_port(env: Mapping[str, str], job: str) -> int:
    """Return MASTER_PORT if it is set, else a port that all ranks derive from the job's name.

    WHY: two jobs on one machine need two ports, and the ranks can't communicate yet.
    """
    if "MASTER_PORT" not in env:
        return _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS
    port = whole_number(env, "MASTER_PORT")
    if not 0 < port < 65536:
        refuse([f"MASTER_PORT={port} is not a port (1 to 65535)"], env)
    return port

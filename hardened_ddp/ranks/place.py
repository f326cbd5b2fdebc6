"""The place of this process among the ranks, and the checks common to all launchers' variables.

Owns: Launch, and reading numbers, ports and whole sets of variables from an environment.
Does not own: which variables a launcher sets (launchers_env.py, slurm_env.py), and who launched us
(launch.py). Nothing here reads os.environ or imports torch.
"""

import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from hardened_ddp.errors import LaunchError

TORCHRUN_COMMAND = "torchrun --standalone --nproc_per_node=2 ddp_training.py"
SRUN_COMMAND = "srun python ddp_training.py (inside a job), or: sbatch train.slurm"
MPIRUN_COMMAND = "mpirun -np 2 python launchers/run_with_mpirun.py"
# Below the kernel's range of ephemeral ports (32768 and up on Linux).
_FIRST_PORT, _NUM_PORTS = 15000, 16000

LauncherName = Literal["none", "torchrun", "slurm", "mpi", "spawn"]


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


def right_command(env: Mapping[str, str]) -> str:
    """Return the right command for the launcher of this process."""
    if any(name.startswith("OMPI_COMM_WORLD_") or name == "MPI_LOCALRANKID" for name in env):
        return MPIRUN_COMMAND
    return SRUN_COMMAND if "SLURM_JOB_ID" in env else TORCHRUN_COMMAND


def need(env: Mapping[str, str], names: Iterable[str]) -> None:
    """Raise LaunchError unless all names are set: some of them don't identify the other ranks."""
    wanted = list(names)
    present = [name for name in wanted if name in env]
    missing = [name for name in wanted if name not in env]
    if missing:
        raise LaunchError(
            f"{', '.join(present)} set, but not {', '.join(missing)}: this process got only a part "
            "of a launcher's environment, so it can't find the other ranks",
            fix=f"{right_command(env)}   (or, for one process: unset {' '.join(present)})",
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

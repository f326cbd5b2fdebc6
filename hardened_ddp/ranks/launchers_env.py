"""The environment variables of torchrun, mpirun and our own launchers.

Owns: one reader for each. A reader takes the variables, checks them against each other and returns
a Launch, or raises LaunchError with the right command.
What goes wrong here: two launchers at once. Each task of srun starts a torchrun that does not know
the others; or RANK was exported once, before srun, and is 0 in every task.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from hardened_ddp.errors import LaunchError
from hardened_ddp.ranks import slurm_env
from hardened_ddp.ranks.place import (
    MPIRUN_COMMAND,
    SRUN_COMMAND,
    Launch,
    need,
    read_numbers,
    read_port,
    whole_number,
)

# Set to "spawn" by run_with_python.py, beside torchrun's variables, for its ranks.
MARK = "HARDENED_DDP_LAUNCHER"
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
MASTER = ("MASTER_ADDR", "MASTER_PORT")
OPEN_MPI = {
    "RANK": "OMPI_COMM_WORLD_RANK",
    "LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_RANK",
    "WORLD_SIZE": "OMPI_COMM_WORLD_SIZE",
    "LOCAL_WORLD_SIZE": "OMPI_COMM_WORLD_LOCAL_SIZE",
}
HYDRA = {
    "RANK": "PMI_RANK",
    "LOCAL_RANK": "MPI_LOCALRANKID",
    "WORLD_SIZE": "PMI_SIZE",
    "LOCAL_WORLD_SIZE": "MPI_LOCALNRANKS",
}


@dataclass(frozen=True, slots=True)
class OuterLauncher:
    """The srun or mpirun that started one process per task, and this one's place among them."""

    name: str
    rank: int
    world_size: int
    local_world_size: int
    command: str


def read_torchrun(env: Mapping[str, str]) -> Launch:
    """Read RANK and the others of torchrun, or of one of our launchers. Rank-local."""
    need(env, (*TORCHRUN, *MASTER))
    numbers = read_numbers(env, {name: name for name in TORCHRUN})
    num_agents = whole_number(env, "GROUP_WORLD_SIZE", default=0)
    outer = find_outer_launcher(env)
    if outer is not None and outer.world_size > 1:
        _check_outer_launcher(outer, env, num_agents=num_agents)
    return Launch(
        launcher="spawn" if env.get(MARK) == "spawn" else "torchrun",
        rank=numbers["RANK"],
        local_rank=numbers["LOCAL_RANK"],
        world_size=numbers["WORLD_SIZE"],
        local_world_size=numbers["LOCAL_WORLD_SIZE"],
        num_nodes=num_agents or -(-numbers["WORLD_SIZE"] // numbers["LOCAL_WORLD_SIZE"]),
        master_addr=env["MASTER_ADDR"],
        master_port=read_port(env, ""),
        attempt=whole_number(env, "TORCHELASTIC_RESTART_COUNT", default=0),
        agent_owns_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def names_of_mpi(env: Mapping[str, str]) -> Mapping[str, str] | None:
    """Return the variables of this mpirun, by our names; None without mpirun."""
    if any(name in env for name in OPEN_MPI.values()):
        return OPEN_MPI
    # WHY not by PMI_RANK inside a Slurm step: srun sets that too.
    is_hydra = "MPI_LOCALRANKID" in env or ("PMI_RANK" in env and not slurm_env.is_step(env))
    return HYDRA if is_hydra else None


def read_mpi(env: Mapping[str, str], names: Mapping[str, str]) -> Launch:
    """Read the variables of mpirun. Rank-local.

    On several hosts MASTER_ADDR must be set: mpirun does not say where rank 0 is.
    """
    need(env, names.values())
    numbers = read_numbers(env, names)
    num_nodes = -(-numbers["WORLD_SIZE"] // numbers["LOCAL_WORLD_SIZE"])
    missing = [name for name in MASTER if name not in env]
    if num_nodes > 1 and missing:
        raise LaunchError(
            f"mpirun started {numbers['WORLD_SIZE']} ranks on several hosts, "
            f"{numbers['LOCAL_WORLD_SIZE']} of them here, and {' and '.join(missing)} not set: "
            "nothing says where rank 0 is, so the ranks can't find each other",
            fix="mpirun ... python launchers/run_with_mpirun.py ddp_training.py   (its ranks agree "
            "on the address), or give all ranks MASTER_ADDR, the host of rank 0, and MASTER_PORT",
        )
    return Launch(
        launcher="mpi",
        rank=numbers["RANK"],
        local_rank=numbers["LOCAL_RANK"],
        world_size=numbers["WORLD_SIZE"],
        local_world_size=numbers["LOCAL_WORLD_SIZE"],
        num_nodes=num_nodes,
        master_addr="127.0.0.1" if num_nodes == 1 else env["MASTER_ADDR"],
        master_port=read_port(env, mpi_job(env)),
    )


def mpi_job(env: Mapping[str, str]) -> str:
    """Return a name for this mpirun: unique at any time, and the same on all ranks of a host."""
    return env.get("PMIX_NAMESPACE") or ancestor_named("hydra") or f"user-{os.getuid()}"


def ancestor_named(beginning: str) -> str:
    """Return pid and start of the ancestor whose program name begins so; empty without one.

    Hydra gives its ranks no job name, but on each host they have a common ancestor.
    """
    pid = os.getppid()
    while pid > 1:
        try:
            with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
        except OSError:
            return ""
        fields = rest.split()
        if name.startswith(beginning):
            return f"{pid}-{fields[19]}"
        pid = int(fields[1])
    return ""


def find_outer_launcher(env: Mapping[str, str]) -> OuterLauncher | None:
    """Find the mpirun or srun that started this process or its torchrun, if there is one."""
    if (names := names_of_mpi(env)) is not None:
        need(env, names.values())
        numbers = read_numbers(env, names)
        program, command = "mpirun", MPIRUN_COMMAND
    elif slurm_env.is_step(env):
        launch = slurm_env.read_step(env)
        return OuterLauncher(
            "srun", launch.rank, launch.world_size, launch.local_world_size, SRUN_COMMAND
        )
    else:
        return None
    world_size, local_world_size = numbers["WORLD_SIZE"], numbers["LOCAL_WORLD_SIZE"]
    return OuterLauncher(program, numbers["RANK"], world_size, local_world_size, command)


def _check_outer_launcher(outer: OuterLauncher, env: Mapping[str, str], *, num_agents: int) -> None:
    """Raise LaunchError if RANK and WORLD_SIZE contradict the srun or mpirun around them."""
    is_agent = "TORCHELASTIC_RUN_ID" in env or env.get(MARK) == "spawn"
    agent = "run_with_python.py" if env.get(MARK) == "spawn" else "torchrun"
    if is_agent and outer.local_world_size > 1:
        raise LaunchError(
            f"{outer.name} started {outer.local_world_size} tasks on this node, and each one a "
            f"{agent} with its own ranks: they would take each other's GPUs and hang",
            fix=f"one task per node: srun --ntasks-per-node=1 torchrun ...   (or without {agent}: "
            f"{outer.command})",
        )
    if is_agent and max(1, num_agents) != outer.world_size:
        raise LaunchError(
            f"{outer.name} started {agent} {outer.world_size} times, but this one knows of "
            f"{max(1, num_agents)} nodes: each would train a separate model",
            fix=f"torchrun --nnodes={outer.world_size} --rdzv_backend=c10d "
            f"--rdzv_endpoint=HOST:PORT --nproc_per_node=N ddp_training.py   (or: "
            f"{outer.command})",
        )
    found = (whole_number(env, "RANK"), whole_number(env, "WORLD_SIZE"))
    if not is_agent and found != (outer.rank, outer.world_size):
        raise LaunchError(
            f"RANK={found[0]} and WORLD_SIZE={found[1]}, but {outer.name} says that this is rank "
            f"{outer.rank} of {outer.world_size}: two processes would have one rank. They were "
            f"exported before {outer.name}",
            fix=f"unset {' '.join((*TORCHRUN, *MASTER))}; then: {outer.command}",
        )

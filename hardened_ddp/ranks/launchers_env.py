"""The environment variables of torchrun, of operators of Kubernetes, mpirun and our own launchers.

Owns: one reader for each. A reader takes the variables, checks them against each other and returns
a Launch, or raises LaunchError with the right command.
What goes wrong here: two launchers at once. Each task of srun starts a torchrun that does not know
the others; or RANK was exported once, before srun, and is 0 in every task.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hardened_ddp.errors import LaunchError
from hardened_ddp.ranks import slurm_env
from hardened_ddp.ranks.place import (
    MASTER,
    Launch,
    LauncherName,
    command_words,
    need,
    one_process,
    read_numbers,
    read_port,
    right_command,
    whole_number,
    with_arguments,
)
from hardened_ddp.settings.typed_command import torchrun_words

# Set to "spawn" by run_with_python.py, beside torchrun's variables, for its ranks.
MARK = "HARDENED_DDP_LAUNCHER"
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
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


def is_of_operator(env: Mapping[str, str]) -> bool:
    """Return whether an operator of Kubernetes numbered the pods, and nobody the ranks in them."""
    is_launched = "LOCAL_RANK" in env or "LOCAL_WORLD_SIZE" in env
    is_inner = names_of_mpi(env) is not None or slurm_env.is_step(env)
    return "RANK" in env and "WORLD_SIZE" in env and not is_launched and not is_inner


def read_operator(env: Mapping[str, str]) -> Launch:
    """Read what an operator gives each pod, in which this process is the only rank. Rank-local."""
    refuse_missing_torchrun(env)
    need(env, ("RANK", "WORLD_SIZE", *MASTER))
    launch = read_torchrun({**env, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
    return replace(launch, launcher="operator")


def refuse_missing_torchrun(env: Mapping[str, str]) -> None:
    """Raise LaunchError for plain python where PET_ variables configure torchrun.

    WHY also if RANK is set: it counts the pods then, and WORLD_SIZE may count the ranks of all. One
    process in each pod would wait for ranks that never come.
    """
    pods, ranks = env.get("PET_NNODES", "1"), env.get("PET_NPROC_PER_NODE", "1")
    is_one_each = pods in ("1", "1:1")
    if "RANK" in env:
        world_size = whole_number(env, "WORLD_SIZE")
        is_one_each = "PET_NNODES" not in env or (pods.isdecimal() and world_size <= int(pods))
    if is_one_each and ranks == "1":
        return
    given = [name for name in (*MASTER, "RANK", "WORLD_SIZE") if name in env]
    given += sorted(name for name in env if name.startswith("PET_"))
    words = (*torchrun_words(), *command_words("none", 1, env=env)[1:])
    raise LaunchError(
        f"PET_NNODES={pods} and PET_NPROC_PER_NODE={ranks}: an operator configured torchrun for "
        "this pod, and this process was started without it, so the other ranks would never join",
        fix=f"{with_arguments(words)}\n  or in one process: {one_process(given)}",
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
            fix="with the options of this mpirun, start launchers/run_with_mpirun.py, whose ranks "
            "agree on the address, or give all ranks MASTER_ADDR, the host of rank 0, and "
            f"MASTER_PORT; on one host: {right_command(env)}",
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
    elif slurm_env.is_step(env):
        launch = slurm_env.read_step(env)
        return OuterLauncher("srun", launch.rank, launch.world_size, launch.local_world_size)
    else:
        return None
    world_size, local_world_size = numbers["WORLD_SIZE"], numbers["LOCAL_WORLD_SIZE"]
    return OuterLauncher("mpirun", numbers["RANK"], world_size, local_world_size)


def _check_outer_launcher(outer: OuterLauncher, env: Mapping[str, str], *, num_agents: int) -> None:
    """Raise LaunchError if RANK and WORLD_SIZE contradict the srun or mpirun around them."""
    is_agent = "TORCHELASTIC_RUN_ID" in env or env.get(MARK) == "spawn"
    agent = "run_with_python.py" if env.get(MARK) == "spawn" else "torchrun"
    if is_agent and outer.local_world_size > 1:
        raise LaunchError(
            f"{outer.name} started {outer.local_world_size} tasks on this node, and each one a "
            f"{agent} with its own ranks: they would take each other's GPUs and hang",
            fix=f"without {agent}: {right_command(env)}",
        )
    if is_agent and max(1, num_agents) != outer.world_size:
        launcher: LauncherName = "slurm" if outer.name == "srun" else "mpi"
        num_ranks = outer.world_size * whole_number(env, "LOCAL_WORLD_SIZE")
        direct = command_words(launcher, num_ranks, num_nodes=outer.world_size, env=env)
        raise LaunchError(
            f"{outer.name} started {agent} {outer.world_size} times, but this one knows of "
            f"{max(1, num_agents)} nodes: each would train a separate model",
            fix=f"give torchrun --nnodes={outer.world_size} and an --rdzv_endpoint that all nodes "
            f"reach, or leave it out: {with_arguments(direct)}",
        )
    found = (whole_number(env, "RANK"), whole_number(env, "WORLD_SIZE"))
    if not is_agent and found != (outer.rank, outer.world_size):
        raise LaunchError(
            f"RANK={found[0]} and WORLD_SIZE={found[1]}, but {outer.name} says that this is rank "
            f"{outer.rank} of {outer.world_size}: two processes would have one rank. They were "
            f"exported before {outer.name}",
            fix=right_command(env, unset=(*TORCHRUN, *MASTER)),
        )

"""What each launcher's environment variables say of this process, and how each one starts ranks.

One reader for each launcher (torchrun, operators of Kubernetes, mpirun, srun, our own) checks its
variables against each other and returns a Launch, or raises LaunchError with the right command.
Nothing here reads os.environ or imports torch.

What goes wrong here: two launchers at once. Each task of srun starts a torchrun that does not know
the others; or RANK was exported once, before srun, and is 0 in every task. And python in a batch
script without srun: SLURM_PROCID is 0 and SLURM_NTASKS 8, but seven others were never started.
"""

import os
import re
import socket
import sys
import time
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NoReturn

from hardened_ddp.errors import LaunchError
from hardened_ddp.settings.typed_command import (
    ROOT,
    SCRIPT,
    StartCommand,
    is_installed,
    own_command,
    program_words,
    torchrun_words,
    working_folder,
)

# Set by launchers/launch.py and train.slurm: what the user typed, quoted for a shell.
COMMAND = "HARDENED_DDP_LAUNCHER_COMMAND"
MASTER = ("MASTER_ADDR", "MASTER_PORT")
# How the variables begin that a launcher gives its ranks.
OF_LAUNCHERS = (
    *("RANK", "LOCAL_", "WORLD_SIZE", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "PET_"),
    *("SLURM_", "OMPI_", "PMI", "MPI_", "HARDENED_DDP_"),
)
LauncherName = Literal["none", "torchrun", "slurm", "mpi", "spawn", "operator"]

# Set to "spawn" by run_with_python.py, beside torchrun's variables, for its ranks.
MARK = "HARDENED_DDP_LAUNCHER"
# Our names -> those of each launcher.
TORCHRUN = {name: name for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
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
STEP = {"RANK": "SLURM_PROCID", "LOCAL_RANK": "SLURM_LOCALID", "WORLD_SIZE": "SLURM_STEP_NUM_TASKS"}
NODE, NODES = "SLURM_NODEID", "SLURM_STEP_NUM_NODES"
TASKS, HOSTS = "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"
# The step of salloc's interactive shell on some clusters: it starts no ranks.
_SHELL_OF_SALLOC = "4294967290"
# Below the kernel's range of ephemeral ports (32768 and up on Linux).
_FIRST_PORT, _NUM_PORTS = 15000, 16000


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
    attempt: int = 0  # how often the launcher has restarted the ranks
    # torchrun's agent already serves a TCPStore on the master port; rank 0 must not.
    agent_owns_store: bool = False
    has_own_gpus: bool = False  # this rank may see only its own GPUs; then it takes the first one
    # The same over all restarts of one job, different between jobs; empty: unknown.
    job_key: str = ""
    # The same over all attempts that one launcher on one node starts; empty: unknown.
    agent_key: str = ""
    run_id: str = ""  # torchrun's --rdzv_id, the same on all nodes of a job; empty: none was given
    # What starts all ranks again.
    start: StartCommand = field(default=StartCommand((), ""), compare=False)
    # When this process read its environment, in seconds since the epoch.
    started_at: float = field(default_factory=time.time, compare=False)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_local_main(self) -> bool:
        return self.local_rank == 0

    def command(self, *arguments: str | Path) -> str:
        """Write the command that starts all ranks again, with these arguments of the script."""
        return self.start.typed(*arguments) if self.start.words else own_command(*arguments)


def read_variables(env: Mapping[str, str]) -> Launch:
    """Read the place of this process among the ranks. Rank-local.

    WHY this order: torchrun may run under srun or mpirun, and mpirun inside a Slurm job; only the
    innermost one knows this process. MASTER_ADDR and MASTER_PORT alone mean nothing: people and
    container images set them for other reasons.
    """
    _refuse_missing_torchrun(env)
    if "RANK" in env and "WORLD_SIZE" in env and _is_alone(env):
        # An operator of Kubernetes numbered the pods: in each this process is the only rank.
        need(env, ("RANK", "WORLD_SIZE", *MASTER))
        launch = _read_torchrun({**env, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"})
        return replace(launch, launcher="operator")
    if any(name in env for name in TORCHRUN):
        return _read_torchrun(env)
    if (names := names_of_mpi(env)) is not None:
        return _read_mpi(env, names)
    if is_step(env):
        return _read_step(env)
    _refuse_missing_srun(env)
    return Launch()


def _read_torchrun(env: Mapping[str, str]) -> Launch:
    """Read RANK and the others of torchrun, or of one of our launchers."""
    need(env, (*TORCHRUN, *MASTER))
    launch = _read_ranks(env, TORCHRUN, "spawn" if env.get(MARK) == "spawn" else "torchrun")
    num_agents = whole_number(env, "GROUP_WORLD_SIZE", default=0)
    mpi = names_of_mpi(env)
    outer = _read_ranks(env, mpi, "mpi") if mpi else _read_step(env) if is_step(env) else None
    if outer is not None and outer.world_size > 1:
        _check_outer_launcher(outer, env, num_agents=num_agents)
    return replace(
        launch,
        num_nodes=num_agents or launch.num_nodes,
        master_addr=env["MASTER_ADDR"],
        master_port=read_port(env, ""),
        attempt=whole_number(env, "TORCHELASTIC_RESTART_COUNT", default=0),
        agent_owns_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _is_alone(env: Mapping[str, str]) -> bool:
    """Return whether no launcher has started this process as one of several of its host."""
    is_launched = "LOCAL_RANK" in env or "LOCAL_WORLD_SIZE" in env
    return not is_launched and names_of_mpi(env) is None and not is_step(env)


def needs_torchrun(env: Mapping[str, str]) -> bool:
    """Whether an operator configured torchrun for this pod, and nothing has started it yet.

    WHY also if RANK is set: it counts the pods then, and WORLD_SIZE may count the ranks of all. One
    process in each pod would wait for ranks that never come.
    """
    pods, ranks = env.get("PET_NNODES", "1"), env.get("PET_NPROC_PER_NODE", "1")
    is_one_each = pods in ("1", "1:1")
    if "RANK" in env:
        world_size = whole_number(env, "WORLD_SIZE", default=0)
        is_one_each = "PET_NNODES" not in env or (pods.isdecimal() and world_size <= int(pods))
    return _is_alone(env) and not (is_one_each and ranks == "1")


def _refuse_missing_torchrun(env: Mapping[str, str]) -> None:
    """Raise LaunchError for plain python where PET_ variables configure torchrun."""
    if not needs_torchrun(env):
        return
    pods, ranks = env.get("PET_NNODES", "1"), env.get("PET_NPROC_PER_NODE", "1")
    given = [name for name in (*MASTER, "RANK", "WORLD_SIZE") if name in env]
    given += sorted(name for name in env if name.startswith("PET_"))
    words = program_words()  # the installed command starts torchrun itself
    if not is_installed():
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
    is_hydra = "MPI_LOCALRANKID" in env or ("PMI_RANK" in env and not is_step(env))
    return HYDRA if is_hydra else None


def _read_mpi(env: Mapping[str, str], names: Mapping[str, str]) -> Launch:
    """Read the variables of mpirun, which does not say where rank 0 is."""
    launch = _read_ranks(env, names, "mpi")
    missing = [name for name in MASTER if name not in env]
    if launch.num_nodes > 1 and missing:
        raise LaunchError(
            f"mpirun started {launch.world_size} ranks on several hosts, "
            f"{launch.local_world_size} of them here, and {' and '.join(missing)} not set: "
            "nothing says where rank 0 is, so the ranks can't find each other",
            fix="with the options of this mpirun, start launchers/run_with_mpirun.py, whose ranks "
            "agree on the address, or give all ranks MASTER_ADDR, the host of rank 0, and "
            f"MASTER_PORT; on one host: {right_command(env)}",
        )
    return replace(
        launch,
        master_addr="127.0.0.1" if launch.num_nodes == 1 else env["MASTER_ADDR"],
        master_port=read_port(env, mpi_job(env)),
    )


def mpi_job(env: Mapping[str, str]) -> str:
    """Return a name for this mpirun: unique at any time, and the same on all ranks of a host."""
    # Hydra gives its ranks no job name, but on each host they have a common parent.
    return env.get("PMIX_NAMESPACE") or f"parent-{os.getppid()}"


def _check_outer_launcher(outer: Launch, env: Mapping[str, str], *, num_agents: int) -> None:
    """Raise LaunchError if RANK and WORLD_SIZE contradict the srun or mpirun around them."""
    name = "srun" if outer.launcher == "slurm" else "mpirun"
    is_agent = "TORCHELASTIC_RUN_ID" in env or env.get(MARK) == "spawn"
    agent = "run_with_python.py" if env.get(MARK) == "spawn" else "torchrun"
    # WHY also more than one on a host: they would take each other's GPUs
    if is_agent and (outer.local_world_size > 1 or max(1, num_agents) != outer.world_size):
        num_ranks = outer.num_nodes * whole_number(env, "LOCAL_WORLD_SIZE")
        direct = command_words(outer.launcher, num_ranks, num_nodes=outer.num_nodes, env=env)
        raise LaunchError(
            f"{name} started {agent} {outer.world_size} times, {outer.local_world_size} of them on "
            f"this host, and this one knows of {max(1, num_agents)} hosts: each would train a "
            "separate model",
            fix=f"leave {agent} out: {with_arguments(direct)}\n  or have {name} start one on each "
            f"host, with --nnodes={outer.num_nodes} and an --rdzv_endpoint that all hosts reach",
        )
    found = (whole_number(env, "RANK"), whole_number(env, "WORLD_SIZE"))
    if not is_agent and found != (outer.rank, outer.world_size):
        raise LaunchError(
            f"RANK={found[0]} and WORLD_SIZE={found[1]}, but {name} says that this is rank "
            f"{outer.rank} of {outer.world_size}: two processes would have one rank. They were "
            f"exported before {name}",
            fix=right_command(env, unset=(*TORCHRUN, *MASTER)),
        )


def is_step(env: Mapping[str, str]) -> bool:
    """Return whether srun started this process."""
    return env.get("SLURM_STEP_ID", _SHELL_OF_SALLOC) != _SHELL_OF_SALLOC


def _read_step(env: Mapping[str, str]) -> Launch:
    """Read the variables of srun: one task per rank. Rank-local."""
    need(env, ("SLURM_JOB_ID", *STEP.values(), NODE, NODES, TASKS, HOSTS))
    tasks, node, num_nodes = tasks_of(env[TASKS]), whole_number(env, NODE), whole_number(env, NODES)
    num_tasks = whole_number(env, STEP["WORLD_SIZE"])
    if (len(tasks), sum(tasks)) != (num_nodes, num_tasks) or node >= num_nodes:
        names = (TASKS, NODES, STEP["WORLD_SIZE"], NODE)
        refuse(", ".join(f"{name}={env[name]}" for name in names), env)
    here = "the tasks of this node"
    launch = _read_ranks(
        {**env, here: str(tasks[node])}, {**STEP, "LOCAL_WORLD_SIZE": here}, "slurm"
    )
    head = env.get("MASTER_ADDR", first_host(env[HOSTS]))  # WHY the first: srun puts task 0 there
    return replace(
        launch,
        num_nodes=num_nodes,
        master_addr="127.0.0.1" if num_nodes == 1 else head,
        master_port=read_port(env, f"{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}"),
        has_own_gpus="SLURM_GPUS_PER_TASK" in env
        or env.get("SLURM_GPU_BIND", "").startswith(("single", "per_task")),
    )


def _refuse_missing_srun(env: Mapping[str, str]) -> None:
    """Raise LaunchError for plain python in a job of several tasks: only srun starts them all."""
    num_tasks = whole_number(env, "SLURM_NTASKS", default=1)
    if "SLURM_JOB_ID" in env and num_tasks > 1:
        alone = command_words("slurm", 1, env=env)
        raise LaunchError(
            f"job {env['SLURM_JOB_ID']} has SLURM_NTASKS={num_tasks} tasks, but this one process "
            "was started without srun (SLURM_STEP_ID is not set), so the others would never join",
            fix=f"{right_command(env)}\n  or in one process: {with_arguments(alone)}",
        )


def first_host(nodelist: str) -> str:
    """Return the first host of Slurm's list: gpu01 of gpu[01-02,7],login."""
    # WHY not scontrol: it is missing inside containers
    return re.sub(r"\[(\d+)[^]]*]", r"\1", nodelist).split(",")[0]


def tasks_of(text: str) -> list[int]:
    """Expand Slurm's tasks per node: 2(x3),1 gives 2, 2, 2, 1."""
    tasks: list[int] = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        tasks += [int(number)] * int(times or 1)
    return tasks


def need(env: Mapping[str, str], names: Collection[str]) -> None:
    """Raise LaunchError unless all names are set: some of them don't identify the other ranks."""
    present = [name for name in names if name in env]
    missing = [name for name in names if name not in env]
    if missing:
        # WHY not of Slurm: its other variables say, too, that this is one of several tasks.
        alone = "" if "SLURM_JOB_ID" in names else f"\n  or in one process: {one_process(present)}"
        raise LaunchError(
            f"{', '.join(present)} set, but not {', '.join(missing)}: this process got only a part "
            "of a launcher's environment, so it can't find the other ranks",
            fix=right_command(env) + alone,
        )


def _read_ranks(env: Mapping[str, str], names: Mapping[str, str], launcher: LauncherName) -> Launch:
    """Read the place of this rank. names: ours to the launcher's."""
    need(env, names.values())
    numbers = {ours: whole_number(env, theirs) for ours, theirs in names.items()}
    is_possible = numbers["RANK"] < numbers["WORLD_SIZE"]
    is_possible &= numbers["LOCAL_RANK"] < numbers["LOCAL_WORLD_SIZE"] <= numbers["WORLD_SIZE"]
    if not is_possible:
        refuse(", ".join(f"{theirs}={numbers[ours]}" for ours, theirs in names.items()), env)
    return Launch(
        launcher=launcher,
        rank=numbers["RANK"],
        local_rank=numbers["LOCAL_RANK"],
        world_size=numbers["WORLD_SIZE"],
        local_world_size=numbers["LOCAL_WORLD_SIZE"],
        num_nodes=-(-numbers["WORLD_SIZE"] // numbers["LOCAL_WORLD_SIZE"]),
    )


def refuse(problem: str, env: Mapping[str, str]) -> NoReturn:
    told = f"the launcher's environment contradicts itself: {problem}"
    raise LaunchError(told, fix=right_command(env))


def whole_number(env: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    """Read a whole number >= 0; raise LaunchError if it is something else."""
    if name not in env and default is not None:
        return default
    if not env[name].strip().isdecimal():
        raise LaunchError(
            f"{name}={env[name]!r} in the environment is not a whole number >= 0",
            fix=f"let a launcher set it: {right_command(env)}",
        )
    return int(env[name])


def read_port(env: Mapping[str, str], job: str) -> int:
    """Return MASTER_PORT if it is set, else a port that all ranks derive from the job's name.

    WHY: two jobs on one machine need two ports, and the ranks can't communicate yet.
    """
    if "MASTER_PORT" not in env:
        return _FIRST_PORT + zlib.crc32(job.encode()) % _NUM_PORTS
    port = whole_number(env, "MASTER_PORT")
    if not 0 < port < 65536:
        refuse(f"MASTER_PORT={port} is not a port (1 to 65535)", env)
    return port


def hold_port() -> socket.socket:
    """Take a port of this machine, which is that of the returned socket, until that is closed.

    WHY not look one up and free it: another process may get it before rank 0 listens on it. As this
    socket was bound without SO_REUSEADDR, nobody gets its port from the kernel; as it has that
    option now, who is told the port and has the option too (as torch and socket.create_server) can
    listen on it.
    """
    holder = socket.socket()
    holder.bind(("", 0))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return holder


def command_words(
    launcher: LauncherName, num_ranks: int, *, num_nodes: int = 1, env: Mapping[str, str]
) -> tuple[str, ...]:
    """Compose what starts so many ranks, up to the script. num_nodes: 0 if it is unknown."""
    given = Path(os.path.abspath(sys.argv[0]))  # it may be a launcher of ours that runs the script
    script = str(given if given.is_relative_to(ROOT) and given.suffix == ".py" else SCRIPT)
    program = program_words() if is_installed() else (sys.executable, script)
    num_local = -(-num_ranks // max(1, num_nodes))
    match launcher:
        case "torchrun":
            where = ["--standalone"]
            if num_nodes > 1:
                names = {"node_rank": "GROUP_RANK", "master_addr": MASTER[0]}
                names["master_port"] = MASTER[1]
                where = [f"--{ours}={env[name]}" for ours, name in names.items() if name in env]
                where.insert(0, f"--nnodes={num_nodes}")
            where.append(f"--nproc_per_node={num_local}")
            if is_installed():
                return (*program, *(word for word in where if word != "--standalone"))
            return (*torchrun_words(), *where, script)
        case "slurm":
            return (*srun_words(env, num_ranks, num_nodes), *program)
        case "mpi":
            # On several hosts its ranks have to agree on an address first.
            agrees = ROOT / "launchers/run_with_mpirun.py"
            if num_nodes > 1 and agrees.is_file():
                program = (sys.executable, str(agrees), script)
            return ("mpirun", "-np", str(num_ranks), *program)
        case "spawn":
            start = str(ROOT / "launchers/run_with_python.py")
            return (sys.executable, start, "--nproc", str(num_ranks), script)
        case _:
            return program


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
    launcher: LauncherName = "torchrun"
    names, num_nodes = ("LOCAL_WORLD_SIZE", "WORLD_SIZE"), 1
    if names_of_mpi(env) is not None:
        launcher, names = "mpi", ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    elif "SLURM_JOB_ID" in env:
        launcher, names = "slurm", (STEP["WORLD_SIZE"], "SLURM_NTASKS")
        num_nodes = _first_number(env, (NODES, "SLURM_JOB_NUM_NODES"), 0)
    words = command_words(launcher, _first_number(env, names, 2), num_nodes=num_nodes, env=env)
    return with_arguments(words, unset=unset)


def with_arguments(words: Sequence[str], *, unset: Iterable[str] = ()) -> str:
    """Write a command with the script's arguments. unset: variables that it must not see."""
    without = [word for name in unset for word in ("-u", name)]
    words = [*(["env", *without] if without else []), *words]
    return StartCommand(tuple(words), working_folder()).typed(*sys.argv[1:])


def one_process(unset: Iterable[str]) -> str:
    return with_arguments(command_words("none", 1, env={}), unset=unset)


def _first_number(env: Mapping[str, str], names: Iterable[str], default: int) -> int:
    found = (env[name] for name in names if name in env)
    return next((int(text) for text in found if text.isdecimal() and int(text) > 0), default)

"""The environment variables of Slurm: one task per rank, on one node or many.

Owns: the place among the ranks that srun assigns, the host of rank 0, and Slurm's own shorthand for
lists of hosts and tasks. Does not use scontrol, which is missing inside containers.
What goes wrong here: python in a batch script without srun. There SLURM_PROCID is 0 and
SLURM_NTASKS may be 8, but the seven others were never started.
"""

import re
from collections.abc import Mapping

from hardened_ddp.errors import LaunchError
from hardened_ddp.ranks.place import (
    Launch,
    check_ranks,
    command_words,
    need,
    read_port,
    refuse,
    right_command,
    whole_number,
    with_arguments,
)

STEP = {
    "RANK": "SLURM_PROCID",
    "LOCAL_RANK": "SLURM_LOCALID",
    "WORLD_SIZE": "SLURM_STEP_NUM_TASKS",
    "NODE": "SLURM_NODEID",
    "NODES": "SLURM_STEP_NUM_NODES",
}
TASKS, HOSTS = "SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST"
# The step of salloc's interactive shell on some clusters: it starts no ranks.
_SHELL_OF_SALLOC = "4294967290"


def is_step(env: Mapping[str, str]) -> bool:
    """Return whether srun started this process."""
    return env.get("SLURM_STEP_ID", _SHELL_OF_SALLOC) != _SHELL_OF_SALLOC


def read_step(env: Mapping[str, str]) -> Launch:
    """Read the variables of srun: one task per rank. Rank-local."""
    need(env, ("SLURM_JOB_ID", *STEP.values(), TASKS, HOSTS))
    numbers = {ours: whole_number(env, theirs) for ours, theirs in STEP.items()}
    tasks, hosts = tasks_of(env[TASKS]), hosts_of(env[HOSTS])
    problems = [
        f"{STEP['NODES']}={numbers['NODES']}, but {name}={env[name]} are {len(found)} nodes"
        for name, found in ((TASKS, tasks), (HOSTS, hosts))
        if len(found) != numbers["NODES"]
    ]
    if sum(tasks) != numbers["WORLD_SIZE"]:
        problems.append(
            f"{STEP['WORLD_SIZE']}={numbers['WORLD_SIZE']}, but {TASKS}={env[TASKS]} are "
            f"{sum(tasks)} tasks"
        )
    if numbers["NODE"] >= len(tasks):
        problems.append(f"{STEP['NODE']}={numbers['NODE']} must be below {len(tasks)} nodes")
    refuse(problems, env)
    numbers["LOCAL_WORLD_SIZE"] = tasks[numbers["NODE"]]
    check_ranks(numbers, {**STEP, "LOCAL_WORLD_SIZE": "the tasks of this node"}, env)
    return Launch(
        launcher="slurm",
        rank=numbers["RANK"],
        local_rank=numbers["LOCAL_RANK"],
        world_size=numbers["WORLD_SIZE"],
        local_world_size=numbers["LOCAL_WORLD_SIZE"],
        num_nodes=numbers["NODES"],
        # WHY the first host: srun puts task 0 there.
        master_addr="127.0.0.1" if len(hosts) == 1 else env.get("MASTER_ADDR", hosts[0]),
        master_port=read_port(env, f"{env['SLURM_JOB_ID']}.{env['SLURM_STEP_ID']}"),
        has_own_gpus="SLURM_GPUS_PER_TASK" in env
        or env.get("SLURM_GPU_BIND", "").startswith(("single", "per_task")),
    )


def refuse_missing_srun(env: Mapping[str, str]) -> None:
    """Raise LaunchError for plain python in a job of several tasks: only srun starts them all."""
    num_tasks = whole_number(env, "SLURM_NTASKS", default=1)
    if "SLURM_JOB_ID" in env and num_tasks > 1:
        alone = command_words("slurm", 1, env=env)
        raise LaunchError(
            f"job {env['SLURM_JOB_ID']} has SLURM_NTASKS={num_tasks} tasks, but this one process "
            "was started without srun (SLURM_STEP_ID is not set), so the others would never join",
            fix=f"{right_command(env)}\n  or in one process: {with_arguments(alone)}",
        )


def hosts_of(nodelist: str) -> list[str]:
    """Expand Slurm's list of hosts: gpu[01-02,7],login gives gpu01, gpu02, gpu7, login."""
    hosts = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist.strip()):
        before, bracket, rest = part.partition("[")
        inside, _, after = rest.partition("]")
        if not bracket:
            hosts.append(part)
            continue
        for numbers in inside.split(","):
            first, _, last = numbers.partition("-")
            if not first.isdecimal() or not (last or first).isdecimal():
                raise LaunchError(
                    f"{HOSTS}={nodelist} can't be read at [{numbers}]",
                    fix="let srun set it, which writes numbers and ranges of numbers there",
                )
            for number in range(int(first), int(last or first) + 1):
                hosts += hosts_of(f"{before}{number:0{len(first)}}{after}")
    return hosts


def tasks_of(text: str) -> list[int]:
    """Expand Slurm's tasks per node: 2(x3),1 gives 2, 2, 2, 1."""
    tasks: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise LaunchError(
                f"{TASKS}={text} can't be read at {part!r}",
                fix="let srun set it, which writes such as 2(x3),1 there",
            )
        tasks += [int(match[1])] * int(match[2] or 1)
    return tasks

"""Every launcher is recognised by its variables, and every bad environment is one clear error."""

from collections.abc import Mapping

import pytest

from hardened_ddp.errors import LaunchError
from hardened_ddp.ranks.launch import prepare_environment, read_launch
from hardened_ddp.ranks.launchers_env import first_host, needs_torchrun, tasks_of
from tests.harness.ranks import run_command
from tests.launcher_environments import (
    AGENT,
    BATCH,
    HYDRA,
    OPEN_MPI,
    OPEN_MPI_ON_TWO_HOSTS,
    OPERATOR,
    PYTORCH_JOB,
    SRUN,
    SRUN_AGENTS,
    TORCHRUN,
    TRAIN_JOB,
    changed,
)

Change = dict[str, str | None]
# Who launched, what is wrong with it, a part of the message, a part of the next command.
BAD: list[tuple[Mapping[str, str], Change, str, str]] = [
    (TORCHRUN, {"RANK": None}, "but not RANK", "torchrun"),
    (TORCHRUN, {"WORLD_SIZE": None, "MASTER_PORT": None}, "WORLD_SIZE, MASTER_PORT", "torchrun"),
    (TORCHRUN, {"LOCAL_RANK": None}, "but not LOCAL_RANK", "env -u RANK -u WORLD_SIZE"),
    (TORCHRUN, {"RANK": "one"}, "RANK='one'", "torchrun"),
    (TORCHRUN, {"RANK": "4"}, "RANK=4, LOCAL_RANK=1, WORLD_SIZE=4", "torchrun"),
    (TORCHRUN, {"LOCAL_RANK": "2"}, "LOCAL_RANK=2, WORLD_SIZE=4, LOCAL_WORLD_SIZE=2", "torchrun"),
    (TORCHRUN, {"LOCAL_WORLD_SIZE": "8"}, "WORLD_SIZE=4, LOCAL_WORLD_SIZE=8", "torchrun"),
    (TORCHRUN, {"MASTER_PORT": "99999"}, "MASTER_PORT=99999 is not a port", "torchrun"),
    (AGENT, {"TORCHELASTIC_RESTART_COUNT": "x"}, "TORCHELASTIC_RESTART_COUNT='x'", "torchrun"),
    # An operator of Kubernetes.
    (OPERATOR, {"MASTER_ADDR": None}, "but not MASTER_ADDR", "env -u RANK -u WORLD_SIZE"),
    (OPERATOR, {"LOCAL_RANK": "0"}, "but not LOCAL_WORLD_SIZE", "torchrun"),
    (PYTORCH_JOB, {}, "PET_NPROC_PER_NODE=4", "torchrun "),
    (PYTORCH_JOB, {"WORLD_SIZE": "2", "PET_NNODES": "1:2"}, "PET_NNODES=1:2", "torchrun "),
    (OPERATOR, {"PET_NPROC_PER_NODE": "auto"}, "PET_NPROC_PER_NODE=auto", "torchrun "),
    (TRAIN_JOB, {}, "PET_NNODES=2 and PET_NPROC_PER_NODE=4", "torchrun "),
    (TRAIN_JOB, {"PET_NPROC_PER_NODE": "1"}, "PET_NNODES=2", "-u PET_MASTER_ADDR"),
    # Exported once, before srun or mpirun: the same in all tasks.
    ({**SRUN, **TORCHRUN}, {}, "RANK=1 and WORLD_SIZE=4, but srun says", "env -u RANK"),
    ({**OPEN_MPI, **TORCHRUN}, {"RANK": "0"}, "but mpirun says that this is rank", "-u RANK"),
    ({**SRUN, "WORLD_SIZE": "4"}, {}, "WORLD_SIZE set, but not RANK", "srun"),
    # torchruns that srun or mpirun started.
    ({**SRUN, **AGENT}, {}, "srun started torchrun 4 times, 2 of them on", "srun --ntasks=4"),
    ({**OPEN_MPI, **AGENT}, {}, "mpirun started torchrun 2 times, 2 of them", "mpirun"),
    ({**SRUN_AGENTS, **AGENT}, {"GROUP_WORLD_SIZE": "1"}, "knows of 1 hosts", "--nnodes=2"),
    ({**SRUN, **TORCHRUN, "HARDENED_DDP_LAUNCHER": "spawn"}, {}, "run_with_python.py", "srun"),
    # Slurm.
    (BATCH, {}, "started without srun", "srun --ntasks=4 "),
    (BATCH, {"SLURM_STEP_ID": "4294967290"}, "SLURM_NTASKS=4", "srun --ntasks=1 "),
    (SRUN, {"SLURM_PROCID": None}, "but not SLURM_PROCID", "srun"),
    (SRUN, {"SLURM_STEP_NODELIST": None}, "but not SLURM_STEP_NODELIST", "--ntasks-per-node=2"),
    (SRUN, {"SLURM_NODEID": "2"}, "SLURM_STEP_NUM_TASKS=4, SLURM_NODEID=2", "srun"),
    (SRUN, {"SLURM_STEP_TASKS_PER_NODE": "2,3"}, "SLURM_STEP_TASKS_PER_NODE=2,3, ", "srun"),
    (SRUN, {"SLURM_STEP_TASKS_PER_NODE": "4"}, "=4, SLURM_STEP_NUM_NODES=2", "srun"),
    (SRUN, {"SLURM_STEP_TASKS_PER_NODE": "two"}, "SLURM_STEP_TASKS_PER_NODE=two, ", "srun"),
    (SRUN, {"SLURM_RESTART_COUNT": "again"}, "SLURM_RESTART_COUNT='again'", "srun"),
    # MPI.
    (OPEN_MPI, {"OMPI_COMM_WORLD_RANK": None}, "but not OMPI_COMM_WORLD_RANK", "mpirun -np 2"),
    (OPEN_MPI, {"MASTER_PORT": "-5"}, "MASTER_PORT='-5'", "mpirun"),
    (OPEN_MPI_ON_TWO_HOSTS, {}, "MASTER_ADDR and MASTER_PORT not set", "run_with_mpirun.py"),
    (OPEN_MPI_ON_TWO_HOSTS, {"MASTER_ADDR": "a"}, "MASTER_PORT not set", "run_with_mpirun.py"),
    (HYDRA, {"MPI_LOCALRANKID": None}, "but not MPI_LOCALRANKID", "env -u PMI_RANK"),
    (HYDRA, {"PMI_SIZE": "1"}, "PMI_RANK=1, MPI_LOCALRANKID=1, PMI_SIZE=1", "mpirun"),
]


@pytest.mark.parametrize(("env", "change", "text", "command"), BAD, ids=lambda v: str(v)[:60])
def test_a_bad_environment_is_one_clear_error(
    env: Mapping[str, str], change: Change, text: str, command: str
) -> None:
    with pytest.raises(LaunchError) as caught:
        read_launch(changed(env, change))
    assert text in caught.value.message
    assert command in caught.value.fix
    assert caught.value.exit_status == 2


def test_as_typed_a_bad_environment_is_status_2_and_no_traceback() -> None:
    done = run_command(["python", "ddp_training.py", "--cpu_only"], timeout_s=60, env=BATCH)
    assert done.status == 2
    assert "error [DDP-L01] job 77 has SLURM_NTASKS=4 tasks" in done.stderr
    assert "next: srun --ntasks=4 python ddp_training.py --cpu_only" in done.stderr
    assert "Traceback" not in done.output


ONE_EACH = {**PYTORCH_JOB, "WORLD_SIZE": "2", "PET_NPROC_PER_NODE": "1"}
# A launcher's environment, and of the rank: launcher, rank, local rank, world size, local world
# size, number of nodes.
GOOD: list[tuple[Mapping[str, str], tuple[str, int, int, int, int, int]]] = [
    ({"HOME": "/root", "MASTER_ADDR": "left over"}, ("none", 0, 0, 1, 1, 1)),
    ({"PET_NNODES": "1", "PET_NPROC_PER_NODE": "1"}, ("none", 0, 0, 1, 1, 1)),
    ({**BATCH, "SLURM_NTASKS": "1"}, ("none", 0, 0, 1, 1, 1)),  # a shell in a job of one task
    (AGENT, ("torchrun", 1, 1, 4, 2, 2)),
    ({**PYTORCH_JOB, **AGENT}, ("torchrun", 1, 1, 4, 2, 2)),
    ({**SRUN_AGENTS, **AGENT}, ("torchrun", 1, 1, 4, 2, 2)),
    ({**TORCHRUN, "HARDENED_DDP_LAUNCHER": "spawn"}, ("spawn", 1, 1, 4, 2, 2)),
    (OPERATOR, ("operator", 1, 0, 2, 1, 2)),  # one process in each pod
    (changed(ONE_EACH, {"PET_NPROC_PER_NODE": None}), ("operator", 1, 0, 2, 1, 2)),
    (SRUN, ("slurm", 3, 1, 4, 2, 2)),
    ({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4"}, ("slurm", 3, 1, 4, 2, 2)),
    (OPEN_MPI, ("mpi", 1, 1, 2, 2, 1)),
    (HYDRA, ("mpi", 1, 1, 2, 2, 1)),
    ({**BATCH, **OPEN_MPI}, ("mpi", 1, 1, 2, 2, 1)),
    ({**SRUN, **HYDRA}, ("mpi", 1, 1, 2, 2, 1)),
]


@pytest.mark.parametrize(("env", "expected"), GOOD, ids=lambda value: str(value)[:60])
def test_a_launcher_and_the_place_of_a_rank_are_recognised(
    env: Mapping[str, str], expected: tuple[str, int, int, int, int, int]
) -> None:
    launch = read_launch(env)
    place = (launch.rank, launch.local_rank, launch.world_size, launch.local_world_size)
    assert (launch.launcher, *place, launch.num_nodes) == expected
    assert launch.is_main == (launch.rank == 0)
    assert launch.master_addr == "127.0.0.1" or launch.launcher != "mpi"
    assert read_launch(env).master_port == launch.master_port


def test_a_part_of_an_operators_variables_starts_no_torchrun() -> None:
    assert not needs_torchrun({"RANK": "0"})


def test_pods_meet_over_the_network() -> None:
    launch = read_launch(OPERATOR)
    assert (launch.master_addr, launch.master_port) == ("job-master-0", 23456)
    prepare_environment(launch, chosen := {})
    assert "GLOO_SOCKET_IFNAME" not in chosen


def test_steps_of_a_job_meet_at_the_first_host_or_where_it_says_on_ports_of_their_own() -> None:
    launch = read_launch(SRUN)
    assert launch.master_addr == "gpu09"
    assert launch.job_key == "slurm-77"
    assert launch.master_port != read_launch({**SRUN, "SLURM_STEP_ID": "1"}).master_port

    first = read_launch({**SRUN, "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"})
    assert (first.rank, first.master_addr) == (0, "gpu09")
    assert 1024 < first.master_port == launch.master_port < 32768
    launch = read_launch({**SRUN, "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "4444"})
    assert (launch.master_addr, launch.master_port) == ("10.0.0.9", 4444)


def test_a_restart_by_torchrun_or_slurm_is_recognised_and_keeps_the_name_of_its_job() -> None:
    for env, name in ((TORCHRUN, "TORCHELASTIC_RESTART_COUNT"), (SRUN, "SLURM_RESTART_COUNT")):
        launch = read_launch({**env, name: "3"})
        assert launch.attempt == 3
    first, second = {"SLURM_JOB_ID": "77"}, {"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "1"}
    assert read_launch(first).job_key == read_launch(second).job_key == "slurm-77"
    assert read_launch(first).attempt == 0
    assert read_launch(second).attempt > 0


@pytest.mark.parametrize(
    ("nodelist", "host"),
    [
        ("login", "login"),
        ("gpu[09-11]", "gpu09"),
        ("n[1,3-4]-ib,big", "n1-ib"),
        ("big,n[1,3-4]", "big"),
        ("r[1-2]n[01-02]", "r1n01"),
        ("10.0.0.[8-9]", "10.0.0.8"),
    ],
)
def test_the_first_host_of_a_list_is_found(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host


def test_a_list_of_tasks_is_spelled_out() -> None:
    assert tasks_of("2(x3),1") == [2, 2, 2, 1]
    assert tasks_of("8") == [8]

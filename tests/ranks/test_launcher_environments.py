"""Every launcher is recognised by its variables, and every bad environment is one clear error."""

from collections.abc import Mapping

import pytest

from hardened_ddp.errors import LaunchError
from hardened_ddp.ranks.launch import prepare_environment, read_launch
from hardened_ddp.ranks.launchers_env import first_host, tasks_of
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
    (TORCHRUN, {"RANK": "-1"}, "RANK='-1'", "torchrun"),
    (TORCHRUN, {"RANK": "4"}, "RANK=4 must be below WORLD_SIZE=4", "torchrun"),
    (TORCHRUN, {"LOCAL_RANK": "2"}, "LOCAL_RANK=2 must be below LOCAL_WORLD_SIZE=2", "torchrun"),
    (TORCHRUN, {"LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE=8 can't be above", "torchrun"),
    (TORCHRUN, {"MASTER_PORT": "99999"}, "MASTER_PORT=99999 is not a port", "torchrun"),
    (TORCHRUN, {"MASTER_PORT": "0"}, "MASTER_PORT=0 is not a port", "torchrun"),
    (AGENT, {"TORCHELASTIC_RESTART_COUNT": "x"}, "TORCHELASTIC_RESTART_COUNT='x'", "torchrun"),
    # An operator of Kubernetes.
    (OPERATOR, {"MASTER_ADDR": None}, "but not MASTER_ADDR", "env -u RANK -u WORLD_SIZE"),
    (OPERATOR, {"RANK": "2"}, "RANK=2 must be below WORLD_SIZE=2", "torchrun"),
    (OPERATOR, {"LOCAL_RANK": "0"}, "but not LOCAL_WORLD_SIZE", "torchrun"),
    (PYTORCH_JOB, {}, "PET_NPROC_PER_NODE=4", "torchrun "),
    (PYTORCH_JOB, {"PET_NPROC_PER_NODE": None}, "PET_NNODES=2", "torchrun "),
    (PYTORCH_JOB, {"WORLD_SIZE": "2", "PET_NNODES": "1:2"}, "PET_NNODES=1:2", "torchrun "),
    (OPERATOR, {"PET_NPROC_PER_NODE": "auto"}, "PET_NPROC_PER_NODE=auto", "torchrun "),
    (TRAIN_JOB, {}, "PET_NNODES=2 and PET_NPROC_PER_NODE=4", "torchrun "),
    (TRAIN_JOB, {"PET_NPROC_PER_NODE": "1"}, "PET_NNODES=2", "-u PET_MASTER_ADDR"),
    (TRAIN_JOB, {"PET_NNODES": "1"}, "PET_NPROC_PER_NODE=4", "-u PET_NNODES"),
    (TRAIN_JOB, {"PET_NNODES": "1:2", "PET_NPROC_PER_NODE": "1"}, "PET_NNODES=1:2", "torchrun "),
    # Exported once, before srun or mpirun: the same in all tasks.
    ({**SRUN, **TORCHRUN}, {}, "RANK=1 and WORLD_SIZE=4, but srun says", "env -u RANK"),
    (
        {**OPEN_MPI, **TORCHRUN},
        {"RANK": "0"},
        "but mpirun says that this is rank 1 of 2",
        "-u RANK",
    ),
    ({**SRUN, "WORLD_SIZE": "4"}, {}, "WORLD_SIZE set, but not RANK", "srun"),
    # torchruns that srun or mpirun started.
    ({**SRUN, **AGENT}, {}, "srun started 2 tasks on this node", "srun --ntasks=4"),
    ({**OPEN_MPI, **AGENT}, {}, "mpirun started 2 tasks on this node", "mpirun"),
    ({**SRUN_AGENTS, **AGENT}, {"GROUP_WORLD_SIZE": "1"}, "knows of 1 nodes", "--nnodes=2"),
    ({**SRUN, **TORCHRUN, "HARDENED_DDP_LAUNCHER": "spawn"}, {}, "run_with_python.py", "srun"),
    # Slurm.
    (BATCH, {}, "started without srun", "srun --ntasks=4 "),
    (BATCH, {"SLURM_STEP_ID": "4294967290"}, "SLURM_NTASKS=4", "srun --ntasks=1 "),
    (SRUN, {"SLURM_PROCID": None}, "but not SLURM_PROCID", "srun"),
    (SRUN, {"SLURM_LOCALID": None, "SLURM_NODEID": None}, "SLURM_LOCALID, SLURM_NODEID", "srun"),
    (SRUN, {"SLURM_STEP_NODELIST": None}, "but not SLURM_STEP_NODELIST", "--ntasks-per-node=2"),
    (SRUN, {"SLURM_PROCID": "4"}, "SLURM_PROCID=4 must be below SLURM_STEP_NUM_TASKS=4", "srun"),
    (SRUN, {"SLURM_LOCALID": "2"}, "SLURM_LOCALID=2 must be below the tasks of this", "srun"),
    (SRUN, {"SLURM_NODEID": "2"}, "SLURM_STEP_NUM_TASKS=4, SLURM_NODEID=2", "srun"),
    (SRUN, {"SLURM_STEP_TASKS_PER_NODE": "2,3"}, "SLURM_STEP_TASKS_PER_NODE=2,3, ", "srun"),
    (SRUN, {"SLURM_STEP_TASKS_PER_NODE": "4"}, "=4, SLURM_STEP_NUM_NODES=2", "srun"),
    (SRUN, {"SLURM_STEP_TASKS_PER_NODE": "two"}, "can't be read at 'two'", "srun"),
    (SRUN, {"SLURM_PROCID": "three"}, "SLURM_PROCID='three'", "srun"),
    (SRUN, {"MASTER_PORT": "70000"}, "MASTER_PORT=70000 is not a port", "srun"),
    (SRUN, {"SLURM_RESTART_COUNT": "again"}, "SLURM_RESTART_COUNT='again'", "srun"),
    # MPI.
    (OPEN_MPI, {"OMPI_COMM_WORLD_RANK": None}, "but not OMPI_COMM_WORLD_RANK", "mpirun -np 2"),
    (OPEN_MPI, {"OMPI_COMM_WORLD_RANK": "2"}, "OMPI_COMM_WORLD_RANK=2 must be below", "mpirun"),
    (OPEN_MPI, {"OMPI_COMM_WORLD_SIZE": "two"}, "OMPI_COMM_WORLD_SIZE='two'", "mpirun"),
    (OPEN_MPI_ON_TWO_HOSTS, {}, "MASTER_ADDR and MASTER_PORT not set", "run_with_mpirun.py"),
    (OPEN_MPI_ON_TWO_HOSTS, {"MASTER_ADDR": "a"}, "MASTER_PORT not set", "run_with_mpirun.py"),
    (HYDRA, {"MPI_LOCALRANKID": None}, "but not MPI_LOCALRANKID", "env -u PMI_RANK"),
    (HYDRA, {"PMI_SIZE": "1"}, "PMI_RANK=1 must be below PMI_SIZE=1", "mpirun"),
]


@pytest.mark.parametrize(
    ("env", "change", "text", "command"), BAD, ids=lambda value: str(value)[:60]
)
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


def test_one_process_in_each_pod_of_an_operator_is_its_local_rank_0() -> None:
    one_each = {**PYTORCH_JOB, "WORLD_SIZE": "2", "PET_NPROC_PER_NODE": "1"}
    for env in (OPERATOR, one_each, changed(one_each, {"PET_NPROC_PER_NODE": None})):
        launch = read_launch(env)
        assert (launch.launcher, launch.rank, launch.local_rank) == ("operator", 1, 0)
        assert (launch.world_size, launch.local_world_size, launch.num_nodes) == (2, 1, 2)
        assert (launch.master_addr, launch.master_port) == ("job-master-0", 23456)
    prepare_environment(launch, chosen := {})
    assert "GLOO_SOCKET_IFNAME" not in chosen  # the pods meet over the network


def test_ranks_that_torchrun_starts_in_the_pods_are_those_of_torchrun() -> None:
    launch = read_launch({**PYTORCH_JOB, **AGENT})
    assert (launch.launcher, launch.local_rank, launch.local_world_size) == ("torchrun", 1, 2)
    one_pod = {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "1"}
    assert read_launch(one_pod).launcher == "none"


def test_srun_is_recognised() -> None:
    launch = read_launch(SRUN)
    assert (launch.launcher, launch.rank, launch.local_rank) == ("slurm", 3, 1)
    assert (launch.world_size, launch.local_world_size, launch.num_nodes) == (4, 2, 2)
    assert launch.master_addr == "gpu09"
    assert launch.job_key == "slurm-77"
    other_step = read_launch({**SRUN, "SLURM_STEP_ID": "1"})
    assert launch.master_port != other_step.master_port


def test_all_tasks_of_a_step_derive_the_same_master_address() -> None:
    places = [
        read_launch({**SRUN, "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank % 2),
                     "SLURM_NODEID": str(rank // 2)})
        for rank in range(4)
    ]  # fmt: skip
    assert [place.rank for place in places] == [0, 1, 2, 3]
    assert len({(place.master_addr, place.master_port) for place in places}) == 1
    assert 1024 < places[0].master_port < 32768


def test_a_job_may_say_itself_where_rank_0_is() -> None:
    launch = read_launch({**SRUN, "MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "4444"})
    assert (launch.master_addr, launch.master_port) == ("10.0.0.9", 4444)


def test_srun_that_sets_pmi_is_still_srun() -> None:
    assert read_launch({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4"}).launcher == "slurm"


@pytest.mark.parametrize("env", [OPEN_MPI, HYDRA, {**BATCH, **OPEN_MPI}, {**SRUN, **HYDRA}])
def test_mpirun_is_recognised_also_inside_of_a_slurm_job(env: dict[str, str]) -> None:
    launch = read_launch(env)
    assert (launch.launcher, launch.rank, launch.local_rank) == ("mpi", 1, 1)
    assert (launch.world_size, launch.local_world_size, launch.num_nodes) == (2, 2, 1)
    assert launch.master_addr == "127.0.0.1"
    assert read_launch(env).master_port == launch.master_port


def test_torchrun_inside_of_a_slurm_job_is_torchrun() -> None:
    launch = read_launch({**SRUN_AGENTS, **AGENT})
    assert (launch.launcher, launch.rank, launch.world_size) == ("torchrun", 1, 4)
    assert launch.num_nodes == 2
    assert read_launch({**BATCH, **AGENT}).launcher == "torchrun"


def test_spawn_is_recognised_by_its_mark() -> None:
    assert read_launch({**TORCHRUN, "HARDENED_DDP_LAUNCHER": "spawn"}).launcher == "spawn"


def test_a_shell_in_a_job_of_one_task_is_one_rank() -> None:
    launch = read_launch({**BATCH, "SLURM_NTASKS": "1"})
    assert (launch.launcher, launch.world_size) == ("none", 1)


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

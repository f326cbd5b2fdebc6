"""Every launcher is recognised by its variables, and every bad environment is one clear error."""

from pathlib import Path

import pytest

from hardened_ddp.errors import LaunchError
from hardened_ddp.ranks.launch import prepare_environment, read_launch
from hardened_ddp.ranks.launchers_env import first_host, needs_torchrun, tasks_of
from tests.harness.ranks import run_command
from tests.launcher_environments import environment_of, lines_of

# Who launched and what is wrong with it, a part of the message, a part of the next command.
BAD = lines_of(Path(__file__).with_name("bad_environments.txt"))


@pytest.mark.parametrize("case", BAD)
def test_a_bad_environment_is_one_clear_error(case: str) -> None:
    env, text, command = case.split(" | ")
    with pytest.raises(LaunchError) as caught:
        read_launch(environment_of(env))
    assert text in caught.value.message
    assert f"{command} " in f"{caught.value.fix} "
    assert caught.value.exit_status == 2


def test_as_typed_a_bad_environment_is_status_2_and_no_traceback() -> None:
    done = run_command(
        ["python", "ddp_training.py", "--cpu_only"], timeout_s=60, env=environment_of("BATCH")
    )
    assert done.status == 2
    assert "error [DDP-L01] job 77 has SLURM_NTASKS=4 tasks" in done.stderr
    assert "next: srun --ntasks=4 python ddp_training.py --cpu_only" in done.stderr
    assert "Traceback" not in done.output


# A launcher's environment, and of the rank: launcher, rank, local rank, world size, local world
# size, number of nodes.
GOOD = """
HOME=/root MASTER_ADDR=left_over | none 0 0 1 1 1
PET_NNODES=1 PET_NPROC_PER_NODE=1 | none 0 0 1 1 1
BATCH SLURM_NTASKS=1 | none 0 0 1 1 1
AGENT | torchrun 1 1 4 2 2
PYTORCH_JOB AGENT | torchrun 1 1 4 2 2
SRUN_AGENTS AGENT | torchrun 1 1 4 2 2
TORCHRUN HARDENED_DDP_LAUNCHER=spawn | spawn 1 1 4 2 2
OPERATOR | operator 1 0 2 1 2
ONE_EACH -PET_NPROC_PER_NODE | operator 1 0 2 1 2
SRUN | slurm 3 1 4 2 2
SRUN PMI_RANK=3 PMI_SIZE=4 | slurm 3 1 4 2 2
OPEN_MPI | mpi 1 1 2 2 1
HYDRA | mpi 1 1 2 2 1
BATCH OPEN_MPI | mpi 1 1 2 2 1
SRUN HYDRA | mpi 1 1 2 2 1
"""


@pytest.mark.parametrize("case", GOOD.strip().splitlines())
def test_a_launcher_and_the_place_of_a_rank_are_recognised(case: str) -> None:
    words, expected = case.split(" | ")
    env = environment_of(words)
    launch = read_launch(env)
    place = (launch.rank, launch.local_rank, launch.world_size, launch.local_world_size)
    assert " ".join(map(str, (launch.launcher, *place, launch.num_nodes))) == expected
    assert launch.is_main == (launch.rank == 0)
    assert launch.master_addr == "127.0.0.1" or launch.launcher != "mpi"
    assert read_launch(env).master_port == launch.master_port


def test_a_part_of_an_operators_variables_starts_no_torchrun() -> None:
    assert not needs_torchrun({"RANK": "0"})


def test_pods_meet_over_the_network() -> None:
    launch = read_launch(environment_of("OPERATOR"))
    assert (launch.master_addr, launch.master_port) == ("job-master-0", 23456)
    prepare_environment(launch, chosen := {})
    assert "GLOO_SOCKET_IFNAME" not in chosen


def test_steps_of_a_job_meet_at_the_first_host_or_where_it_says_on_ports_of_their_own() -> None:
    launch = read_launch(environment_of("SRUN"))
    assert launch.master_addr == "gpu09"
    assert launch.job_key == "slurm-77"
    assert launch.master_port != read_launch(environment_of("SRUN SLURM_STEP_ID=1")).master_port

    words = "SRUN SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NODEID=0"
    first = read_launch(environment_of(words))
    assert (first.rank, first.master_addr) == (0, "gpu09")
    assert 1024 < first.master_port == launch.master_port < 32768
    launch = read_launch(environment_of("SRUN MASTER_ADDR=10.0.0.9 MASTER_PORT=4444"))
    assert (launch.master_addr, launch.master_port) == ("10.0.0.9", 4444)


def test_a_restart_by_torchrun_or_slurm_is_recognised_and_keeps_the_name_of_its_job() -> None:
    for words in ("TORCHRUN TORCHELASTIC_RESTART_COUNT=3", "SRUN SLURM_RESTART_COUNT=3"):
        assert read_launch(environment_of(words)).attempt == 3
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
def test_the_first_host_and_the_tasks_of_a_list_are_found(nodelist: str, host: str) -> None:
    assert first_host(nodelist) == host
    assert (tasks_of("2(x3),1"), tasks_of("8")) == ([2, 2, 2, 1], [8])

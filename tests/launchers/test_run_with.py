"""The launchers of launchers/ in real processes: who the ranks are, and how a run ends.

Where a program of the test is not installed (mpirun), the test is skipped and says so.
"""

import os
import re
import shlex
import shutil
from functools import partial
from pathlib import Path

import pytest

from tests.harness.ranks import run_command, run_program, train
from tests.marks import slow_after
from tests.run_folder import last_tensors, only_run, read_summary

SMALL = ["--cpu_only", "--model", "mlp", "--num_workers", "0"]
RUN = ["ddp_training.py", *SMALL, "--epochs", "2"]
LIMIT_S = 150
# WHY: mpirun refuses root and more ranks than cores; and its own sockets stay on loopback.
MPI_ENV = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
MPI_ENV |= {"OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_oob_tcp_if_include": "lo"}
# As the README has them.
INSPECT = "torchrun --nproc_per_node=2 launchers/run_with_torchrun.py --inspect"
LAUNCHERS = (
    "torchrun --nproc_per_node=2 launchers/run_with_torchrun.py ddp_training.py --epochs 2",
    "python launchers/run_with_python.py --nproc 2 ddp_training.py --epochs 2",
    "mpirun -np 2 python launchers/run_with_mpirun.py ddp_training.py --epochs 2",
    "mpirun -np 2 python ddp_training.py --epochs 2",
)
MPICH = LAUNCHERS[2].replace("mpirun", "mpirun.mpich", 1)
BROKEN = """
import os, time
if os.environ["RANK"] == "1":
    raise ValueError("a fault of rank 1")
time.sleep(100)
"""


@pytest.fixture(scope="module")
def by_torchrun(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The tensors that a torchrun of the script ends in; its ranks are forked."""
    output = tmp_path_factory.mktemp("torchrun")
    train([*RUN[1:], "--output_dir", output], 2).ok()
    return last_tensors(output)


@pytest.mark.parametrize("command", slow_after(1, [*LAUNCHERS, MPICH]))
def test_every_launcher_ends_in_the_same_weights(
    command: str, by_torchrun: dict[str, str], tmp_path: Path
) -> None:
    program = command.split()[0]
    if program.startswith("mpirun") and shutil.which(program) is None:
        pytest.skip(f"{program} is not installed on this machine (see .ci/run)")
    argv = [*command.split(), *SMALL, "--output_dir", tmp_path]
    run = partial(run_command, env=MPI_ENV) if program.startswith("mpirun") else run_program
    done = run(argv, timeout_s=LIMIT_S).ok()
    if "launchers/" in command:
        host, lines = os.uname().nodename, done.stdout.splitlines()
        assert [line for line in lines if line.startswith("host ")] == [
            f"host {host}  rank {rank}  local rank {rank}  world size 2  device cpu"
            for rank in range(2)
        ]
        assert re.search(r"2 ranks, started by \w+; rendezvous at \S+:\d+\n", done.stdout)
        assert "all-reduce  gives every rank the sum:        3 (checked)" in done.stdout
        assert "all-gather  gives every rank all of them:    [1, 2]" in done.stdout
    assert read_summary(only_run(tmp_path))["world_size"] == 2
    assert last_tensors(tmp_path) == by_torchrun


@pytest.mark.slow
def test_to_inspect_shows_the_ranks_and_runs_no_script() -> None:
    done = run_program(INSPECT.split(), timeout_s=LIMIT_S).ok()
    assert "2 ranks, started by torchrun" in done.stdout
    assert "epoch" not in done.output


@pytest.mark.slow
def test_a_failed_child_ends_the_others_and_shows_its_traceback(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    argv = ["python", "launchers/run_with_python.py", "--nproc", "2", "--no_lesson", script]
    done = run_program(argv, timeout_s=150)
    assert done.status == 1
    assert "rank 1 failed" in done.stderr
    assert "ValueError: a fault of rank 1" in done.stderr
    assert "broken.py" in done.stderr


@pytest.mark.parametrize(
    ("command", "text", "next_command"),
    [
        ("run_with_torchrun.py", "this process was not started by torchrun", "torchrun --standal"),
        ("run_with_mpirun.py", "this process was not started by mpirun", "mpirun -np 2 python"),
        ("run_with_python.py --nproc -1", "needs a number of processes", ""),
        ("run_with_python.py no_such_script.py", "there is no script", ""),
        ("run_with_python.py --fast ddp_training.py", "unknown option --fast", ""),
        ("launch.py --nproc_per_node 2", "--hosts", ""),
        ("launch.py --hosts a,a --nproc_per_node 2", "name each host once", ""),
        ("launch.py --hosts localhost,b --nproc_per_node 2", "can't reach the first one", ""),
        ("launch.py --hosts a --nproc_per_node 0", "needs 1 or more", ""),
    ],
)
def test_a_misused_launcher_says_what_is_right(command: str, text: str, next_command: str) -> None:
    done = run_program(["python", *f"launchers/{command}".split()], timeout_s=60)
    assert done.status in (1, 2)
    assert text in done.stderr
    assert next_command in done.stderr
    assert "Traceback" not in done.output


def test_a_dry_run_prints_one_torchrun_for_each_host() -> None:
    argv = ["launchers/launch.py", "--hosts", "a,b", "--nproc_per_node", "4", "--dry-run"]
    argv += ["--folder", "/shared/my code", "--python", "python", "--env", "NCCL_DEBUG=WARN"]
    done = run_program(["python", *argv, "ddp_training.py", "--run_name", "x y"], timeout_s=60).ok()
    for node_rank, line in enumerate(done.stdout.splitlines()):
        ssh, tty, host, command = shlex.split(line)
        assert (ssh, tty, host) == ("ssh", "-tt", "ab"[node_rank])
        assert command == (
            "cd '/shared/my code' && exec env NCCL_DEBUG=WARN python -m hardened_ddp_command "
            f"--nnodes=2 --node_rank={node_rank} --nproc_per_node=4 --master_addr=a "
            "--master_port=29500 ddp_training.py --run_name 'x y'"
        )
    assert len(done.stdout.splitlines()) == 2


def test_a_host_that_fails_ends_the_launch_with_its_status(tmp_path: Path) -> None:
    ssh = tmp_path / "ssh"
    ssh.write_text("#!/bin/sh\nexit 7\n")
    ssh.chmod(0o755)
    argv = ["python", "launchers/launch.py", "--hosts", "127.0.0.2", "--nproc_per_node", "1"]
    # WHY quoted: --ssh is a command with its options, and the folder's name may have a space.
    quoted = shlex.quote(str(ssh))
    done = run_program([*argv, "--ssh", quoted, "ddp_training.py"], timeout_s=60)
    assert done.status == 7
    assert "127.0.0.2 ended with status 7" in done.stderr
    argv += ["--ssh", f"{quoted}-missing -p 22", "ddp_training.py"]
    missing = run_program(argv, timeout_s=60)
    assert missing.status == 2
    assert missing.stderr.endswith(f"there is no program {ssh}-missing\n")
    assert "Traceback" not in missing.stderr

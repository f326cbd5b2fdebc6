"""A run on two hosts with addresses of their own: it trains, and a cut cable has a verdict."""

import shlex
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.ranks import run_command, start_command
from tests.run_folder import find_checkpoints, last_tensors, only_run, read_summary
from tests.two_hosts import ADDRESSES, TwoHosts, why_not

pytestmark = [pytest.mark.slow]
RUN = ["--cpu_only", "--epochs", "2", "--batch_size", "64"]
TIMEOUT_S = 8.0
MPI_ON_TWO_HOSTS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_oob_tcp_if_include": "10.77.0.0/24",
}


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[TwoHosts]:
    # WHY here and not as a mark: looking makes a namespace, and --quick must not do that
    if reason := why_not():
        pytest.skip(reason)
    (tmp_path / "etc").mkdir()
    with TwoHosts(tmp_path / "etc") as made:
        yield made


def torchrun(index: int, *words: str | Path) -> list[str | Path]:
    """Give the command of one host; the same on both but for --node_rank."""
    argv: list[str | Path] = ["torchrun", "--nnodes=2", f"--node_rank={index}"]
    argv += ["--nproc_per_node=1", "--master_addr=node0", "--master_port=29700"]
    return [*argv, "ddp_training.py", *words]


def by_hand(index: int, port: int = 29700, address: str = ADDRESSES[0]) -> dict[str, str]:
    """Give the environment of one rank without an agent: then rank 0 itself serves the store."""
    return {
        "RANK": str(index),
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
    }


def test_two_hosts_train_as_one_run_with_the_weights_of_one_host(
    hosts: TwoHosts, tmp_path: Path
) -> None:
    words = [*RUN, "--output_dir", tmp_path / "two"]
    with (
        start_command(hosts.on(0, *torchrun(0, *words))) as first,
        start_command(hosts.on(1, *torchrun(1, *words))) as second,
    ):
        first.wait(timeout_s=150).ok()
        second.wait(timeout_s=30).ok()
    assert read_summary(only_run(tmp_path / "two"))["world_size"] == 2
    argv = ["torchrun", "--nproc_per_node=2", "ddp_training.py", *RUN]
    run_command([*argv, "--output_dir", tmp_path / "one"], timeout_s=120).ok()
    assert last_tensors(tmp_path / "two") == last_tensors(tmp_path / "one")


def test_ssh_to_each_host_is_one_run(hosts: TwoHosts, tmp_path: Path) -> None:
    ssh = make_ssh(hosts, tmp_path / "ssh", host="$2", command="$3")
    argv = ["launchers/launch.py", "--hosts", "node0,node1", "--nproc_per_node", "1", "--ssh", ssh]
    argv += ["launchers/run_with_torchrun.py", "ddp_training.py", *RUN]
    done = run_command(["python", *argv, "--output_dir", tmp_path / "runs"], timeout_s=150).ok()
    shown = [line for line in done.stdout.splitlines() if line.startswith("host ")]
    assert shown == [
        f"host node{rank}  rank {rank}  local rank 0  world size 2  device cpu" for rank in (0, 1)
    ]
    assert read_summary(only_run(tmp_path / "runs"))["status"] == "finished"


def test_mpirun_on_two_hosts_agrees_on_a_place_to_meet(hosts: TwoHosts, tmp_path: Path) -> None:
    if shutil.which("mpirun.openmpi") is None:
        pytest.skip("Open MPI is not installed on this machine (see .ci/run)")
    agent = make_ssh(hosts, tmp_path / "agent", host="$1", command="${*:2}")
    argv = ["mpirun.openmpi", "--host", "node0,node1", "-np", "2", "--mca", "plm_rsh_agent", agent]
    argv += ["-x", "PATH", "python", "launchers/run_with_mpirun.py", "--folder", tmp_path / "meet"]
    argv += [*["ddp_training.py", *RUN], "--output_dir", tmp_path / "runs"]
    done = run_command(hosts.on(0, *argv), timeout_s=150, env=MPI_ON_TWO_HOSTS).ok()
    shown = [line for line in done.stdout.splitlines() if line.startswith("host ")]
    assert shown == [
        f"host node{rank}  rank {rank}  local rank 0  world size 2  device cpu" for rank in (0, 1)
    ]
    assert read_summary(only_run(tmp_path / "runs"))["world_size"] == 2
    assert not list((tmp_path / "meet").iterdir())


def test_a_cut_cable_has_a_clear_verdict_on_both_hosts_within_the_timeout(
    hosts: TwoHosts, tmp_path: Path
) -> None:
    words = ["--cpu_only", "--epochs", "1000", "--log_interval", "1", "--timeout_s", str(TIMEOUT_S)]
    folders = [tmp_path / "node0", tmp_path / "node1"]
    argvs = [["python", "ddp_training.py", *words, "--output_dir", f] for f in folders]
    with (
        start_command(hosts.on(0, *argvs[0]), env=by_hand(0)) as first,
        start_command(hosts.on(1, *argvs[1]), env=by_hand(1)) as second,
    ):
        first.wait_for(
            lambda: list(folders[0].glob("*/metrics.jsonl")), timeout_s=90, what="a step"
        )
        hosts.cut()
        cut_at = time.monotonic()
        done = [command.wait(timeout_s=3 * TIMEOUT_S + 20) for command in (first, second)]
        assert time.monotonic() - cut_at < 2 * TIMEOUT_S + 10
    for rank, completed in enumerate(done):
        assert completed.status == 75, completed.output
        assert "[DDP-G05]" in completed.output
        assert f"rank {1 - rank}" in completed.output
        assert "its host, its network or its process is stopped" in completed.output
        assert f"rank {rank} waits in all-reduce of step" in completed.output
        assert "Traceback" not in completed.output
    assert find_checkpoints(folders[0])


@pytest.mark.parametrize(
    ("rank", "env", "texts"),
    [
        (1, by_hand(1), ["10.77.0.1: refused: nothing listens on that port"]),
        (1, by_hand(1, address="10.77.0.9"), ["10.77.0.9"]),
        (1, by_hand(1, address="node7"), ["the name node7 can't be resolved here"]),
        (0, by_hand(0), ["these of 2 ranks never came: [1]", "There: rank 0 (process"]),
        (0, by_hand(0, address=ADDRESSES[1]), ["tried 10.77.0.2:29700 for 4 s", "10.77.0.1"]),
        (0, {**by_hand(0), "GLOO_SOCKET_IFNAME": "eth9"}, ["never came: [1]"]),
    ],
    ids=["no rank 0", "no such host", "no such name", "no rank 1", "rank 0 elsewhere", "alone"],
)
def test_a_meeting_that_fails_says_what_was_tried(
    rank: int, env: dict[str, str], texts: list[str], hosts: TwoHosts, tmp_path: Path
) -> None:
    argv = ["python", "ddp_training.py", "--cpu_only", "--timeout_s", "4", "--output_dir", tmp_path]
    done = run_command(hosts.on(rank, *argv), timeout_s=60, env=env)
    assert done.status == 1, done.output
    assert "[DDP-G01]" in done.output
    for text in texts:
        assert text in done.output
    assert "Traceback" not in done.output


def make_ssh(hosts: TwoHosts, path: Path, *, host: str, command: str) -> Path:
    """Make an ssh for tests; host and command: where bash finds them among its arguments."""
    cases = "\n".join(
        f'node{i}) exec {shlex.join(hosts.on(i, "bash", "-c"))} "{command}" ;;' for i in (0, 1)
    )
    path.write_text(f'#!/bin/bash\ncase "{host}" in\n{cases}\nesac\n')
    path.chmod(0o755)
    return path

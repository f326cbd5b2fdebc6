"""A run on two hosts with addresses of their own: it trains, and a cut cable has a verdict."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from hardened_ddp.checkpoint.disk import LOCK_NAME
from tests import run_folder
from tests.harness import ranks
from tests.harness.processes import ask, kill
from tests.harness.ranks import run_command, run_program, start_command, start_program, train
from tests.launcher_environments import environment_of
from tests.launchers.test_run_with import MPI_ENV
from tests.marks import sections, slow_after
from tests.run_folder import is_past, last_tensors, only_run, read_summary, samples_by_step
from tests.settings.test_next_commands import command_after
from tests.two_hosts import ADDRESSES, TwoHosts

PROGRAMS = sections(Path(__file__).with_name("programs.txt"))
RUN = ["--cpu_only", "--epochs", "2", "--batch_size", "64"]
ELASTIC = ["--cpu_only", "--batch_size", "12", "--epochs", "1000", "--num_workers", "0", "--ledger"]
ELASTIC += ["--lr_schedule", "constant", "--log_interval", "1", "--eval_every", "0"]
PACED = ["--model", "tests.plugins:paced_mlp"]
TIMEOUT_S = 8.0
SSHD = "/usr/sbin/sshd"
MARK = "OVER_SSH"
MPI_ON_TWO_HOSTS = MPI_ENV | {"OMPI_MCA_oob_tcp_if_include": "10.77.0.0/24"}


def torchrun(index: int, *words: str | Path) -> list[str | Path]:
    """Give the command of one host; the same on both but for --node_rank."""
    argv: list[str | Path] = ["torchrun", "--nnodes=2", f"--node_rank={index}"]
    argv += ["--nproc_per_node=1", "--master_addr=node0", "--master_port=29700"]
    return [*argv, "ddp_training.py", *words]


def by_hand(index: int, port: int = 29700, address: str = ADDRESSES[0]) -> dict[str, str]:
    """Give the environment of one rank without an agent: then rank 0 itself serves the store."""
    words = f"RANK={index} LOCAL_RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=1 MASTER_ADDR={address}"
    return environment_of(f"{words} MASTER_PORT={port}")


@pytest.mark.slow
def test_two_hosts_train_to_the_weights_of_one_host(hosts: TwoHosts, tmp_path: Path) -> None:
    words = [*RUN, "--output_dir", tmp_path / "two"]
    with (
        start_program(torchrun(0, *words), host=hosts.host(0)) as first,
        start_program(torchrun(1, *words), host=hosts.host(1)) as second,
    ):
        first.wait(timeout_s=150).ok()
        second.wait(timeout_s=30).ok()
    assert read_summary(only_run(tmp_path / "two"))["world_size"] == 2
    train([*RUN, "--output_dir", tmp_path / "one"], 2).ok()
    assert last_tensors(tmp_path / "two") == last_tensors(tmp_path / "one")


@pytest.mark.slow
def test_over_ssh_two_hosts_are_one_run_that_its_command_resumes(
    hosts: TwoHosts, tmp_path: Path
) -> None:
    if missing := [program for program in (SSHD, "ssh") if shutil.which(program) is None]:
        pytest.skip(f"not installed on this machine: {', '.join(missing)} (see .ci/run)")
    settings = make_ssh_settings(tmp_path)
    serve = [SSHD, "-D", "-e", "-f", settings.with_name("sshd_config")]
    words = ["--cpu_only", "--epochs", "1000", "--log_interval", "1", "--time_limit", "120s"]
    words += ["--stop_status", "3"]
    argv = ["python", "launchers/launch.py", "--hosts", "node0,node1", "--nproc_per_node", "1"]
    argv += ["--ssh", f"ssh -F {settings}", "--env", f"TMPDIR={tmp_path}", "--env", f"{MARK}=1"]
    argv += ["ddp_training.py", *words, "--output_dir", str(tmp_path / "runs")]
    with start_command(hosts.on(0, *serve)) as first, start_command(hosts.on(1, *serve)) as second:
        first.wait_for(lambda: "listening" in first.stderr, timeout_s=20, what="a server")
        second.wait_for(lambda: "listening" in second.stderr, timeout_s=20, what="a server")
        with start_command(hosts.on(0, *argv)) as launched:
            launched.wait_for(lambda: is_past(tmp_path / "runs", 5), timeout_s=90, what="steps")
            os.kill(launched.pid, signal.SIGINT)
            stopped = launched.wait(timeout_s=60)
            marked = [pid for pid in psutil.pids() if (ask(pid, "environ") or {}).get(MARK)]
            assert not marked, "the launcher waits for the ranks of all hosts"
        summary = read_summary(only_run(tmp_path / "runs"))
        assert (summary["status"], summary["world_size"]) == ("stopped", 2)
        assert stopped.status == 3, "as the ranks noted"
        assert run_folder.saved_step(tmp_path / "runs") == summary["step"]
        resume = f"{command_after(stopped.output, 'resume: ')} --max_steps {summary['step'] + 2}"
        run_command(hosts.on(0, "bash", "-c", resume), timeout_s=90).ok()
    again = read_summary(only_run(tmp_path / "runs"))
    assert (again["step"], again["world_size"]) == (summary["step"] + 2, 2)


def start_elastic(hosts: TwoHosts, index: int, *words: str | Path) -> ranks.Running:
    """Start the torchrun of one host, in a run of one or two; words: of torchrun and the script."""
    argv = ["torchrun", "--nnodes=1:2", "--nproc_per_node=1", "--max_restarts=3"]
    # WHY 10 s: if the agents came together too late, each would begin a run folder of its own
    argv += ["--rdzv_backend=c10d", "--rdzv_conf=last_call_timeout=10"]
    argv += [f"--local_addr={ADDRESSES[index]}"]
    # WHY: torch 2.13's agents wait for each other for ever when a node joins and they share it
    env = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return start_program([*argv, *words], host=hosts.host(index), env=env)


def await_steps(running: ranks.Running, output: Path, *, num_ranks: int) -> None:
    running.wait_for(
        lambda: run_folder.ranks_of_newest_start(output) == num_ranks,
        timeout_s=120,
        what=f"{num_ranks} ranks",
    )
    begin = run_folder.last_step(output)
    running.wait_for(lambda: is_past(output, begin + 5), timeout_s=60, what="their steps")


@pytest.mark.slow
def test_a_dead_host_of_rank_0_changes_only_the_speed(hosts: TwoHosts, tmp_path: Path) -> None:
    output = tmp_path / "runs"
    # Without --rdzv_id: with the id that all jobs have.
    job = ["--rdzv_endpoint=node1:29702", "ddp_training.py", *ELASTIC, *PACED]
    job += ["--timeout_s", "40", "--output_dir", str(output)]
    with start_elastic(hosts, 1, *job) as second, start_elastic(hosts, 0, *job) as first:
        await_steps(second, output, num_ranks=2)
        lock = json.loads((only_run(output) / LOCK_NAME).read_text())
        assert lock["mark"]["host"] == "node0"
        for pid in (first.pid, *first.living_ranks()):
            kill(pid)
        first.wait(timeout_s=20)
        await_steps(second, output, num_ranks=1)
        second.kill(0, signal.SIGTERM)
        completed = second.wait(timeout_s=60)
    assert "an earlier attempt of this job" in completed.output
    summary = read_summary(only_run(output))
    assert summary["status"] == "stopped"
    found = samples_by_step(only_run(output))
    # As many as at the start: 24 of two ranks, or 12 if one host came too late for it.
    global_batch = len(found[0])
    assert global_batch in (12, 24)
    alone = [*ELASTIC, "--batch_size", str(global_batch), "--model", "mlp", "--run_name", "run"]
    alone += ["--max_steps", str(summary["step"])]
    train([*alone, "--output_dir", tmp_path / "alone"], 1).ok()
    assert found == samples_by_step(tmp_path / "alone" / "run")


@pytest.mark.parametrize(
    ("name", "job"),
    [("node0", "of-nobody-else"), ("node1", "shared")],
    ids=["same name", "elastic"],
)
@pytest.mark.slow
def test_a_lock_is_taken_over_from_a_dead_host_and_never_from_a_living_one(
    name: str, job: str, hosts: TwoHosts, tmp_path: Path
) -> None:
    hold = ["python", "-c", PROGRAMS["hold a lock"], tmp_path]
    second, host = [*hold, job], hosts.host(1, name=name)
    with start_program([*hold, "shared", "stay"], host=hosts.host(0)) as first:
        first.wait_for(lambda: "has the lock" in first.stdout, timeout_s=60, what="the lock")
        refused = run_program(second, host=host, timeout_s=60)
        assert refused.status == 1
        assert f"is in use by process {first.pid} on host node0" in refused.output
        first.kill(0, signal.SIGKILL)
        first.wait(timeout_s=20)
    after = run_program(second, host=host, timeout_s=60)
    if job == "shared":
        assert "has the lock" in after.ok().output
    else:  # another machine of that name: only a person can know that it is dead
        assert "is in use by process" in after.output


@pytest.mark.slow
def test_mpirun_on_two_hosts_agrees_on_a_place_to_meet(hosts: TwoHosts, tmp_path: Path) -> None:
    if shutil.which("mpirun.openmpi") is None:
        pytest.skip("Open MPI is not installed on this machine (see .ci/run)")
    agent = make_ssh(hosts, tmp_path / "agent")
    argv = ["mpirun.openmpi", "--host", "node0,node1", "-np", "2", "--mca", "plm_rsh_agent", agent]
    argv += ["-x", "PATH", "python", "launchers/run_with_mpirun.py", "--folder", tmp_path / "meet"]
    argv += [*["ddp_training.py", *RUN], "--output_dir", tmp_path / "runs"]
    done = run_command(hosts.on(0, *argv), timeout_s=150, env=MPI_ON_TWO_HOSTS).ok()
    shown = [line for line in done.stdout.splitlines() if line.startswith("host ")]
    assert shown == [
        f"host node{r}  rank {r}  local rank 0  world size 2  device cpu" for r in (0, 1)
    ]
    assert read_summary(only_run(tmp_path / "runs"))["world_size"] == 2
    assert not list((tmp_path / "meet").iterdir())


@pytest.mark.slow
def test_a_cut_cable_is_told_on_both_hosts_in_the_timeout(hosts: TwoHosts, tmp_path: Path) -> None:
    words = ["--cpu_only", "--epochs", "1000", "--log_interval", "1", "--timeout_s", str(TIMEOUT_S)]
    folders = [tmp_path / "node0", tmp_path / "node1"]
    argvs = [["python", "ddp_training.py", *words, "--output_dir", f] for f in folders]
    with (
        start_program(argvs[0], host=hosts.host(0), env=by_hand(0)) as first,
        start_program(argvs[1], host=hosts.host(1), env=by_hand(1)) as second,
    ):
        first.wait_for(lambda: [*folders[0].glob("*/metrics.jsonl")], timeout_s=90, what="a step")
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
    assert run_folder.find_checkpoints(folders[0])


WHERE = "where rank 0 of 2 should be"
# what is wrong: the rank that comes, where it looks for rank 0, and what it says
FAILED_RENDEZVOUS = {
    "no rank 0": (1, ADDRESSES[0], f"tried 10.77.0.1:29700 for 4 s, {WHERE}: Connection refused"),
    "no such name": (1, "node7", f"tried node7:29700 for 4 s, {WHERE}: Name or service not known"),
    "no rank 1": (0, ADDRESSES[0], "of 2 ranks these never joined: [1]. Joined: rank 0 (process"),
    "rank 0 elsewhere": (0, ADDRESSES[1], "tried 10.77.0.2:29700 for 4 s"),
}


@pytest.mark.parametrize("what", slow_after(1, FAILED_RENDEZVOUS))
def test_a_failed_rendezvous_says_what_it_tried(what: str, hosts: TwoHosts, tmp_path: Path) -> None:
    rank, address, text = FAILED_RENDEZVOUS[what]
    env = by_hand(rank, address=address)
    argv = ["python", "ddp_training.py", "--cpu_only", "--timeout_s", "4", "--output_dir", tmp_path]
    done = run_program(argv, host=hosts.host(rank), timeout_s=60, env=env)
    assert done.status == 1, done.output
    assert "[DDP-G01]" in done.output
    assert text in done.output
    assert "Traceback" not in done.output
    assert "[W" not in done.output, "torch's warnings bury it"


def make_ssh(hosts: TwoHosts, path: Path) -> Path:
    """Make a program that runs a command on a host as ssh does."""
    on_host = [shlex.join(hosts.on(index, "bash", "-c")) for index in (0, 1)]
    cases = "\n".join(f'node{i}) exec {words} "${{*:2}}" ;;' for i, words in enumerate(on_host))
    path.write_text(f'#!/bin/bash\ncase "$1" in\n{cases}\nesac\n')
    path.chmod(0o755)
    return path


def make_ssh_settings(folder: Path) -> Path:
    """Make keys for a server and its user, and the settings of both; give the user's."""
    for name in ("host_key", "user_key"):
        argv = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(argv, check=True, timeout=20)
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)  # the server insists on it
    # WHY no StrictModes: it would refuse keys below a folder that all may write to, such as /tmp
    for name in ("sshd", "ssh"):
        text = PROGRAMS[f"settings of {name}"].replace("FOLDER", str(folder))
        (folder / f"{name}_config").write_text(text)
    return folder / "ssh_config"

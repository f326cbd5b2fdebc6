"""Every command that is printed works when it is pasted where the user stands.

Each situation is a real command in a folder of the user's own, with a space in its name, in a shell
in which no environment is active. The commands that it prints are pasted into a shell there.
The commands of Slurm: test_slurm.py.
"""

import os
import re
import shlex
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from ddp_drills.faults import all_faults
from hardened_ddp.ranks.launch import read_launch
from hardened_ddp.settings import typed_command
from hardened_ddp.settings.typed_command import SCRIPT, StartCommand, own_command
from hardened_ddp.training.survivor_save import read_failures
from tests.harness import ranks
from tests.harness.processes import ROOT
from tests.harness.ranks import held_port, run_command, run_program, start_command, start_program
from tests.launcher_environments import environment_of
from tests.run_folder import only_run, read_summary

PYTHON = sys.executable
TORCHRUN_HERE = str(Path(PYTHON).parent / "torchrun")
SYSTEM_PATH = "/usr/bin:/bin"
TRAIN = ["--cpu_only", "--model", "mlp", "--num_workers", "0", "--max_steps", "3"]
TRAIN += ["--run_name", "r", "--no_tensorboard"]
TWO_RANKS = [PYTHON, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
LIMIT_S = 120
# What stands for something that the reader is to fill in.
PLACEHOLDER = re.compile(
    r"\b(?:NAME|PATH|FILE|FOLDER|LOG|RUN|HOST|PORT|N|COMMAND|ADDRESS)\b|[<>]|\.\.\. "
)
# Where a command begins in a line: a program of this Python, of a launcher or of the system.
PROGRAMS = r"(?:\(cd |env |srun |mpirun |python |torchrun |rm |source |zcat |[^ ']*/bin/python"
PROGRAMS += r"|'[^'\n]*/bin/python')"
COMMAND = re.compile(rf"(?:^ *|: |-> )({PROGRAMS}.*)$", re.MULTILINE)


class Shell:
    """A user's folder and shell: no environment is active, and the folder is not the clone."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.env = folder, {"PATH": SYSTEM_PATH}

    def run(self, *words: str | Path, **variables: str) -> ranks.Finished:
        env = self.env | variables
        return run_command(words, timeout_s=LIMIT_S, cwd=self.folder, env=env)

    def paste(self, command: str, **variables: str) -> ranks.Finished:
        """Run a printed command in bash; one of this Python is forked, which saves its imports."""
        words, env = shlex.split(command), self.env | variables
        if words[0] not in (PYTHON, TORCHRUN_HERE) or re.search(r"launchers/|[|&;<>]", command):
            return self.run("bash", "-c", command, **variables)
        return run_program(words, timeout_s=LIMIT_S, cwd=self.folder, env=env)


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    folder = tmp_path / "my own folder"
    folder.mkdir()
    return Shell(folder)


def commands_in(text: str) -> list[str]:
    """Give all commands that a text tells the user to type, each once."""
    found = list(dict.fromkeys(match[1] for match in COMMAND.finditer(text)))
    assert not [command for command in found if PLACEHOLDER.search(command)]
    return found


def command_after(text: str, label: str) -> str:
    """Give the command that a line of a text has after some words."""
    [line] = {line.partition(label)[2].strip() for line in text.splitlines() if label in line}
    assert not PLACEHOLDER.search(line), line
    return line


def trains_on(shell: Shell, command: str, *, step: int = 5, **variables: str) -> None:
    """Paste a command, and more steps, up to this one; check that two ranks did them."""
    end = ")" * command.endswith(")")  # of "(cd FOLDER && COMMAND)"
    done = shell.paste(f"{command.removesuffix(')')} --max_steps {step}{end}", **variables).ok()
    assert "2 ranks" in done.output
    summary = read_summary(only_run(shell.folder / "runs"))
    assert (summary["status"], summary["step"]) == ("finished", step)
    assert summary["world_size"] == 2


# What needs no training: mistakes, and the commands that look at files.

QUICK = {
    "two wrong values": ["--epochs", "0", "--seed", "x"],
    "an unknown option of a command": ["explain", "--loud", "x"],
    "watch too often": ["watch", "--every", "0"],
    "an unknown drill": ["drill", "no-such"],
    "audit with a wrong number": ["audit", "--steps", "0", "--", "true"],
}


@pytest.mark.parametrize("situation", QUICK)
def test_what_a_mistake_says_to_type_next_works(situation: str, shell: Shell) -> None:
    says = "usage: " if situation != "an unknown drill" else f"{len(all_faults())} drills"
    done = shell.run(PYTHON, SCRIPT, *QUICK[situation])
    assert done.status == 2
    [command] = commands_in(done.output)
    assert shell.paste(command).ok().stdout.startswith(says)


def test_a_cut_archive_is_read_as_far_as_it_goes_by_the_command_that_is_named(shell: Shell) -> None:
    import gzip

    text = "x\n" * 40_000 + "RuntimeError: CUDA error: device-side assert triggered\n" * 2000
    cut = shell.folder / "a log.gz"
    cut.write_bytes(gzip.compress(text.encode(), compresslevel=0)[:-100])
    done = shell.run(PYTHON, SCRIPT, "explain", cut.name)
    assert done.status == 2
    [command] = commands_in(done.output)
    assert "assert" in shell.paste(command).stdout


def test_explain_and_watch_name_commands_that_work(shell: Shell) -> None:
    run = shell.folder / "runs" / "r"
    (run / "logs").mkdir(parents=True)
    lost = "[DDP-G04] rank 0 lost another rank. Cause: rank 1: it was killed\n"  # and no status
    (run / "logs" / "rank_0.log").write_text(lost)
    status = '{"rank": 0, "state": "running", "now": 1.0, "world_size": 2, "every_s": 1, '
    (run / "status").mkdir()
    (run / "status" / "rank-0.json").write_text(status + '"launcher": "torchrun", "num_nodes": 1}')
    watched = shell.run(PYTHON, SCRIPT, "watch", "--once")
    assert watched.status == 1
    why = shell.paste(command_after(watched.stdout, "why: ")).stdout
    assert "ended without a word" in why
    resume = command_after(watched.stdout, "continue: ")
    assert command_after(why, "to continue: ") == resume
    assert "--nproc_per_node=2" in resume
    assert resume.endswith("--resume runs/r")


def test_a_command_fits_where_the_user_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "my env" / "bin"
    own.mkdir(parents=True)
    for name in ("python", "torchrun"):
        (own / name).touch(mode=0o755)
    monkeypatch.setattr("sys.executable", str(own / "python"))
    monkeypatch.setenv("PATH", str(own))
    monkeypatch.chdir(tmp_path)
    script = shlex.quote(str(SCRIPT))
    assert own_command("doctor") == f"python {script} doctor"
    assert own_command("explain", tmp_path / "a b") == f"python {script} explain 'a b'"
    torchrun = (str(own / "torchrun"), "--standalone", "x.py")
    assert StartCommand(torchrun, str(tmp_path)).typed("--a") == "torchrun --standalone x.py --a"
    noted = StartCommand(("srun", "x"), str(tmp_path), note="on each node")
    assert noted.typed() == "srun x   # on each node"
    monkeypatch.setenv("PATH", "/nowhere")  # in a new shell no environment is active
    assert own_command("doctor") == f"'my env/bin/python' {script} doctor"
    assert typed_command.pip_command("requirements.txt").startswith(
        "'my env/bin/python' -m pip install -r "
    )
    monkeypatch.chdir(own)
    assert own_command("doctor") == f"./python {script} doctor"
    assert typed_command.shell_command("rm", Path("-r")) == "rm ./-r"
    # A run is continued in its own folder: there are its data, and the user's modules.
    elsewhere = StartCommand((str(own / "python"), "x.py"), str(tmp_path)).typed("--a", Path("b"))
    home = shlex.quote(str(tmp_path))
    assert elsewhere == f"(cd {home} && '{own}/python' x.py --a '{own}/b')"
    # launch_examples.sh went into the project's folder; its user did not.
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", [str(SCRIPT)])
    project = shlex.quote(str(ROOT))
    assert own_command("doctor") == f"(cd {project} && '{own}/python' {script} doctor)"


def test_a_command_that_no_ancestor_shows_is_composed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", [str(SCRIPT)])
    monkeypatch.setattr("os.getppid", lambda: 2**22 + 1)  # it has ended
    nodes = "AGENT GROUP_RANK=1 MASTER_ADDR=gpu1"
    sbatch = {"HARDENED_DDP_LAUNCHER_COMMAND": "env 'A=a b' sbatch train.slurm"}
    srun = "srun --ntasks=4 --nodes=2 --ntasks-per-node=2 --partition=a "
    starts = {
        "--standalone --nproc_per_node=2 ": "TORCHRUN WORLD_SIZE=2",
        "--nnodes=2 --node_rank=1 --master_addr=gpu1 --master_port=29500 --nproc_per_node=2": nodes,
        "env PET_NNODES=2 ": f"{nodes} PET_NNODES=2",
        srun: "SRUN SLURM_JOB_PARTITION=a",
        "mpirun -np 2 ": "OPEN_MPI",
        "run_with_python.py --nproc 2 ": "TORCHRUN WORLD_SIZE=2 HARDENED_DDP_LAUNCHER=spawn",
        "env 'A=a b' sbatch train.slurm --resume x": "SRUN",
    }
    for words, names in starts.items():
        env = environment_of(names) | (sbatch if "sbatch" in words else {})
        command = read_launch(env).command("--resume", "x")
        assert words in command.replace("py' ", "py ")  # the project may be in a path with a space
        assert ("   # on each of the 2 nodes" in command) == ("nnodes" in words.lower())


# What trains. The commands of all ends of a run are those of its first one.


LAST_LINES = ("resume: ", "evaluate: ", "export: ", "TensorBoard: ")
SPAWN = [PYTHON, ROOT / "launchers/run_with_python.py", "--no_lesson", "--nproc", "2", SCRIPT]


@pytest.mark.slow
def test_a_stopped_run_is_resumed_by_the_launcher_that_started_it(shell: Shell) -> None:
    """Here run_with_python.py; of launch.py: test_two_hosts.py."""
    runs = shell.folder / "runs"
    argv = [*SPAWN, *TRAIN, "--max_steps", "100000", "--stop_status", "3"]
    with start_command([*argv, "--output_dir", runs], cwd=shell.folder, env=shell.env) as running:
        metrics = runs / "r/metrics.jsonl"
        running.wait_for(metrics.exists, timeout_s=LIMIT_S, what="a step")
        running.kill(number=signal.SIGTERM)
        stopped = running.wait(LIMIT_S)
    assert stopped.status == 3, stopped.describe()  # as the ranks noted
    summary = read_summary(only_run(runs))
    assert summary["status"] == "stopped"
    assert not read_failures(only_run(runs))
    trains_on(shell, command_after(stopped.output, "resume: "), step=summary["step"] + 2)


@pytest.mark.slow
def test_after_a_dead_rank_what_is_said_to_do_works(shell: Shell) -> None:
    words = [*TWO_RANKS, SCRIPT, *TRAIN[:-1]]
    words[words.index("--max_steps") + 1] = "100000"
    with start_command(words, cwd=shell.folder, env=shell.env) as command:
        metrics = shell.folder / "runs/r/metrics.jsonl"
        command.wait_for(metrics.exists, timeout_s=LIMIT_S, what="a step")
        pid = command.wait_for(lambda: command.pid_of_rank(1), timeout_s=30, what="rank 1")
        os.kill(pid, signal.SIGKILL)
        died = command.wait(timeout_s=60)
    assert died.status == 1
    assert "rank 1" in shell.paste(command_after(died.output, "why: ")).stdout.lower()
    resume = command_after(died.output, "to resume: ")
    watched = shell.run(PYTHON, SCRIPT, "watch", "--once", "r")
    assert command_after(watched.stdout, "continue: ").split()[-2:] == resume.split()[-2:]
    step = int(died.output.partition("the state after step ")[2].split()[0])
    done = shell.paste(f"{resume} --max_steps {step + 2}").ok()
    assert f"resuming runs/r from step {step}" in done.output
    found = {label: command_after(done.output, label) for label in LAST_LINES}
    trains_on(shell, found["resume: "], step=step + 4)
    assert "accuracy" in shell.paste(found["evaluate: "]).ok().stdout
    shell.paste(found["export: "]).ok()
    assert list(shell.folder.glob("exports/*/model.safetensors"))
    assert "graph" in shell.paste(f"{found['TensorBoard: ']} --inspect").ok().output


@pytest.mark.slow
@pytest.mark.parametrize(
    "variables",
    [{"RANK": "0", "LOCAL_RANK": "0"}, {"PET_NNODES": "1", "PET_NPROC_PER_NODE": "2"}],
    ids=["half an environment", "an operator without torchrun"],
)
def test_a_refused_start_names_the_right_ones(variables: dict[str, str], shell: Shell) -> None:
    words = [word for word in TRAIN if word not in ("--run_name", "r")]
    refused = shell.run(PYTHON, SCRIPT, *words, **variables)
    assert refused.status == 2
    found = commands_in(refused.output.replace("  or in one process: ", "").replace("  next: ", ""))
    for command, expected in zip(found, ("2 ranks", "1 rank"), strict=True):
        assert expected in shell.paste(command, **variables).ok().output


@pytest.mark.slow
def test_a_port_that_is_taken_is_left_by_the_command_that_is_named(shell: Shell) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(holder.getsockname()[1])}
        refused = shell.run(PYTHON, SCRIPT, *TRAIN, **names)
        assert refused.status == 1
        done = shell.paste(command_after(refused.output, "takes a free one: "), **names).ok()
    assert "2 ranks" in done.output


def in_pods(start: Callable[..., ranks.Running], shell: Shell, words: Sequence[str | Path]) -> str:
    """Run one process for each of two pods of an operator, which says nothing of local ranks."""
    given = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held_port())}
    given |= {"GLOO_SOCKET_IFNAME": "lo", **shell.env}
    envs = [{"RANK": rank, **given} for rank in "01"]
    pods = [start(words, cwd=shell.folder, env=env) for env in envs]
    first, _ = [pod.wait(timeout_s=LIMIT_S).ok() for pod in pods]
    return first.output


@pytest.mark.slow
def test_the_pods_of_an_operator_train_and_are_resumed_in_each(shell: Shell) -> None:
    output = in_pods(start_command, shell, [PYTHON, SCRIPT, *TRAIN])
    assert "2 ranks on 2 nodes, started by operator" in output
    command, _, note = command_after(output, "resume: ").partition("   # ")
    assert note == "in each of the 2 pods"
    in_pods(start_program, shell, [*shlex.split(command), "--max_steps", "5"])
    summary = read_summary(only_run(shell.folder / "runs"))
    assert (summary["step"], summary["world_size"]) == (5, 2)

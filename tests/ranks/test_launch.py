"""How the ranks meet, or end in one clear error; the GPU of each of them; what a start says."""

import logging
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from hardened_ddp.errors import DataError, HardenedError, LaunchError, RankMismatchError
from hardened_ddp.guard.stop import STOP_FILE
from hardened_ddp.ranks import device
from hardened_ddp.ranks import launch as launching
from hardened_ddp.ranks import rendezvous as meeting
from hardened_ddp.ranks.launch import Launch, prepare_environment, read_launch
from hardened_ddp.ranks.phase import Phase, Tracker
from hardened_ddp.reporting.log import start_logging, stop_logging, watch_start
from hardened_ddp.training.run_report import changed_settings, not_used_line
from tests.harness.processes import HOUR_S, ROOT, clean_environment, limit_of, wait_until
from tests.harness.ranks import held_port, run_command, run_ranks, start_training, train
from tests.launcher_environments import environment_of
from tests.marks import sections
from tests.ranks.test_shared_sum import rendezvous
from tests.run_folder import is_past, only_run, read_summary, saved_step
from tests.settings.given import settings_of

CPU = torch.device("cpu")
PROGRAMS = sections(Path(__file__).with_name("programs.txt"))
QUEUES = {"CUDA_SCALE_LAUNCH_QUEUES": "4x"}
STOPPED = "ddp_training.py: stopped by Ctrl-C; there was nothing to save\n"


def test_what_torch_reads_from_the_environment_is_set_unless_the_user_did() -> None:
    env = {"NCCL_SOCKET_IFNAME": "eth7", "OMP_NUM_THREADS": "2"}
    prepare_environment(Launch(world_size=2, num_nodes=1), env)
    assert env == {
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "eth7",
        "OMP_NUM_THREADS": "2",
        **QUEUES,
    }
    prepare_environment(Launch(world_size=4, num_nodes=2), env := {})
    assert env == {"OMP_NUM_THREADS": "1", **QUEUES}, "as torchrun sets it"
    prepare_environment(Launch(), env := {})
    assert env == QUEUES
    prepare_environment(Launch(), env := {"CUDA_SCALE_LAUNCH_QUEUES": "1x"})
    assert env == {"CUDA_SCALE_LAUNCH_QUEUES": "1x"}
    for given, value in (({}, ":4096:8"), ({"CUBLAS_WORKSPACE_CONFIG": "x"}, "x")):
        prepare_environment(Launch(), env := dict(given), deterministic=True)
        assert env["CUBLAS_WORKSPACE_CONFIG"] == value


def test_a_watched_run_keeps_nccl_from_ending_ranks_that_have_not_saved() -> None:
    name, two_nodes = "TORCH_NCCL_ASYNC_ERROR_HANDLING", Launch(world_size=16, num_nodes=2)
    for given, expected in (({}, "0"), ({name: "1"}, "0"), ({name: "3"}, "3")):  # 1: by torchrun
        env: dict[str, str] = dict(given)
        launching.keep_nccl_from_exiting(two_nodes, env)
        assert env[name] == expected
    # Whatever that says, its watchdog ends the process at an error of CUDA, and its monitor does
    # after a collective that was late by the clock.
    for end in ("RETHROW_CUDA_ERRORS", "ENABLE_MONITORING", "DUMP_ON_TIMEOUT"):
        for given, expected in (({}, "0"), ({f"TORCH_NCCL_{end}": "1"}, "1")):
            launching.keep_nccl_from_exiting(two_nodes, env := dict(given))
            assert env[f"TORCH_NCCL_{end}"] == expected
    assert int(env["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"]) < 1000
    launching.keep_nccl_from_exiting(Launch(), alone := {})
    assert not alone


def test_output_that_nobody_reads_any_more_is_no_error() -> None:
    reading, writing = os.pipe()
    os.close(reading)  # as head does after its lines
    with os.fdopen(writing, "w") as output:
        done = subprocess.run(
            [sys.executable, ROOT / "ddp_training.py", "--help"],
            stdout=output,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("imported", "status", "said"),
    [("hardened_ddp.settings.cli", -signal.SIGINT, ""), ("ddp_runs", 130, STOPPED)],
)
def test_ctrl_c_amid_imports_gives_no_traceback(imported: str, status: int, said: str) -> None:
    script = PROGRAMS["Ctrl-C amid imports"].replace("IMPORTED", imported)
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (status, said)


def test_a_name_server_that_is_silent_delays_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()
    monkeypatch.setattr(meeting.socket, "getaddrinfo", lambda *a, **k: answers.wait(60) and [])
    monkeypatch.setattr(meeting, "_ANSWER_LIMIT_S", 0.1)
    assert meeting.why_unreachable("node7", 29500) == "no answer for 0.1 s"
    answers.set()


def meet_with_wrong_numbers(rank: str, name: str, value: str) -> str:
    if os.environ["RANK"] == rank:
        os.environ[name] = value
    with pytest.raises(LaunchError) as caught:
        rendezvous(timeout_s=HOUR_S)
    return caught.value.message


@pytest.mark.parametrize(
    ("num_ranks", "rank", "name", "value", "texts"),
    [
        (3, "2", "RANK", "1", ["rank 1 (process ", " and rank 1 (process ", " both have RANK=1"]),
        (3, "2", "WORLD_SIZE", "4", ["rank 2 (process ", "has WORLD_SIZE=4 and backend gloo, and"]),
        (2, "0", "WORLD_SIZE", "4", ["rank 0 (process ", "has WORLD_SIZE=2 and backend gloo, and"]),
    ],
    ids=["one number twice", "it counts more", "rank 0 counts more"],
)
def test_ranks_that_are_numbered_wrongly_are_told_at_once_on_all(
    num_ranks: int, rank: str, name: str, value: str, texts: list[str]
) -> None:
    messages = run_ranks(meet_with_wrong_numbers, num_ranks, rank, name, value)
    assert len(set(messages)) == 1
    assert all(text in messages[0] for text in texts)


@pytest.mark.parametrize(("address", "is_v4"), [("10.0.0.1", True), ("::1", False), ("node", True)])
def test_clients_of_an_ipv4_address_are_not_looked_up_as_ipv6(address: str, is_v4: bool) -> None:
    launch = Launch(master_addr=address, master_port=held_port(), world_size=2, num_nodes=2)
    with socket.socket(fileno=meeting._listen(launch)) as listener:
        assert (listener.family == socket.AF_INET) == is_v4


def share_values() -> tuple[object, ...]:
    group = rendezvous()
    rank = group.launch.rank
    values = group.gather_json({"rank": rank, "text": "x" * rank})
    total = group.sum_(torch.tensor([float(rank)])).item()
    first = group.broadcast_(torch.tensor([rank + 5])).item()
    answer = group.run_on_main(lambda: {"from": rank}, what="asking")
    try:
        group.run_on_main(lambda: 1 // 0, what="dividing")
    except HardenedError as error:
        failure = error.message
    refuse = mock.Mock(side_effect=DataError("no such file", fix="look for it"))
    with pytest.raises(DataError, match="reading failed on rank 0: no such file") as caught:
        group.run_on_main(refuse, what="reading")
    assert caught.value.fix == "look for it"
    try:
        group.check_equal({"code": "a"} | ({"data": "bc"[not rank]} if rank < 2 else {}))
    except RankMismatchError as error:
        mismatch = error.message
    group.close()
    return values, total, first, answer, failure, mismatch


def test_ranks_share_values_results_and_errors_of_rank_0() -> None:
    results = run_ranks(share_values, 3)
    assert results[0] == results[1] == results[2]
    values, total, first, answer, failure, mismatch = results[0]
    assert values == [{"rank": rank, "text": "x" * rank} for rank in range(3)]
    assert (total, first, answer) == (3.0, 5, {"from": 0})
    error = "ZeroDivisionError: integer division or modulo by zero"
    assert failure == f"dividing failed on rank 0: {error}"
    assert "rank 1: data is 'b', rank 0 has 'c'; rank 2: data is None, rank 0 has 'c'" in mismatch


def test_a_stop_file_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    argv = ["--cpu_only", "--epochs", "1000", "--output_dir", str(tmp_path), "--log_interval", "1"]
    with start_training(argv, 2) as running:
        running.wait_for(lambda: is_past(tmp_path, 0), timeout_s=60, what="a step")
        stop = only_run(tmp_path) / STOP_FILE
        stop.touch()
        running.wait(60).ok()
    summary = read_summary(stop.parent)
    assert summary["status"] == "stopped"
    assert saved_step(tmp_path) == summary["step"]
    assert not stop.exists(), "the run that continues would stop at once"


def test_a_rank_outlives_the_thread_that_started_it() -> None:
    """A thread pool, Ray or a notebook starts ranks from threads that end at once."""
    started: list[subprocess.Popen[str]] = []

    def launch() -> None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        argv = [sys.executable, "-c", PROGRAMS["a rank that ends with its parent"]]
        rank = subprocess.Popen(argv, cwd=ROOT, env=clean_environment(), text=True, **pipes)
        assert rank.stdout.readline() == "ready\n"
        started.append(rank)

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    task = Path(f"/proc/self/task/{thread.native_id}")
    wait_until(lambda: not task.exists(), 10, "the end of the thread")
    with started[0] as rank:
        answer, _ = rank.communicate("still here\n", timeout=60)
        assert answer == "still here\n"
    assert rank.returncode == 0


# The GPUs that it sees, its local rank and environment, and the index of its GPU.
@pytest.mark.parametrize(
    "case",
    [
        (4, 2, "SRUN", 2),
        (4, 2, "SRUN SLURM_GPUS_PER_TASK=1 SLURM_GPU_BIND=none", 2),
        (1, 2, "SRUN SLURM_GPUS_PER_TASK=1", 0),
        (1, 2, "TORCHRUN CUDA_VISIBLE_DEVICES=2", 0),
        (2, 3, "TORCHRUN CUDA_VISIBLE_DEVICES=6,7", 0),
        (1, 2, "TORCHRUN", None),
    ],
)
def test_a_rank_takes_a_gpu_that_it_sees(case: tuple[int, int, str, int | None]) -> None:
    visible, local_rank, env, index = case
    has_own_gpus = read_launch(environment_of(env)).has_own_gpus
    launch = Launch(launcher="torchrun", local_rank=local_rank, has_own_gpus=has_own_gpus)
    gpu = {"is_available": lambda: True, "device_count": lambda: visible, "set_device": mock.Mock()}
    with mock.patch.multiple(torch.cuda, **gpu):
        if index is None:
            with pytest.raises(LaunchError, match="has no GPU"):
                device.pick_device(launch, cpu_only=False, backend="auto")
        else:
            picked = device.pick_device(launch, cpu_only=False, backend="auto")
            assert picked == torch.device("cuda", index)
    assert device.pick_device(launch, cpu_only=True, backend="auto") == torch.device("cpu")


def meet_with(backends: list[str], gpus: list[str]) -> str:
    launch = read_launch(os.environ)
    store = meeting.open_store(launch, timedelta(seconds=20))
    rank = launch.rank
    try:
        met = meeting.rendezvous(store, launch, 20.0, backend=backends[rank], gpu=gpus[rank])
    except LaunchError as error:
        return f"{error.message}; {error.fix}"
    met.set(f"done/{rank}", "")
    if launch.is_main:  # which serves the store
        met.wait([f"done/{rank}" for rank in range(launch.world_size)])
    return ""


BLIND = ["rank 1 (process ", "has WORLD_SIZE=3 and backend gloo, and rank 0 (", "nvidia-smi"]
SAME = ["rank 0 (process ", "rank 2 (process ", " both have the GPU GPU-a; ", "as it has GPUs"]


@pytest.mark.parametrize(
    ("backends", "gpus", "told"),
    [
        (["nccl", "gloo", "nccl"], ["GPU-a", "", "GPU-c"], BLIND),
        (["nccl"] * 3, ["GPU-a", "GPU-b", "GPU-a"], SAME),
        (["nccl"] * 2, ["GPU-a", "GPU-b"], []),
        (["gloo"] * 2, ["", ""], []),
    ],
    ids=["one without", "one GPU twice", "one each", "none"],
)
def test_ranks_without_a_gpu_of_their_own_are_told_on_all_before_nccl_hangs(
    backends: list[str], gpus: list[str], told: list[str]
) -> None:
    for text in run_ranks(meet_with, len(gpus), backends, gpus):
        assert bool(text) == bool(told)
        assert all(words in text for words in told)


class Driver:
    """CUDA's driver, as ctypes gives it."""

    def __init__(self, status: int) -> None:
        self.cuEventQuery = lambda handle: status


@pytest.mark.parametrize(
    ("status", "is_there"), [(0, True), (600, False), (719, "by torch"), (None, "by torch")]
)
def test_an_event_is_asked_for_without_the_gil_and_an_error_by_torch(
    status: int | None, is_there: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = SimpleNamespace(cuda_event=0x7F00, query=lambda: "by torch")
    driver = None if status is None else Driver(status)
    monkeypatch.setattr(device, "_driver", lambda: driver)
    assert device.is_reached(event) == is_there


def open_with_few_files() -> int:
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    rendezvous().close()
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_the_limit_of_open_files_is_raised_before_the_ranks_connect() -> None:
    assert min(run_ranks(open_with_few_files, 2)) > 128


def test_a_start_says_what_runs_and_debug_what_each_rank_does(tmp_path: Path) -> None:
    argv = ["--cpu_only", "--max_steps", "3", "--epochs", "1", "--log_interval", "2", "--debug"]
    finished = train([*argv, "--output_dir", tmp_path, "--run_name", "r"], 2).ok()
    [main, other] = finished.outputs
    lines = [line.partition("] ")[2] for line in main.splitlines()]
    at = next(n for n, line in enumerate(lines) if line.startswith("2 ranks, started by torchrun:"))
    assert "CPU, backend gloo" in lines[at]
    assert "model simple_cnn: 53,002 parameters; dataset digits: 1,437 samples" in lines[at + 1]
    assert lines[at + 1].endswith("64 per step = 2 x 32; 3 steps")
    assert "task classification" in lines[at + 2]
    assert lines[at + 3].startswith("settings: command line: cpu_only true, epochs 1, max_steps 3")
    assert at + 3 < next(n for n, line in enumerate(lines) if line.startswith("epoch 1/1 step 2/3"))
    assert any(line.startswith("step 3 done: test loss") for line in lines)
    assert "2 ranks, started by" not in other
    for rank, output in enumerate(finished.outputs):
        written = (tmp_path / "r" / "logs" / f"rank-{rank}.log").read_text(encoding="utf-8")
        for text in (output, written):
            assert "start: building the model: " in text
            assert f"local rank {rank} of 2, device cpu" in text


@pytest.mark.parametrize(
    "words", [["ddp_training.py", "--cpu_only"], ["launchers/run_with_python.py", "--nproc", "2"]]
)
def test_without_the_environment_the_next_command_is_told(words: list[str], tmp_path: Path) -> None:
    text = "raise ModuleNotFoundError('No module named torch', name='torch')\n"
    (tmp_path / "torch.py").write_text(text)
    script = ROOT / words[0]
    env = {"PYTHONPATH": str(tmp_path)}
    done = run_command([sys.executable, script, *words[1:]], timeout_s=60, cwd=tmp_path, env=env)
    assert done.status == 2
    assert f"{sys.executable} has no package torch" in done.stderr
    assert re.search(rf"source '?{re.escape(str(ROOT))}/\.venv/bin/activate", done.stderr)
    assert "Traceback" not in done.output


def test_garbage_is_looked_for_in_what_a_run_makes_and_not_in_what_was_imported() -> None:
    """In a process of its own: the objects of this one must stay as they are."""
    code = sections(Path(__file__).with_name("programs.txt"))["garbage"]
    run_command(["python", "-c", code], timeout_s=30).ok()


def test_settings_name_who_changed_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text("epochs: 3\nseed: 0\n\nbatch_size: 8\n")
    found = settings_of("--config my.yaml --cpu_only --amp auto")
    sources = {**found.sources, "epochs": "run"}
    assert changed_settings(replace(found, sources=sources)) == [
        "command line: cpu_only true",
        "my.yaml: batch_size 8",
        "the continued run: epochs 3",
    ]
    assert changed_settings(settings_of("")) == []
    edited = replace(found, not_used={"seed": "config.yaml:2"})
    assert not_used_line(edited).startswith("not used: seed (config.yaml:2): the continued run")
    assert not_used_line(edited).endswith("give it as a flag: --seed VALUE")
    many = settings_of(
        "--seed 1 --epochs 2 --batch_size 3 --momentum 0.1 --learning_rate 1 --weight_decay 1 "
        "--max_steps 9 --warmup_steps 3 --keep_last 1 --log_interval 2 --eval_every 2 --ledger "
        "--drop_last --augment"
    )
    [line] = changed_settings(many)
    assert line.endswith(" and 2 more")


def test_a_long_part_of_the_start_gives_a_sign_of_life(caplog: pytest.LogCaptureFixture) -> None:
    tracker = Tracker()
    caplog.set_level(logging.INFO, logger="hardened_ddp")
    start_logging(rank=0, world_size=1)
    is_over = watch_start(tracker, first_sign_s=0.02)
    [thread] = [each for each in threading.enumerate() if each.name == "start-up"]
    try:
        for begin, name, part in (
            (tracker.begin, "opening the dataset", "opening the dataset: "),
            (tracker.enter, Phase.FORWARD, "the first step, forward: "),
            (tracker.enter, Phase.ALL_REDUCE, "the first step, forward, waiting for other ranks: "),
        ):
            begin(name)
            wait_until(lambda part=part: part in caplog.text, 10, part)
        tracker.end_step(1)
        thread.join(limit_of(10))
        assert not thread.is_alive(), "it ends with the first step"
    finally:
        is_over.set()
        stop_logging()

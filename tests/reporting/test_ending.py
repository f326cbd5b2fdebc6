"""What a run leaves at its end: its status for a scheduler, torchrun's last block, an account.

The account is of its wall time: every second is somewhere, over all attempts.
"""

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

import ddp_training
from hardened_ddp.errors import PeerLostError, SampleError, StepError
from hardened_ddp.ranks.launch import Launch
from hardened_ddp.ranks.phase import Phase, Tracker
from hardened_ddp.reporting import ending, goodput
from hardened_ddp.reporting.ending import MOST_STARTS, RECORD, RUN, read_endings, settle
from hardened_ddp.reporting.goodput import NAME, Goodput, account_of, read_attempts
from tests.harness.ranks import train

POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "0", "RANK": "0"}
Capture = pytest.CaptureFixture[str]
SPENT = {"start_up": 2.0, "data_wait": 1.0, "training": 10.0, "evaluation": 1.0, "checkpoint": 1.0}


def attempt(began_at: float, *, first_step: int, step: int) -> dict[str, float]:
    times = {"began_at": began_at, "now": began_at + sum(SPENT.values()), **SPENT}
    return {**times, "first_step": first_step, "step": step}


def write_attempts(folder: Path, *steps: tuple[int, int]) -> None:
    """Write the attempts of a run: the first and the last step of each."""
    lines = [attempt(20.0 * i, first_step=a, step=b) for i, (a, b) in enumerate(steps)]
    (folder / NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("steps", "count"),
    [
        ([], 0),
        ([(0, 0)], 1),
        ([(0, 5), (5, 5), (5, 5)], 2),
        ([(0, 9), (5, 8), (7, 8)], 1),  # the second saved what the third begins with
        ([(0, 9), (5, 8), (5, 8), (5, 10)], 0),
    ],
)
def test_starts_that_got_no_further_are_counted(steps: list[tuple[int, int]], count: int) -> None:
    found = [{"first_step": first, "step": last} for first, last in steps]
    assert goodput.num_without_progress(found) == count


def test_a_stop_is_3_in_a_pod_or_as_asked_and_no_progress_is_1(tmp_path: Path) -> None:
    env = {RUN: str(tmp_path)}
    write_attempts(tmp_path, (0, 5), *[(5, 5)] * (MOST_STARTS - 1))
    assert [settle(status, env) for status in (0, 1, 2, 3, 75)] == [0, 1, 2, 3, 75]
    write_attempts(tmp_path, (0, 5), *[(5, 5)] * MOST_STARTS)
    assert [settle(status, env) for status in (0, 1, 2, 3, 75)] == [0, 1, 2, 1, 1]
    assert (ending.stop_status(None, {}), ending.stop_status(None, POD)) == (0, 3)
    assert (ending.stop_status(0, POD), ending.stop_status(3, {})) == (0, 3)


def test_a_stopped_rank_of_torchrun_is_0(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    record = tmp_path / "endings.jsonl"
    assert settle(3, {**TORCHRUN, RECORD: str(record)}) == 0
    assert read_endings(record)[0] == 3
    assert "hardened-ddp" not in caplog.text
    assert settle(3, TORCHRUN) == 0
    assert "torchrun ends with 0, as if finished: use hardened-ddp" in caplog.text
    assert settle(75, TORCHRUN) == 75


@pytest.mark.parametrize(
    ("noted", "status"),
    [
        *(([0, 0], 0), ([3, 3], 3), ([75, 2], 2), ([75, 3], 75), ([139], 139), ([], None)),
        ([75, 1, 75], 1),  # who raised, not who lost it
    ],
)
def test_the_cause_decides_the_status(noted: list[int], status: int | None, tmp_path: Path) -> None:
    record = tmp_path / "endings.jsonl"
    for code in noted:
        settle(code, {**TORCHRUN, RECORD: str(record)})
    assert read_endings(record)[0] == status


def test_the_last_attempt_counts_and_of_its_errors_that_of_the_cause(tmp_path: Path) -> None:
    env: dict[str, Any] = {**TORCHRUN, RECORD: str(tmp_path / "endings.jsonl")}
    settle(75, env)
    env |= {"TORCHELASTIC_RESTART_COUNT": "1"}
    settle(0, env)
    ending.write_error_file(PeerLostError("rank 1 is gone"), env)
    ending.write_error_file(SampleError("sample 7 is broken"), env)
    status, error = read_endings(tmp_path / "endings.jsonl")
    assert status == 0
    assert "sample 7" in error


def test_the_termination_log_of_a_pod_has_the_error_and_fits(tmp_path: Path) -> None:
    path = tmp_path / "termination-log"
    env = {"HARDENED_DDP_TERMINATION_LOG": str(path)}
    ending.write_termination_log("x", POD | env)
    assert not path.exists()  # the kubelet makes it; nobody else's file is made
    path.touch()
    ending.write_termination_log("x", env)
    assert path.read_bytes() == b""
    ending.write_error_file(SampleError("y" * 9000), POD | env)
    assert path.read_bytes().startswith(b"SampleError: [DDP-D02] yyy")
    assert len(path.read_bytes()) == 4000


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Make the environment that torchrun gives a rank."""
    return {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}


def test_the_cause_alone_writes_torchruns_error_file(env: dict[str, str]) -> None:
    path = Path(env["TORCHELASTIC_ERROR_FILE"])
    ending.write_error_file(PeerLostError("rank 0 lost another rank"), env)
    assert not path.exists()
    ending.write_error_file(StepError("rank 1, step 4", fix="look at its log"), env)
    info = json.loads(path.read_text())["message"]["extraInfo"]
    assert info["py_callstack"] == "StepError: [DDP-S01] rank 1, step 4\n  next: look at its log"
    assert int(info["timestamp"]) > 0
    ending.write_error_file(
        StepError("x"), {"TORCHELASTIC_ERROR_FILE": "/no/x.json"}
    )  # does not raise


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_mistake_in_the_settings_is_printed_once_per_node(
    rank: str, env: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2"}
    launched |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    launched |= {"TORCHELASTIC_RUN_ID": "none"}
    for name, value in (launched | env).items():
        monkeypatch.setenv(name, value)
    assert ddp_training.main(["--bach_size", "3"]) == 2
    assert ("bach_size" in capsys.readouterr().err) == (rank == "0")
    assert "DDP-C01" in Path(env["TORCHELASTIC_ERROR_FILE"]).read_text()


def test_steps_done_twice_are_lost_and_the_time_between_attempts_is_down() -> None:
    # The first did 100 steps, and the second went on from 80; 5 s lie between them.
    account = account_of(
        [attempt(100, first_step=0, step=100), attempt(120, first_step=80, step=200)]
    )
    assert account["lost"] == pytest.approx(2.0)
    assert account["training"] == pytest.approx(18.0)
    assert account["down"] == pytest.approx(5.0)
    assert account["wall"] == pytest.approx(35.0)
    assert account["goodput"] == pytest.approx(18 / 35)
    # an attempt that kept nothing is lost whole
    attempts = [attempt(0, first_step=50, step=60), attempt(20, first_step=40, step=70)]
    assert account_of(attempts)["lost"] == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("ended", "restart", "down"),
    [("stopped", 0, 0), ("finished", 0, 0), ("stopped", 1, 5), ("", 0, 5)],
    ids=["stopped-by-hand", "continued", "requeued", "killed"],
)
def test_a_pause_between_starts_by_hand_is_not_down(ended: str, restart: int, down: float) -> None:
    first = {**attempt(100, first_step=0, step=100), "ended": ended}
    second = {**attempt(120, first_step=100, step=200), "restart": restart}
    account = account_of([first, second])
    assert account["down"] == pytest.approx(down)
    assert account["wall"] == pytest.approx(30 + down)


def test_every_second_is_in_one_phase(tmp_path: Path) -> None:
    began_at = time.time() - 3
    tracker = Tracker()
    goodput = Goodput(tmp_path, tracker, Launch(started_at=began_at), step=0)
    tracker.enter(Phase.FORWARD)
    with tracker.within(Phase.ALL_REDUCE), tracker.within(Phase.CHECKPOINT):
        goodput.note(5)  # too early for a line
    tracker.enter(Phase.DATA)
    account = goodput.account()
    parts = [account[name] for name in (*SPENT, "lost", "down")]
    assert sum(parts) == pytest.approx(account["wall"])
    assert account["wall"] == pytest.approx(time.time() - began_at, abs=0.5)
    assert account["start_up"] >= 3
    assert not read_attempts(tmp_path)
    goodput.note(5, is_last=True)
    assert [entry["step"] for entry in read_attempts(tmp_path)] == [5]


STRANGE = [("began_at", "x"), ("began_at", {}), ("now", None), ("training", []), ("step", True)]
STRANGE += [("start_up", math.nan), ("first_step", 10**400)]


def test_lines_that_were_cut_off_are_passed_over(tmp_path: Path) -> None:
    whole = json.dumps(attempt(1, first_step=0, step=3))
    strange = [json.dumps({**json.loads(whole), name: value}) for name, value in STRANGE]
    broken = "\n".join(["[]", '{"step": 4}', *strange, whole[:30]])
    (tmp_path / NAME).write_bytes(f"{whole}\n{broken}\n".encode() + b"\0\xff\xfe")
    attempts = read_attempts(tmp_path)
    assert [entry["step"] for entry in attempts] == [3]
    assert account_of(attempts)["wall"] > 0


@pytest.mark.slow
def test_an_attempt_that_dies_in_its_start_up_is_recorded(tmp_path: Path) -> None:
    argv: list[str | Path] = ["--cpu_only", "--max_steps", "2", "--eval_every", "0"]
    argv += ["--run_name", "run", "--output_dir", tmp_path, "--model_args", "{}"]
    assert train([*argv, "--model_args", "{nonsense: 1}"], 1).statuses != (0,)
    [died] = read_attempts(tmp_path / "run")
    assert died["start_up"] > 0 == died["first_step"] == died["step"] == died["training"]
    assert "s in 2 attempts" in train(argv, 1).ok().outputs[0]
    train(argv, 1).ok()  # it is finished: nothing to do
    assert [entry["ended"] for entry in read_attempts(tmp_path / "run")[1:]] == ["finished"] * 2

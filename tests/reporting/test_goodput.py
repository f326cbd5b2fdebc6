"""The account of a run's wall time: every second is somewhere, over all attempts."""

import json
import math
import time
from pathlib import Path

import pytest

from hardened_ddp.ranks.launch import Launch
from hardened_ddp.ranks.phase import Phase, Tracker
from hardened_ddp.reporting.goodput import NAME, Goodput, account_of, read_attempts
from tests.harness.ranks import train

PHASES = {"start_up": 2.0, "data_wait": 1.0, "training": 10.0, "evaluation": 1.0, "checkpoint": 1.0}


def attempt(began_at: float, *, first_step: int, step: int) -> dict[str, float]:
    times = {"began_at": began_at, "now": began_at + sum(PHASES.values()), **PHASES}
    return {**times, "first_step": first_step, "step": step}


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
    parts = [account[name] for name in (*PHASES, "lost", "down")]
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

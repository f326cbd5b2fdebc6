"""What the status of a run tells a scheduler, and what torchrun's last block says of an error."""

import json
from pathlib import Path
from typing import Any

import pytest

import ddp_training
from hardened_ddp.errors import PeerLostError, SampleError, StepError
from hardened_ddp.reporting.ending import (
    MOST_STARTS,
    RECORD,
    RUN,
    read_endings,
    settle,
    stop_status,
    write_error_file,
    write_termination_log,
)
from hardened_ddp.reporting.goodput import num_without_progress

POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "0", "RANK": "0"}
Capture = pytest.CaptureFixture[str]
PHASES = dict.fromkeys(("start_up", "data_wait", "training", "evaluation", "checkpoint"), 0.1)


def attempts(folder: Path, *steps: tuple[int, int]) -> None:
    """Write the attempts of a run: the first and the last step of each."""
    lines = [
        {"began_at": float(i), "now": i + 0.5, "first_step": first, "step": last, **PHASES}
        for i, (first, last) in enumerate(steps)
    ]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "attempts.jsonl").write_text(text)


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
    assert num_without_progress(found) == count


def test_a_stop_is_3_in_a_pod_or_as_asked_and_no_progress_is_1(tmp_path: Path) -> None:
    env = {RUN: str(tmp_path)}
    attempts(tmp_path, (0, 5), *[(5, 5)] * (MOST_STARTS - 1))
    assert [settle(status, env) for status in (0, 1, 2, 3, 75)] == [0, 1, 2, 3, 75]
    attempts(tmp_path, (0, 5), *[(5, 5)] * MOST_STARTS)
    assert [settle(status, env) for status in (0, 1, 2, 3, 75)] == [0, 1, 2, 1, 1]
    assert (stop_status(None, {}), stop_status(None, POD)) == (0, 3)
    assert (stop_status(0, POD), stop_status(3, {})) == (0, 3)


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
    write_error_file(PeerLostError("rank 1 is gone"), env)
    write_error_file(SampleError("sample 7 is broken"), env)
    status, error = read_endings(tmp_path / "endings.jsonl")
    assert status == 0
    assert "sample 7" in error


def test_the_termination_log_of_a_pod_has_the_error_and_fits(tmp_path: Path) -> None:
    path = tmp_path / "termination-log"
    env = {"HARDENED_DDP_TERMINATION_LOG": str(path)}
    write_termination_log("x", POD | env)
    assert not path.exists()  # the kubelet makes it; nobody else's file is made
    path.touch()
    write_termination_log("x", env)
    assert path.read_bytes() == b""
    write_error_file(SampleError("y" * 9000), POD | env)
    assert path.read_bytes().startswith(b"SampleError: [DDP-D02] yyy")
    assert len(path.read_bytes()) == 4000


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Make the environment that torchrun gives a rank."""
    return {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}


def test_the_cause_alone_writes_torchruns_error_file(env: dict[str, str]) -> None:
    path = Path(env["TORCHELASTIC_ERROR_FILE"])
    write_error_file(PeerLostError("rank 0 lost another rank"), env)
    assert not path.exists()
    write_error_file(StepError("rank 1, step 4", fix="look at its log"), env)
    info = json.loads(path.read_text())["message"]["extraInfo"]
    assert info["py_callstack"] == "StepError: [DDP-S01] rank 1, step 4\n  next: look at its log"
    assert int(info["timestamp"]) > 0
    write_error_file(StepError("x"), {"TORCHELASTIC_ERROR_FILE": "/no/x.json"})  # does not raise


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

"""Trackers: what they get, and that none of them stops training."""

import json
import math
import re
import sqlite3
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hardened_ddp.reporting.metrics import MetricsLog
from hardened_ddp.reporting.trackers import PrometheusFile, TrackerThread
from hardened_ddp.settings.config import RunConfig
from hardened_ddp.training.run_report import check_trackers, has_tensorboard
from tests.harness.ranks import train
from tests.run_folder import read_summary
from tests.settings.given import settings_of

ARGV = ["--cpu_only", "--max_steps", "4", "--log_interval", "2", "--run_name", "r"]


class Recorder:
    """Writes what it gets into the run folder."""

    def __init__(self, *, folder: Path, settings: Mapping[str, Any]) -> None:
        self.file = (folder / "recorded.jsonl").open("w")
        self.log(-1, {"batch_size": settings["batch_size"]})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.file.write(json.dumps([step, *values.items()]) + "\n")

    def close(self) -> None:
        self.file.close()
        time.sleep(0.6)  # as one that sends its last values over a network


class Greedy(Recorder):
    """Takes the values away that it was given, and ends its thread."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        dict.clear(values)  # type: ignore[arg-type]
        sys.exit("no more of it")


class Broken(Recorder):
    """Fails at its second value, as a tracker whose server went away."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        if step > 0:
            raise ConnectionError("no route to host")


class Slow:
    """Waits for release before it takes a value."""

    waits: threading.Event
    release: threading.Event
    got: list[int | str]

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self.waits.set()
        self.release.wait(60)
        self.got.append(step)

    def close(self) -> None:
        self.got.append("closed")


@pytest.fixture(autouse=True)
def slow_begins() -> None:
    Slow.waits, Slow.release, Slow.got = threading.Event(), threading.Event(), []


def test_a_tracker_gets_what_metrics_jsonl_gets_and_a_broken_one_is_left(tmp_path: Path) -> None:
    kinds = ("Greedy", "Broken", "Recorder")
    names = ", ".join(f"tests.reporting.test_trackers:{kind}" for kind in kinds)
    finished = train([*ARGV, "--output_dir", tmp_path, "--tracker", names], 2).ok()
    said = "tracker tests.reporting.test_trackers:Broken failed, training continues without it"
    assert finished.output.count(said) == 1
    assert "no route to host" in finished.output
    assert "Greedy failed, training continues without it: SystemExit: no more" in finished.output
    folder = tmp_path / "r"
    [wall] = re.findall(r"time: ([\d.]+) s in 1 attempt", finished.output)
    assert float(wall) == pytest.approx(read_summary(folder)["time"]["wall"], abs=0.3)
    first, *recorded = map(json.loads, (folder / "recorded.jsonl").open())
    assert first == [-1, ["batch_size", 32]]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    assert [entry[0] for entry in recorded] == [line["step"] for line in lines]
    assert [dict(entry[1:]).get("loss/train") for entry in recorded] == [
        line.get("loss/train") for line in lines
    ]
    assert not (folder / "tensorboard").exists()
    assert "TensorBoard:" not in finished.output


def test_without_a_package_that_can_be_imported_a_run_goes_on_without_tensorboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert has_tensorboard(RunConfig())
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_trackers(RunConfig())
    assert "the package tensorboard is not installed" in caplog.text
    assert not has_tensorboard(RunConfig())
    monkeypatch.undo()
    caplog.clear()
    monkeypatch.setitem(sys.modules, "tensorboard.compat.proto.event_pb2", None)
    metrics = MetricsLog(tmp_path, tensorboard=True, is_main=True)
    for step in range(3):
        metrics.scalars(step, {"loss": 1.0})
    metrics.close()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    [text] = caplog.messages
    assert text.startswith("tensorboard can't be imported, its curves are not written: ")


def test_a_tracker_that_hangs_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hardened_ddp.reporting.sinks._QUIET_S", 0.05)
    monkeypatch.setattr("hardened_ddp.reporting.sinks._FINISH_S", 0.05)
    caplog.set_level("INFO")
    tracker = TrackerThread("slow", Slow)
    metrics = MetricsLog(tmp_path, tensorboard=False, is_main=True, trackers=[tracker])
    try:
        for step in range(3):
            metrics.scalars(step, {"loss/train": 1.0})
        metrics.close()
    finally:
        Slow.release.set()
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3
    assert "waiting for tracker slow to take its last values" in caplog.text
    assert "tracker slow did not close in time" in caplog.text


def test_values_that_a_slow_tracker_does_not_get_are_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hardened_ddp.reporting.sinks._MAX_WAITING", 3)
    tracker = TrackerThread("slow", Slow)
    tracker.log(0, {})
    assert Slow.waits.wait(60)
    for step in range(1, 7):
        tracker.log(step, {})
    Slow.release.set()
    tracker.close()
    assert Slow.got == [0, 1, 2, 3, "closed"]
    [told] = caplog.messages
    assert "tracker slow was too slow: 3 values were dropped" in told


@pytest.mark.slow
@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_run_folder_keeps_one_run_of_a_tracker(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name, reason="requirements-extras.txt has it")
    env = {"WANDB_MODE": "offline", "HOME": str(tmp_path), "WANDB_ERROR_REPORTING": "false"}
    argv = [*ARGV, "--output_dir", tmp_path, "--tracker", f"tensorboard,{name}"]
    # WHY: on a busy machine the import of a tracker takes as long as the end of a run waits for it
    argv += ["--model", "tests.plugins:paced_mlp", "--model_args", "{pause_s: 3}"]
    folder = tmp_path / "r" / name
    ids = set()
    for last in ("4", "6"):
        finished = train([*argv, "--max_steps", last], 1, env=env, timeout_s=240).ok()
        assert "failed, training continues" not in finished.output
        ids.add((folder / "run-id.txt").read_text().strip())
    [run_id] = ids
    assert (tmp_path / "r" / "tensorboard").is_dir()
    if name == "wandb":
        written = list(folder.glob("offline-run-*/*.wandb"))
        assert len(written) == 2
        assert all(run_id in path.name and path.stat().st_size > 0 for path in written)
        return
    with sqlite3.connect(folder / "mlflow.db") as store:
        found = store.execute("select run_uuid, key, step from metrics").fetchall()
    assert {row[0] for row in found} == {run_id}
    assert {2, 4, 6} <= {step for _, key, step in found if key == "loss/train"}


def test_the_metrics_file_is_whole_and_has_the_newest_values_of_all_kinds(tmp_path: Path) -> None:
    path = tmp_path / "ddp.prom"
    argv = [*ARGV, "--output_dir", tmp_path, "--metrics_file", path]
    train(argv, 2).ok()
    lines = path.read_text().splitlines()
    values = {line.split("{")[0]: line for line in lines if not line.startswith("#")}
    assert values["ddp_training_step"] == 'ddp_training_step{run="r"} 4'
    assert {"ddp_training_loss_train", "ddp_training_accuracy_test"} <= values.keys()
    form = r'ddp_training_\w+\{run="r"\} (NaN|[+-]?Inf|-?[0-9.e+-]+)'  # no timestamp behind
    assert all(re.fullmatch(form, line) for line in values.values())
    assert len(lines) == 2 * len(values)
    assert [p.name for p in tmp_path.iterdir() if p.is_file()] == ["ddp.prom"]


def test_a_metrics_file_that_cannot_be_written_stops_nothing_and_is_written_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = PrometheusFile(tmp_path / "later" / "ddp.prom", "größer")
    for step in range(3):
        file.log(step, {"loss": math.nan})
    assert len(caplog.messages) == 1
    (tmp_path / "later").mkdir()
    file.log(3, {"loss": -math.inf})
    text = (tmp_path / "later" / "ddp.prom").read_text(encoding="utf-8")
    assert 'ddp_training_loss{run="größer"} -Inf' in text


def test_a_tracker_that_is_not_there_is_refused_before_anything_starts(tmp_path: Path) -> None:
    finished = train([*ARGV, "--output_dir", tmp_path, "--tracker", "tests.plugins:NoSuch"], 1)
    assert finished.statuses == (2,)
    assert "--tracker tests.plugins:NoSuch can't be imported" in finished.output
    assert not (tmp_path / "r").exists()
    assert settings_of("--tracker none").config.run.tracker == "none"

"""What a run tells others: trackers, none of which stops it; --on_event, and Kubeflow's server."""

import json
import math
import os
import re
import shlex
import shutil
import sqlite3
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import closing
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hardened_ddp.errors import SampleError
from hardened_ddp.model.zoo import BUILT_IN
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.launch import Launch
from hardened_ddp.reporting import events as events_module
from hardened_ddp.reporting import sinks
from hardened_ddp.reporting.events import Events
from hardened_ddp.reporting.metrics import MetricsLog
from hardened_ddp.reporting.rank_status import RankStatus
from hardened_ddp.reporting.status_writer import KUBEFLOW_URL as URL
from hardened_ddp.reporting.status_writer import StatusWriter, Work, post_progress
from hardened_ddp.reporting.trackers import PrometheusFile, TrackerThread
from hardened_ddp.settings.config import RunConfig
from hardened_ddp.training.run_report import check_trackers, has_tensorboard
from tests.harness.processes import ROOT
from tests.harness.ranks import train
from tests.run_folder import only_run, read_summary
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


def patient(num_classes: int, input_shape: tuple[int, ...]) -> nn.Module:
    """Build a model, in a run whose end waits for a tracker that a busy machine imports slowly."""
    sinks._FINISH_S = 200.0
    return BUILT_IN["mlp"](num_classes=num_classes, input_shape=input_shape)


@pytest.fixture(autouse=True)
def slow_begins() -> None:
    Slow.waits, Slow.release, Slow.got = threading.Event(), threading.Event(), []


def test_trackers_and_a_metrics_file_get_what_metrics_jsonl_gets_and_a_broken_one_is_left(
    tmp_path: Path,
) -> None:
    kinds, file = ("Greedy", "Broken", "Recorder"), tmp_path / "ddp.prom"
    names = ", ".join(f"tests.reporting.test_trackers:{kind}" for kind in kinds)
    argv = [*ARGV, "--output_dir", tmp_path, "--tracker", names, "--metrics_file", file]
    finished = train(argv, 2).ok()
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
    lines = file.read_text().splitlines()
    values = {line.split("{")[0]: line for line in lines if not line.startswith("#")}
    assert values["ddp_training_step"] == 'ddp_training_step{run="r"} 4'
    assert {"ddp_training_loss_train", "ddp_training_accuracy_test"} <= values.keys()
    form = r'ddp_training_\w+\{run="r"\} (NaN|[+-]?Inf|-?[0-9.e+-]+)'  # no timestamp behind
    assert all(re.fullmatch(form, line) for line in values.values())
    assert len(lines) == 2 * len(values)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == [file.name]


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
    argv += ["--model", "tests.reporting.test_trackers:patient"]
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


RUN = ["--cpu_only", "--num_workers", "0", "--batch_size", "4", "--no_tensorboard", "--model"]
RUN += ["tests.plugins:Faulty", "--dataset", "tests.plugins:points", "--epochs", "2"]

Posts = list[tuple[str, dict[str, Any]]]  # Any: JSON


@pytest.fixture
def server() -> Iterator[tuple[str, Posts]]:
    """Serve on a port; give its URL, and what is posted there: authorization and content."""
    posts: Posts = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            posts.append((self.headers["Authorization"], json.loads(body)))
            if self.path == "/garbage":
                self.wfile.write(b"what is this")
                return
            self.send_response(422 if self.path == "/refused" else 200)
            self.end_headers()

        def log_message(self, *words: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        thread = threading.Thread(target=served.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{served.server_port}", posts
        served.shutdown()
        thread.join()


def told(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "told.jsonl").read_text().splitlines()]


def command_in(folder: Path) -> str:
    """Write a command that keeps what it gets."""
    told, names = (shlex.quote(str(folder / name)) for name in ("told.jsonl", "names"))
    return f"(cat; echo) >> {told}; echo $HDDP_EVENT $HDDP_STATUS >> {names}"


def test_a_run_tells_its_events_with_facts_and_status(tmp_path: Path) -> None:
    argv = [*RUN, "--on_event", command_in(tmp_path), "--output_dir", str(tmp_path / "runs")]
    argv += ["--model_args", "{kind: raise, first: 8, last: 8}", "--run_name", "r"]
    train(argv, timeout_s=60).ok()
    names = (tmp_path / "names").read_text().splitlines()
    # the last checkpoint is written by its own thread, at any moment after the last step
    others = [name.strip() for name in names if name.strip() != "checkpoint"]
    assert others == ["started", "fault", "retry", "finished 0"]
    found = told(tmp_path)
    assert {event["event"] for event in found} >= {"checkpoint"}
    assert {event["run"] for event in found} == {str(only_run(tmp_path / "runs"))}
    assert found[1]["step"] == found[2]["step"]
    assert "a fault of the drill" in str(found[1]["cause"])
    assert found[-1]["step"] == 20
    train([*argv, "--epochs", "3"], timeout_s=60).ok()
    assert told(tmp_path)[len(found)]["event"] == "restart"


def test_a_failed_run_tells_its_error_and_a_command_that_fails_is_a_warning(tmp_path: Path) -> None:
    argv = [*RUN, "--on_event", f"{command_in(tmp_path)}; echo no good >&2; exit 3"]
    argv += ["--model_args", "{kind: raise, first: 8}", "--output_dir", str(tmp_path / "runs")]
    finished = train(argv, timeout_s=60)
    assert finished.status == 1
    last = told(tmp_path)[-1]
    assert (last["event"], last["status"]) == ("failed", 1)
    assert "DDP-S01" in str(last["error"])
    assert "the command of on_event failed for failed: status 3: no good" in finished.output


def test_a_command_that_takes_too_long_is_killed_with_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(events_module, "LIMIT_S", 0.2)
    late = shlex.quote(str(tmp_path / "late"))
    with closing(Events(f"sleep 1000 & sleep 1000; touch {late}")) as events:
        events.tell("started")
    assert "not over after 0 s: it was killed" in caplog.text
    assert not (tmp_path / "late").exists()


def test_a_command_is_no_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID", "HARDENED_DDP_ENDINGS"):
        monkeypatch.setenv(name, "0")
    with closing(Events(f"env > {shlex.quote(str(tmp_path / 'env'))}")) as events:
        events.tell("started")
    found = (tmp_path / "env").read_text()
    assert "HDDP_EVENT=started\n" in found
    assert not [name for name in ("RANK=", "TORCHELASTIC", "ENDINGS") if name in found]


def test_nothing_is_told_by_other_ranks_or_after_the_end(tmp_path: Path) -> None:
    with closing(Events(command_in(tmp_path), Launch(rank=1, world_size=2))) as events:
        events.tell("started")
    assert not (tmp_path / "names").exists()
    events = Events(command_in(tmp_path))
    events.tell("stopped", status=3)
    events.close(SampleError("later"))
    assert (tmp_path / "names").read_text() == "stopped 3\n"


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_the_webhook_and_the_message_of_the_manual_are_sent(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    server: tuple[str, Posts],
) -> None:
    url, posts = server
    text = (ROOT / "docs" / "WHERE_IT_RUNS.md").read_text(encoding="utf-8")
    commands = [shlex.split(line)[2] for line in text.splitlines() if "ddp --on_event '" in line]
    assert len(commands) == 2
    apprise = tmp_path / "apprise"
    apprise.write_text('#!/bin/sh\n(echo "$@"; cat) >> "$APPRISE_URL"\n')
    apprise.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("APPRISE_URL", str(tmp_path / "sent"))
    monkeypatch.setenv("WEBHOOK_URL", url)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setenv("HDDP_RUN", "runs/a")
    for command in commands:
        with closing(Events(command)) as events:
            events.tell("checkpoint", step=4)
            events.tell("failed", status=1)
    assert not caplog.text
    assert [content["event"] for _, content in posts] == ["checkpoint", "failed"]
    title, body = (tmp_path / "sent").read_text().splitlines()
    assert "runs/a failed" in title
    assert json.loads(body)["status"] == 1


def variables(url: str, folder: Path) -> dict[str, str]:
    """Give the variables that the operator sets."""
    (folder / "token").write_text("first\n")
    return {URL: url, "KUBEFLOW_TRAINER_SERVER_TOKEN": str(folder / "token")}


@pytest.mark.slow
def test_one_rank_tells_the_end_of_a_run(server: tuple[str, Posts], tmp_path: Path) -> None:
    url, posts = server
    env = variables(url, tmp_path)
    argv = [*RUN, "--model", "mlp", "--max_steps", "4", "--output_dir", tmp_path / "one"]
    train(argv, 2, env=env, timeout_s=60).ok()
    token, content = posts[-1]
    told = content["trainerStatus"]
    assert token == "Bearer first"
    assert told["progressPercentage"] == 100
    assert {"name": "step", "value": "4"} in told["metrics"]
    assert told["lastUpdatedTime"].endswith("Z")
    assert len(posts) == 2  # the run took less than 10 s, and the other rank is silent


def test_a_token_is_read_each_time_and_what_fails_is_ignored(
    server: tuple[str, Posts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, posts = server
    env = variables(url, tmp_path)
    monkeypatch.setenv(URL, env[URL])
    status = RankStatus(rank=0, state="running", step=30, total_steps=40)
    post_progress(status, env)
    (tmp_path / "token").write_text("second")
    post_progress(status, env)
    assert [token for token, _ in posts] == ["Bearer first", "Bearer second"]
    assert posts[0][1]["trainerStatus"]["progressPercentage"] == 75
    writer = StatusWriter(tmp_path, Group(Launch(), torch.device("cpu")))
    writer._end.set()
    for url in (env[URL] + "/refused", "no url", "http://127.0.0.1:1/", env[URL] + "/garbage"):
        writer._repeat(partial(post_progress, status, {URL: url}), 1.0)
    no_token = {URL: url, "KUBEFLOW_TRAINER_SERVER_TOKEN": "/no/such/token"}
    writer._repeat(partial(post_progress, status, no_token), 1.0)
    assert len(posts) == 4
    call: Any = vars(writer._threads[1])["_target"]
    assert call.keywords == {"share": 1.0}  # a slow server is told as often as another one
    read: list[int] = []
    writer.attach(Work(epoch=lambda: read.append(1) or min([])))
    writer._repeat(writer._tell_kubeflow, 1.0)  # a status that can't be read at one moment
    assert read

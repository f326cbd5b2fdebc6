"""What a run tells others: the command of --on_event, and Kubeflow's status server, a small one."""

import json
import os
import shlex
import shutil
import threading
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from hardened_ddp.errors import SampleError
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.launch import Launch
from hardened_ddp.reporting import events as events_module
from hardened_ddp.reporting.events import Events
from hardened_ddp.reporting.rank_status import RankStatus
from hardened_ddp.reporting.status_writer import KUBEFLOW_URL as URL
from hardened_ddp.reporting.status_writer import StatusWriter, Work, post_progress
from tests.harness.processes import ROOT
from tests.harness.ranks import train
from tests.run_folder import only_run

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

"""The copy of a run on another store: file:// here, a real S3 server below (slow)."""

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from hardened_ddp.checkpoint import mirror as mirror_module
from hardened_ddp.checkpoint.mirror import Mirror, Objects, check_mirror, fetch, open_mirror
from hardened_ddp.checkpoint.store import CheckpointStore
from hardened_ddp.errors import CheckpointError, ConfigError, MissingPackageError, RunFolderError
from tests.harness.forks import run_forked
from tests.harness.processes import deadline
from tests.harness.ranks import held_port, run_command, start_command, train
from tests.harness.run_folder import last_tensors, read_summary

TRAIN = ["--cpu_only", "--num_workers", "0", "--batch_size", "10", "--no_tensorboard", "--model"]
TRAIN += ["mlp", "--dataset", "tests.plugins:points", "--run_name", "r", "--ledger"]
TRAIN += ["--lr_schedule", "constant"]
MOTO = shutil.which("moto_server") or os.environ.get("MOTO_SERVER", "")


def write_steps(run: Path, url: str, *steps: int, keep_last: int = 2) -> Mirror:
    """Write checkpoints of a run folder, and have the mirror send each one."""
    import torch

    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_text("epochs: 1\n")
    mirror = Mirror(url, run, open_mirror(url, run, is_new=False), keep_last)
    store = CheckpointStore(run / "checkpoints", keep_last=keep_last)
    for step in steps:
        mirror.take(store.write(step, tensors={"w": torch.full((1000,), step)}, meta={}))
        end = deadline(20)
        while mirror.num_sent < 1 + steps.index(step) and time.monotonic() < end:
            time.sleep(0.01)
    return mirror


def url_of(folder: Path) -> str:
    return f"file://{folder}/mirror/r"


def fetched_step(url: str, folder: Path) -> str:
    fetch(url, folder)
    return ",".join(path.name for path in sorted((folder / "checkpoints").glob("step-*")))


def test_a_run_goes_on_on_an_empty_machine_to_the_same_weights_and_ledger(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/mirror"
    first = [*TRAIN, "--mirror", url, "--output_dir", str(tmp_path / "one"), "--max_steps", "5"]
    train(first, timeout_s=60).ok()
    there = [*TRAIN, "--mirror", url, "--output_dir", str(tmp_path / "two"), "--max_steps", "9"]
    done = train(there, timeout_s=60).ok()
    assert f"fetched the checkpoint of step 5 (0.0 MB) from {url}/r" in done.output
    train([*TRAIN, "--output_dir", str(tmp_path / "whole"), "--max_steps", "9"], timeout_s=60).ok()
    assert last_tensors(tmp_path / "two") == last_tensors(tmp_path / "whole")
    ledgers = sorted(path.name for path in (tmp_path / "two" / "r" / "ledger").iterdir())
    assert len(ledgers) == 2  # that of the first machine, too
    objects = Objects(f"{url}/r")
    newest = json.loads(objects.read("newest.json"))["manifest"]
    files = json.loads(objects.read(f"manifests/{newest}"))["files"]
    assert {"summary.json", "metrics.jsonl", "config.yaml"} <= files.keys()


def test_only_the_newest_and_the_best_are_kept_and_nothing_that_no_manifest_names(
    tmp_path: Path,
) -> None:
    url, run = url_of(tmp_path), tmp_path / "r"
    write_steps(run, url, 1).close()
    (run / "checkpoints" / "best.json").write_text('{"schema": 1, "step": 1}')
    objects = Objects(url)
    objects.write("data/000000009-000001-crashed/part", b"left over")
    write_steps(run, url, 2, 3, 4).close()
    steps = {int(name[:9]) for name in objects.names("manifests")}
    assert steps == {1, 3, 4} or steps == {3, 4}  # 1 if the store still has it: it is the best
    named = set()
    for name in objects.names("manifests"):
        files = json.loads(objects.read(f"manifests/{name}"))["files"]
        named |= {entry["object"] for entry in files.values()}
    assert {f"data/{name}" for name in objects.names("data")} == named
    assert not list(run.glob(".mirror-*"))


def test_an_invalid_checkpoint_is_named_and_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    url = url_of(tmp_path)
    write_steps(tmp_path / "r", url, 1, 2).close()
    for state in (tmp_path / "mirror").rglob("000000002-*/**/state.safetensors"):
        state.write_bytes(state.read_bytes()[:-1] + b"x")
    assert fetched_step(url, tmp_path / "empty" / "r") == "step-000000001"
    assert "passed over the checkpoint 000000002-" in caplog.text
    assert "fetched the checkpoint of step 1" in caplog.text
    for state in (tmp_path / "mirror").rglob("state.safetensors"):
        state.unlink()
    with pytest.raises(CheckpointError, match=r"none of the \d checkpoints"):
        fetch(url, tmp_path / "another" / "r")


def test_a_hostile_manifest_writes_nothing_outside_of_the_run(tmp_path: Path) -> None:
    url = url_of(tmp_path)
    write_steps(tmp_path / "r", url, 1).close()
    for path in (tmp_path / "mirror").rglob("manifests/*"):
        path.write_text(path.read_text().replace('"config.yaml"', '"../../evil.yaml"'))
    with pytest.raises(CheckpointError, match="none of the"):
        fetch(url, tmp_path / "empty" / "r")
    assert not list(tmp_path.rglob("evil.yaml"))


def test_a_second_run_is_refused_and_an_older_start_stops_sending(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = url_of(tmp_path)
    first = write_steps(tmp_path / "r", url, 1)
    other = tmp_path / "other" / "r"
    other.mkdir(parents=True)
    with pytest.raises(RunFolderError, match="belongs to another run"):
        open_mirror(url, other, is_new=False)
    fetch(url, other)
    open_mirror(url, other, is_new=False)  # the same run, on another machine
    first.close()
    assert "another start of this run has taken over" in caplog.text
    assert json.loads(Objects(url).read("newest.json"))["manifest"].startswith("000000001-000001")


def test_a_store_that_fails_costs_no_step_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mirror_module, "_PAUSE_S", 0.001)
    fails = [OSError("no route"), ValueError("odd"), OSError("again")]
    put = Objects.put

    def fail_first(self: Objects, path: Path, name: str) -> None:
        if fails:
            raise fails.pop()
        put(self, path, name)

    monkeypatch.setattr(Objects, "put", fail_first)
    mirror = write_steps(tmp_path / "r", url_of(tmp_path), 1)
    mirror.close()
    assert (mirror.num_failed, mirror.num_sent) == (3, 2)
    assert "step 1 was not sent: OSError: again" in caplog.text
    assert "mirror: 3 tries failed, 2 sent" in caplog.text


def test_what_can_not_be_used_is_said_before_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="knows no nonsense"):
        check_mirror("nonsense://bucket")
    with pytest.raises(MissingPackageError, match="gcsfs"):
        check_mirror("gs://bucket")
    argv = ["--cpu_only", "--mirror"]
    refused = train([*argv, "s3://key:secret@bucket", "--run_name", "r"], timeout_s=60)
    assert refused.status == 2
    assert "without credentials" in refused.output
    nameless = train([*argv, f"file://{tmp_path}"], timeout_s=60)
    assert nameless.status == 2
    assert "add --run_name" in nameless.output


class Relay:
    """A way to a server that can swallow what it gets, or break after so many bytes."""

    def __init__(self, port: int) -> None:
        self._to = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.is_silent = False
        self.most_bytes = 10**12
        self._open, self._threads = [self._listener], [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def close(self) -> None:
        for each in self._open:
            with suppress(OSError):  # it is over already
                each.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._to)
            self._open += [client, server]
            for ends in ((client, server, True), (server, client, False)):
                self._threads.append(threading.Thread(target=self._pass, args=ends))
                self._threads[-1].start()

    def _pass(self, source: socket.socket, target: socket.socket, is_sent: bool) -> None:
        passed = 0
        with source, target:
            while passed <= self.most_bytes:
                try:
                    content = source.recv(65536)
                    if not content:
                        return
                    passed += len(content) * is_sent
                    if not self.is_silent:
                        target.sendall(content)
                except OSError:
                    return


class Server:
    """A real S3 server with a bucket, behind a relay."""

    def __init__(self, folder: Path) -> None:
        self.port = port = held_port()
        with (folder / "moto.log").open("wb") as log:
            argv = [MOTO, "-H", "127.0.0.1", "-p", str(port)]
            self.process = subprocess.Popen(argv, stdout=log, stderr=log)
        end = deadline(60)
        while not self._makes_bucket(port):
            assert time.monotonic() < end, (folder / "moto.log").read_text()
            time.sleep(0.1)
        self.relay = Relay(port)
        self.env = {
            "AWS_ACCESS_KEY_ID": "key-of-the-test",
            "AWS_SECRET_ACCESS_KEY": "secret-of-the-test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.relay.port}",
        }

    def _makes_bucket(self, port: int) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request("PUT", "/bucket")
            return connection.getresponse().status < 300
        except OSError:
            return False
        finally:
            connection.close()

    def check(self, work: Callable[[], object]) -> None:
        """Run work in a process of its own: the loop of fsspec stays in the one that made it."""

        def prepared() -> None:
            os.environ.update(self.env)
            work()

        assert run_forked(prepared) == 0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    pytest.importorskip("s3fs")
    if not MOTO:
        pytest.skip("there is no moto_server: see .ci/run")
    found = Server(tmp_path)
    yield found
    found.relay.close()
    found.process.kill()
    found.process.wait()


@pytest.mark.slow
def test_on_s3_a_run_goes_on_on_an_empty_machine_also_with_forked_workers(
    server: Server, tmp_path: Path
) -> None:
    argv = [sys.executable, "ddp_training.py", *TRAIN, "--mirror", "s3://bucket/runs"]
    argv += ["--num_workers", "1", "--multiprocessing_context", "fork", "--output_dir"]
    first = run_command(
        [*argv, tmp_path / "one", "--max_steps", "5"], env=server.env, timeout_s=60
    ).ok()
    assert "step 5 is on the mirror s3://bucket/runs/r" in first.output
    done = run_command(
        [*argv, tmp_path / "two", "--max_steps", "9"], env=server.env, timeout_s=60
    ).ok()
    assert "fetched the checkpoint of step 5" in done.output
    assert read_summary(tmp_path / "two" / "r")["step"] == 9
    for place in [tmp_path / "one", tmp_path / "two"]:
        texts = [path.read_text(errors="replace") for path in place.rglob("*.*") if path.is_file()]
        assert "secret-of-the-test" not in "".join([first.output, done.output, *texts])


@pytest.mark.slow
def test_the_traps_of_s3_are_none_here(server: Server, tmp_path: Path) -> None:
    large = tmp_path / "large"
    large.write_bytes(bytes(12 * 2**20))

    def check() -> None:
        mirror_module._CALL_S, mirror_module._BYTES_PER_S = 5.0, 1e9
        relay = Relay(server.port)  # in this process
        os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{relay.port}"
        objects, other = Objects("s3://bucket/a"), Objects("s3://bucket/a")
        objects.create("owner", b"1")
        with pytest.raises(FileExistsError):  # the second one is refused by the server
            other.create("owner", b"2")
        assert objects.names("claims") == []
        other.create("claims/000001", b"")
        assert objects.names("claims") == ["000001"]  # no stale listing
        for name, value in (("is_silent", True), ("most_bytes", 9 * 2**20)):
            before = getattr(relay, name)
            setattr(relay, name, value)
            began = time.monotonic()
            with pytest.raises(Exception):  # noqa: B017, PT011  # whatever the store raises
                Objects("s3://bucket/a").put(large, "data/x")
            assert time.monotonic() - began < 60
            setattr(relay, name, before)
            with pytest.raises(FileNotFoundError):  # half of it is nothing
                Objects("s3://bucket/a").read("data/x")

    server.check(check)


@pytest.mark.slow
def test_a_store_that_is_silent_or_gone_does_not_slow_the_run(
    server: Server, tmp_path: Path
) -> None:
    argv = [sys.executable, "ddp_training.py", *TRAIN, "--mirror", "s3://bucket/runs"]
    argv += ["--epochs", "100", "--checkpoint_every_steps", "10", "--stop_grace_s", "3"]
    argv += ["--output_dir", str(tmp_path / "runs")]
    with start_command(argv, env=server.env) as running:
        running.wait_for(
            lambda: "is on the mirror" in running.stderr + running.stdout,
            timeout_s=60,
            what="a checkpoint on the mirror",
        )
        server.relay.is_silent = True
        finished = running.wait(120)
    # it finished all steps; what could not be sent is said
    assert "finished" in finished.ok().output

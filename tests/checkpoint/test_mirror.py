"""The copy of a run on another store: file:// here, a real S3 server below (slow)."""

import filecmp
import http.client
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from ddp_runs.report import page_of
from ddp_runs.run_files import read_run
from ddp_runs.watch import run_watch
from hardened_ddp.checkpoint import mirror as mirror_module
from hardened_ddp.checkpoint.mirror import Mirror, Objects, check_mirror, fetch, open_mirror
from hardened_ddp.checkpoint.store import CheckpointStore
from hardened_ddp.errors import CheckpointError, ConfigError, MissingPackageError, RunFolderError
from tests.forks import run_forked
from tests.harness.processes import wait_until
from tests.harness.ranks import held_port, train
from tests.run_folder import last_tensors, read_summary

TRAIN = ["--cpu_only", "--num_workers", "0", "--batch_size", "10", "--no_tensorboard", "--model"]
TRAIN += ["mlp", "--dataset", "tests.plugins:points", "--run_name", "r", "--ledger"]
TRAIN += ["--lr_schedule", "constant"]
SECRET = "secret-of-the-test"
MOTO = shutil.which("moto_server") or os.environ.get("MOTO_SERVER", "")


def write_steps(run: Path, url: str, *steps: int, keep_last: int = 2, size: int = 1000) -> Mirror:
    """Write checkpoints of a run folder, and have the mirror send each one."""
    import torch

    run.mkdir(exist_ok=True)
    (run / "config.yaml").write_text("epochs: 1\n")
    mirror = Mirror(url, run, open_mirror(url, run), keep_last)
    store = CheckpointStore(run / "checkpoints", keep_last=keep_last)
    for step in steps:
        mirror.take(store.write(step, tensors={"w": torch.arange(size) + step}, meta={}))
        wait_until(lambda step=step: mirror.told["num_sent"] > steps.index(step), 300, "a copy")
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
    steps = {int(name.split("-")[2]) for name in objects.names("manifests")}
    assert steps == {1, 3, 4}  # 1 is the best
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
    for state in (tmp_path / "mirror").rglob("*-2-*/**/state.safetensors"):
        state.write_bytes(state.read_bytes()[:-1] + b"x")
    assert fetched_step(url, tmp_path / "empty" / "r") == "step-000000001"
    assert "passed over the checkpoint 000001-" in caplog.text
    assert "fetched the checkpoint of step 1" in caplog.text
    for state in (tmp_path / "mirror").rglob("state.safetensors"):
        state.unlink()
    with pytest.raises(CheckpointError, match=r"none of the \d checkpoints"):
        fetch(url, tmp_path / "another" / "r")


def test_after_a_rollback_the_newest_is_of_an_earlier_step(tmp_path: Path) -> None:
    url, run = url_of(tmp_path), tmp_path / "r"
    write_steps(run, url, 1, 9).close()
    shutil.rmtree(run / "checkpoints" / "step-000000009")
    write_steps(run, url, 2, keep_last=1).close()
    assert fetched_step(url, tmp_path / "empty" / "r") == "step-000000002"
    assert fetched_step(url, run) == "step-000000002"  # which has it already


def test_names_of_others_and_half_a_manifest_stop_neither_sending_nor_fetching(
    tmp_path: Path,
) -> None:
    url, folder = url_of(tmp_path), tmp_path / "mirror" / "r" / "manifests"
    write_steps(tmp_path / "r", url, 1).close()
    (folder / ".DS_Store").write_text("of a file manager")
    [first] = folder.glob("*-1-*.json")
    (folder / f"{first.name[:7]}9{first.name[8:]}").write_text('{"format": 1')
    mirror = write_steps(tmp_path / "r", url, 2)
    mirror.close()
    assert mirror.told["num_sent"]
    assert not mirror.told["num_failed"]
    assert fetched_step(url, tmp_path / "empty" / "r") == "step-000000002"


def test_a_new_run_starts_a_mirror_of_its_own_and_takes_over_no_other(tmp_path: Path) -> None:
    argv = [*TRAIN, "--resume", "never", "--max_steps", "2", "--mirror"]
    argv.append(f"file://{tmp_path}/mirror")
    train([*argv, "--output_dir", str(tmp_path / "one")], timeout_s=60).ok()
    assert fetched_step(url_of(tmp_path), tmp_path / "empty" / "r") == "step-000000002"
    refused = train([*argv, "--output_dir", str(tmp_path / "two")], timeout_s=60)
    assert "belongs to another run" in refused.output


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
        open_mirror(url, other)
    fetch(url, other)
    open_mirror(url, other)  # the same run, on another machine
    first.close()
    assert "another start of this run has taken over" in caplog.text
    assert json.loads(Objects(url).read("newest.json"))["manifest"].startswith("000001-")


def test_an_id_that_a_full_disk_cut_off_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / "mirror.json").write_text('{"id"')
    assert open_mirror(url_of(tmp_path), tmp_path) == "000001"


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
    assert (mirror.told["num_failed"], mirror.told["num_sent"]) == (3, 2)
    assert "step 1 was not sent: OSError: again" in caplog.text
    assert "mirror: 3 tries failed, 2 sent" in caplog.text
    told = f"2 sent to {url_of(tmp_path)}, the newest of step 1; tries that failed: 3"
    run = read_run(tmp_path / "r")
    seen = io.StringIO()
    run_watch({"run": str(run.folder), "output_dir": "", "once": "1", "every": "1"}, output=seen)
    assert f"\nmirror      {told}\n" in seen.getvalue()
    assert f"<td>{told}</td>" in page_of({"r": run}, "")


def test_a_copy_aside_that_fails_leaves_nothing_and_the_next_one_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = tmp_path / "r"
    mirror = write_steps(run, url_of(tmp_path), 1)
    copies: list[object] = []

    def fail_from_second(source: object, target: object) -> None:
        copies.append(source)
        if len(copies) > 1:
            raise OSError(28, "No space left on device")

    earlier = {*run.glob(".mirror-*")}  # which the thread removes
    with monkeypatch.context() as patched:
        patched.setattr(mirror_module.os, "link", fail_from_second)
        patched.setattr(mirror_module.shutil, "copyfile", fail_from_second)
        mirror.take(run / "checkpoints" / "step-000000001")
    assert "step-000000001 can't be prepared: OSError" in caplog.text
    assert {*run.glob(".mirror-*")} <= earlier
    mirror.close()
    assert (mirror.told["num_failed"], mirror.told["num_sent"]) == (1, 2)


def test_a_store_that_becomes_silent_stops_neither_the_run_nor_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    answered = threading.Event()
    mirror = write_steps(tmp_path / "r", url_of(tmp_path), 1)
    monkeypatch.setattr(Objects, "names", lambda *_: answered.wait(60) and [])
    mirror.take(tmp_path / "r" / "checkpoints" / "step-000000001")
    mirror.close(limit_s=0.1)
    assert "the newest state is not on the mirror" in caplog.text
    answered.set()


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


def asked(port: int, method: str, path: str, body: str = "") -> int:
    """Ask the S3 server; return its status, 0 if it is not there."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with suppress(OSError), closing(connection):
        connection.request(method, path, body=body)
        return connection.getresponse().status
    return 0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[int, dict[str, str]]]:
    """Start a real S3 server with a bucket; give its process, and what programs need for it."""
    pytest.importorskip("s3fs")
    if not MOTO:
        pytest.skip("there is no moto_server: see .ci/run")
    port = held_port()
    with (tmp_path / "moto.log").open("wb") as log:
        argv = [MOTO, "-H", "127.0.0.1", "-p", str(port)]
        process = subprocess.Popen(argv, stdout=log, stderr=log)
    wait_until(lambda: asked(port, "PUT", "/bucket"), 30, "a server")
    env = {"AWS_ACCESS_KEY_ID": "key-of-the-test", "AWS_SECRET_ACCESS_KEY": SECRET}
    env |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}"}
    yield process.pid, env
    process.kill()
    process.wait()


@pytest.mark.slow
def test_on_s3_a_run_goes_on_on_an_empty_machine_also_with_forked_workers(
    server: tuple[int, dict[str, str]], tmp_path: Path
) -> None:
    argv = [*TRAIN, "--mirror", "s3://bucket/runs", "--num_workers", "1"]
    argv += ["--multiprocessing_context", "fork", "--output_dir"]
    one, two = [*argv, tmp_path / "one", "--max_steps", "5"], [*argv, tmp_path / "two"]
    first = train(one, env=server[1], timeout_s=60).ok().output
    assert "step 5 is on the mirror s3://bucket/runs/r" in first
    second = train([*two, "--max_steps", "9"], env=server[1], timeout_s=60).ok().output
    assert "fetched the checkpoint of step 5" in second
    assert read_summary(tmp_path / "two" / "r")["step"] == 9
    files = [path for path in tmp_path.glob("*/r/**/*") if path.is_file()]
    texts = [path.read_text(errors="replace") for path in files]
    assert SECRET not in "".join([first, second, *texts])


@pytest.mark.slow
def test_the_traps_of_s3_are_none_here(
    server: tuple[int, dict[str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid, env = server
    (tmp_path / "state").write_bytes(bytes(12 * 2**20))

    def check() -> None:
        os.environ.update(env)
        mirror_module._BYTES_PER_S = 1e9
        objects, other = Objects("s3://bucket/a"), Objects("s3://bucket/a")
        objects.create("owner", b"1")
        with pytest.raises(FileExistsError):  # the second one is refused by the server
            other.create("owner", b"2")
        assert objects.names("claims") == []
        other.create("claims/000001", b"")
        assert objects.names("claims") == ["000001"]  # no stale listing
        with pytest.raises(OSError, match="Input/output error"):  # while the file is read
            objects.put(Path("/proc/self/mem"), "data/half")
        usual_s, mirror_module._CALL_S = mirror_module._CALL_S, 5.0
        os.kill(pid, signal.SIGSTOP)  # connections are accepted, and nothing is answered
        with pytest.raises(TimeoutError):
            objects.put(tmp_path / "state", "data/silent")
        os.kill(pid, signal.SIGCONT)
        mirror_module._CALL_S = usual_s
        assert Objects("s3://bucket/a").names("data") == []

    assert run_forked(check) == 0  # WHY: the loop of fsspec stays in the process that made it


class Proxy:
    """Stands between a client and the S3 server: passes bytes on, slowly, or not at all."""

    def __init__(self, env: dict[str, str]) -> None:
        self._port = int(env["AWS_ENDPOINT_URL"].rpartition(":")[2])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.env = env | {"AWS_ENDPOINT_URL": "http://{}:{}".format(*self._listener.getsockname())}
        self.bytes_per_s, self.is_gone, self.num_passed = 1e12, False, 0
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            client, _ = self._listener.accept()
            if self.is_gone:
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", self._port))
            for source, target in ((client, server), (server, client)):
                pump = threading.Thread(target=self._pump, args=(source, target), daemon=True)
                pump.start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with source, target, suppress(OSError):
            while (piece := source.recv(65536)) and not self.is_gone:
                time.sleep(len(piece) / self.bytes_per_s)
                target.sendall(piece)
                self.num_passed += len(piece)
            target.shutdown(socket.SHUT_RDWR)


@pytest.mark.slow
def test_a_slow_and_a_vanishing_server_are_told_and_the_next_checkpoint_is_sent(
    server: tuple[int, dict[str, str]], tmp_path: Path
) -> None:
    url, run = "s3://bucket/a", tmp_path / "r"

    def check() -> None:
        import torch

        proxy = Proxy(server[1])
        os.environ.update(proxy.env)
        mirror_module._BYTES_PER_S = 1e9
        mirror_module._TRIES, mirror_module._PAUSE_S = 2, 0.01
        mirror = write_steps(run, url, 1)
        store = CheckpointStore(run / "checkpoints", keep_last=2)

        def take(step: int, is_over: Callable[[], bool]) -> None:
            tensors = {"w": torch.full((200_000,), step)}
            checkpoint = store.write(step, tensors=tensors, meta={})
            began = time.monotonic()
            mirror.take(checkpoint)
            assert time.monotonic() - began < 5.0, "the run waits for its mirror"
            wait_until(is_over, 60, f"step {step}")

        mirror_module._CALL_S, proxy.bytes_per_s = 8.0, 20e3
        take(2, lambda: mirror.told["num_failed"] == 2)
        proxy.is_gone = True
        take(3, lambda: mirror.told["num_failed"] == 4)
        mirror_module._CALL_S, proxy.is_gone, proxy.bytes_per_s = 60.0, False, 1e12
        take(4, lambda: mirror.told["num_sent"] == 2)
        mirror.close()
        assert fetched_step(url, tmp_path / "empty" / "r") == "step-000000004"
        objects = Objects(url)
        [state] = [n for n in objects.names("data") if "-4-" in n and n.endswith("safetensors")]
        objects.write(f"data/{state}", objects.read(f"data/{state}")[:1000])  # truncated
        assert fetched_step(url, tmp_path / "another" / "r") == "step-000000001"

    assert run_forked(check) == 0


@pytest.mark.slow
@pytest.mark.timeout(1800)  # 20 s of CPU time, of which a busy machine gives it little
def test_500_mb_are_fetched_as_they_were_and_a_kill_in_mid_upload_leaves_no_object(
    server: tuple[int, dict[str, str]], tmp_path: Path
) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(120 * 2**20)  # above 100 MiB s3fs sends it in parts
    code = "import sys; from pathlib import Path; from hardened_ddp.checkpoint.mirror import *\n"
    code += "Objects('s3://bucket/a').put(Path(sys.argv[1]), 'data/large')"
    url, run, empty = "s3://bucket/a", tmp_path / "r", tmp_path / "empty" / "r"

    def check() -> None:
        proxy = Proxy(server[1])
        proxy.bytes_per_s = 40e6
        sender = subprocess.Popen(
            [sys.executable, "-c", code, tmp_path / "large"], env=os.environ | proxy.env
        )
        wait_until(lambda: proxy.num_passed >= 20 * 2**20, 60, "parts")
        assert sender.poll() is None
        sender.kill()
        sender.wait()
        os.environ.update(server[1])
        assert Objects(url).names("data") == []
        # WHY: this server is slow on a busy machine, and botocore gives up
        mirror_module._TRIES = 8
        write_steps(run, url, 1, size=62_500_000).close()  # of 8 bytes
        assert fetched_step(url, empty) == "step-000000001"
        names = [path.relative_to(run) for path in run.glob("checkpoints/*/*")]
        assert sum((run / name).stat().st_size for name in names) > 500_000_000
        assert filecmp.cmpfiles(run, empty, names, shallow=False)[0] == names

    assert run_forked(check) == 0


@pytest.mark.slow
def test_wrong_credentials_end_a_start_with_one_error_that_does_not_show_them(
    server: tuple[int, dict[str, str]], tmp_path: Path
) -> None:
    argv = [*TRAIN, "--mirror", "s3://bucket/runs", "--output_dir", str(tmp_path), "--max_steps"]
    port = server[1]["AWS_ENDPOINT_URL"].rpartition(":")[2]
    # from now on keys are looked at
    assert asked(int(port), "POST", "/moto-api/reset-auth", "0") == 200
    refused = train([*argv, "2"], env=server[1], timeout_s=60)
    assert refused.status == 1
    assert "the mirror s3://bucket/runs/r can't be read: PermissionError" in refused.output
    assert "check address, network and credentials" in refused.output
    assert SECRET not in refused.output
    assert "Traceback" not in refused.output

"""Fetching files once: cut connections, wrong bytes, two at a time, no network. All on loopback."""

import gzip
import hashlib
import http.server
import io
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import download
from hardened_ddp.data.foreign_code import import_torchvision
from hardened_ddp.data.sources import downloads
from hardened_ddp.data.sources.datasets import prepare_data
from hardened_ddp.data.sources.downloads import Wanted, fetch, fetch_dataset, files_of, weights_of
from hardened_ddp.errors import DataError, ModelError
from hardened_ddp.model import zoo
from hardened_ddp.model.zoo import build_model
from hardened_ddp.ranks.launch import prepare_environment, read_launch
from hardened_ddp.settings.config import DataConfig, ModelConfig

SQUEEZENET = ModelConfig(model="squeezenet1_1")
CONTENT = np.random.default_rng(0).bytes(3_000_000)


class Server(http.server.ThreadingHTTPServer):
    """Serves CONTENT and other files on loopback, as badly as a test wants."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = {"/file": CONTENT}
        self.cut_after: int | None = None
        """End each answer after so many bytes."""

        self.knows_ranges = True
        self.asked: list[str] = []
        """For each request its Range, or nothing."""

    def url(self, name: str = "/file") -> str:
        return f"http://127.0.0.1:{self.server_port}{name}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        body = self.server.files.get(self.path)
        self.server.asked.append(self.headers.get("Range", ""))
        if body is None:
            self.send_error(404)
            return
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").rstrip("-"))
        start = start if self.server.knows_ranges else 0
        if start >= len(body):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        end = len(body) if self.server.cut_after is None else start + self.server.cut_after
        self.wfile.write(body[start:end])

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "WAIT_S", 0.0)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def wanted(server: Server, path: Path, content: bytes = CONTENT) -> Wanted:
    digest = hashlib.sha256(content).hexdigest()[:8]
    return Wanted(urls=[server.url()], path=path, algorithm="sha256", digest=digest)


def quietly(file: Wanted) -> None:
    fetch(file, say=lambda text: None)


def test_a_connection_that_breaks_is_continued_from_where_it_broke(
    server: Server, tmp_path: Path
) -> None:
    server.cut_after = 500_000
    quietly(wanted(server, tmp_path / "sub" / "file"))
    assert (tmp_path / "sub" / "file").read_bytes() == CONTENT
    starts = range(500_000, len(CONTENT), 500_000)  # more of them than tries without progress
    assert server.asked == ["", *(f"bytes={start}-" for start in starts)]
    assert [path.name for path in (tmp_path / "sub").iterdir() if path.suffix == ".part"] == []
    quietly(wanted(server, tmp_path / "sub" / "file"))
    assert len(server.asked) == len(starts) + 1


def test_a_later_command_continues_or_starts_anew(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "file"
    server.cut_after = 0
    with pytest.raises(DataError, match="connection was lost"):
        quietly(wanted(server, path))
    (tmp_path / "file.part").write_bytes(CONTENT[:1000])
    server.cut_after, server.knows_ranges = None, False
    quietly(wanted(server, path))
    assert server.asked[-1] == "bytes=1000-"
    assert path.read_bytes() == CONTENT


def test_wrong_bytes_never_get_the_files_name(server: Server, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has another sha256"):
        quietly(wanted(server, tmp_path / "file", b"something else"))
    assert not (tmp_path / "file").exists()
    assert not (tmp_path / "file.part").exists()
    (tmp_path / "file.part").write_bytes(b"wrong" + CONTENT)  # longer than the file: answer 416
    with pytest.raises(DataError, match="has another sha256"):
        quietly(wanted(server, tmp_path / "file"))
    quietly(wanted(server, tmp_path / "file"))
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_the_second_address_is_taken_if_the_first_is_empty(server: Server, tmp_path: Path) -> None:
    file = wanted(server, tmp_path / "file")
    quietly(replace(file, urls=[server.url("/gone"), *file.urls]))
    assert file.is_here()
    assert len(server.asked) == 2  # to ask again for what is not there would be of no use


def test_many_at_once_fetch_it_once(server: Server, tmp_path: Path) -> None:
    file = wanted(server, tmp_path / "file")
    threads = [threading.Thread(target=quietly, args=(file,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert file.is_here()
    assert server.asked == [""]


def publish_mnist(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have server publish an MNIST of 6 samples, and torchvision know its files."""
    mnist = import_torchvision().datasets.MNIST
    resources = []
    for name, _ in mnist.resources:
        shape = (6, 28, 28) if "images" in name else (6,)
        head = struct.pack(f">4B{len(shape)}I", 0, 0, 8, len(shape), *shape)
        packed = gzip.compress(head + bytes(int(np.prod(shape))))
        server.files[f"/{name}"] = packed
        resources.append((name, hashlib.md5(packed).hexdigest()))
    monkeypatch.setattr(mnist, "resources", resources)
    monkeypatch.setattr(mnist, "mirrors", [server.url("/")])


def test_training_fetches_as_the_command_does(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish_mnist(server, monkeypatch)
    server.cut_after = 20
    config = DataConfig(dataset="mnist", data_dir=str(tmp_path))
    prepare_data(config)
    assert "bytes=20-" in server.asked
    said: list[str] = []
    fetch_dataset("mnist", tmp_path, say=said.append)
    assert said[-2:] == ["mnist: 6 samples to train on", "mnist: 6 samples to test on"]
    for archive in tmp_path.rglob("*.gz"):
        archive.unlink()
    num_asked = len(server.asked)
    prepare_data(config)  # what is unpacked needs no archive
    assert len(server.asked) == num_asked
    server.files.clear()
    with pytest.raises(DataError, match="the server answers 404") as caught:
        prepare_data(DataConfig(dataset="mnist", data_dir=str(tmp_path / "other")))
    assert "download.py --dataset mnist" in caught.value.fix


def test_pretrained_weights_are_fetched_once_and_the_head_is_new(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import_torchvision()
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    published = build_model(SQUEEZENET, num_classes=1000, input_shape=(3, 32, 32)).state_dict()
    file = io.BytesIO()
    torch.save(published, file)
    server.files["/weights"] = file.getvalue()
    name = Path(weights_of("squeezenet1_1", tmp_path).path).name
    digest = hashlib.sha256(file.getvalue()).hexdigest()
    place, urls = tmp_path / "checkpoints" / name, [server.url("/weights")]
    wanted = Wanted(urls=urls, path=place, algorithm="sha256", digest=digest)
    monkeypatch.setattr(zoo, "weights_of", lambda name, folder: wanted)
    config = replace(SQUEEZENET, pretrained=True)
    for _ in range(2):
        model = build_model(config, num_classes=7, input_shape=(3, 32, 32))
    assert server.asked == [""]
    found = model.state_dict()
    assert found["classifier.1.weight"].shape[0] == 7
    kept = [name for name in published if not name.startswith("classifier")]
    assert all(torch.equal(found[name], published[name]) for name in kept)
    wanted.path.unlink()
    server.files.clear()
    with pytest.raises(ModelError, match="the server answers 404") as caught:
        build_model(config, num_classes=7, input_shape=(3, 32, 32))
    assert "download.py --model squeezenet1_1" in caught.value.fix


def test_each_published_set_has_its_files_and_hashes_and_others_are_told(tmp_path: Path) -> None:
    datasets = import_torchvision().datasets
    for name, count in (("MNIST", 4), ("FashionMNIST", 4), ("CIFAR10", 1), ("CIFAR100", 1)):
        files = files_of(getattr(datasets, name), tmp_path)
        assert len(files) == count
        assert all(len(file.digest) == 32 and file.urls for file in files)
    with pytest.raises(DataError, match="'digit' can't be downloaded"):
        fetch_dataset("digit", tmp_path, say=lambda text: None)
    with pytest.raises(DataError, match="no published weights of 'resnet81'") as caught:
        weights_of("resnet81", tmp_path)
    assert "list_models()" in caught.value.fix


def test_without_network_the_command_says_what_to_do_by_hand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("http_proxy", "https_proxy"):  # whatever network there is, this one is not there
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setattr("urllib.request._opener", None)  # it knows the proxies of its first use
    words = ["download.py", "--model", "resnet18", "--models_dir", str(tmp_path / "models")]
    monkeypatch.setattr("sys.argv", words)
    assert download.main() == 2
    told = capsys.readouterr().err
    assert "[DDP-D01] resnet18-f37072fd.pth can't be fetched" in told
    assert "refused" in told
    assert "By hand: give this command on a machine with network" in told


def test_training_finds_downloaded_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for is_there in (False, True):
        env: dict[str, str] = {}
        prepare_environment(read_launch({}), env)
        assert ("TORCH_HOME" in env) is is_there
        (tmp_path / "models" / "hub").mkdir(parents=True, exist_ok=True)
    assert env["TORCH_HOME"] == str(tmp_path / "models")
    env = {"TORCH_HOME": "mine"}
    prepare_environment(read_launch({}), env)
    assert env["TORCH_HOME"] == "mine"


def test_a_url_is_no_place_for_downloads(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for flag in ("--data_dir", "--models_dir"):
        monkeypatch.setattr("sys.argv", ["download.py", "--dataset", "mnist", flag, "s3://bucket"])
        with pytest.raises(SystemExit, match="2"):
            download.parse()
        assert "s3:// can't be read or written here" in capsys.readouterr().err

"""hf: with a name that is mistyped, or without network: one error, and soon. No network is used."""

import http.server
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hardened_ddp.data.sources import hub_place
from hardened_ddp.data.sources.datasets import build_data
from hardened_ddp.data.sources.hub_place import find_place, hub_answers
from hardened_ddp.errors import DataError, ModelError
from hardened_ddp.model.zoo import build_model
from hardened_ddp.settings.config import DataConfig, ModelConfig

constants: Any = pytest.importorskip(
    "huggingface_hub.constants", reason="needs requirements-extras.txt"
)


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Hub that knows nothing."""

    class NotFound(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_error(404)

        def log_message(self, *_: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), NotFound) as server:
        monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield
        server.shutdown()
        thread.join()


@pytest.fixture(params=["refuses", "hangs"])
def away(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Hub that is away."""
    monkeypatch.setattr(hub_place, "ANSWER_S", 0.2)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if request.param == "hangs":
            listener.listen()
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", address)
        yield


@pytest.mark.parametrize("place", ["./pets", "../pets", "/no/such/pets", "~/no/pets", "a/b/pets"])
def test_a_folder_that_is_missing_is_told_before_a_library_is_imported(place: str) -> None:
    for streaming in (False, True):
        with pytest.raises(DataError, match=r"there is no such folder; .* that exists is /"):
            build_data(DataConfig(dataset=f"hf:{place}", streaming=streaming))
    with pytest.raises(ModelError, match=r"there is no such folder; .* that exists is /"):
        build_model(ModelConfig(model=f"hf:{place}"), num_classes=2, input_shape=(1, 8, 8))


def test_a_folder_of_the_home_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "pets").mkdir()
    assert find_place("hf:~/pets", error=DataError) == str(tmp_path / "pets")
    assert find_place("hf:owner/pets", error=DataError) == "owner/pets"


def test_any_answer_of_the_hub_is_one(answering: None) -> None:
    assert hub_answers()


def test_the_libraries_do_not_ask_a_hub_that_is_away(
    away: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match=r"no folder owner/pets here, .* does not answer"):
        build_model(ModelConfig(model="hf:owner/pets"), num_classes=2, input_shape=(1, 8, 8))


def test_a_dataset_is_then_looked_for_in_the_cache(away: None, tmp_path: Path) -> None:
    datasets: Any = pytest.importorskip("datasets")
    before = datasets.config.HF_HUB_OFFLINE
    for streaming in (False, True):
        config = DataConfig(dataset="hf:owner/pets", streaming=streaming, data_dir=str(tmp_path))
        with pytest.raises(DataError, match=r"no folder owner/pets here, .* does not answer"):
            build_data(config)
    assert datasets.config.HF_HUB_OFFLINE is before


def test_a_hub_that_is_off_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(hub_place.urllib.request, "urlopen", pytest.fail)
    assert not hub_answers()

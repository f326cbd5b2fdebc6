"""hf: with a folder that is missing: one error, before any library is imported."""

from pathlib import Path

import pytest

from hardened_ddp.data.sources.datasets import build_data
from hardened_ddp.data.sources.hub_place import find_place
from hardened_ddp.errors import DataError, ModelError
from hardened_ddp.model.zoo import build_model
from hardened_ddp.settings.config import DataConfig, ModelConfig


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

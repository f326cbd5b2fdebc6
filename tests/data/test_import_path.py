"""Datasets, models and collates by import path, package.module:callable: the same words for all."""

from collections.abc import Callable
from pathlib import Path

import pytest

from hardened_ddp.data.batches.collate import find_collate
from hardened_ddp.data.sources.datasets import build_data
from hardened_ddp.data.sources.hub_sets import find_place
from hardened_ddp.errors import DataError, HardenedError, ModelError
from hardened_ddp.model.zoo import build_model
from hardened_ddp.settings.config import DataConfig, ModelConfig

NUMBER = 3


def open_dataset(path: str) -> None:
    build_data(DataConfig(dataset=path))


def open_model(path: str) -> None:
    build_model(ModelConfig(model=path), num_classes=2, input_shape=(1, 8, 8))


def open_collate(path: str) -> None:
    find_collate([], path)


WAYS = pytest.mark.parametrize(
    ("setting", "load", "kind"),
    [
        ("dataset", open_dataset, DataError),
        ("model", open_model, ModelError),
        ("collate", open_collate, DataError),
    ],
    ids=["dataset", "model", "collate"],
)
MISTAKES = {
    "no.such.module:it": "can't be imported: No module named 'no'",
    "tests.data.test_import_path:nothing": "can't be imported: .* has no attribute 'nothing'",
    ":it": "is no import path",
    "./bad:good": "is no import path",
    "tests.data.test_import_path:": "is no import path",
    "tests.data.test_import_path:NUMBER": "is of type int, not a class or function",
    "builtins:dict": "has no signature",
}


@WAYS
@pytest.mark.parametrize("path", MISTAKES)
def test_a_path_that_is_of_no_use_is_refused_in_the_same_words(
    setting: str, load: Callable[[str], None], kind: type[HardenedError], path: str
) -> None:
    with pytest.raises(kind, match=MISTAKES[path]) as caught:
        load(path)
    assert caught.value.message.startswith(f"--{setting} {path} ")
    assert caught.value.fix


def test_a_name_that_is_nearly_right_gets_the_right_one_as_advice() -> None:
    with pytest.raises(DataError) as caught:
        open_dataset("tests.data.test_import_path:open_datase")
    assert caught.value.fix == "did you mean tests.data.test_import_path:open_dataset?"


@WAYS
def test_an_error_in_a_module_names_its_file_and_line(
    setting: str,
    load: Callable[[str], None],
    kind: type[HardenedError],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / f"broken_{setting}.py").write_text("import os\nos.gone()\n")
    (tmp_path / f"unread_{setting}.py").write_text("import os\nos.(\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(kind, match=rf"no attribute 'gone' \(.*broken_{setting}.py:2\)"):
        load(f"broken_{setting}:it")
    with pytest.raises(kind, match=rf"SyntaxError: .*\(unread_{setting}.py, line 2\)") as caught:
        load(f"unread_{setting}:it")
    assert "fix it" in caught.value.fix
    (tmp_path / f"lazy_{setting}.py").write_text(
        "try:\n    {}['key']\nexcept KeyError as e:\n    raise ImportError('no Bert') from e\n"
    )
    with pytest.raises(kind, match=r"no Bert.*; caused by KeyError: 'key'"):
        load(f"lazy_{setting}:it")
    (tmp_path / f"script_{setting}.py").write_text("import sys\nsys.exit(2)\n")
    with pytest.raises(kind, match=rf"SystemExit\(2\).*script_{setting}.py:2") as caught:
        load(f"script_{setting}:it")
    assert "__main__" in caught.value.fix


@pytest.mark.parametrize("place", ["./pets", "/no/such/pets", "~/no/pets", "a/b/pets"])
def test_a_folder_that_is_missing_is_told_before_a_library_is_imported(place: str) -> None:
    for streaming in (False, True):
        with pytest.raises(DataError, match=r"there is no such folder; .* that exists is /"):
            build_data(DataConfig(dataset=f"hf:{place}", streaming=streaming))
    with pytest.raises(ModelError, match=r"there is no such folder; .* that exists is /"):
        open_model(f"hf:{place}")


def test_a_folder_of_the_home_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "pets").mkdir()
    assert find_place("hf:~/pets", error=DataError) == str(tmp_path / "pets")
    assert find_place("hf:owner/pets", error=DataError) == "owner/pets"

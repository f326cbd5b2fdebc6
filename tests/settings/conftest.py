"""What all tests of settings have."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in an empty folder: output_dir and --config are relative paths."""
    monkeypatch.chdir(tmp_path)

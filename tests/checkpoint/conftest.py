"""What all tests of checkpoints have."""

from pathlib import Path

import pytest

from hardened_ddp.checkpoint.store import CheckpointStore


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run" / "checkpoints", keep_last=3)

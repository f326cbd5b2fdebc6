"""What torchrun's last block says of a failed rank: the error file."""

import json
from pathlib import Path

import pytest

import ddp_training
from hardened_ddp.errors import PeerLostError, StepError
from hardened_ddp.reporting.ending import write_error_file


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    """Make the environment that torchrun gives a rank."""
    return {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "error.json")}


def test_it_has_code_cause_and_next_command_in_torch_elastics_form(env: dict[str, str]) -> None:
    write_error_file(StepError("rank 1, step 4", fix="look at its log"), env)
    entry = json.loads(Path(env["TORCHELASTIC_ERROR_FILE"]).read_text())
    shown = entry["message"]["extraInfo"]["py_callstack"]
    assert shown == "StepError: [DDP-S01] rank 1, step 4\n  next: look at its log"
    assert int(entry["message"]["extraInfo"]["timestamp"]) > 0


def test_a_rank_that_lost_another_one_writes_none(env: dict[str, str]) -> None:
    write_error_file(PeerLostError("rank 0 lost another rank"), env)
    assert not Path(env["TORCHELASTIC_ERROR_FILE"]).exists()


def test_a_file_that_can_not_be_written_does_not_hide_the_error(tmp_path: Path) -> None:
    write_error_file(StepError("x"), {"TORCHELASTIC_ERROR_FILE": str(tmp_path / "no" / "x.json")})


@pytest.mark.parametrize(("local_rank", "is_printed"), [("0", True), ("1", False)])
def test_a_mistake_in_the_settings_is_printed_once_per_node(
    local_rank: str,
    is_printed: bool,
    env: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    launched = {"RANK": local_rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": "2"}
    launched |= {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    launched |= {"TORCHELASTIC_RUN_ID": "none"}
    for name, value in (launched | env).items():
        monkeypatch.setenv(name, value)
    assert ddp_training.main(["--bach_size", "3"]) == 2
    assert ("bach_size" in capsys.readouterr().err) == is_printed
    assert "DDP-C01" in Path(env["TORCHELASTIC_ERROR_FILE"]).read_text()

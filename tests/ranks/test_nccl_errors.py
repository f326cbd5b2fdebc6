"""Errors of NCCL, in its own words: which of them mean a lost rank, and what is wrong at a start.

The texts are those that torch puts together: its line, the code's explanation, NCCL's last error.
"""

from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import ddp_training
from hardened_ddp.errors import GroupError
from hardened_ddp.ranks import group as group_module
from hardened_ddp.ranks.group import Group, lost_peer, open_group
from hardened_ddp.ranks.launch import Launch
from tests.marks import sections

CPU = torch.device("cpu")
ERRORS = sections(Path(__file__).with_name("nccl_errors.txt"))
"""lost: or own:, and what it is; at a start: what is told; what helps."""


@pytest.mark.parametrize("kind", [k for k in ERRORS if not k.startswith("at a start: ")])
def test_only_what_another_rank_caused_is_a_lost_rank(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, is_lost = ERRORS[kind].removesuffix("\n"), kind.startswith("lost: ")
    monkeypatch.setattr(group_module, "LISTEN_LIMIT_S", 0.0)
    group = Group(Launch(world_size=2), CPU)
    lost = lost_peer(dist.DistBackendError(text), group)
    assert (lost is not None) == group.is_broken == is_lost


@pytest.mark.parametrize("told", [k for k in ERRORS if k.startswith("at a start: ")])
def test_a_start_that_fails_says_what_nccl_said_last_and_explain_what_helps(
    told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found, fix = told.removeprefix("at a start: ").split("; ")
    text = ERRORS[told].removesuffix("\n")
    met = {"open_store": lambda *_: dist.HashStore(), "rendezvous": lambda store, *_, **__: store}
    with (
        mock.patch.multiple(group_module, **met),
        mock.patch.object(dist, "init_process_group", side_effect=dist.DistBackendError(text)),
        pytest.raises(GroupError) as caught,
    ):
        open_group(Launch(world_size=2), device=CPU, backend="gloo", timeout_s=1)
    assert found in caught.value.message
    log = tmp_path / "log"
    log.write_text(f"[2026-11-26 23:00:00 rank 0] ERROR hardened_ddp.ranks: {caught.value}\n")
    assert ddp_training.main(["explain", str(log)]) == 0
    said = capsys.readouterr().out
    assert fix in caught.value.fix + said
    assert "No failure seen" not in said
    assert "Ould not meet" not in said

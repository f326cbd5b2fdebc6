"""How a saved state comes to the ranks; the memory of a resume: tests/ranks/test_memory.py."""

from collections.abc import Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from hardened_ddp.checkpoint.tensors import TensorSpec
from hardened_ddp.errors import MainRankError
from hardened_ddp.step.progress import Progress
from hardened_ddp.training import state
from tests.harness.ranks import run_ranks
from tests.ranks.test_shared_sum import rendezvous


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_state_goes_over_nccl_if_it_can(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, cpu = torch.device("cuda", 0), torch.device("cpu")
    sent: dict[str, torch.device] = {}

    def receive(group: object, saved: object, names: list[str], device: torch.device) -> Any:
        sent.update(dict.fromkeys(names, device))
        return {}

    monkeypatch.setattr(state, "receive", receive)
    for name in ("check_fits", "restore_state"):
        monkeypatch.setattr(state, name, mock.Mock())
    parts = mock.MagicMock(average=None, base={}, precision=mock.Mock(scaler=None))
    parts.group = SimpleNamespace(device=gpu, backend=backend)
    parts.optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(3))])
    shapes = {"model.weight": (3,), "optimizer.weight.exp_avg": (3,), "optimizer.weight.step": ()}
    specs = {name: SimpleNamespace(shape=shape) for name, shape in shapes.items()}
    meta = asdict(Progress(step=7)) | {"stream": None, "optimizer_state": {}}
    assert state.restore(parts, mock.Mock(specs=specs, meta=meta)).step == 7
    large = gpu if backend == "nccl" else cpu
    assert list(sent.values()) == [large, large, cpu], "step counts stay on the host"


NAMES = [f"model.{number}" for number in range(5)]


def received(fails_at: int) -> tuple[list[float], int, str]:
    """Receive a state in chunks of one tensor; return it, the ranks' votes, and the error."""
    cpu = torch.device("cpu")
    group = rendezvous()
    votes, gather = [], group.gather_json

    def read(names: Sequence[str]) -> dict[str, torch.Tensor]:
        numbers = [int(name.removeprefix("model.")) for name in names]
        if fails_at in numbers:
            raise OSError(f"tensor {fails_at} can't be read")
        return {name: torch.full((3,), number) for name, number in zip(names, numbers, strict=True)}

    def count(value: Any) -> list[Any]:
        votes.append(value)
        return gather(value)

    specs = {name: TensorSpec((3,), "int64") for name in NAMES}
    saved = state.Saved(specs, {}, read=read if group.is_main else None)
    found, error = {}, ""
    group.gather_json = count  # type: ignore[method-assign]
    with mock.patch.object(state, "_CHUNK_BYTES", 1):
        try:
            found = state.receive(group, saved, NAMES, cpu)
        except MainRankError as raised:
            error = raised.message
    group.close()
    return [float(found[name][2]) for name in found], len(votes), error


def test_the_ranks_agree_once_on_a_state_however_large_it_is() -> None:
    assert run_ranks(received, 2, -1) == [([0.0, 1.0, 2.0, 3.0, 4.0], 1, "")] * 2
    for found, votes, error in run_ranks(received, 2, 2):
        assert (found, votes) == ([], 1)
        assert "reading the checkpoint failed on rank 0: OSError: tensor 2 can't be read" in error

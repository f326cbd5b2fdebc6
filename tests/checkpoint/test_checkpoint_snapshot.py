"""Checkpoints written beside training: the state is that of submit, nobody waits, and when."""

import errno
import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from hardened_ddp.checkpoint import folder
from hardened_ddp.checkpoint import tensors as tensors_module
from hardened_ddp.checkpoint.disk import Disk
from hardened_ddp.checkpoint.folder import list_steps, load_checkpoint, verify_checkpoint
from hardened_ddp.checkpoint.store import CheckpointStore, CheckpointWriter, WriteCost
from hardened_ddp.checkpoint.tensors import HostArena
from hardened_ddp.errors import CheckpointError
from hardened_ddp.training import state as state_module
from hardened_ddp.training.run import Run
from hardened_ddp.training.state import Saver, save_interval_s
from tests.checkpoint_states import assert_same, found_in

LIMIT_S = 90


class GatedDisk(Disk):
    """A disk that lets only as many writes through as the test allows."""

    def __init__(self) -> None:
        self._allowed = threading.Semaphore(0)
        self._is_open = False
        self.error: Exception | None = None

    def write(self, descriptor: int, data: memoryview) -> int:
        if not self._is_open:
            assert self._allowed.acquire(timeout=LIMIT_S)
        if self.error is not None:
            raise self.error
        return os.write(descriptor, data)

    def allow(self) -> None:
        """Let one write through."""
        self._allowed.release()

    def open(self) -> None:
        """Let all writes through."""
        self._is_open = True
        self._allowed.release(1000)


class Bench:
    """A writer on a gated disk."""

    def __init__(self, root: Path) -> None:
        self.disk = GatedDisk()
        self.store = CheckpointStore(root, keep_last=5, disk=self.disk)
        self.writer = CheckpointWriter(self.store)

    def save(self, step: int, state: dict[str, Tensor] | None = None, **more: Any) -> None:
        """Write a state, and wait for it."""
        state = some_state() if state is None else state
        assert self.writer.submit(step, tensors=state, meta={}, **more)
        self.writer.close(timeout_s=LIMIT_S)

    def loaded(self, step: int) -> dict[str, Tensor]:
        found = found_in(self.store)
        assert found.step == step
        return load_checkpoint(found)[0]


@pytest.fixture
def bench(tmp_path: Path) -> Any:
    bench = Bench(tmp_path / "checkpoints")
    yield bench
    bench.disk.open()
    bench.writer.close(timeout_s=LIMIT_S)


def some_state() -> dict[str, Tensor]:
    torch.manual_seed(3)
    return {
        "model.w": torch.randn(40, 30),
        "model.conv": torch.randn(8, 3, 3, 3).to(memory_format=torch.channels_last),
        "model.half": torch.randn(64).bfloat16(),
        "model.none": torch.empty(0),
        "optimizer.step": torch.tensor(7.0),
    }


def test_training_beside_the_writer_saves_each_step_as_it_was(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors_module, "_BLOCK_BYTES", 256)
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 2)
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters())
    buffers = {f"model.{name}" for name, _ in model.named_buffers()}
    saved: dict[int, dict[str, Tensor]] = {}
    for step in range(12):
        model(torch.randn(16, 8)).square().mean().backward()
        bench.writer.before_update()
        optimizer.step()
        optimizer.zero_grad()
        state = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
        for index, entry in optimizer.state_dict()["state"].items():
            state |= {f"optimizer.{index}.{name}": tensor for name, tensor in entry.items()}
        meta: dict[str, Any] = {"nested": {"steps": [step]}}
        if bench.writer.submit(step, tensors=state, meta=meta, volatile=buffers):
            saved[step] = {name: tensor.clone() for name, tensor in state.items()}
        meta["nested"]["steps"].append("later")
        if step == 6:  # the second half has a disk without a gate
            bench.disk.open()
            bench.writer.close(timeout_s=LIMIT_S)
        else:
            bench.disk.allow()
    bench.writer.close(timeout_s=LIMIT_S)
    assert bench.writer.poll() is None
    assert {0, 7} <= saved.keys()
    for step in list_steps(bench.store.root):
        found: Any = verify_checkpoint(bench.store.root / f"step-{step:09d}")
        assert_same(load_checkpoint(found)[0], saved[step])
        assert found.manifest.meta == {"nested": {"steps": [step]}}


def test_a_submit_while_busy_is_refused_and_never_queued(bench: Bench) -> None:
    assert bench.writer.submit(1, tensors=some_state(), meta={})
    assert not bench.writer.submit(2, tensors=some_state(), meta={})
    assert bench.writer.is_busy
    bench.disk.open()
    bench.writer.close(timeout_s=LIMIT_S)
    assert list_steps(bench.store.root) == [1]
    bench.save(4)
    assert list_steps(bench.store.root) == [4, 1]


def test_a_write_that_fails_is_told_once_and_the_older_checkpoint_stays(bench: Bench) -> None:
    bench.disk.open()
    bench.store.write(1, tensors=some_state(), meta={})
    for error in (OSError(errno.EIO, "Input/output error"), KeyError("surprise")):
        bench.disk.error = error
        bench.save(2)
        found = bench.writer.poll()
        assert isinstance(found, CheckpointError)
        assert "step 2" in found.message
        assert error.args[-1] in found.message
        assert bench.writer.poll() is None
        assert list_steps(bench.store.root) == [1]
    bench.disk.error = None
    bench.save(3)
    assert bench.writer.poll() is None
    assert list_steps(bench.store.root) == [3, 1]


def test_a_mistake_of_the_caller_is_raised_at_submit(bench: Bench) -> None:
    with pytest.raises(CheckpointError, match="object"):
        bench.writer.submit(1, tensors=some_state(), meta={"x": object()})
    with pytest.raises(CheckpointError, match=r"model\.odd"):
        bench.writer.submit(1, tensors={"model.odd": torch.eye(2).to_sparse()}, meta={})
    assert not bench.writer.is_busy


def test_a_state_of_another_shape_is_laid_out_anew(bench: Bench) -> None:
    bench.disk.open()
    for step, size in enumerate((3, 3, 5)):
        state = {"model.w": torch.full((size,), float(step))}
        bench.save(step, state, best={"value": float(step)})
        assert_same(bench.loaded(step), state)
    assert folder.read_best_step(bench.store.root) == 2


def test_the_last_save_waits_for_the_write_in_flight_and_then_writes(bench: Bench) -> None:
    saver: Any = Saver.__new__(Saver)
    saver._writer, saver._store, saver._saved_step = bench.writer, bench.store, 1
    saver.contents = SimpleNamespace(meta=lambda progress: {})
    bench.writer.submit(1, tensors=some_state(), meta={})
    threading.Timer(0.05, bench.disk.open).start()
    saver._write_now(SimpleNamespace(step=2), some_state())
    assert list_steps(bench.store.root) == [2, 1]


def test_a_disk_that_hangs_does_not_hold_the_last_save_for_ever(bench: Bench) -> None:
    bench.writer.submit(1, tensors=some_state(), meta={})
    with pytest.raises(CheckpointError, match=r"checkpoint-1.*not written after.*hangs"):
        bench.writer.close(timeout_s=0.05)


def test_memory_is_pinned_ahead_in_a_thread(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, calls = threading.Event(), list[Any]()

    def reserve(arena: HostArena, size_bytes: int, *, pinned: bool) -> None:
        assert gate.wait(LIMIT_S)
        calls.append((threading.current_thread().name, size_bytes, pinned))

    monkeypatch.setattr(HostArena, "reserve", reserve)
    bench.writer.pin_ahead(100)
    gate.set()  # training has gone on meanwhile
    monkeypatch.setattr(torch.cuda, "Stream", lambda *given, **named: calls.append(named))
    held: Any = {"weight": SimpleNamespace(is_cuda=True)}
    with pytest.raises(AttributeError):  # there is no stream here
        bench.writer._copy(held, mock.Mock(data_bytes=90), volatile=())
    pinned = [("pin-memory", 100, True), (threading.current_thread().name, 90, True)]
    # WHY a priority: streams of 0 are given to NCCL, too
    assert calls == [*pinned, {"priority": -1}]


def test_without_memory_for_a_copy_a_save_is_left_out_and_nothing_else_is_told(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(HostArena, "reserve", lambda *_, **__: bytearray(2**62))
    bench.writer.pin_ahead(100)
    with pytest.raises(CheckpointError, match="step 1 is not saved: no memory to copy") as caught:
        bench.writer.submit(1, tensors=some_state(), meta={})
    assert "memory" in caught.value.fix
    assert not bench.writer.is_busy
    assert not capsys.readouterr().err  # no traceback of the thread


def test_at_most_half_of_the_memory_that_is_free_is_pinned(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = SimpleNamespace(available=150)
    monkeypatch.setattr(tensors_module, "virtual_memory", lambda: free)
    for _ in range(2):  # once there is memory of another kind, it stays
        bench.writer._reserve(100, pinned=True)
    assert len(caplog.records) == 1
    assert "150 bytes of host memory are free" in caplog.text


def test_pinned_memory_has_sizes_that_torch_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    free, sizes = SimpleNamespace(available=2**40), list[int]()
    monkeypatch.setattr(tensors_module, "virtual_memory", lambda: free)
    monkeypatch.setattr(torch, "empty", lambda size, **_: sizes.append(size))
    arena, wanted = HostArena(), 2**30 + 200
    arena.reserve(wanted, pinned=True)
    assert {size & (size - 1) for size in sizes} == {0}
    assert wanted <= sum(sizes) < wanted + 2**26
    num_blocks = len(sizes)
    arena.reserve(wanted + 2**26, pinned=True)
    assert len(sizes) == num_blocks + 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_state_on_a_gpu_is_written_as_it_was_at_submit(bench: Bench) -> None:
    state = {name: tensor.cuda() for name, tensor in some_state().items()}
    state["model.big"] = torch.randn(2**24, device="cuda")
    expected = {name: tensor.cpu() for name, tensor in state.items()}
    for step in (1, 2):
        bench.writer.submit(step, tensors=state, meta={}, volatile={"model.conv"})
        state["model.conv"].add_(1)
        bench.writer.before_update()
        for tensor in state.values():
            tensor.zero_()
        bench.disk.open()
        bench.writer.close(timeout_s=LIMIT_S)
        assert_same(bench.loaded(step), expected)
        for name, tensor in state.items():
            tensor.copy_(expected[name])
    bench.store.write(3, tensors=state, meta={})
    assert_same(bench.loaded(3), expected)


def test_a_save_is_due_when_the_last_began_long_enough_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    now, saved_at, nothing = 0.0, list[float](), SimpleNamespace(step=1)
    monkeypatch.setattr(state_module, "time", SimpleNamespace(monotonic=lambda: now))
    group: Any = mock.MagicMock(device=torch.device("cpu"))
    contents = mock.Mock(tensors=dict)
    every: Any = SimpleNamespace(checkpoint_every_steps=None, checkpoint_every_epochs=0)
    saver = Saver(contents, mock.Mock(), group=group, config=every)
    writer: Any = mock.Mock(is_busy=False, is_copying=False, cost=WriteCost(5.0, 1.0))
    saver._writer = writer
    for now in range(0, 1800, 100):
        if saver.is_time():
            saver.save(nothing)
            saved_at.append(now)
    assert saved_at == [500, 1000, 1500]
    writer.submit.return_value, saver._is_auto = False, False
    saver.save(nothing)  # refused: another one is under way
    assert saver.is_time()
    saver._is_auto, writer.submit.side_effect = True, CheckpointError("no memory")
    saver.save(nothing)
    assert not saver.is_time()  # not in the next step


def test_only_the_rank_that_writes_waits_for_the_device_before_a_save() -> None:
    for is_main in (False, True):
        run: Any = Run.__new__(Run)
        run.parts = SimpleNamespace(group=SimpleNamespace(is_main=is_main))
        run.stepper = mock.Mock(**{"is_finite.return_value": False})
        run.save()
        assert run.stepper.is_finite.called is is_main


@pytest.mark.parametrize("training_s", [0.0, 0.02, 5.0])
@pytest.mark.parametrize("size_bytes", [1.2e6, 12e9, 360e9])
def test_saving_takes_little_of_the_time_and_the_disk(size_bytes: float, training_s: float) -> None:
    assert 0 < save_interval_s(int(size_bytes), None) <= 600
    interval_s = save_interval_s(int(size_bytes), WriteCost(training_s, size_bytes / 1e9))
    assert interval_s >= max(training_s / 0.01, size_bytes / 1e9 / 0.1)


def test_a_write_measures_how_long_the_disk_was_in_use(tmp_path: Path) -> None:
    slow = Disk()
    slow.sync = lambda descriptor: time.sleep(0.5)  # type: ignore[method-assign]
    writer = CheckpointWriter(CheckpointStore(tmp_path, keep_last=2, disk=slow))
    assert writer.cost is None
    assert writer.submit(1, tensors={"weight": torch.ones(4)}, meta={})
    writer.close()
    assert writer.cost.disk_s >= 1.0  # two files
    assert writer.cost.training_s < writer.cost.disk_s

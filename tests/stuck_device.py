"""A model whose CPU ranks work as ranks with GPUs do: the host queues work, a device does it later.

An all-reduce that another rank does not join never ends, and nothing that was queued behind it runs
(as with NCCL; gloo would raise an error). Imported by a rank when it builds its model. The variable
STUCK_DEVICE is JSON: the folder in which ranks note where they are, and who leaves when and how.
What is queued: all-reduces, updates, events. Forward and backward run on the host; a real device
would run them, too, behind the update before them: so a step waits for that first.
"""

import ctypes
import json
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hardened_ddp.gradients.by_ddp import ByDdp
from hardened_ddp.ranks.phase import Phase
from hardened_ddp.step import async_device, parts
from hardened_ddp.step.gradient import Attempt
from hardened_ddp.step.step import Stepper
from hardened_ddp.training import survivor_save

PLAN = json.loads(os.environ["STUCK_DEVICE"])
_FOLDER = Path(PLAN["folder"])
compute_the_gradient, _update = Stepper.compute_gradient, torch.optim.AdamW.step
_has_updated = threading.Event()


class Device:
    """A thread that does queued work in order."""

    def __init__(self) -> None:
        self.is_stuck = threading.Event()
        self._queue: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
        self._num_sums = 0
        self._group = dist.new_group(backend="gloo")  # collective
        threading.Thread(target=self._run, name="device", daemon=True).start()

    def submit(self, work: Callable[[], object]) -> None:
        self._queue.put(work)

    def settle(self) -> None:
        """Wait until all work is done, or the device is stuck."""
        done = threading.Event()
        self.submit(done.set)
        while not done.wait(0.001) and not self.is_stuck.is_set():
            pass

    def sum_(self, tensor: torch.Tensor) -> None:
        """Do an all-reduce once all ranks have come to it. On the device's thread."""
        rank, number = dist.get_rank(), self._num_sums
        self._num_sums += 1
        (_FOLDER / f"sum-{number}-{rank}").touch()
        while True:
            has_left = (_FOLDER / "left").exists()  # WHY first: who has come did so before
            if len(list(_FOLDER.glob(f"sum-{number}-*"))) == dist.get_world_size():
                break
            if has_left:
                self.is_stuck.set()
                time.sleep(1e6)
            time.sleep(0.001)
        dist.all_reduce(tensor, group=self._group)

    def _run(self) -> None:
        while True:
            self._queue.get()()


class QueuedEvent:
    """An event on the device's queue."""

    def __init__(self) -> None:
        self._is_set = threading.Event()
        _device().submit(self._is_set.set)

    def is_reached(self) -> bool:
        return self._is_set.is_set()

    def wait(self) -> None:
        self._is_set.wait()


class QueuedFlag(async_device.Flag):
    def is_up(self) -> bool:
        is_up = super().is_up()
        _device().settle()  # the host's next read of the weights comes behind the update
        return is_up


def send(self: ByDdp, state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Queue the all-reduce of a bucket, and go on: DDP's communication hook."""
    buffer = bucket.buffer()
    self._under_way.append(bucket.parameters())
    self._buffers.append(buffer)
    if bucket.is_last():
        self._layout, self._flats = self._under_way, self._buffers
        if self._when_computed is not None:  # in a step
            self._when_computed()
        self.group.tracker.enter(Phase.ALL_REDUCE)
    _device().submit(lambda: _device().sum_(buffer))
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(buffer)
    return future


def do_step(optimizer: torch.optim.AdamW) -> None:
    """Queue the update, with the gradients and the learning rate of now."""
    groups = optimizer.param_groups
    rates = [group["lr"] for group in groups]
    weights = [p for group in groups for p in group["params"]]
    gradients = [p.grad for p in weights]
    flag = optimizer.found_inf  # type: ignore[attr-defined]

    def update() -> None:
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.grad = gradient
        optimizer.found_inf = flag  # type: ignore[attr-defined]
        _update(optimizer)  # type: ignore[no-untyped-call]  # torch
        for weight in weights:
            weight.grad = None

    optimizer.zero_grad = lambda set_to_none=True: None  # type: ignore[method-assign]
    for weight in weights:
        weight.grad = None
    _leave_in("update")
    _has_updated.set()
    _device().submit(update)


def compute_gradient(self: Stepper, *arguments: Any) -> Attempt:
    """Begin a step behind the last update."""
    _device().settle()
    return compute_the_gradient(self, *arguments)


class Net(nn.Module):
    """Two layers; a rank leaves in its forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(points)
        if not self.training:
            _device().settle()
            if _has_updated.is_set():  # a start tries the test set, too
                _leave_in("evaluation")
        elif torch.is_grad_enabled():
            _leave_in("forward")
            output.register_hook(lambda gradient: _leave_in("backward"))
        return output


_counts: dict[str, int] = {}


@cache
def _device() -> Device:
    return Device()


def _stay() -> None:
    """A kernel that never ends. On the device's thread."""
    _device().is_stuck.set()
    (_FOLDER / "left").touch()
    time.sleep(1e6)


def _leave_in(phase: str) -> None:
    """Kill or stop this process, or its device, at the planned call in the planned phase."""
    if not dist.is_initialized() or [dist.get_rank(), phase] != [PLAN["rank"], PLAN["phase"]]:
        return
    _counts[phase] = _counts.get(phase, 0) + 1
    if _counts[phase] == PLAN["call"]:
        _device().settle()
        if PLAN["signal"] == "kernel":
            _device().submit(_stay)
            return
        (_FOLDER / "left").touch()
        os.kill(os.getpid(), getattr(signal, PLAN["signal"]))


def copy_beside(*arguments: Any) -> Any:
    """Fail on one rank, as memory does that can't be corrected."""
    if dist.get_rank() == PLAN.get("unreadable"):
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
    return _copy_beside(*arguments)


def do_once(*arguments: Any, head_start_s: float, **named: Any) -> bool:
    """Note how long the survivor's save waits for rank 0."""
    (_FOLDER / "head_start").write_text(f"{head_start_s}")
    return _do_once(*arguments, head_start_s=head_start_s, **named)


def dump() -> bytes:
    """Give what NCCL's recorder gives; or wait with the GIL, as torch does for a stuck device."""
    if PLAN.get("dump") == "stuck":
        ctypes.PyDLL(None).sleep(1000)
    return b'{"entries": []}'


_copy_beside, _do_once = survivor_save.copy_beside, survivor_save.do_once
survivor_save.copy_beside, survivor_save.do_once = copy_beside, do_once  # type: ignore[assignment]
parts.ASYNC_DEVICES = (*parts.ASYNC_DEVICES, "cpu")
async_device.Event = QueuedEvent  # type: ignore[assignment, misc]
async_device.Flag = QueuedFlag  # type: ignore[misc]
ByDdp._send = send  # type: ignore[method-assign]
Stepper.compute_gradient = compute_gradient  # type: ignore[method-assign]
torch._C._distributed_c10d._dump_nccl_trace_json = dump  # type: ignore[attr-defined]
torch.optim.AdamW.step = do_step  # type: ignore[method-assign, assignment]

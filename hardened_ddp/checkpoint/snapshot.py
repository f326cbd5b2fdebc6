"""Checkpoints written in the background, with as few copies as possible.

Owns: the writer thread (one, one checkpoint in flight), the rule when live tensors are copied, and
the copies from a GPU.
Does not own: the bytes (stream.py), the files (files.py), when a checkpoint is due (training/).
Between two optimizer steps parameters and optimizer state don't change, so the thread reads them in
place. before_update is called right before a change and copies what is not read yet. From a GPU
everything is copied at submit, on a side stream; before_update makes the update wait for that.
What goes wrong here: a change without before_update: an update in place, a load of other weights,
buffers that a forward changes (name these in `volatile`: they are copied at submit).
"""

import logging
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from hardened_ddp.checkpoint.files import CheckpointStore
from hardened_ddp.checkpoint.manifest import JSON, Best, plain_meta
from hardened_ddp.checkpoint.stream import HostArena, TensorStream
from hardened_ddp.checkpoint.tensors import FilePlan, plan_file
from hardened_ddp.errors import CheckpointError
from hardened_ddp.settings.typed_command import shell_command

# Longer than a working disk needs for any state; a network disk that hangs never finishes.
_WAIT_S = 1800.0

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class WriteCost:
    """What one write cost."""

    training_s: float
    """How long training stood still, on the host or on a device; on the CPU also the writer's own
    CPU time, which training could have used."""

    disk_s: float
    """How long the disk was in use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _InFlight:
    """The checkpoint in flight."""

    stream: TensorStream
    copied: list[tuple[torch.device, torch.cuda.Event]]
    """For each GPU, the event after the copies from it."""

    waits: list[tuple[torch.cuda.Event, torch.cuda.Event]]
    """For each GPU, the event at which its update began to wait, and the one that it waited for."""

    tensors: Mapping[str, Tensor]
    """Kept until then: memory that is freed while it is copied would be reused."""


class CheckpointWriter:
    """Writes checkpoints while training continues. Call all methods from the training thread."""

    def __init__(self, store: CheckpointStore) -> None:
        self._store = store
        self._arena = HostArena()
        self._plan: FilePlan | None = None
        self._layout: list[tuple[str, torch.dtype, torch.Size]] = []
        self._lock = threading.Lock()
        self._copy_streams: dict[torch.device, torch.cuda.Stream] = {}
        self._thread: threading.Thread | None = None
        self._unfrozen: _InFlight | None = None
        self._error: CheckpointError | None = None
        self._was_refused = False
        self._stall_s = 0.0
        self.cost: WriteCost | None = None
        """Of the last finished write; None: there is none."""

    @property
    def is_busy(self) -> bool:
        """A checkpoint is in flight."""
        return self._thread is not None and self._thread.is_alive()

    @property
    def is_wanted(self) -> bool:
        """A submit was refused and the writer is free now: submit the state of this step."""
        return self._was_refused and not self.is_busy

    def submit(
        self,
        step: int,
        *,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, JSON],
        volatile: Collection[str] = (),
        best: Best | None = None,
    ) -> bool:
        """Start writing a checkpoint; False if one is still in flight, see is_wanted.

        Tensors are read until the write is done: call before_update before each change. Those
        named in volatile are copied here. Raises CheckpointError if something can't be stored.
        """
        if self.is_busy:
            self._was_refused = True
            return False
        started_at = time.perf_counter()
        plain = plain_meta(meta)
        # WHY kept: the layout is the same each time, and it takes most of the time here
        layout = [(name, tensor.dtype, tensor.shape) for name, tensor in tensors.items()]
        if self._plan is None or self._layout != layout:
            self._plan, self._layout = plan_file(tensors), layout
        stream = TensorStream(tensors, plan=self._plan, arena=self._arena, lock=self._lock)
        copied = self._copy_from_gpus(stream, tensors, volatile)
        stream.freeze_only(
            # WHY other devices too: only CUDA has streams that copy while training continues
            [name for name, tensor in tensors.items() if name in volatile or not tensor.is_cpu]
        )
        flight = _InFlight(stream=stream, copied=copied, waits=[], tensors=dict(tensors))
        self._unfrozen = flight
        self._was_refused = False
        # WHY a daemon: a disk that hangs must not keep the process from exiting. Each write has its
        # own thread, so there is none when nothing is written.
        self._thread = threading.Thread(
            target=self._write,
            args=(step, flight, plain, best),
            name=f"checkpoint-{step}",
            daemon=True,
        )
        self._stall_s = time.perf_counter() - started_at
        self._thread.start()
        return True

    def before_update(self) -> None:
        """Make the tensors safe to change. Call right before every optimizer step.

        Costs nothing when no checkpoint is in flight; else it copies what is not read yet.
        """
        flight = self._unfrozen
        if flight is None:
            return
        self._unfrozen = None
        started_at = time.perf_counter()
        flight.stream.freeze()
        self._stall_s += time.perf_counter() - started_at
        for device, event in flight.copied:
            # WHY no synchronize: the update waits on the GPU, and this thread continues
            compute = torch.cuda.current_stream(device)
            reached = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]  # torch's
            reached.record(compute)
            compute.wait_event(event)
            flight.waits.append((reached, event))

    def poll(self) -> CheckpointError | None:
        """Return the error of a write that failed since the last poll. Training can continue."""
        error, self._error = self._error, None
        return error

    def write_now(
        self,
        step: int,
        *,
        tensors: Mapping[str, Tensor],
        meta: Mapping[str, JSON],
        timeout_s: float = _WAIT_S,
    ) -> Path:
        """Wait for the write in flight, then write this checkpoint and return its folder.

        For the last checkpoint and for emergencies. Raises CheckpointError.
        """
        self._wait(timeout_s)
        return self._store.write(step, tensors=tensors, meta=meta)

    def close(self, *, timeout_s: float = _WAIT_S) -> None:
        """Wait for the write in flight. Raises CheckpointError if it takes longer; poll after."""
        self._wait(timeout_s)

    def _wait(self, timeout_s: float) -> None:
        if self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise CheckpointError(
                f"the checkpoint in flight ({self._thread.name}) is not written after "
                f"{timeout_s:.0f} s: the disk under {self._store.root} hangs",
                fix="older checkpoints are unchanged; check the disk: "
                + shell_command("df", self._store.root),
            )
        self._thread = None

    def _write(
        self,
        step: int,
        flight: _InFlight,
        meta: dict[str, JSON],
        best: Best | None,
    ) -> None:
        try:
            for _, event in flight.copied:
                event.synchronize()
            began_at = time.perf_counter()
            self._store.write_stream(step, stream=flight.stream, meta=meta, best=best)
            # WHY not with a GPU: there the writer's CPU core would be idle
            work_s = device_wait_s(flight.waits) if flight.copied else time.thread_time()
            self.cost = WriteCost(self._stall_s + work_s, time.perf_counter() - began_at)
        except CheckpointError as error:
            self._error = error
        except Exception as error:  # WHY broad: nothing else reports what a thread raises
            log.exception("the checkpoint of step %d failed", step)
            self._error = CheckpointError(f"the checkpoint of step {step} failed: {error!r}")
        finally:
            # WHY: a failed write needs no copies, and a finished one needs no tensors
            self._unfrozen = None

    def _copy_from_gpus(
        self, stream: TensorStream, tensors: Mapping[str, Tensor], volatile: Collection[str]
    ) -> list[tuple[torch.device, torch.cuda.Event]]:
        """Start the copies to pinned memory; return, for each GPU, the event after them."""
        on_gpu = {name: tensor for name, tensor in tensors.items() if tensor.is_cuda}
        if not on_gpu:
            return []
        self._reserve_pinned(stream.plan.data_bytes)
        # WHY in the compute stream: these copies must come before the next forward; the others run
        # in parallel to it
        for name in on_gpu.keys() & set(volatile):
            _start_copy(name, on_gpu[name], stream)
        copied = []
        for device in {tensor.device for tensor in on_gpu.values()}:
            if device not in self._copy_streams:
                side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's
                self._copy_streams[device] = side
            side = self._copy_streams[device]
            side.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(side):
                for name, tensor in on_gpu.items():
                    if name not in volatile and tensor.device == device:
                        _start_copy(name, tensor, stream)
                # WHY timing: it tells how long the update waited for it
                event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                event.record(side)
            copied.append((device, event))
        return copied

    def _reserve_pinned(self, size_bytes: int) -> None:
        try:
            self._arena.reserve(size_bytes, pinned=True)
        except RuntimeError as error:
            log.warning(
                "%d bytes of host memory can't be pinned (%s): ordinary memory is used, and "
                "training stops while a checkpoint is copied from the GPU",
                size_bytes,
                error,
            )
            self._arena.reserve(size_bytes, pinned=False)


def device_wait_s(waits: Sequence[tuple[torch.cuda.Event, torch.cuda.Event]]) -> float:
    """Return how long devices stood still between reaching a wait and the event waited for."""
    longest_ms = 0.0
    for reached, event in waits:
        reached.synchronize()
        # negative if the event came first: then nothing waited
        longest_ms = max(longest_ms, reached.elapsed_time(event))
    return longest_ms / 1000


def _start_copy(name: str, tensor: Tensor, stream: TensorStream) -> None:
    """Start the copy of a GPU tensor to the memory from which the stream will read it."""
    source = tensor.detach().resolve_conj().resolve_neg().contiguous()
    data = source.reshape(-1).view(torch.uint8)
    taken = 0
    for piece in stream.hand_over(name):
        piece.copy_(data[taken : taken + piece.numel()], non_blocking=True)
        taken += piece.numel()

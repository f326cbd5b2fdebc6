"""What step_ops.py runs inside of the ranks: it counts operations, and reads of device values.

A training run builds its model by `--model benchmarks.ops_trace:build`; that also runs the bare DDP
loop on the same model, and then switches on the counting of the run. $OPS_TRACE is the file that
rank 0 writes.

There is no GPU. So this module makes the code take the branches that it takes on one
(`_as_on_gpu`), and keeps a list of which tensors would be on it: the model, its batches, and
whatever is computed from them. Reading the value of such a tensor is a wait for the device.

Does not own: the bars (step_ops.py). What it can't see: copies from memory that is not pinned, and
kernels; one operation may be several.
"""

import contextlib
import functools
import json
import os
import threading
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.ops_models import MODELS, bare_loss, sample_inputs
from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.step import async_device, parts, step
from hardened_ddp.training import run, run_report

ROOT = str(Path(__file__).resolve().parents[1])
BARE_STEPS = 4
START, STEP, REPORT, EVALUATION = "start", "step", "report", "evaluation"
"""Kinds of parts of a run. REPORT: a step, and the report, the save or the look behind it."""


_READS = ("_local_scalar_dense", "nonzero", "equal", "is_nonzero", "masked_select", "_unique2")
"""Operations whose result, or its size, the host has to know."""


class Trace(TorchDispatchMode):
    """Counts the operations of the thread that trains, and finds out which wait for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: Counter[str] = Counter()
        self.allocations: Counter[str] = Counter()
        """Results in memory of their own."""

        self.waits: list[str] = []
        """The place in our code of each."""

        self.is_paused = False
        self._on_device: dict[int, StorageWeakRef] = {}
        self._thread = threading.get_ident()

    def __torch_dispatch__(
        self,
        func: Any,  # Any: torch's own signature
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        inputs = list(tensors_in((args, kwargs)))
        is_on_device = any(self.knows(tensor) for tensor in inputs)
        is_counted = not self.is_paused and (is_on_device or not inputs)
        if is_counted:
            self.operations[str(func)] += 1
        if is_on_device and func.overloadpacket.__name__ in _READS:
            self.note_wait(func.overloadpacket.__name__)
        result = func(*args, **kwargs)
        if is_counted:
            there = {tensor.untyped_storage()._cdata for tensor in inputs}
            results = {tensor.untyped_storage()._cdata for tensor in tensors_in(result)}
            self.allocations[str(func)] += len(results - there)
        if is_on_device:
            written = [
                value
                for value, argument in zip(args, func._schema.arguments, strict=False)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            self.add((result, written, kwargs.get("out")))
        return result

    def add(self, value: object) -> None:
        """Note that these tensors would be on the device."""
        for tensor in tensors_in(value):
            storage = StorageWeakRef(tensor.untyped_storage())
            # WHY kept: as long as it is, no other storage gets this number.
            self._on_device[storage.cdata] = storage

    def knows(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor would be on the device."""
        return tensor.untyped_storage()._cdata in self._on_device

    def note_wait(self, what: str) -> None:
        """Note that the host reads what the device computes."""
        if self.is_paused or threading.get_ident() != self._thread:
            return
        frames = [f for f in traceback.extract_stack() if f.filename.startswith(ROOT)]
        ours = [f for f in frames if f.filename != __file__]
        where = f"{Path(ours[-1].filename).relative_to(ROOT)}:{ours[-1].lineno}" if ours else "?"
        self.waits.append(f"{what} at {where}")

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing inside."""
        before, self.is_paused = self.is_paused, True
        try:
            yield
        finally:
            self.is_paused = before

    def take(self) -> dict[str, Any]:  # Any: JSON
        """Return what was counted since the last call."""
        found = {"operations": dict(self.operations), "waits": list(self.waits)}
        found |= {"allocations": dict(self.allocations)}
        for counted in (self.operations, self.waits, self.allocations):
            counted.clear()
        dead = [key for key, storage in self._on_device.items() if storage.expired()]
        for key in dead:
            del self._on_device[key]
        return found

    def of_other_threads(self, callback: Callable[..., Any]) -> Callable[..., Any]:
        """Return callback so that its operations count in whatever thread it runs.

        WHY: gloo runs what follows an all-reduce in a thread of its own; NCCL in that of backward.
        """

        def counted(*args: Any) -> Any:
            if threading.get_ident() == self._thread:
                return callback(*args)
            with self:
                return callback(*args)

        return counted


class StepTrace:
    """Sorts what the trace counts: by steps, and evaluations."""

    def __init__(self, trace: Trace, bare: dict[str, Any], file: str) -> None:
        self._trace, self._bare, self._file = trace, bare, file
        self._found: list[dict[str, Any]] = []
        self._kind = START
        # WHY not atexit: ranks that multiprocessing started end without that
        Finalize(None, self.write, exitpriority=0)

    def begin(self, kind: str) -> None:
        """Begin a part of the run of this kind; what was counted before belongs to the last one."""
        self._found.append({"kind": self._kind, **self._trace.take()})
        self._kind = kind

    def report(self) -> None:
        """Note that the step under way ends with a report."""
        self._kind = REPORT

    def write(self) -> None:
        """Write what was counted."""
        self.begin(START)
        seen = {"bare": self._bare, "parts": self._found}
        Path(self._file).write_text(json.dumps(seen), encoding="utf-8")


class HostFlag(async_device.Flag):
    """The flag with its copy for the host as on a GPU, where reading it is a wait."""

    def __init__(self, is_bad: torch.Tensor) -> None:
        super().__init__(is_bad)
        self._on_host = torch.empty((), dtype=is_bad.dtype)
        self._on_host.copy_(is_bad, non_blocking=True)
        self._was_read = False

    def is_up(self) -> bool:
        """Return whether the gradient was bad; the first call waits."""
        if not self._was_read:
            _trace.note_wait("flag")
        self._was_read = True
        with _trace.paused():
            return super().is_up()


class HostEvent:
    """An event on the CPU, which runs its work at once."""

    def is_reached(self) -> bool:
        """Return that the device is past it."""
        return True

    def wait(self) -> None:
        """Do not wait."""


def build(work: str, num_classes: int) -> nn.Module:
    """Count the bare loop with a model of this name, begin to count the run, return its model."""
    _as_on_gpu()
    is_main = os.environ["RANK"] == "0"
    with _trace if is_main else contextlib.nullcontext():
        bare = bare_loop(work, num_classes)
    model = MODELS[work](num_classes)
    if is_main:
        _count_run(StepTrace(_trace, bare, os.environ["OPS_TRACE"]), model)
    return model


def bare_loop(work: str, num_classes: int) -> dict[str, Any]:
    """Train as DDP's tutorial does, in bf16, with torch's fused AdamW; return its last step."""
    model = MODELS[work](num_classes)
    _trace.add(list(model.parameters()) + list(model.buffers()))
    inputs, labels = sample_inputs(work, num_classes)
    _trace.add((inputs, labels))
    network = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    for _ in range(BARE_STEPS):
        _trace.take()
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = bare_loss(network(inputs), labels)
        loss.backward()
        optimizer.step()
        _trace.add(list(optimizer.state.values()))
    return _trace.take()


def _as_on_gpu() -> None:
    """Let this process take the branches that it would take with tensors on a GPU.

    - A gradient is found to be bad one step later (step/async_device.py), whose flag has a copy.
    - Sums of losses are copied on the device, and not read (Totals.mark asks is_cpu).
    - torch takes one operation for all tensors of a list, where it has one.
    """
    parts.ASYNC_DEVICES = (*parts.ASYNC_DEVICES, "cpu")
    async_device.Flag, async_device.Event = HostFlag, HostEvent  # type: ignore[misc, assignment]
    torch.Tensor.is_cpu = property(lambda self: False)  # type: ignore[assignment]
    devices = _foreach_utils._get_foreach_kernels_supported_devices()
    _foreach_utils._get_foreach_kernels_supported_devices = lambda: [*devices, "cpu"]


def _count_run(steps: StepTrace, model: nn.Module) -> None:
    """Count from now on, sorted by the steps of the run."""
    _trace.add(list(model.parameters()) + list(model.buffers()))
    _trace.__enter__()
    torch._C.Future.then = functools.partialmethod(  # type: ignore[method-assign]
        lambda self, callback, *, then: then(self, _trace.of_other_threads(callback)),
        then=torch._C.Future.then,
    )
    _around(step.Stepper, "train_step", lambda stepper, window, batches: _begin(steps, batches))
    _around(run.Run, "report_losses", lambda *_: steps.report())
    _around(run, "evaluate", lambda *_, **__: steps.begin(EVALUATION))
    _around(Batch, "to", lambda batch, *_, **__: _trace.add((batch.inputs, batch.targets)))
    _around(run_report.RunReport, "log_evaluation", lambda *_: steps.begin(REPORT))
    windows = run.Run.windows

    def paused_windows(self: run.Run) -> Iterator[Any]:
        # WHY: a loop of the tutorial has to load its samples too
        found = windows(self)
        while True:
            with _trace.paused():
                item = next(found, None)
            if item is None:
                return
            yield item

    run.Run.windows = paused_windows  # type: ignore[method-assign]
    for name in ("tolist", "cpu", "numpy"):
        _around(torch.Tensor, name, functools.partial(_read, name))
    torch.Tensor.to = functools.partialmethod(_to, to=torch.Tensor.to)  # type: ignore[method-assign]
    for make in ("tensor", "as_tensor"):
        _around(torch, make, functools.partial(_make, make))


def _begin(steps: StepTrace, batches: Any) -> None:
    steps.begin(STEP)
    _trace.add([(batch.inputs, batch.targets) for batch in batches])


def _read(name: str, tensor: torch.Tensor, *_: object, **__: object) -> None:
    if _trace.knows(tensor):
        _trace.note_wait(name)


def _to(tensor: torch.Tensor, *args: Any, to: Callable[..., Any], **kwargs: Any) -> Any:
    """Move a tensor, and note the wait: to the host, or to the device, as far as it shows.

    Both are the CPU here. A host is always named "cpu"; the device is group.device.
    """
    wanted = kwargs.get("device", args[0] if args else None)
    is_on_device, is_wait = _trace.knows(tensor), not kwargs.get("non_blocking")
    if wanted == "cpu" and is_on_device:
        if is_wait:
            _trace.note_wait("to")
        with _trace.paused(), torch._C._DisableTorchDispatch():
            return to(tensor, *args, **kwargs).clone()
    if isinstance(wanted, torch.device) and not is_on_device:
        if is_wait:
            _trace.note_wait("to")
        _trace.add(found := to(tensor, *args, **kwargs))
        return found
    return to(tensor, *args, **kwargs)


def _make(name: str, data: object, *_: object, device: object = None, **__: object) -> None:
    """Note the wait if numbers are copied to the device."""
    if device is not None and not isinstance(data, torch.Tensor):
        _trace.note_wait(name)


def _around(owner: Any, name: str, before: Callable[..., None]) -> None:
    """Call before, with the same arguments, whenever owner.name is called."""
    inner = getattr(owner, name)

    @functools.wraps(inner)
    def call(*args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        return inner(*args, **kwargs)

    setattr(owner, name, call)


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested lists, tuples and mappings."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))


_trace = Trace()

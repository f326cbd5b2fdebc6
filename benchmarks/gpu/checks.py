"""What is to be tried first on a GPU, one function each: it raises AssertionError if it fails.

    python -m benchmarks.gpu.checks [--device cpu]      PASS or MISS for each

On the CPU these show only that they run; the waits and the sizes that they check are a GPU's. Some
also return a figure for the report.
"""

import argparse
import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.batches.sampler import Window
from hardened_ddp.gradients.by_ddp import ByDdp
from hardened_ddp.gradients.sums import Marks, Sums, flag_of
from hardened_ddp.model.checksum import checksums
from hardened_ddp.model.optimizer import allocate_state, build_optimizer, skips_by_flag
from hardened_ddp.model.precision import Precision
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.launch import read_launch
from hardened_ddp.ranks.threads import call_within, keep_ready
from hardened_ddp.settings.config import OptimizerConfig
from hardened_ddp.step.async_device import Event, Flag, beside, copy_beside
from hardened_ddp.step.gradient import Totals
from hardened_ddp.task.classification import Classification

os.environ.setdefault("CUDA_SCALE_LAUNCH_QUEUES", "4x")  # as in a run: ranks/launch.py

_MIB = 2**20
_LAUNCHES = 3000  # a queue holds 1,021; with CUDA_SCALE_LAUNCH_QUEUES=4x, 4,093
_COPY_LIMIT_S = 60.0
_QUEUE_FULL_S = 1.0  # in which all of them are launched, or the queue is full
_STUCK_CYCLES = 1 << 33  # some seconds
_MOST_WORKSPACE_MIB = 300  # of checksums: while factors of 128 MiB are mixed, as much again


def nan_and_inf_are_found_in_every_type(device: torch.device) -> str:
    """One norm of all gradients finds NaN and inf; a number whose square is finite is none."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        most = torch.finfo(dtype).max / 2 if dtype in (torch.float16, torch.float64) else 1.8e19
        large = torch.full((4096,), most, dtype=dtype, device=device)
        others = [torch.ones(2, dtype=dtype, device=device), large[:0]]
        assert flag_of([large, *others]).item() == 0.0, dtype
        if most == 1.8e19:  # fused Adam on a GPU makes NaN of a gradient whose square is inf
            assert flag_of([large, large[:3] * 1.1]).item() == 1.0, dtype
        for bad in (float("nan"), float("inf"), -float("inf")):
            broken = large.clone()
            broken[7] = bad
            flag = flag_of([*others, broken])
            assert flag.item() == 1.0, (dtype, bad)
            assert (flag.dtype, flag.shape) == (torch.float32, ()), dtype
    return ""


def fused_optimizers_skip_a_step_whose_flag_is_up(device: torch.device) -> str:
    """found_inf of 1.0 leaves weights and state as they are, also those of the step count."""
    for name in ("adamw", "adam", "sgd"):
        model = nn.Linear(64, 64).to(device)
        optimizer = build_optimizer(
            [{"params": list(model.parameters())}], OptimizerConfig(optimizer=name)
        )
        assert skips_by_flag(optimizer), f"{name} is not fused on {device}"
        allocate_state(optimizer)
        precision = Precision("off", device)
        for flag, changes in ((0.0, True), (1.0, False), (0.0, True)):
            model(torch.ones(2, 64, device=device)).square().sum().backward()
            before = _copies(model, optimizer)
            precision.leave_out(optimizer, torch.tensor(flag, device=device))
            optimizer.step()
            optimizer.zero_grad()
            same = [
                torch.equal(a, b) for a, b in zip(before, _copies(model, optimizer), strict=True)
            ]
            assert changes != all(same), (name, flag)
    return ""


def a_gradient_whose_square_overflows_changes_no_weight(device: torch.device) -> str:
    """Of a finite one, fused Adam on CUDA makes NaN: so the flag is up for it."""
    model = nn.Linear(64, 64).to(device)
    optimizer = build_optimizer([{"params": list(model.parameters())}], OptimizerConfig())
    allocate_state(optimizer)
    for size in (1.0, 1e20, 1.0):
        gradients = [torch.full_like(weight, size) for weight in model.parameters()]
        for weight, gradient in zip(model.parameters(), gradients, strict=True):
            weight.grad = gradient
        Precision("off", device).leave_out(optimizer, flag_of(gradients))
        optimizer.step()
        assert all(weight.isfinite().all() for weight in model.parameters()), size
    return ""


def the_scale_of_fp16_is_taken_back(device: torch.device) -> str:
    """A step that was left out lowers the scale; go_back restores it, without a wait before."""
    if device.type != "cuda":
        return "no fp16 on the CPU"
    precision = Precision("fp16", device)
    assert precision.scaler is not None
    model = nn.Linear(8, 8).to(device)
    optimizer = build_optimizer([{"params": list(model.parameters())}], OptimizerConfig())
    with _no_wait(device):
        mark = precision.mark()
        precision.scaler.scale(model(torch.ones(2, 8, device=device)).sum()).backward()
        precision.leave_out(optimizer, torch.ones((), device=device))
    before = precision.state()
    precision.scaler.step(optimizer)
    precision.scaler.update()
    assert precision.state()["scale"] < before["scale"]
    precision.go_back(mark)
    assert precision.state() == before
    return ""


def a_flag_is_queued_without_a_wait(device: torch.device) -> str:
    """Computing the flag of a step, its copy and the sums of its losses never wait."""
    gradients = [torch.ones(1000, device=device) for _ in range(20)]
    task = Classification(num_classes=4)
    totals = Totals(task, device)
    batch = Batch(
        torch.rand(8, 3, 4, 4, device=device),
        torch.zeros(8, dtype=torch.int64, device=device),
        torch.arange(8),
    )
    score = task.score(torch.rand(8, 4, device=device), batch)
    uses_gpu = device.type == "cuda"  # events are a GPU's
    if uses_gpu:
        Flag(flag_of(gradients)).send().wait()  # allocates the pinned memory
    with _no_wait(device):
        flag = Flag(flag_of(gradients))
        totals.mark()
        totals.add(score, 8)
        if uses_gpu:
            flag.send()
    assert not flag.is_up()
    assert totals.read(_alone(device))["samples"] == 8.0
    return ""


def checksums_need_little_memory(device: torch.device) -> str:
    """Comparing replicas takes a workspace of a fixed size, also for large weights."""
    size = 2**28 if device.type == "cuda" else 2**16
    weights = {"weights": torch.ones(size, device=device)}
    first = checksums(weights)
    with _peak_mib(device) as peak:
        second = checksums(weights)
    assert torch.equal(first, second)
    weights["weights"].view(-1)[size // 3] += 1
    assert not torch.equal(first, checksums(weights))
    assert peak[0] <= _MOST_WORKSPACE_MIB, f"{peak[0]:.0f} MiB"
    return f"workspace {peak[0]:.0f} MiB"


def sums_after_backward_copy_the_gradients_once(device: torch.device) -> str:
    """Where no hook sends gradients, adding them up needs one copy of them."""
    num = 2**26 if device.type == "cuda" else 2**12
    gradients = [torch.ones(num // 16, device=device) for _ in range(16)]
    with _peak_mib(device) as peak:
        _alone(device).sum_each_(gradients)
    share = peak[0] / (num * 4 / _MIB)
    assert share <= 1.1, f"{share:.2f} x the gradients"
    return f"{share:.2f} x the gradients"


def a_state_is_copied_behind_a_full_launch_queue(device: torch.device) -> str:
    """With more launches behind a stuck kernel than the queue holds, copies beside still end."""
    state = {
        "weight": torch.arange(1 << 20, dtype=torch.float32, device=device),
        "image": torch.rand(2, 3, 8, 8, device=device).to(memory_format=torch.channels_last),
        "step": torch.zeros((), device=device),
    }
    expected = {name: tensor.cpu() for name, tensor in state.items()}
    state["weight"].add_(0)  # WHY: to load a kernel may wait for the whole device
    beside(device)  # as at the start of a run
    end_threads = keep_ready(1)
    with _stuck(device) as is_over:
        # WHY a thread: the host waits in a launch once the queue is full
        thread = threading.Thread(target=_launch_many, args=(state["weight"],), daemon=True)
        thread.start()
        thread.join(_QUEUE_FULL_S)
        began_at = time.monotonic()
        copied = call_within(partial(copy_beside, state, device), _COPY_LIMIT_S)
        took_s = time.monotonic() - began_at
        was_over = is_over()
    thread.join()
    end_threads()
    assert not was_over, "the copy waited for the stuck kernel"
    if device.type == "cuda":
        assert all(torch.equal(copied[name], tensor) for name, tensor in expected.items())
    return f"{_LAUNCHES} launches queued; the copy took {took_s:.2f} s"


def ddps_hook_sums_over_the_backend(device: torch.device) -> str:
    """DDP with our hook, over NCCL on a GPU: a step, one whose rank failed, and one after it."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).to(device)
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=0.01)
        sums = ByDdp(ddp, _alone(device), counts=True)
        inputs, window = torch.ones(4, 64, device=device), Window(epoch=0, start=0, size=4)

        def backward(call: nn.Module) -> None:
            sums.note_count(4.0)
            call(inputs).sum().backward()

        def step(*, fails: bool = False) -> Sums | None:
            model.zero_grad()
            sums.begin(window, keeps_local=False)
            if fails:
                sums.send_nan_for_rest()
            else:
                with sums.around(is_last=True):
                    backward(sums.call)
            mine = Marks(has_failed=fails, num_samples=4, count=4.0)
            return sums.finish(mine, window=window, on_device=True)

        sums.warm_up(backward)
        for fails in (False, True, False, False):
            found = step(fails=fails)
            assert found is not None
            is_bad = found.is_bad is not None and bool(found.is_bad)
            assert is_bad == fails
            if fails:
                sums.start_over()
                continue
            assert float(found.count) == 4.0
            expected = torch.autograd.grad(model(inputs).sum(), list(model.parameters()))
            for gradient, wanted in zip(sums.local.real(), expected, strict=True):
                assert torch.allclose(gradient, wanted)
    finally:
        dist.destroy_process_group()
    return backend


def a_pageable_copy_behind_a_stuck_kernel(device: torch.device) -> str:
    """A copy from memory that is not pinned may hold up the host: the figure says if it does."""
    target = torch.zeros(1 << 20, device=device)
    source = torch.ones(1 << 20)
    target.copy_(source, non_blocking=True)
    found = []
    for name, on_host in (("pageable", source), ("pinned", _pinned(source, device))):
        with _stuck(device) as is_over:
            target.copy_(on_host, non_blocking=True)
            found.append(f"{name}: the host {'waits' if is_over() else 'goes on'}")
    return ", ".join(found)


CHECKS: tuple[Callable[[torch.device], str], ...] = (
    nan_and_inf_are_found_in_every_type,
    fused_optimizers_skip_a_step_whose_flag_is_up,
    a_gradient_whose_square_overflows_changes_no_weight,
    the_scale_of_fp16_is_taken_back,
    a_flag_is_queued_without_a_wait,
    checksums_need_little_memory,
    sums_after_backward_copy_the_gradients_once,
    a_state_is_copied_behind_a_full_launch_queue,
    ddps_hook_sums_over_the_backend,
    a_pageable_copy_behind_a_stuck_kernel,
)


def main() -> int:
    """Run all, and print a line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", default="cuda")
    device = torch.device(parser.parse_args().device)
    num_missed = 0
    for check in CHECKS:
        name = check.__name__.replace("_", " ")
        try:
            print(f"PASS\t{name}\t{check(device)}", flush=True)
        except Exception as error:  # WHY broad: the others are still to be tried
            num_missed += 1
            traceback.print_exc()
            print(f"MISS\t{name}\t{type(error).__name__}: {error}".partition("\n")[0], flush=True)
    return 1 if num_missed else 0


@contextlib.contextmanager
def _no_wait(device: torch.device) -> Iterator[None]:
    """Raise if something inside waits for the GPU."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def _stuck(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Let the device work for seconds on one kernel; give whether it is over. Waits at the end."""
    if device.type != "cuda":
        yield lambda: False
        return
    torch.cuda.synchronize(device)
    torch.cuda._sleep(_STUCK_CYCLES)  # type: ignore[no-untyped-call]  # torch's
    after = Event()
    try:
        yield after.is_reached
    finally:
        torch.cuda.synchronize(device)


def _launch_many(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.set_device(tensor.device)
    for _ in range(_LAUNCHES):
        tensor.add_(1)


def _pinned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    return tensor.pin_memory() if device.type == "cuda" else tensor


@contextlib.contextmanager
def _peak_mib(device: torch.device) -> Iterator[list[float]]:
    """Give the memory that is needed inside, beyond what was taken before; 0 on the CPU."""
    found = [0.0]
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    yield found
    if device.type == "cuda":
        found[0] = (torch.cuda.max_memory_allocated(device) - before) / _MIB


def _copies(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [t for state in optimizer.state.values() for t in state.values()]
    return [t.detach().clone() for t in [*model.parameters(), *states] if t is not None]


def _alone(device: torch.device) -> Group:
    return Group(read_launch({}), device)


if __name__ == "__main__":
    sys.exit(main())

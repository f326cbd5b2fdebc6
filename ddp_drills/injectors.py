"""Faults inside of a rank, as a bad model, a bad dataset or a bad machine causes them.

Each is real: an allocation larger than any memory, a real signal, a read of an invalid address.
"""

import contextlib
import ctypes
import errno
import mmap
import os
import select
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import active_children
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_drills.injections import Injection, Pause
from hardened_ddp.task.output import split_output

TOO_MUCH = 1 << 50  # bytes
HOLD_S = 60.0
TEXT = "a fault of the drill"


def do(
    injection: Injection, moments: Any, number: int, gradient: torch.Tensor | None = None
) -> Any:
    """Inject the fault now. Any: wrappers.Moments; a gradient that replaces the given one."""
    match injection.kind:
        case "pause" | "pause while another rank waits" as kind:
            if kind != "pause":
                while not moments.board.has("passed"):
                    time.sleep(0.01)
                time.sleep(0.1)  # WHY: by then the other rank waits in the all-reduce
            victim = injection.victim % moments.world_size
            moments.board.pause(Pause(number, victim, injection.signal))
        case "pass":
            moments.board.claim("passed")
        case "sleep":
            time.sleep(injection.seconds)
        case "nan gradient" if gradient is not None:
            return gradient * float("nan")
        case "kill a worker":
            for worker in active_children():
                worker.kill()
        case _:
            FAULTS[injection.kind]()
    return None


def spoil(kind: str, sample: Any, num_classes: int) -> Any:  # Any: whatever the dataset gives
    match kind:
        case "unreadable":
            raise ValueError("broken file")
        case "label":
            return _with_label(sample, num_classes + 3)
        case "nan":
            return _with_inputs(sample, lambda tensor: tensor * float("nan"))
        case "shape":
            return _with_inputs(sample, lambda tensor: tensor.reshape(-1)[:-1])
    raise KeyError(kind)


def change_output(kind: str, output: Any) -> Any:  # Any: logits, or a mapping that has them
    changes: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "nan": lambda tensor: tensor * float("nan"),
        # The loss then gets fewer logits than labels.
        "too few": lambda tensor: tensor[:-1] if tensor.dim() else tensor * float("nan"),
    }
    change = changes[kind]
    if isinstance(output, torch.Tensor):
        return change(output)
    names = [n for n in ("logits", "loss") if isinstance(output.get(n), torch.Tensor)]
    return {**output, **{name: change(output[name]) for name in names}}


def change_weights(kind: str, network: nn.Module) -> None:
    """Flip a bit of one weight, as a cosmic ray does; or close this process's output."""
    if kind == "close output":
        reader, writer = os.pipe()
        os.close(reader)
        for descriptor in (1, 2):
            os.dup2(writer, descriptor)  # WHY: a pipe without a reader, as after "| head"
        os.close(writer)
        return
    with torch.no_grad():
        weight = next(p for p in network.parameters() if p.requires_grad)
        flip_bit(weight, 6 if weight.element_size() == 2 else 20)  # a high bit of the mantissa


def normalise(inputs: Sequence[Any]) -> tuple[Any, ...]:  # Any: a model's positional arguments
    """Normalise inputs with the mean and the variance over all ranks, as SyncBatchNorm does."""
    sums = torch.zeros(3, dtype=torch.float64, device=_device())
    for values in (value.double() for value in inputs if _is_input(value)):
        sums += torch.stack([values.sum(), values.square().sum(), torch.ones_like(values).sum()])
    dist.all_reduce(sums)
    mean, square = sums[:2] / sums[2].clamp(min=1)
    scale = (square - mean.square()).clamp(min=1e-5).rsqrt()
    return tuple(
        ((value.double() - mean) * scale).to(value.dtype) if _is_input(value) else value
        for value in inputs
    )


def flip_bit(values: torch.Tensor, bit: int) -> None:
    words = values.view(torch.int16 if values.element_size() == 2 else torch.int32).view(-1)
    words[0] ^= 1 << bit


def tensors_of(output: Any) -> list[torch.Tensor]:  # Any: whatever a model returned
    """Return the logits and the loss of an output, if a gradient comes to them.

    WHY both: only the task knows whether it takes the model's loss, or computes one of the logits.
    """
    tensors = split_output(output)
    return [tensor for tensor in tensors if tensor is not None and tensor.requires_grad]


def first_layer(network: nn.Module) -> nn.Module:
    for part in network.modules():
        if not list(part.children()) and any(True for _ in part.parameters()):
            return part
    return network


def _with_label(sample: Any, label: int) -> Any:  # Any: a pair, or a mapping
    def like(old: Any) -> Any:  # Any: a number or a tensor of one
        return torch.full_like(old, label) if isinstance(old, torch.Tensor) else label

    if isinstance(sample, Mapping):
        name = next(n for n in ("labels", "label", "targets", "target") if n in sample)
        return {**sample, name: like(sample[name])}
    return sample[0], like(sample[1])


def _is_input(value: Any) -> bool:  # Any: an argument of a model, or a part of a sample
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _with_inputs(sample: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(sample, Mapping):
        return {name: change(v) if _is_input(v) else v for name, v in sample.items()}
    return change(sample[0]) if _is_input(sample[0]) else sample[0], sample[1]


def _device() -> str:
    return "cuda" if torch.cuda.is_initialized() else "cpu"  # type: ignore[no-untyped-call]  # torch


def _raise(error: Exception) -> None:
    raise error


def _kill_itself() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _die_in_silence() -> None:
    """Kill this process, but let a child hold its connections open: no other rank sees an end.

    So an all-reduce with it never ends, as on NCCL; gloo would raise an error in the others.
    """
    if os.fork() == 0:
        _hold_connections()
    _kill_itself()


def _hold_connections() -> None:
    """Wait until another rank closes its end of an inherited connection, then end."""
    watched = select.poll()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                watched.register(int(name), select.POLLRDHUP)
    for descriptor, _ in watched.poll(0):  # such as a socket that listens
        watched.unregister(descriptor)
    watched.poll(HOLD_S * 1000)
    os._exit(0)


def _read_past_a_mapped_file() -> None:
    """Get SIGBUS, as when /dev/shm is full."""
    with tempfile.TemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        with mmap.mmap(file.fileno(), mmap.PAGESIZE) as page:
            file.truncate(0)
            page[0] = 1


FAULTS: Mapping[str, Callable[[], object]] = {
    "raise": lambda: _raise(ValueError(TEXT)),
    "memory": lambda: torch.empty(TOO_MUCH, dtype=torch.uint8, device=_device()),
    "host memory": lambda: bytearray(TOO_MUCH),
    "disk": lambda: _raise(OSError(errno.EIO, os.strerror(errno.EIO))),
    "hang": lambda: time.sleep(1e6),
    "collective": lambda: dist.all_reduce(torch.zeros(1, device=_device())),
    # WHY PyDLL: it calls native code without releasing the GIL, as a careless extension does.
    "hold the GIL": lambda: ctypes.PyDLL(None).usleep(900_000),
    "segfault": lambda: ctypes.string_at(0),
    "kill itself": _kill_itself,
    "die in silence": _die_in_silence,
    "exit": lambda: os._exit(3),
    "bus": _read_past_a_mapped_file,
}

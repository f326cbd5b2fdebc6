"""What goes wrong in a training process, and the log of what it trained on.

Owns both because both need the step: fire() does the harm of $FAULT_KIND, StepLog writes a line for
each optimizer step with the ids of the samples that this rank's gradient came from. Contenders
know of neither: the model calls fire() in forward, torch's global hook calls the log.
The step is counted in a buffer of the model, so it comes back with the weights of a checkpoint:
what the log says is what these weights have seen, whatever a contender believes.
"""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

FAULT_RANK = 1
FAULT_STEP = 34  # in the second epoch of 22 steps; the last checkpoint is that of step 30
BAD_SAMPLE = 777
RANK = int(os.environ.get("RANK", "0"))
_FOLDER = Path(os.environ.get("FAULT_FOLDER", "."))
_KIND = os.environ.get("FAULT_KIND", "")


class StepLog:
    """Writes a line for each optimizer step of one model."""

    def __init__(self, steps_done: torch.Tensor, module: nn.Module) -> None:
        self.steps_done, self.module = steps_done, module
        self.ids: list[int] = []
        """Of the backwards since the last step, as far as their gradients were not thrown away."""

        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        start = f"{os.environ.get('FAULT_RUN', '0')}-{attempt}"
        # WHY no buffer: what the kernel has survives a SIGKILL.
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._fd = os.open(_FOLDER / f"steps-{start}-rank-{RANK}.jsonl", flags, 0o644)
        register_optimizer_step_post_hook(self._after_step)

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.module.steps_done += 1  # type: ignore[operator]  # a buffer
        line = {
            "step": int(self.module.steps_done),  # type: ignore[arg-type]  # a buffer
            "time": time.monotonic(),
            "finite": all(bool(p.isfinite().all()) for p in self.module.parameters()),
            "ids": self.ids,
        }
        os.write(self._fd, (json.dumps(line) + "\n").encode())
        self.ids = []

    def begin_forward(self) -> None:
        """Forget what was backward before the gradients were cleared: no step came of it."""
        if next(self.module.parameters()).grad is None:
            self.ids = []


def fire(step: int) -> str:
    """Do the harm of this step, if any; return what the model has to do to its output."""
    if RANK != FAULT_RANK or step < FAULT_STEP:
        return ""
    if _KIND == "unused":  # from that step on, after a restart too
        _is_first()
        return _KIND
    if step != FAULT_STEP or _KIND in ("", "bad_sample") or not _is_first():
        return ""
    if _KIND in ("sigterm", "kill"):
        os.kill(os.getpid(), signal.SIGTERM if _KIND == "sigterm" else signal.SIGKILL)
    elif _KIND == "agent":
        os.kill(os.getppid(), signal.SIGKILL)
    elif _KIND == "worker":
        os.kill(_one_worker(), signal.SIGKILL)
    elif _KIND == "hang":
        time.sleep(3600)
    elif _KIND == "out_of_memory":
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB (injected)")
    return _KIND


def check_sample(index: int, *, main_pid: int) -> None:
    """Fail if this sample is to be a bad one; note the process if it is a DataLoader's worker."""
    if os.getpid() != main_pid:
        (_FOLDER / f"worker-of-{RANK}-{os.getpid()}").touch()
    if _KIND == "bad_sample" and index == BAD_SAMPLE:
        _is_first()
        raise ValueError(f"sample {index} can't be decoded (injected)")


def _one_worker() -> int:
    names = [path.name for path in _FOLDER.glob(f"worker-of-{RANK}-*")]
    pids = [int(name.rpartition("-")[2]) for name in names]
    return min(pid for pid in pids if Path(f"/proc/{pid}").exists())


def _is_first() -> bool:
    """Note the time of the fault; False if it happened before, in an earlier start too."""
    try:
        with (_FOLDER / "fault.json").open("x", encoding="ascii") as file:
            json.dump({"time": time.monotonic()}, file)
    except FileExistsError:
        return False
    return True

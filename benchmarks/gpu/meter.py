"""Measures a training program from inside of its rank: times, memory, kernels, waits.

    GPU_METER={"file": ..., "warm_up": 40, "steps": 40, "batch_size": 8}

The bare loop (bare.py) and this project (`--model benchmarks.gpu.meter:build`) are measured by the
same hook, behind each optimizer step. After warm_up steps: so many steps are timed between two
waits for the device; one is left out, since a report may follow the last timed one; then PROFILED
steps are recorded by torch's profiler. What the meter itself waits for lies outside of its marks.
"""

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from benchmarks.gpu import works

PROFILED = 5
BEGIN, END = "meter: begin", "meter: end"
WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")


class Meter:
    """Counts optimizer steps, and measures at some of them."""

    def __init__(
        self, *, file: str, warm_up: int, steps: int, batch_size: int, started_at: float
    ) -> None:
        self._file, self._steps, self._batch_size = file, steps, batch_size
        self._warm_up, self._started_at = warm_up, started_at
        self._count = 0
        self._began = 0.0
        self._found: dict[str, float] = {}
        self._profile: Any = None  # torch.profiler.profile
        self._uses_gpu = torch.cuda.is_available()

    def after_step(self, *_: object) -> None:
        """Take one step. As a hook of torch's optimizers."""
        self._count += 1
        if self._count == 1:
            self._wait()
            self._found["first_step_s"] = time.time() - self._started_at
        elif self._count == self._warm_up:
            self._began = self._wait()
        elif self._count == self._warm_up + self._steps:
            seconds = self._wait() - self._began
            self._found["samples_per_s"] = self._steps * self._batch_size / seconds
            self._found["peak_mib"] = self._peak_mib()
        elif self._count == self._warm_up + self._steps + 1:
            self._start_profile()
        elif self._count == self._warm_up + self._steps + 1 + PROFILED:
            self._end_profile()
            Path(self._file).write_text(json.dumps(self._found), encoding="utf-8")

    def _wait(self) -> float:
        if self._uses_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _peak_mib(self) -> float:
        if self._uses_gpu:
            return torch.cuda.max_memory_allocated() / 2**20
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        peak = next(line for line in lines if line.startswith("VmHWM"))
        return int(peak.split()[1]) / 1024

    def _start_profile(self) -> None:
        kinds = [torch.profiler.ProfilerActivity.CPU]
        kinds += [torch.profiler.ProfilerActivity.CUDA] if self._uses_gpu else []
        self._profile = torch.profiler.profile(activities=kinds)
        self._profile.start()
        with torch.profiler.record_function(BEGIN):
            pass

    def _end_profile(self) -> None:
        with torch.profiler.record_function(END):
            pass
        self._wait()
        self._profile.stop()
        events = list(self._profile.events())
        at = {e.name: e.time_range.start for e in events if e.name in (BEGIN, END)}
        on_gpu = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
        kernels = on_gpu if self._uses_gpu else [e for e in events if e.name.startswith("aten::")]
        waits = [
            e for e in events if e.name in WAITS and at[BEGIN] <= e.time_range.start <= at[END]
        ]
        self._found["kernels"] = len(kernels) / PROFILED
        self._found["waits"] = len(waits) / PROFILED


def install() -> None:
    """Measure this process, if $GPU_METER asks for it."""
    if "GPU_METER" in os.environ:
        register_optimizer_step_post_hook(Meter(**json.loads(os.environ["GPU_METER"])).after_step)


def build(work: str, small: bool) -> nn.Module:
    """Build the model of a work and begin to measure, for --model."""
    install()
    return works.model(work, small=small)

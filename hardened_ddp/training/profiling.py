"""A profile of a few steps, for chrome://tracing or Perfetto: --profile.

Owns which steps are profiled. WHY not the first ones: they allocate memory and choose kernels.
"""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile, schedule

log = logging.getLogger(__name__)

T = TypeVar("T")

NUM_SKIPPED = 5
NUM_STEPS = 5


def start_profile(folder: Path, *, rank: int, device: torch.device) -> Callable[[], None]:
    """Start profiling this rank; call the result after each step. The trace goes to folder."""
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    path = folder / f"profile-rank-{rank}.json"

    def save(profiler: profile) -> None:
        try:
            profiler.export_chrome_trace(str(path))
            log.info("profile of %d steps: %s (open it in chrome://tracing)", NUM_STEPS, path)
        except (OSError, RuntimeError) as error:
            log.warning("the profile can't be written: %s", error)

    profiler = profile(
        activities=activities,
        schedule=schedule(wait=NUM_SKIPPED - 1, warmup=1, active=NUM_STEPS, repeat=1),
        on_trace_ready=save,
    )
    profiler.start()
    num_done = 0

    def step_done() -> None:
        nonlocal num_done
        num_done += 1
        if num_done <= NUM_SKIPPED + NUM_STEPS:
            profiler.step()
        if num_done == NUM_SKIPPED + NUM_STEPS:
            profiler.stop()

    return step_done


def profiled(steps: Iterator[T], step_done: Callable[[], None]) -> Iterator[T]:
    """Yield from steps; call step_done after each."""
    for step in steps:
        yield step
        step_done()

"""Settings of the training loop: how long, and what to do about a fault."""

from dataclasses import dataclass
from typing import Literal

from hardened_ddp.settings.declare import (
    COUNT,
    COUNT_OR_ZERO,
    SECONDS,
    SECONDS_OR_ZERO,
    Shape,
    setting,
)

DURATION = Shape(
    pattern=r"([0-9]+(\.[0-9]+)?d)?([0-9]+(\.[0-9]+)?h)?([0-9]+(\.[0-9]+)?m)?([0-9]+(\.[0-9]+)?s)?",
    words="a time such as 3h55m, 1d12h or 90s",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopConfig:
    epochs: int = setting(5, "How often to go through the training samples.", bounds=COUNT)
    max_steps: int = setting(
        0, "Stop after this many optimizer steps. 0: no limit.", bounds=COUNT_OR_ZERO
    )
    eval_every: int = setting(
        1, "Evaluate after every so many epochs. 0: never.", bounds=COUNT_OR_ZERO
    )
    log_interval: int = setting(
        50,
        "Steps from one progress report to the next. Each one waits for the GPU once.",
        bounds=COUNT,
    )
    time_limit: str = setting(
        "",
        "Stop by itself so long after the launcher started, saved and ready to go on: 3h55m, 90s. "
        "Choose it a little below the job's limit. Empty: no limit.",
        shape=DURATION,
    )
    stop_grace_s: float = setting(
        30.0,
        "Seconds from the launcher's SIGTERM to its SIGKILL; 30 in torchrun and Slurm. A rank that "
        "still waits for another one after two thirds of them saves by itself and leaves.",
        bounds=SECONDS,
        may_differ=True,
    )
    hang_after_s: float = setting(
        60.0,
        "Seconds in one phase of a step after which a rank counts as hung, if that is also 5 times "
        "the longest such phase so far. Start-up, first steps and evaluation may take 30 times as "
        "long. 0: no watch.",
        bounds=SECONDS_OR_ZERO,
        may_differ=True,
    )
    debug: bool = setting(
        False,
        "Check more and say more: an error in backward names its forward line, torch's "
        "distributed checks, every rank's log. Slow.",
    )
    step_retry: Literal["on", "off"] = setting(
        "on",
        "When one rank fails inside a step, do the window again on all: out of memory with smaller "
        "micro-batches. off: the first exception ends the run.",
    )
    continue_on_error: bool = setting(
        False,
        "Leave a bad sample out, count it and name it, instead of stopping the run.",
    )
    max_errors: int = setting(
        100, "With continue_on_error: stop after more left-out samples than this.", bounds=COUNT
    )
    rollback_after: int = setting(
        3,
        "With continue_on_error: after so many windows in a row whose loss or gradient is not "
        "finite, go back to the last good checkpoint; if they come again, stop. 0: never.",
        bounds=COUNT_OR_ZERO,
    )
    check_replicas_every: int = setting(
        1000,
        "Steps from one comparison of the ranks' weights and optimizer state to the next; there is "
        "one at the end too. A rank that differs is named, and the state mended. 0: never.",
        bounds=COUNT_OR_ZERO,
    )

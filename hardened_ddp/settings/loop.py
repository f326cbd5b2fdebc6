"""Settings of the training loop: how long, and what to do about a fault."""

from dataclasses import dataclass
from typing import Literal

from hardened_ddp.settings.declare import (
    ANY_TEXT,
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
    epochs: int = setting(5, "Number of passes over the training set.", bounds=COUNT)
    max_steps: int = setting(
        0, "Stop after this many optimizer steps. 0: no limit.", bounds=COUNT_OR_ZERO
    )
    eval_every: int = setting(
        1, "Evaluate every this many epochs, and at the end. 0: never.", bounds=COUNT_OR_ZERO
    )
    stop_when: str = setting(
        "",
        "Stop early when this metric of the test set no longer improves: loss, or one of the task; "
        "auto: the one that best_metric auto takes. Lower or higher is better as the metric says. "
        "Empty: never.",
        shape=ANY_TEXT,
    )
    patience: int = setting(
        3, "With stop_when: so many evaluations in a row without a better value.", bounds=COUNT
    )
    log_interval: int = setting(
        50,
        "Steps between progress reports. Each report waits for the GPU once.",
        bounds=COUNT,
    )
    time_limit: str = setting(
        "",
        "Stop this long after the launcher started, saved and ready to resume: 3h55m, 90s. Choose "
        "it a little below the job's limit. Empty: no limit.",
        shape=DURATION,
    )
    stop_grace_s: float = setting(
        30.0,
        "Seconds between the launcher's SIGTERM and its SIGKILL: 30 in torchrun and Slurm. A rank "
        "that still waits for another rank after two thirds of them saves on its own and exits.",
        bounds=SECONDS,
        may_differ=True,
    )
    hang_after_s: float = setting(
        60.0,
        "Seconds in one phase of a step after which a rank counts as hung, if that is also 5 "
        "times the longest such phase so far. Start-up, first steps and evaluation may take 30 "
        "times as long. 0: no hang detection.",
        bounds=SECONDS_OR_ZERO,
        may_differ=True,
    )
    debug: bool = setting(
        False,
        "More checks and more messages: an error in backward names its line of forward, "
        "TORCH_DISTRIBUTED_DEBUG is set to INFO, and every rank logs to the console: the parts of "
        "its start, and at each report its times and its memory. CPU ranks of one machine sum "
        "gradients by DDP's hooks, as everywhere else, not through shared memory. Slow.",
    )
    step_retry: Literal["on", "off"] = setting(
        "on",
        "When one rank fails inside a step, retry the step on all ranks; after an out-of-memory "
        "error, with smaller micro-batches. off: the first exception ends the run.",
    )
    continue_on_error: bool = setting(
        False,
        "Leave out a bad sample, count it and name it, instead of stopping the run.",
    )
    max_errors: int = setting(
        100, "With continue_on_error: stop if more samples than this were left out.", bounds=COUNT
    )
    rollback_after: int = setting(
        3,
        "With continue_on_error: after this many steps in a row whose loss or gradient is not "
        "finite, roll back to the last good checkpoint. If it happens again, stop. 0: never.",
        bounds=COUNT_OR_ZERO,
    )
    check_replicas_every: int = setting(
        1000,
        "Steps between two comparisons of weights and optimizer state over all ranks; they are "
        "compared at the end too. A rank that differs is named, and its state is repaired. 0: "
        "never.",
        bounds=COUNT_OR_ZERO,
    )

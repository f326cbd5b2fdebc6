"""The runs that equal_weights.py compares: digits or noise, a few dozen steps each.

Owns the list. Does not own: the models that fail (failing_parts.py), how ranks start (ranks.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

FORMS = {"shared": [], "hooks": ["--no_shared_memory"]}
_NET = ["--model", "failing_parts:net"]
_IMAGES = [*_NET, "--dataset", "failing_parts:images"]


@dataclass(frozen=True, slots=True)
class Run:
    """Commands that are given one after the other in one run folder."""

    name: str
    stages: Sequence[tuple[int, Sequence[str]]]
    """Ranks and flags of each command."""

    has_fault: bool = False
    """Something of failing_parts.py has to come, or it was no test."""

    may_fail: bool = False
    """All commands but the last may end with a failure."""


# Of two ranks, in both forms of the gradients.
_STEPS = {
    "accumulation": ["--accumulation_steps", "3"],
    "batch-norm": [*_NET, "--dataset", "synthetic", "--max_steps", "24"],
    "unused": [*_NET, "--model_args", "{spare: never}"],
    "used-sometimes": [
        *[*_NET, "--model_args", "{spare: sometimes}"],
        *["--find_unused_parameters", "on"],
    ],
    "clip": ["--clip_grad_norm", "0.5", "--label_smoothing", "0.1"],
    "no-retry": ["--step_retry", "off"],
}
# Of two ranks, in one form.
_SETTINGS = {
    "sgd-step": ["--optimizer", "sgd", "--learning_rate", "0.05", "--lr_schedule", "step"],
    "sgd-constant": ["--optimizer", "sgd", "--momentum", "0", "--lr_schedule", "constant"],
    "adam-linear": ["--optimizer", "adam", "--lr_schedule", "linear", "--warmup_steps", "9"],
    "workers": [*_IMAGES, "--num_workers", "2", "--ledger"],
    "uneven": ["--global_batch_size", "50", "--batch_size", "8"],
    "drop-last": ["--drop_last", "--accumulation_steps", "2"],
    "channels-last": [*_NET, "--channels_last", "true"],
    "checkpointing": [*_NET, "--gradient_checkpointing", "true"],
    "buckets": [*FORMS["hooks"], "--gradient_as_bucket_view", "false", "--bucket_cap_mb", "0.05"],
    "compressed": [*FORMS["hooks"], "--comm_hook", "fp16"],
}


def _all() -> list[Run]:
    runs = [Run("1r", [(1, [])]), Run("1r-bf16", [(1, ["--amp", "bf16"])])]
    for ranks, form in product((2, 3), FORMS):
        runs.append(Run(f"{ranks}r-{form}", [(ranks, FORMS[form])]))
        runs.append(Run(f"{ranks}r-{form}-bf16", [(ranks, [*FORMS[form], "--amp", "bf16"])]))
    for name, form in product(_STEPS, FORMS):
        runs.append(Run(f"{name}-{form}", [(2, [*_STEPS[name], *FORMS[form]])]))
    runs += [Run(name, [(2, flags)]) for name, flags in _SETTINGS.items()]
    for fault, form in product(("raise", "backward", "nan", "memory"), FORMS):
        flags = [*_with_fault(fault), *FORMS[form]]
        runs.append(Run(f"{fault}-{form}", [(2, flags)], has_fault=True))
        flags = [*flags, "--accumulation_steps", "3"]
        runs.append(Run(f"{fault}-accumulation-{form}", [(2, flags)], has_fault=True))
    flags = [*_IMAGES, "--dataset_args", "{broken: 77}", "--continue_on_error"]
    for form in FORMS:
        runs.append(Run(f"left-out-{form}", [(2, [*flags, *FORMS[form]])], has_fault=True))
    save_often = ["--checkpoint_every_steps", "4"]
    flags = [*_with_fault("poison"), "--continue_on_error", *save_often]
    runs.append(Run("poison", [(2, flags)], has_fault=True))
    flags = [*_with_fault("differ"), "--check_replicas_every", "4", *save_often]
    runs.append(Run("differ", [(2, flags)], has_fault=True))
    # WHY each step is reported: where such a run stops is a matter of time, and the mean of a
    # report begins there.
    for fault in ("terminate", "kill"):
        stage = (2, [*_with_fault(fault), "--log_interval", "1"])
        runs.append(Run(fault, [stage, stage], has_fault=True, may_fail=fault == "kill"))
    for name, flags in {"": [], "-hooks-bf16": [*FORMS["hooks"], "--amp", "bf16"]}.items():
        begun = (2, [*_NET, *flags, "--max_steps", "15"])
        runs.append(Run(f"resume{name}", [begun, (2, [*_NET, *flags])]))
    for first, second in ((2, 3), (3, 1)):
        begun = (first, [*_NET, "--max_steps", "15"])
        runs.append(Run(f"elastic-{first}-{second}", [begun, (second, _NET)]))
    return runs


def _with_fault(fault: str) -> list[str]:
    return [*_NET, "--model_args", f"{{fault: {fault}}}"]


RUNS = {run.name: run for run in _all()}

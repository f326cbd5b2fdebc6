"""What is known of an optimizer, and short looks at its parameters: cheap, and enough to compare.

Probes are a few parameters from all over the model; of their gradients a few numbers are read.
"""

import sys

from ddp_doctor.audit.injected.recorder import Foreign

NUM_PROBES, NUM_VALUES = 3, 8
MAX_EVERY = 256
SAMPLING_SHARE = 0.03
"""Of the time of a step: more than that, and fewer steps are sampled."""

LOOKS_COST = 2
"""Times the fingerprints' cost: that of all looks at a sampled step."""


class Optimizer:
    """What is known of one optimizer."""

    def __init__(self, number: int, line: str) -> None:
        self.number, self.line = number, line
        self.num_steps = 0
        self.first: list[Foreign] = []
        """Fingerprints of its parameters before its first step."""

        self.num_backwards = 0
        self.num_zero = 0
        """Backwards since its last step, and how many of them began with empty gradients."""

        self.last_values: list[float] | None = None
        """A few numbers of the gradients as the last backward left them."""


def parameters_of(optimizer: Foreign) -> list[Foreign]:
    """List the parameters of an optimizer, group by group."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def probes_of(parameters: list[Foreign]) -> list[Foreign]:
    """Take a few parameters from all over the model."""
    every = max(1, len(parameters) // NUM_PROBES)
    return parameters[::every][:NUM_PROBES]


def probe_values(parameters: list[Foreign]) -> list[float]:
    """Give a few numbers of the gradients of the probes."""
    values: list[float] = []
    for parameter in probes_of(parameters):
        gradient = parameter.grad
        if gradient is not None and not gradient.is_sparse and not is_sharded(parameter):
            values += gradient.detach().reshape(-1)[:NUM_VALUES].tolist()
    return values


def ratio(before: list[float] | None, after: list[float]) -> float | None:
    """Give the factor between two lists of numbers; None if there is none for all of them."""
    if not before or len(before) != len(after):
        return None
    pairs = [(b, a) for b, a in zip(before, after, strict=True) if abs(b) > 1e-12]
    if not pairs:
        return None
    first = pairs[0][1] / pairs[0][0]
    is_same = all(abs(a / b - first) <= 1e-4 * abs(first) for b, a in pairs)
    return round(first, 7) if is_same else None


def is_sharded(parameter: Foreign) -> bool:
    return type(parameter).__name__ in ("DTensor", "FlatParameter") or any(
        base.__name__ == "DTensor" for base in type(parameter).__mro__
    )


def is_engine_loaded() -> bool:
    """Whether a library that gives each rank other parts of the model is in use."""
    return any(name in sys.modules for name in ("deepspeed", "megatron.core", "colossalai"))


def is_compiling() -> bool:
    """Whether torch.compile traces the current line: then nothing is looked at."""
    import torch

    return bool(torch.compiler.is_compiling())


def rounded(seconds: float | None) -> float | None:
    """Shorten a time for a record."""
    return None if seconds is None else round(seconds, 6)


def sampling_interval(used_s: float, *, step_s: float) -> int:
    """Say that every n-th step is sampled, a power of two, if the fingerprints take used_s."""
    every = 1
    while every < MAX_EVERY and LOOKS_COST * used_s > every * SAMPLING_SHARE * step_s:
        every *= 2
    return every

"""The verdicts of an audit: how bad each is, what it means, and how to mend it in plain torch.

error: the result is wrong, or the program hangs. warning: the result is worse than it could be, or
is right by luck. advice: speed, or something that may be meant so; it never counts as a mistake.
docs/AUDIT.md shows this table; tests compare the two.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "advice"]


@dataclass(frozen=True, slots=True)
class Kind:
    """What all verdicts of one code have in common."""

    severity: Severity
    meaning: str
    fix: str


SOURCE: Mapping[str, Kind] = {
    "bypasses-ddp": Kind(
        "error",
        "training calls model.module, so DDP does not average the gradients",
        "call the DDP object: loss_fn(model(x), y); model.module is for saving and evaluation",
    ),
    "set-epoch-missing": Kind(
        "error",
        "DistributedSampler gives the same order in every epoch",
        "call sampler.set_epoch(epoch) at the start of every epoch",
    ),
    "collective-on-one-rank": Kind(
        "error",
        "only one rank calls a collective, so it waits for ever",
        "call it on all ranks: move it out of the condition",
    ),
    "ddp-forward-on-one-rank": Kind(
        "error",
        "only one rank calls DDP's forward, which has collectives of its own",
        "call model.module(x) under torch.no_grad() there, or call model(x) on all ranks",
    ),
    "save-on-all-ranks": Kind(
        "error",
        "all ranks write one file at the same time",
        "save under `if dist.get_rank() == 0:`, then dist.barrier() on all ranks",
    ),
    "local-rank-argument": Kind(
        "error",
        "the script expects --local_rank, which torchrun does not pass",
        'read it from the environment: local_rank = int(os.environ["LOCAL_RANK"])',
    ),
    "hard-coded-device": Kind(
        "error",
        "all ranks use the same GPU",
        'use the local rank: torch.cuda.set_device(int(os.environ["LOCAL_RANK"])), then "cuda"',
    ),
}
CATALOGUE: Mapping[str, Kind] = {**SOURCE}

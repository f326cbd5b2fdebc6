"""Puts the verdicts together: each cause once, and what follows from another one as advice only."""

from collections.abc import Iterator
from dataclasses import replace

from ddp_doctor.audit.endings import judge_endings
from ddp_doctor.audit.modes import judge_modes
from ddp_doctor.audit.records import Ranks
from ddp_doctor.audit.samples import judge_samples
from ddp_doctor.audit.speed import judge_speed
from ddp_doctor.audit.updates import judge_updates
from ddp_doctor.audit.verdict import Verdict
from ddp_doctor.audit.weights import judge_weights

# Cause -> what it leads to.
FOLLOWS = {
    "no-process-group": ("weights-differ", "gradients-not-averaged", "evaluation-not-joined"),
    "gradients-not-averaged": ("weights-differ", "buffers-differ", "learning-rates-differ"),
    "weights-differ": ("gradients-not-averaged",),
    "learning-rates-differ": ("weights-differ",),
    "uneven-steps": ("collectives-differ", "hang", "exception"),
    "collectives-differ": ("hang", "exception", "uneven-steps"),
    "same-samples": ("samples-overlap", "same-augmentation", "same-dropout"),
    "exception": ("hang",),
    "gradients-not-zeroed": ("accumulation-not-divided",),
}


def judge(ranks: Ranks, *, hung: bool) -> list[Verdict]:
    """Give all verdicts on a program of which at least one rank was seen."""
    found: list[Verdict] = []
    for verdict in _all(ranks, hung=hung):
        if not any(v.code == verdict.code and v.place == verdict.place for v in found):
            found.append(verdict)
    causes = {v.code for v in found if v.is_mistake}
    effects: set[str] = set()
    for code in FOLLOWS:
        if code in causes - effects:
            effects |= set(FOLLOWS[code]) & causes
    return [replace(v, softened=v.softened or v.code in effects) for v in found]


def _all(ranks: Ranks, *, hung: bool) -> Iterator[Verdict]:
    yield from judge_weights(ranks)
    yield from judge_samples(ranks)
    yield from judge_updates(ranks)
    yield from judge_modes(ranks)
    yield from judge_endings(ranks, hung=hung)
    yield from judge_speed(ranks)


def unseen(ranks: Ranks) -> list[str]:
    """Say what this run could not show."""
    found = []
    passes = [p for rank in ranks for p in rank.all("pass")]
    if not passes:
        found.append("no DataLoader was used: samples are compared at DDP's forward only")
    elif max(p["number"] for p in passes) == 0:
        found.append("no second epoch was seen, so nothing is said of set_epoch: try more --steps")
    if ranks.are_sharded:
        found.append("the ranks hold parts of the model (FSDP or the like): weights not compared")
    if len(ranks) < ranks.world_size:
        found.append(f"{ranks.world_size - len(ranks)} of {ranks.world_size} ranks were not seen")
    if not any(rank.all("ddp") for rank in ranks):
        found.append("no DistributedDataParallel was seen")
    errors = {r["where"] + ": " + r["what"] for rank in ranks for r in rank.all("error")}
    found += [f"a part of the observer failed: {error}" for error in sorted(errors)]
    return found

"""Judges the optimizer's steps: zeroed gradients, clipping, parameters that stay put.

The ranks agree on these, so one rank tells; but clipping before the all-reduce shows only between
ranks.
"""

from collections.abc import Iterator, Sequence

from ddp_doctor.audit.records import Rank, Ranks, Record
from ddp_doctor.audit.scales import ENOUGH, judge_by_hand, judge_scale
from ddp_doctor.audit.verdict import Verdict, at
from ddp_doctor.audit.weights import MAX_NAMED, name_of


def judge_updates(ranks: Ranks) -> Iterator[Verdict]:
    """Yield what is wrong with the steps."""
    rank = ranks.first
    for optimizer in rank.all("optimizer"):
        steps = [s for s in rank.all("step") if s["o"] == optimizer["o"] and "g" in s]
        yield from _zeroing(steps)
        yield from judge_scale(rank, steps, ranks)
        if not ranks.are_sharded:
            yield from _still(rank, optimizer, steps)
    yield from judge_by_hand(rank, ranks)
    yield from _orphans(rank)
    yield from _clipping(ranks)


def _zeroing(steps: Sequence[Record]) -> Iterator[Verdict]:
    """Yield gradients that are never emptied, or emptied between the parts of a step."""
    later = [s for s in steps if s["n"] > 1 and s["num_looks"] and any(s["g"])]
    if len(later) < ENOUGH:
        return
    if all(step["num_zero"] == 0 for step in later):
        step = later[0]
        yield Verdict(
            code="gradients-not-zeroed",
            sentence="the gradients are never set to zero: every step adds to those of all steps "
            "before",
            **at(step["backward_line"] or step["line"]),
            evidence=(
                f"at every backward of {len(later)} steps looked at, the gradients of the step "
                "before were still there",
                f"step: {step['line']}",
            ),
        )
    elif all(
        step["num_looks"] > 1
        and step["num_zero"] == step["num_looks"] == step["batches"]
        and len(step["backward_lines"]) == 1
        for step in later
    ):
        step = later[0]
        yield Verdict(
            code="accumulation-lost",
            sentence=f"{step['num_looks']} batches make a step, but the gradients are set to zero "
            "before each of them: only the last one counts",
            **at(step["backward_line"]),
            evidence=(f"all {step['num_looks']} backwards of a step began with empty gradients",),
        )


def _still(rank: Rank, optimizer: Record, steps: Sequence[Record]) -> Iterator[Verdict]:
    """Yield parameters of an optimizer that do not move."""
    if len(steps) < 4:
        return
    every = [i for i, is_trained in enumerate(optimizer["trainable"]) if is_trained]
    unused = [i for i in every if all(step["g"][i] is None for step in steps)]
    if any(look["orphans"] for look in rank.all("still")):  # see _orphans
        unused = [i for i in unused if optimizer["in_ddp"][i]]
    stuck = {
        i
        for record in rank.all("still")
        if record["o"] == optimizer["o"]
        for i, rate in record["still"]
        if i in every
        and len({step["w"][i] for step in steps} | {optimizer["first"][i]}) == 1
        and (rate != 0 or all(0 in step["lr"] for step in steps))
    }
    is_other = unused and not any(optimizer["in_ddp"][i] for i in unused) and rank.all("ddp")
    if len(unused) == len(every) and is_other:
        yield Verdict(
            code="parameter-not-in-optimizer",
            sentence="the optimizer holds the parameters of another model than the one that DDP "
            "trains: it was made before the model was replaced",
            **at(optimizer["line"]),
            evidence=(f"none of its {len(unused)} parameters ever has a gradient",),
        )
    elif unused:
        yield Verdict(
            code="parameter-never-moves",
            sentence=f"{_named(optimizer, unused)} never get a gradient: no loss depends on them",
            **at(optimizer["line"]),
            evidence=(f"{len(steps)} of {steps[-1]['n']} steps were looked at",),
        )
    if stuck:
        rates = {rate for r in rank.all("still") for i, rate in r["still"] if i in stuck}
        yield Verdict(
            code="parameter-never-moves",
            sentence=f"{_named(optimizer, sorted(stuck))} get gradients, but never change",
            **at(optimizer["line"]),
            evidence=(f"learning rate {', '.join(map(str, sorted(rates)))}",),
        )


def _named(optimizer: Record, indices: Sequence[int]) -> str:
    names = ", ".join(name_of(optimizer, i) for i in indices[:MAX_NAMED])
    more = len(indices) - MAX_NAMED
    return names + (f" and {more} more parameters" if more > 0 else "")


def _orphans(rank: Rank) -> Iterator[Verdict]:
    """Yield parameters of the DDP model that no optimizer holds."""
    looks = rank.all("still")
    made = {record["o"]: record for record in rank.all("optimizer")}
    if not looks:
        return
    names = [name for name in looks[-1]["orphans"] if name]
    optimizer = made.get(looks[-1]["o"])
    if names and optimizer:
        shown = ", ".join(names[:MAX_NAMED])
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        num_stale = sum(not is_in_ddp for is_in_ddp in optimizer["in_ddp"])
        yield Verdict(
            code="parameter-not-in-optimizer",
            sentence=f"{shown}{more}: trainable, but in no optimizer, so never updated",
            **at(optimizer["line"]),
            evidence=(
                f"{len(names)} parameters of the DDP model are in no optimizer",
                f"the optimizer has {num_stale} that DDP's model does not have",
            )[: 1 + bool(num_stale)],
        )


def _clipping(ranks: Ranks) -> Iterator[Verdict]:
    clips = [(rank, clip) for rank in ranks for clip in rank.all("clip")]
    scaled = [clip for _, clip in clips if clip["is_scaled"]]
    if len(scaled) >= ENOUGH:
        yield Verdict(
            code="clipped-before-unscale",
            sentence="gradients are clipped while they are multiplied by the loss scale: the limit "
            "is too small by that factor",
            **at(scaled[0]["line"]),
            evidence=(f"loss scale {scaled[0]['scale']:g}, and unscale_ was not called before",),
        )
    if ranks.are_sharded or len(ranks) < 2:
        return
    mine, yours = (rank.by_step("clip") for rank in list(ranks)[:2])
    differing = [
        a
        for step, clips in mine.items()
        for a, b in zip(clips, yours.get(step, ()), strict=False)
        if a["g"] != b["g"] and _are_averaged_later(ranks, a)
    ]
    if len(differing) >= ENOUGH:
        yield Verdict(
            code="clipped-before-all-reduce",
            sentence="gradients are clipped on each rank before they are averaged: what is left "
            "depends on how the batch is split",
            **at(differing[0]["line"]),
            evidence=("the gradients differ between ranks at the clipping, and not at the step",),
        )


def _are_averaged_later(ranks: Ranks, clip: Record) -> bool:
    """Whether the ranks had equal gradients at the step that followed a clipping."""
    pair = [
        [s for s in rank.all("step") if s["n"] == clip["next_steps"].get(str(s["o"])) and "g" in s]
        for rank in list(ranks)[:2]
    ]
    return all(pair) and all(a["g"] == b["g"] for a, b in zip(*pair, strict=False))

"""Judges the optimizer's steps: zeroed gradients, their scale, clipping, parameters that stay put.

The ranks agree on these, so the records of one rank are enough; but clipping before the all-reduce
shows only between ranks.
"""

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence

from ddp_doctor.audit import origins
from ddp_doctor.audit.records import Rank, Ranks, Record
from ddp_doctor.audit.verdict import Verdict
from ddp_doctor.audit.weights import MAX_NAMED, name_of, reducing_calls

ENOUGH = 2
"""Sampled steps that must agree before anything is said."""

CLOSE = 1e-3
"""Relative: factors of a loss are products of few floats."""

_HORIZONS = ("T_max", "total_steps", "total_iters", "num_training_steps")
"""Keywords that plan a schedule."""

_WORLD = frozenset(("world", "num_processes", "nprocs", "n_gpu", "num_gpus", "ngpus")).union(
    ("num_replicas", "n_ranks", "num_ranks")
)


def judge_updates(ranks: Ranks) -> Iterator[Verdict]:
    """Yield what is wrong with the optimizers' steps, and with their scale."""
    rank = ranks.first
    for optimizer in rank.all("optimizer"):
        steps = [s for s in rank.steps("g").values() if s["o"] == optimizer["o"]]
        yield from _zeroing(steps, ranks)
        yield from judge_scale(rank, optimizer, steps, ranks)
        if not ranks.are_sharded:
            yield from _still(rank, optimizer, steps, ranks.files)
    yield from judge_by_hand(rank, ranks)
    yield from _orphans(rank)
    yield from _schedules(rank, ranks)
    yield from _clipping(ranks)


def _zeroing(steps: Sequence[Record], ranks: Ranks) -> Iterator[Verdict]:
    """Yield gradients that are never emptied, or emptied between the parts of a step."""
    later = [s for s in steps if s["n"] > 1 and s["num_looks"] and any(s["g"])]
    if len(later) < ENOUGH:
        return
    step = later[0]
    if all(step["num_zero"] == 0 for step in later):
        told = "the gradients are never set to zero: every step adds to those of all before"
        seen = f"at every backward of {len(later)} steps looked at, the gradients of the last one "
        facts = (f"{seen}were still there", f"step: {step['line']}")
        place = step["backward_line"] or step["line"]
        yield Verdict("gradients-not-zeroed", told, place, evidence=facts)
    elif not ranks.are_sharded and all(  # FSDP2 keeps what it has not reduced to itself
        1 < step["num_looks"] == step["num_zero"]
        and _is_split(step, step["num_looks"])
        and len(step["backward_lines"]) == 1
        for step in later
    ):
        told = f"{step['num_looks']} batches make a step, but the gradients are set to zero before "
        told += "each of them: only the last one counts"
        place, line = step["zero_line"] or step["backward_line"], step["backward_line"]
        seen = f"all {step['num_looks']} backwards of a step began with empty gradients"
        yield Verdict("accumulation-lost", told, place, seen_at=line, evidence=(seen,))


def _schedules(rank: Rank, ranks: Ranks) -> Iterator[Verdict]:
    """Yield schedules that are planned for other numbers of steps, by the number of ranks."""
    plans = (rank.last("schedules") or {"all": []})["all"]
    passes = len(rank.trained_passes()) if plans else 0
    for plan in plans if rank.ended_well and ranks.world_size > 1 else ():
        made, planned, places = plan["steps"], plan["horizon"], [plan["step_line"]]
        # WHY passes: an epoch has a rounded number of steps
        slack = ranks.world_size * (1 + passes)
        if made <= 2 * max(1, passes):
            is_of_steps = planned == rank.step_count and origins.is_planned_by_loader(plan["line"])
            if not is_of_steps or planned < 4 * made:
                continue  # a schedule of epochs
            code, whose = "schedule-too-long", "those of the optimizer, is stepped once an epoch"
        elif planned == passes > 1 and made == rank.step_count and _has_ended(planned, rank):
            code, whose = "schedule-too-short", "as many as epochs, is stepped at each batch"
        elif abs(planned - made * ranks.world_size) <= min(slack, 0.2 * planned):
            if origins.is_planned_by_loader(plan["line"]):
                continue  # it is divided, and the run has stopped early
            code, whose = "schedule-too-long", "those of the undivided data"
            places = [origins.made_line(plan["line"], keyword) for keyword in _HORIZONS]
        elif (
            abs(planned * ranks.world_size - made) <= min(slack, 0.2 * made)
            and made >= ranks.world_size * rank.step_count - slack
            and not _falls_after(planned / ranks.world_size, rank)
        ):
            code, whose = "schedule-too-short", "and is stepped once for each rank"
            places = ["" if ranks.have_framework else plan["step_line"]]
        else:
            continue
        told = f"the learning rate's schedule is planned for {planned} steps, {whose}, and the run "
        told += f"makes {made} of them, with {ranks.world_size} ranks"
        place, line = next(filter(None, places), plan["line"]), plan["step_line"]
        seen = f"{rank.step_count} optimizer steps in {passes} epochs"
        yield Verdict(code, told, place, seen_at=line, evidence=(seen,))


def _has_ended(step: int, rank: Rank) -> bool:
    """Whether the learning rate is down at a step: no warm-up is planned to end there."""
    steps = rank.all("step")
    # WHY one optimizer: more than one have schedules and rates of their own
    rates = [s["lr"][0] for s in steps if s["n"] <= step + 1 and len(s["lr"]) == 1]
    return len({s["o"] for s in steps}) == 1 and bool(rates) and rates[-1] < 0.1 * max(rates)


def _falls_after(step: float, rank: Rank) -> bool:
    """Whether the learning rate goes on to fall after a step: its plan does not end there."""
    last = rank.all("step")[-1]
    rates = [s["lr"][0] for s in rank.all("step") if s["o"] == last["o"] and s["n"] > step]
    return rates == sorted(rates, reverse=True) and rates[:1] > rates[-1:] > [0]


def _still(
    rank: Rank, optimizer: Record, steps: Sequence[Record], files: Sequence[str]
) -> Iterator[Verdict]:
    """Yield parameters of an optimizer that do not move."""
    if len(steps) < 4:
        return
    made = optimizer["line"]
    every = [i for i, is_trained in enumerate(optimizer["trainable"]) if is_trained]
    weights = zip(optimizer["first"], *(step["w"] for step in steps), strict=True)
    stays = [len(set(values)) == 1 for values in weights]
    unused = [i for i in every if stays[i] and all(step["g"][i] is None for step in steps)]
    looks = rank.all("still")
    if any(look["orphans"] for look in looks):  # see _orphans
        unused = [i for i in unused if optimizer["in_ddp"][i]]
    stuck = {
        i
        for look in looks
        if look["o"] == optimizer["o"]
        for i, rate in look["still"]
        if i in every and stays[i] and (rate != 0 or all(0 in step["lr"] for step in steps))
    }
    is_other = unused and not any(optimizer["in_ddp"][i] for i in unused) and rank.all("ddp")
    if len(unused) == len(every) and is_other:
        told = "the optimizer holds the parameters of another model than the one that DDP trains: "
        told += "it was made before the model was replaced"
        seen = f"none of its {len(unused)} parameters ever has a gradient"
        yield Verdict("parameter-not-in-optimizer", told, made, evidence=(seen,))
    elif unused and 3 * steps[-1]["n"] >= rank.step_count:  # it may have its turn later
        told = f"{_named(optimizer, unused)} never get a gradient: no loss depends on them"
        place = next(filter(None, map(origins.forward_cut_line, files)), made)
        seen = f"{len(steps)} of {steps[-1]['n']} steps were looked at"
        yield Verdict("parameter-never-moves", told, place, seen_at=made, evidence=(seen,))
    if stuck:
        rates = sorted({rate for look in looks for i, rate in look["still"] if i in stuck})
        told = f"{_named(optimizer, sorted(stuck))} get gradients, but never change"
        seen = f"learning rate {', '.join(map(str, rates))}"
        yield Verdict("parameter-never-moves", told, made, evidence=(seen,))


def _named(optimizer: Record, indices: Sequence[int]) -> str:
    names = ", ".join(name_of(optimizer, i) for i in indices[:MAX_NAMED])
    more = len(indices) - MAX_NAMED
    return names + (f" and {more} more parameters" if more > 0 else "")


def _orphans(rank: Rank) -> Iterator[Verdict]:
    """Yield parameters of the DDP model that no optimizer holds."""
    look = rank.last("still") or {"orphans": [], "o": None}
    names = [name for name in look["orphans"] if name]
    optimizer = next((made for made in rank.all("optimizer") if made["o"] == look["o"]), None)
    if names and optimizer:
        more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
        num_stale = sum(not is_in_ddp for is_in_ddp in optimizer["in_ddp"])
        told = f"{', '.join(names[:MAX_NAMED])}{more}: trainable, but in no optimizer, so never "
        told += "updated"
        facts = [f"{len(names)} parameters of the DDP model are in no optimizer"]
        facts += [f"the optimizer has {num_stale} that DDP's model does not have"] * bool(num_stale)
        place = optimizer["line"]
        yield Verdict("parameter-not-in-optimizer", told, place, evidence=tuple(facts))


def _clipping(ranks: Ranks) -> Iterator[Verdict]:
    clips = [(rank, clip) for rank in ranks for clip in rank.all("clip")]
    scaled = [clip for _, clip in clips if clip["is_scaled"]]
    if len(scaled) >= ENOUGH:
        told = "gradients are clipped while they are multiplied by the loss scale: the limit is "
        told += "too small by that factor"
        seen = f"loss scale {scaled[0]['scale']:g}, and unscale_ was not called before"
        yield Verdict("clipped-before-unscale", told, scaled[0]["line"], evidence=(seen,))
    late = [clip for _, clip in clips if not clip["num_backwards"]]
    if len(late) >= ENOUGH and len(late) == len(clips):
        told = "gradients are clipped once the optimizer has used them: no step is limited"
        seen = "no backward runs between the optimizer's step and the clipping"
        yield Verdict("clipped-after-step", told, late[0]["line"], evidence=(seen,))
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
        told = "gradients are clipped on each rank before they are averaged: what is left depends "
        told += "on how the batch is split"
        place = differing[0]["line"]
        seen = "the gradients differ between ranks at the clipping, and not at the step"
        yield Verdict("clipped-before-all-reduce", told, place, evidence=(seen,))


def _are_averaged_later(ranks: Ranks, clip: Record) -> bool:
    """Whether the ranks had equal gradients at the steps that followed a clipping."""
    mine, yours = (rank.steps("g") for rank in list(ranks)[:2])
    found = {(int(o), n) for o, n in clip["next_steps"].items()} & mine.keys() & yours.keys()
    return bool(found) and all(mine[key]["g"] == yours[key]["g"] for key in found)


def judge_scale(
    rank: Rank, optimizer: Record, steps: Sequence[Record], ranks: Ranks
) -> Iterator[Verdict]:
    """Yield gradients that are too large or too small by the accumulation or the world size."""
    later = [s for s in steps if s["n"] > 1 and not s["has_closure"]] or list(steps)
    readings = [reading for step in later if (reading := _reading(rank, step)) is not None]
    if len(readings) < ENOUGH or len(set(readings)) != 1:
        return
    parts, factor = readings[0]
    world, step = ranks.world_size, later[0]
    near = step["backward_line"]
    whole = factor * parts
    seen = f"each loss is multiplied by {factor:.6g}; {parts} backwards make a step"
    if parts > 1 and _is(whole, parts):
        told = f"{parts} batches make a step, and their losses are added up without a division: "
        told += f"the gradients are {parts} times too large"
        place = (ranks.have_framework and origins.own_loss_line(near)) or near
        yield Verdict("accumulation-not-divided", told, place, seen_at=near, evidence=(seen,))
    elif parts > 1 and _is(whole, 1 / parts) and (line := origins.scaling_line(near, ())):
        told = f"the loss is divided by the {parts} batches of a step twice"
        yield Verdict("divided-twice", told, line, evidence=(seen,))
    elif world > 1 and (_is(whole, world) or _is(whole, 1 / world)):
        if _shares_outputs(rank) or not any(s["backwards"].get("sync") for s in steps):
            return
        is_large = _is(whole, world)
        lines = [c["line"] for c in rank.all("collective") if c["op"] == "all_reduce"]
        at = next(filter(None, (step["reduced_line"], *lines)), near)
        is_reduced = any(kind == "reduced" for _, kind in step["factors"])
        calls = reducing_calls(rank, optimizer) if _is(step["ratio"] or 1, whole) else []
        line = calls[-1]["line"] if calls else origins.scaling_line(near, _WORLD)
        if is_reduced and not origins.is_between(line, at, near):
            line = at  # it is divided elsewhere: by a helper
        if line:
            code = "scaled-by-world-size" if is_large else "divided-twice"
            told = "DDP averages the gradients over the ranks already; the program "
            told += f"multiplies them by the {world} ranks" if is_large else "divides them again"
            told += ": the loss that goes backward was all-reduced" if is_reduced else ""
            yield Verdict(code, told, line, seen_at=near, evidence=(seen,))


def _reading(rank: Rank, step: Record) -> tuple[int, float] | None:
    """Give the number of batches of a step, and the factor of each; None if it is not sure."""
    kinds = {kind for _, kind in step["factors"]}
    values = {round(value / step["amp_scale"], 7) for value, _ in step["factors"]}
    is_one = len(kinds) == len(values) == 1 and kinds <= {"mean", "reduced"}
    if not is_one or not origins.are_alternatives(list(step["backward_lines"])):
        return None
    number = step["backwards"]["all"]
    if number > 1 and not _is_split(step, number):
        return None
    factor: float = values.pop()
    by_hand = step["ratio"]
    is_clipped = any(step["n"] in clip["next_steps"].values() for clip in rank.all("clip"))
    if by_hand is not None and not is_clipped:
        factor *= by_hand * step["amp_scale"]
    return number, round(factor, 6)


def _is_split(step: Record, number: int) -> bool:
    """Whether each backward had a batch of its own: losses of one batch are added up rightly."""
    inputs = [x for x in step["inputs"] if x is not None]
    is_seen = not step["batches"] and len(set(inputs)) == min(number, 16)
    return bool(step["batches"] == number or is_seen)


def _is(value: float, wanted: float) -> bool:
    return abs(value - wanted) <= CLOSE * abs(wanted)


def _shares_outputs(rank: Rank) -> bool:
    """Whether outputs are gathered in training: then a loss may rightly count for all ranks."""
    trained = rank.trained_passes()
    batches = sorted((b["t"], (b["loader"], b["number"]) in trained) for b in rank.all("batch"))
    for call in rank.all("collective"):
        if "gather" in call["op"] or "reduce_scatter" in call["op"]:
            before = bisect_right(batches, (call["t"], True))
            if not before or batches[before - 1][1]:  # the newest batch is one of training
                return True
    return False


def judge_by_hand(rank: Rank, ranks: Ranks) -> Iterator[Verdict]:
    """Yield gradients that an all-reduce of the program adds up, and does not average."""
    others = [r.steps() for r in ranks if r is not rank]
    lines = Counter(c["line"] for c in rank.all("collective") if c["op"] == "all_reduce")
    is_whole = len(ranks) == ranks.world_size and bool(others)
    if not lines or not is_whole or any(r.all("ddp") for r in ranks):
        return
    found = []
    for key, step in rank.steps("g").items():
        same = [steps[key] for steps in others if key in steps]
        reading = _reading(rank, step | {"ratio": None})
        if reading is None or step["n"] < 2 or len(same) != len(others):
            continue
        share = _share_of_sum(step, same)
        if share is not None:
            found.append(round(share * math.prod(reading) * ranks.world_size, 3))
    if len(found) < ENOUGH or len(set(found)) != 1:
        return
    world, whole = ranks.world_size, found[0]
    line = lines.most_common(1)[0][0]
    seen = f"after the all-reduce a gradient is {whole:g} times the mean over the {world} ranks"
    is_large = _is(whole, world)
    if is_large or _is(whole, 1 / world):
        how = "added up over the ranks, and not divided" if is_large else "divided twice"
        code = "scaled-by-world-size" if is_large else "divided-twice"
        told = f"the gradients are {how} by the {world} ranks"
        place = line if is_large else origins.scaling_line(line, _WORLD) or line
        yield Verdict(code, told, place, evidence=(seen,))


def _share_of_sum(step: Record, others: Sequence[Record]) -> float | None:
    """Give the factor between the sum of all ranks' own gradients and those of the step."""
    values: list[list[list[float]]] = [s["values"] for s in (step, *others) if s.get("values")]
    is_known = len(values) > len(others) and all(map(all, values))
    if not is_known or len({len(part) for pair in values for part in pair}) != 1:
        return None
    own = [sum(numbers) for numbers in zip(*(before for before, _ in values), strict=True)]
    shares = [b / a for a, b in zip(own, values[0][1], strict=True) if abs(a) > 1e-6]
    return shares[0] if shares and all(_is(share, shares[0]) for share in shares) else None

"""Judges whether the ranks train one model: equal gradients, equal weights, equal learning rates.

What differs is a fact; why it differs is read from what DDP was asked to do before.
"""

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod

from ddp_doctor.audit import origins
from ddp_doctor.audit.records import Rank, Ranks, Record
from ddp_doctor.audit.verdict import Verdict

MAX_NAMED = 3
_OF_DDP = {"sync": "averaged", "no_sync": "under no_sync()", "bypass": "past DDP"}
"""What a DDP object that is alive does in a backward."""


def judge_weights(ranks: Ranks) -> Iterator[Verdict]:
    """Yield what makes the ranks' models differ: the first cause for each pair of ranks."""
    if len(ranks) > 1 and not any(rank.all("init") for rank in ranks):
        told = f"{len(ranks)} processes train, but none called init_process_group: each trains a "
        told += "model of its own"
        seen = f"ranks seen: {sorted(ranks.by_number)}"
        place = next((o["line"] for o in ranks.first.all("optimizer")), "")
        yield Verdict("no-process-group", told, place, evidence=(seen,))
        return
    if ranks.are_sharded:
        return
    first, *others = ranks
    for other in others:
        is_apart = ranks.are_apart(first, other)
        for verdict in (*_first_difference(first, other, ranks), *_by_hand(first, other)):
            yield replace(verdict, softened=verdict.softened or is_apart)
        yield from _buffers(first, other)


def _first_difference(first: Rank, other: Rank, ranks: Ranks) -> Iterator[Verdict]:
    mine, yours = first.steps(), other.steps()
    made, made_there = ({o["o"]: o for o in rank.all("optimizer")} for rank in (first, other))
    # WHY: after a Join the ranks have made other numbers of steps, and count on from there
    until = min((j["t"] for rank in (first, other) for j in rank.all("joined")), default=None)
    for key in sorted(set(mine) & set(yours), key=lambda key: key[1]):
        number, step = key
        if number not in made or number not in made_there:
            continue
        optimizer, there, a, b = made[number], made_there[number], mine[key], yours[key]
        if optimizer["shapes"] != there["shapes"]:
            return  # they hold other parts of the model on purpose
        if until is not None and max(a["t"], b["t"]) > until:
            return
        if not any(optimizer["in_ddp"]) and not any(a.get("g", [None])):
            continue  # its parameters take no part in training: no rank uses them
        who = f"ranks {first.number} and {other.number}"
        starts = [_trained(optimizer, a, made["first"]) for made in (optimizer, there)]
        if step == 1 and (seen := _which(optimizer, *starts)):
            place, why = _unequal_start(first, other, optimizer, there, ranks)
            told = f"the weights differ between ranks before the first step: {why}"
            place, seen = place or optimizer["line"], f"{who}, before step 1: {seen}"
            yield Verdict("weights-differ", told, place, evidence=(seen,))
            return
        if a["lr"] != b["lr"]:
            schedulers = [_only_on_one(first, other, "schedule")]
            schedulers += [r["line"] for rank in (first, other) for r in rank.all("schedule")]
            place = next(filter(None, schedulers if step > 1 else ()), optimizer["line"])
            told, line = f"the learning rate differs between ranks at step {step}", a["line"]
            seen = f"rank {first.number}: {a['lr']}, rank {other.number}: {b['lr']}"
            yield Verdict("learning-rates-differ", told, place, seen_at=line, evidence=(seen,))
            return
        if "g" not in a or "g" not in b:
            continue
        if seen := _which(optimizer, a["g"], b["g"]):
            told = f"{who}, step {step}: {seen}"
            yield _not_averaged(first, other, optimizer, a, told, ranks)
            return
        if seen := _which(optimizer, *(_trained(optimizer, a, s["w"]) for s in (a, b))):
            told = f"the weights differ between ranks from step {step} on, though the gradients "
            told += "were equal: the optimizer's state, or a change of the weights on one rank, "
            told += "differs"
            place = _only_on_one(first, other, "load", "load_optimizer") or a["line"]
            yield Verdict("weights-differ", told, place, evidence=(f"{who}: {seen}",))
            return
    yield from _never_steps(first, other)


def _never_steps(first: Rank, other: Rank) -> Iterator[Verdict]:
    """Yield a rank that steps no optimizer, so that its weights stay as they were."""
    for idle, busy in ((first, other), (other, first)):
        looks, steps = idle.all("by_hand"), [s for s in busy.all("step") if "w" in s]
        is_still = len(looks) > 1 and looks[0]["w"] == looks[-1]["w"]
        if is_still and not idle.step_count and steps and steps[0]["w"] != steps[-1]["w"]:
            told = f"rank {idle.number} never steps its optimizer: its weights stay as they were, "
            told += f"and rank {busy.number} trains on"
            seen = f"equal after {looks[0]['n']} and {looks[-1]['n']} backwards"
            yield Verdict("weights-differ", told, steps[0]["line"], evidence=(seen,))


def _trained(optimizer: Record, step: Record, weights: Sequence[object]) -> list[object]:
    """Leave out the weights that no model uses: replaced before the wrap."""
    gradients = step.get("g") or weights
    parts = zip(weights, optimizer["in_ddp"], gradients, strict=True)
    return [w if is_in_ddp or g is not None else None for w, is_in_ddp, g in parts]


def _unequal_start(
    first: Rank, other: Rank, optimizer: Record, there: Record, ranks: Ranks
) -> tuple[str, str]:
    """Give the line where weights became unequal, if it is known, and why they did."""
    if loaded := _only_on_one(first, other, "load"):
        return loaded, "one rank alone loads weights, after DDP made them equal"
    if group := ranks.smaller_group(first, other):
        return group["line"], f"DDP made them equal among the ranks {group['ranks']} alone"
    weights = zip(
        optimizer["first"], there["first"], optimizer["in_ddp"], optimizer["made"], strict=True
    )
    if late := [made for a, b, in_ddp, made in weights if a != b and not in_ddp and made]:
        return late[0], "they were made after the DDP wrap, which knows nothing of them"
    if wrap := first.last("ddp"):
        changed = origins.change_line(wrap["line"], optimizer["line"])
        return changed, "they were changed after DDP made them equal"
    return origins.made_line(
        optimizer["line"]
    ), "other seeds or files, and no DDP that makes them equal"


def _not_averaged(
    first: Rank, other: Rank, optimizer: Record, step: Record, seen: str, ranks: Ranks
) -> Verdict:
    """Say why gradients differ, by what DDP was asked to do. All of it was recorded."""
    counts = step["backwards"]
    lines = [s["lines"] for s in first.all("step") if "lines" in s]
    bare, quiet = (next((at[kind] for at in lines if at[kind]), "") for kind in ("bare", "no_sync"))
    unknown = _unknown(optimizer, step, other)
    searches = any(d["find_unused"] or d["static_graph"] for d in first.all("ddp"))
    # WHY: the reduction of a bucket begins when all of its parameters have gradients
    unfinished = [
        i for i, g in enumerate(step["g"]) if g is None and optimizer["in_ddp"][i] and not searches
    ]
    names = ", ".join(name_of(optimizer, i) for i in (unknown or unfinished)[:MAX_NAMED])
    line = step["backward_line"] or step["line"]
    group = ranks.smaller_group(first, other)
    calls = reducing_calls(first, optimizer)
    # WHY not those in backward: a hook of DDP makes them, in every step
    own = [c for c in calls if not (c["in_backward"] and first.all("ddp"))]
    rare = _rare_steps(first, own)
    if calls and not first.all("ddp"):
        line = calls[-1]["line"]
        left_out = names * (len(unknown) < len(step["g"]))
        why = f"this all-reduce {_fault_of(calls[-1]['ranks'], other, rare, left_out)}"
    elif not first.all("ddp"):
        why = "the model is not wrapped in DistributedDataParallel"
        line = origins.made_line(optimizer["line"]) or optimizer["line"] or line
    elif counts.get("all") and not any(counts.get(kind) for kind in _OF_DDP):
        why = "the model was unwrapped: no DDP object is alive in this step"
        line = origins.unwrapping_line(ranks.files) or line
    elif group:
        why = f"DDP averages over the process group of the ranks {group['ranks']} alone"
        line = group["line"]
    elif unknown and len(unknown) < len(optimizer["in_ddp"]):
        why = f"DDP does not know {names}: added, replaced or unfrozen after the wrap"
        unfrozen = next(filter(None, map(origins.unfreezing_line, ranks.files)), "")
        line = optimizer["made"][unknown[0]] or unfrozen or optimizer["line"] or line
    elif unknown:
        why = "the optimizer's parameters are not those that DDP wraps"
        line = origins.made_line(optimizer["line"]) or optimizer["line"] or line
    elif bare or (counts.get("bypass") and not counts.get("sync")):
        why = "the forward did not go through DDP: its inner module was called"
        line = bare or line
    elif unfinished:
        why = f"DDP still waits for the gradients of {names}, which this backward did not give"
    elif counts.get("ends_quiet"):
        why = "the last backward of the step ran under no_sync()"
        files = [record["line"].rpartition(":")[0] for record in first.all("ddp")]
        switches = [origins.set_line(file, "require_backward_grad_sync") for file in files]
        line = quiet or next(filter(None, switches), line)
    else:
        why, line = _after_ddp(first, other, step, calls)
    averages = any(c["of"] == "weights" and c["t"] > first.all("step")[0]["t"] for c in calls)
    is_local = averages or bool(rare and first.all("ddp")) or has_local_steps(first, other)
    told = f"the gradients differ between ranks: {why}"
    told += "; the weights are averaged now and then (local SGD)" if is_local else ""
    facts = (seen, f"DDP in this step: {_told(counts)}")
    return Verdict("gradients-not-averaged", told, line, evidence=facts, softened=is_local)


def _after_ddp(first: Rank, other: Rank, step: Record, calls: Sequence[Record]) -> tuple[str, str]:
    """Say what made the gradients differ that DDP had in its hands, and at which line."""
    hooked = [c["ranks"] for c in calls if c["in_backward"] and c["t"] <= step["t"]][-1:]
    if hooked and other.number not in (hooked[0] or [other.number]):
        places = [record["line"] for record in first.all("comm_hook")]
        why = f"the hook of DDP averages over the ranks {hooked[0]} alone"
        return why, next(filter(None, places), step["line"])
    why = "DDP averaged them, and then they were changed, not alike on all ranks"
    return why, _only_on_one(first, other, "clip") or step["line"]


def _unknown(optimizer: Record, step: Record, other: Rank) -> list[int]:
    """List the parameters with other gradients on another rank that DDP does not average."""
    theirs = other.steps("g")[step["o"], step["n"]]
    pairs = enumerate(zip(step["g"], theirs["g"], strict=True))
    return [i for i, (a, b) in pairs if a != b and not optimizer["in_ddp"][i]]


def _rare_steps(rank: Rank, calls: Sequence[Record]) -> str:
    """Say in how few steps the program's own all-reduces come; empty if they come in most."""
    times = [step["t"] for step in rank.all("step")]
    number = len({bisect_right(times, call["t"]) for call in calls})
    return f"{number} of {len(times)}" if 0 < 2 * number <= len(times) else ""


def _fault_of(members: list[int], other: Rank, rare: str, left_out: str) -> str:
    """Say why the program's own all-reduce does not make gradients equal."""
    if members and other.number not in members:
        return f"is among the ranks {members} alone"
    if rare:
        return f"runs in {rare} steps"
    default = "gets a copy of them, or is not between the backward and the step"
    return f"leaves out {left_out}" if left_out else default


def reducing_calls(rank: Rank, optimizer: Record) -> list[Record]:
    """List the program's own all-reduces of as many numbers as gradients have, or weights."""
    sizes = [prod(map(int, filter(None, shape.split("x")))) for shape in optimizer["shapes"]]
    return [
        call
        for call in rank.all("collective")
        if call["op"] == "all_reduce"
        and prod(map(int, re.findall(r"\d+", call["what"].partition("[")[2]))) >= max(2, *sizes)
    ]


def has_local_steps(first: Rank, other: Rank) -> bool:
    """Whether the weights become equal again after steps with other gradients."""
    differed: set[object] = set()  # optimizers: each may have a model of its own
    mine, theirs = first.steps("g"), other.steps("g")
    for key in (key for key in mine if key in theirs):
        step, match = mine[key], theirs[key]
        if step["o"] in differed and step["before"] == match["before"]:
            return True
        if step["w"] != match["w"]:
            differed.add(step["o"])
    return False


def _by_hand(first: Rank, other: Rank) -> Iterator[Verdict]:
    for a, b in zip(first.all("by_hand"), other.all("by_hand"), strict=False):
        differ = [n for n, x, y in zip(a["names"], a["w"], b["w"], strict=False) if x != y]
        if a["names"] == b["names"] and differ:
            told = "the weights differ between ranks; no optimizer of torch moves them"
            seen = f"after {a['n']} backwards {len(differ)} of {len(a['w'])} differ, as {differ[0]}"
            yield Verdict("weights-differ", told, a["line"], evidence=(seen,))
            return


def _buffers(first: Rank, other: Rank) -> Iterator[Verdict]:
    steps, theirs = first.steps("buffers"), other.steps("buffers")
    for key in (key for key in steps if key in theirs):
        mine, yours = steps[key]["buffers"], theirs[key]["buffers"]
        differ = [name for name in mine if mine[name] != yours.get(name)]
        if differ:
            wrap = next(d for d in first.all("ddp") if not d["broadcasts"])
            is_norm = all("running_" in name for name in differ)
            told = "the statistics of BatchNorm differ" if is_norm else f"{differ[0]} differs"
            told += " between ranks: each rank evaluates, and saves, another model"
            seen = f"step {key[1]}: {len(differ)} of {len(mine)} buffers, first {differ[0]}"
            facts = (seen, "DDP was made with broadcast_buffers=False")
            yield Verdict("buffers-differ", told, wrap["line"], evidence=facts)
            return


def _which(optimizer: Record, mine: Sequence[object], yours: Sequence[object]) -> str:
    """Say which tensors differ; empty if none does."""
    differ = [i for i, (a, b) in enumerate(zip(mine, yours, strict=False)) if a != b]
    if not differ:
        return ""
    return f"{len(differ)} of {len(mine)} tensors differ, first {name_of(optimizer, differ[0])}"


def name_of(optimizer: Record, index: int) -> str:
    """Name a parameter: as the model does, or by its place and shape."""
    name: str = optimizer["names"][index]
    return name or f"parameter {index} ({optimizer['shapes'][index] or 'a number'})"


def _only_on_one(first: Rank, other: Rank, *kinds: str) -> str:
    """Give the line of a kind of record that one of two ranks has, and the other has not."""
    mine, yours = ({r["line"] for k in kinds for r in rank.all(k)} for rank in (first, other))
    return next(iter(sorted(mine ^ yours)), "")


def _told(counts: dict[str, int]) -> str:
    parts = [f"{counts[name]} {text}" for name, text in _OF_DDP.items() if counts.get(name)]
    return f"{counts.get('all', 0)} backwards" + (f", {', '.join(parts)}" if parts else "")

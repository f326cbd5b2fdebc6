"""Judges whether the ranks train one model: equal gradients, equal weights, equal learning rates.

What differs is a fact; why it differs is read from what DDP was asked to do before.
"""

from collections.abc import Iterator, Sequence

from ddp_doctor.audit.origins import change_line, made_line, set_line
from ddp_doctor.audit.records import Rank, Ranks, Record
from ddp_doctor.audit.verdict import Verdict

MAX_NAMED = 3


def judge_weights(ranks: Ranks) -> Iterator[Verdict]:
    """Yield what makes the ranks' models differ: the first cause for each pair of ranks."""
    if len(ranks) > 1 and not any(rank.all("init") for rank in ranks):
        yield _no_group(ranks)
        return
    if ranks.are_sharded:
        return
    first, *others = ranks
    for other in others:
        yield from _first_difference(first, other)
        yield from _by_hand(first, other)
        yield from _buffers(first, other)


def _no_group(ranks: Ranks) -> Verdict:
    line = next((o["line"] for o in ranks.first.all("optimizer")), "")
    return Verdict(
        code="no-process-group",
        sentence=f"{len(ranks)} processes train, but none called init_process_group: each trains "
        "a model of its own",
        place=line,
        evidence=(f"ranks seen: {sorted(ranks.by_number)}",),
    )


def _first_difference(first: Rank, other: Rank) -> Iterator[Verdict]:
    mine, yours = (
        {(step["o"], step["n"]): step for step in rank.all("step")} for rank in (first, other)
    )
    made = {record["o"]: record for record in first.all("optimizer")}
    made_there = {record["o"]: record for record in other.all("optimizer")}
    # WHY: after a Join the ranks have made other numbers of steps, and count on from there
    until = min((j["t"] for rank in (first, other) for j in rank.all("joined")), default=None)
    for key in sorted(set(mine) & set(yours), key=lambda key: key[1]):
        number, step = key
        if number not in made or number not in made_there:
            continue
        optimizer = made[number]
        if optimizer["shapes"] != made_there[number]["shapes"]:
            return  # they hold other parts of the model on purpose
        a, b = mine[key], yours[key]
        if until is not None and max(a["t"], b["t"]) > until:
            return
        if not any(optimizer["in_ddp"]) and not any(a.get("g", [None])):
            continue  # its parameters take no part in training: no rank uses them
        who = f"ranks {first.number} and {other.number}"
        there = made_there[number]
        starts = [_trained(optimizer, a, made["first"]) for made in (optimizer, there)]
        if step == 1 and (seen := _which(optimizer, *starts)):
            late = _made_late(optimizer, there)
            yield _unequal_start(first, other, optimizer, f"{who}, before step 1: {seen}", late)
            return
        if a["lr"] != b["lr"]:
            schedulers = [r["line"] for rank in (first, other) for r in rank.all("schedule")]
            yield Verdict(
                code="learning-rates-differ",
                sentence=f"the learning rate differs between ranks at step {step}",
                place=next(filter(None, schedulers if step > 1 else ()), optimizer["line"]),
                seen_at=a["line"],
                evidence=(f"rank {first.number}: {a['lr']}, rank {other.number}: {b['lr']}",),
            )
            return
        if "g" not in a or "g" not in b:
            continue
        if seen := _which(optimizer, a["g"], b["g"]):
            yield _not_averaged(first, other, optimizer, a, f"{who}, step {step}: {seen}")
            return
        if seen := _which(optimizer, *(_trained(optimizer, a, s["w"]) for s in (a, b))):
            yield Verdict(
                code="weights-differ",
                sentence=f"the weights differ between ranks from step {step} on, though the "
                "gradients were equal: the optimizer's state, or a change of the weights on one "
                "rank, differs",
                place=_only_on_one(first, other, "load") or a["line"],
                evidence=(f"{who}: {seen}",),
            )
            return


def _trained(optimizer: Record, step: Record, weights: Sequence[object]) -> list[object]:
    """Leave out the weights that no model uses: replaced before the wrap."""
    gradients = step.get("g") or weights
    parts = zip(weights, optimizer["in_ddp"], gradients, strict=True)
    return [w if is_in_ddp or g is not None else None for w, is_in_ddp, g in parts]


def _made_late(optimizer: Record, there: Record) -> str:
    """Give the line of a weight that differs because it was made after the DDP wrap."""
    weights = zip(optimizer["first"], there["first"], optimizer["in_ddp"], strict=True)
    late = [i for i, (a, b, is_in_ddp) in enumerate(weights) if a != b and not is_in_ddp]
    return next((optimizer["made"][i] for i in late if optimizer["made"][i]), "")


def _unequal_start(first: Rank, other: Rank, optimizer: Record, seen: str, late: str) -> Verdict:
    loaded = _only_on_one(first, other, "load")
    wraps = first.last("ddp")
    if loaded:
        why = "one rank alone loads weights, after DDP made them equal"
    elif late:
        why = "they were made after the DDP wrap, which knows nothing of them"
    elif wraps:
        why = "they were changed after DDP made them equal"
        late = change_line(wraps["line"], optimizer["line"])
    else:
        why = "other seeds or files, and no DistributedDataParallel that makes them equal"
    return Verdict(
        code="weights-differ",
        sentence=f"the weights differ between ranks before the first step: {why}",
        place=loaded or late or optimizer["line"],
        evidence=(seen,),
    )


def _not_averaged(first: Rank, other: Rank, optimizer: Record, step: Record, seen: str) -> Verdict:
    """Say why gradients differ, by what DDP was asked to do. All of it was recorded."""
    counts = step["backwards"]
    steps = [record for record in first.all("step") if "lines" in record]
    bare = next((s["lines"]["bare"] for s in steps if s["lines"]["bare"]), "")
    quiet = next((s["lines"]["no_sync"] for s in steps if s["lines"]["no_sync"]), "")
    other_step = next(
        s for s in other.all("step") if (s["o"], s["n"]) == (step["o"], step["n"]) and "g" in s
    )
    unknown = [
        i
        for i, (a, b) in enumerate(zip(step["g"], other_step["g"], strict=True))
        if a != b and not optimizer["in_ddp"][i]
    ]
    searches = any(d["find_unused"] or d["static_graph"] for d in first.all("ddp"))
    # WHY: the reduction of a bucket begins when all of its parameters have gradients
    unfinished = [
        i for i, g in enumerate(step["g"]) if g is None and optimizer["in_ddp"][i] and not searches
    ]
    line = step["backward_line"] or step["line"]
    if not first.all("ddp"):
        why = "the model is not wrapped in DistributedDataParallel"
        line = made_line(optimizer["line"]) or optimizer["line"] or line
    elif unknown and len(unknown) < len(optimizer["in_ddp"]):
        names = ", ".join(name_of(optimizer, i) for i in unknown[:MAX_NAMED])
        why = f"DDP does not know {names}: added or replaced after the wrap"
        line = optimizer["made"][unknown[0]] or optimizer["line"] or line
    elif unknown:
        why = "the optimizer's parameters are not those that DDP wraps"
        line = made_line(optimizer["line"]) or optimizer["line"] or line
    elif bare or (counts.get("bypass") and not counts.get("sync")):
        why = "the forward did not go through DDP: its inner module was called"
        line = bare or line
    elif unfinished:
        names = ", ".join(name_of(optimizer, i) for i in unfinished[:MAX_NAMED])
        why = f"DDP still waits for the gradients of {names}, which this backward did not give"
    elif counts.get("no_sync") and not counts.get("sync"):
        why = "every backward of the step ran under no_sync()"
        files = [record["line"].rpartition(":")[0] for record in first.all("ddp")]
        switches = [set_line(file, "require_backward_grad_sync") for file in files]
        line = quiet or next(filter(None, switches), line)
    else:
        why = "DDP averaged them, and one rank changed them afterwards"
        line = _only_on_one(first, other, "clip") or step["line"]
    is_local = has_local_steps(first, other)
    return Verdict(
        code="gradients-not-averaged",
        sentence=f"the gradients differ between ranks: {why}"
        + ("; the weights are averaged now and then (local SGD)" if is_local else ""),
        place=line,
        evidence=(seen, f"DDP in this step: {_told(counts)}"),
        softened=is_local,
    )


def has_local_steps(first: Rank, other: Rank) -> bool:
    """Whether the weights become equal again after steps with other gradients."""
    differed: set[object] = set()  # optimizers: each may have a model of its own
    theirs = {(s["o"], s["n"]): s for s in other.all("step") if "g" in s}
    for step in first.all("step"):
        match = theirs.get((step["o"], step["n"]))
        if "g" not in step or match is None:
            continue
        if step["o"] in differed and step["before"] == match["before"]:
            return True
        if step["w"] != match["w"]:
            differed.add(step["o"])
    return False


def _by_hand(first: Rank, other: Rank) -> Iterator[Verdict]:
    for a, b in zip(first.all("by_hand"), other.all("by_hand"), strict=False):
        differ = [n for n, x, y in zip(a["names"], a["w"], b["w"], strict=False) if x != y]
        if a["names"] == b["names"] and differ:
            yield Verdict(
                code="weights-differ",
                sentence="the weights differ between ranks; no optimizer of torch moves them",
                place=a["line"],
                evidence=(
                    f"after {a['n']} backwards {len(differ)} of {len(a['w'])} tensors differ, "
                    f"first {differ[0]}",
                ),
            )
            return


def _buffers(first: Rank, other: Rank) -> Iterator[Verdict]:
    theirs = {(s["o"], s["n"]): s for s in other.all("step") if s.get("buffers")}
    for step in first.all("step"):
        match = theirs.get((step["o"], step["n"]))
        if match is None or not step.get("buffers") or step["buffers"] == match["buffers"]:
            continue
        mine, yours = step["buffers"], match["buffers"]
        differ = [name for name in mine if mine[name] != yours.get(name)]
        if differ:
            wrap = next(d for d in first.all("ddp") if not d["broadcasts"])
            is_norm = all("running_" in name for name in differ)
            what = "the statistics of BatchNorm differ" if is_norm else f"{differ[0]} differs"
            yield Verdict(
                code="buffers-differ",
                sentence=f"{what} between ranks: each rank evaluates, and saves, another model",
                place=wrap["line"],
                evidence=(
                    f"step {step['n']}: {len(differ)} of {len(mine)} buffers, first {differ[0]}; "
                    "DDP was made with broadcast_buffers=False",
                ),
            )
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


def _only_on_one(first: Rank, other: Rank, kind: str) -> str:
    """Give the line of a kind of record that one of two ranks has, and the other has not."""
    mine, yours = ({r["line"] for r in rank.all(kind)} for rank in (first, other))
    return next(iter(sorted(mine ^ yours)), "")


def _told(counts: dict[str, int]) -> str:
    names = {"sync": "averaged", "no_sync": "under no_sync()", "bypass": "past DDP"}
    parts = [f"{counts[name]} {text}" for name, text in names.items() if counts.get(name)]
    return f"{counts.get('all', 0)} backwards" + (f", {', '.join(parts)}" if parts else "")

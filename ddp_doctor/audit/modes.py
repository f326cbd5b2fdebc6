"""Judges what depends on the mode and on random numbers: dropout, augmentation, evaluation."""

from collections.abc import Iterator

from ddp_doctor.audit.records import Rank, Ranks, Record
from ddp_doctor.audit.samples import Key, Pass, read_passes
from ddp_doctor.audit.verdict import Verdict

ENOUGH = 2
"""Draws that must agree: one may be equal by a seed that is set once, before the ranks part."""

_JOINING = frozenset(("all_reduce", "reduce", "all_gather", "gather", "all_gather_object")).union(
    ("gather_object", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor")
)


def judge_modes(ranks: Ranks) -> Iterator[Verdict]:
    """Yield what is wrong with modes, masks and evaluation."""
    yield from _train_mode(ranks.first)
    if len(ranks) > 1:
        yield from _masks(ranks)
        yield from _augmentations(ranks)
        yield from _evaluation(ranks)


def _train_mode(rank: Rank) -> Iterator[Verdict]:
    passes = read_passes(rank)
    trained = rank.trained_passes()
    ended = {
        (p.about["loader"], p.about["number"]) for p in passes.values() if p.num_batches is not None
    }
    for record in (*rank.all("mode"), *rank.all("quiet")):
        of = tuple(record["of"]) if record["of"] else None
        is_quiet = record["k"] == "quiet" or not record["has_grad"]
        if of is None:
            # No loader: DDP's own forward without gradients is an evaluation.
            is_evaluation = record["k"] == "quiet" and bool(rank.all("step"))
        else:
            is_evaluation = bool(trained) and of not in trained and (is_quiet or of in ended)
        if is_evaluation:
            op = record.get("op", "the model")
            yield Verdict(
                code="evaluation-in-train-mode",
                sentence=f"{op} is in train mode in an evaluation: the metric is that of another, "
                "noisy model" + (", and its statistics change" if op == "batch_norm" else ""),
                place=record["line"],
                evidence=("no step of training uses the batches of this loop",),
            )
            return


def _masks(ranks: Ranks) -> Iterator[Verdict]:
    draws = [_states_of(rank) for rank in ranks]
    common = set.intersection(*(set(d) for d in draws))
    if len(common) < ENOUGH or any(len({d[key] for d in draws}) > 1 for key in common):
        return
    first = next(m for m in ranks.first.all("mode") if m["op"] == "dropout" and m["has_grad"])
    seed = _own_seed(ranks)
    yield Verdict(
        code="same-dropout",
        sentence="all ranks draw the same dropout masks: their random generators are in the same "
        "state",
        place=seed["line"] if seed else first["line"],
        evidence=(
            f"{len(common)} of {len(common)} masks are equal; dropout: {first['line']}",
            f"seed {seed['value']} on all ranks" if seed else "no line of the program sets a seed",
        ),
        # Frameworks, and programs without a seed, have it so; then it is nobody's slip.
        softened=seed is None,
    )


def _states_of(rank: Rank) -> dict[tuple[object, ...], str]:
    return {
        (str(m["of"]), m["number"]): m["state"]
        for m in rank.all("mode")
        if m["op"] == "dropout" and m["has_grad"]
    }


def _own_seed(ranks: Ranks) -> Record | None:
    """Give the last seed that the program itself sets, if all ranks set the same."""
    lasts = []
    for rank in ranks:
        own = [seed for seed in rank.all("seed") if seed["by_user"]]
        lasts.append(own[-1] if own else None)
    values = {None if last is None else last["value"] for last in lasts}
    return lasts[0] if len(values) == 1 else None


def _augmentations(ranks: Ranks) -> Iterator[Verdict]:
    draws = [
        {
            (a["dataset"], a["worker"], a["number"], name): state
            for a in rank.all("augment")
            for name, state in a["drawn"].items()
        }
        for rank in ranks
    ]
    common = set.intersection(*(set(d) for d in draws))
    same = [key for key in common if len({d[key] for d in draws}) == 1]
    generators = sorted({str(key[3]) for key in same})
    if len(same) < ENOUGH:
        return
    first = next(a for a in ranks.first.all("augment"))
    about = next((p for p in ranks.first.all("pass") if p["dataset"] == first["dataset"]), None)
    seed = _own_seed(ranks)
    yield Verdict(
        code="same-augmentation",
        sentence="all ranks draw the same random numbers for their samples: the n-th sample of "
        "each rank is augmented alike",
        place=first["line"] or (about["made"] if about else ""),
        evidence=(
            f"{len(same)} states of {', '.join(generators)} are equal when samples are read",
            f"seed: {seed['line']}" if seed else "no line of the program sets a seed",
        ),
        softened=seed is None,
    )


def _evaluation(ranks: Ranks) -> Iterator[Verdict]:
    by_rank = {rank.number: read_passes(rank) for rank in ranks}
    first = ranks.first
    mine = by_rank[first.number]
    if not any(p.trains for p in mine.values()):
        return
    starts = sorted(p.about["t"] for p in mine.values())
    begin = min(p.about["t"] for p in mine.values() if p.trains)  # before it, data is looked at
    for key, one in mine.items():
        parts = [passes.get(key) for passes in by_rank.values()]
        if one.trains or one.num_batches is None or key[2] > 1 or one.about["t"] < begin:
            continue
        others = [p for p in parts if p is not None and p.num_batches is not None]
        if len(others) < len(ranks):
            continue  # on one rank only, which may have the whole set
        until = min((t for t in starts if t > one.ended_at), default=float("inf"))
        joining = _joining(first, one.ended_at, until) + _joining(
            first, one.about["t"], one.ended_at
        )
        yield from _judge_pass(key, others, joining, ranks, is_over=first.ended_well)


def _joining(rank: Rank, begin: float, end: float) -> list[str]:
    return [
        c["op"] for c in rank.all("collective") if begin <= c["t"] <= end and c["op"] in _JOINING
    ]


def _judge_pass(
    key: Key, parts: list[Pass], joining: list[str], ranks: Ranks, *, is_over: bool
) -> Iterator[Verdict]:
    one = parts[0]
    size = one.about["size"]
    # WHY keys: index 3 of a Subset is another sample on each rank
    is_part = any(p.about["base"] == "part" for p in parts)
    sets = [set(p.keys) if is_part or not p.indices else set(p.indices) for p in parts]
    if not all(sets):
        return
    shared = len(sets[0] & sets[1])
    is_split = shared < 0.5 * len(sets[0])
    if is_split and not joining and is_over:
        yield Verdict(
            code="evaluation-not-joined",
            sentence="each rank evaluates its own share, and nothing joins the results: a metric "
            f"that one rank prints covers 1/{ranks.world_size} of the data",
            place=one.about["line"],
            evidence=(
                f"{len(sets[0])} samples on rank 0, {shared} of them on rank 1, too; no reduce or "
                "gather follows",
            ),
        )
    total = sum(len(p.indices) for p in parts)
    is_padded = bool(size) and not is_part and one.about["replicas"] == len(parts) and total > size
    is_summed = bool(joining) and all("gather" not in op for op in joining)
    if is_split and is_padded and is_summed and not one.about["drop_last"]:
        yield Verdict(
            code="evaluation-padded",
            sentence=f"{total - size} of {size} samples are evaluated twice: DistributedSampler "
            "fills up the last batches, and the sums over the ranks count them again",
            place=one.about["made"],
            evidence=(f"{total} samples evaluated, {size} in the dataset",),
        )

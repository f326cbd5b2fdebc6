"""Judges what depends on the mode and on random numbers: dropout, augmentation, evaluation."""

from collections.abc import Iterator, Sequence
from typing import Any

from ddp_doctor.audit.origins import call_line, drops_padding, last_line, noise_line, seed_line
from ddp_doctor.audit.records import Rank, Ranks, Record
from ddp_doctor.audit.samples import Pass, own_seed, place_of, read_passes
from ddp_doctor.audit.verdict import Verdict

ENOUGH = 2
"""Draws that must agree: one may be equal by a seed that is set once, before the ranks part."""

LOST = [True, False, False]
"""Modes of steps in a row: one step alone may be meant so."""

FEWEST_STEPS = 4
"""Steps in the mode of evaluation, from which on it counts as the only one."""

_JOINING = frozenset(("all_reduce", "reduce", "all_gather", "gather", "all_gather_object")).union(
    ("gather_object", "all_gather_into_tensor", "reduce_scatter", "reduce_scatter_tensor"),
    ("all_gather_single", "reduce_scatter_single"),
)


def judge_modes(ranks: Ranks) -> Iterator[Verdict]:
    """Yield what is wrong with train mode, and with random numbers."""
    yield from _train_mode(ranks.first)
    for rank in ranks:
        yield from _lost_mode(rank)
    if len(ranks) > 1:
        yield from _noise(ranks)
        yield from _augmentations(ranks)
        yield from _evaluation(ranks)
        yield from _picking(ranks)


def _train_mode(rank: Rank) -> Iterator[Verdict]:
    trained = rank.trained_passes()
    ended = {(end["loader"], end["number"]) for end in rank.all("end")}
    for record in (*rank.all("mode"), *rank.all("quiet")):
        of = tuple(record["of"]) if record["of"] else None
        is_quiet = record["k"] == "quiet" or not record["has_grad"]
        is_apart = bool(trained) and of not in trained and (is_quiet or of in ended)
        # Without a loader DDP's own forward without gradients is an evaluation.
        is_evaluation = is_apart if of else record["k"] == "quiet" and bool(rank.all("step"))
        if is_evaluation:
            op = record.get("op", "the model")
            told = f"{op} is in train mode in an evaluation: the metric is that of another, noisy "
            told += "model" + (", and its statistics change" if op == "batch_norm" else "")
            seen = "no step of training uses the batches of this loop"
            yield Verdict("evaluation-in-train-mode", told, record["line"], evidence=(seen,))
            return


def _lost_mode(rank: Rank) -> Iterator[Verdict]:
    """Yield a model that trains on in the mode of evaluation, or, as advice, in no other."""
    for number in {step["o"] for step in rank.all("step")}:
        steps = [s for s in rank.all("step") if s["o"] == number and s["trains"] is not None]
        modes = [step["trains"] for step in steps]
        lost = next((i for i in range(1, len(modes) - 1) if modes[i - 1 : i + 2] == LOST), None)
        if lost is not None and (place := steps[lost]["eval_line"]):
            told = f"from step {steps[lost]['n']} on the model trains in the mode of evaluation: "
            told += "dropout is off, and BatchNorm's statistics stand still; model.train() is "
            told += "missing after this eval()"
            line = steps[lost]["backward_line"]
            seen = f"{sum(modes)} of {len(modes)} steps trained in train mode"
            yield Verdict("train-mode-lost", told, place, seen_at=line, evidence=(seen,))
            return
        if len(modes) >= FEWEST_STEPS and not any(modes):
            told = "no step is in train mode: dropout is off, and BatchNorm's statistics stand "
            told += "still; unless that is meant, model.train() is missing before the training"
            place, line = steps[0]["eval_line"], steps[0]["backward_line"]
            facts = (f"{len(modes)} steps trained in the mode of evaluation",)
            code = "train-mode-lost"
            yield Verdict(code, told, place, seen_at=line, evidence=facts, softened=True)


def _noise(ranks: Ranks) -> Iterator[Verdict]:
    """Yield random numbers that a step draws once its batch has come, equal on all ranks."""
    draws = [{key: step["drawn"] for key, step in rank.steps("drawn").items()} for rank in ranks]
    common = set.intersection(*map(set, draws))
    if len(common) < ENOUGH or len(common) > len(_equal(draws)):
        return
    seed = own_seed(ranks)
    noise = next(filter(None, map(noise_line, ranks.files)), "")
    masks = [m["line"] for m in ranks.first.all("mode") if m["op"] == "dropout" and m["has_grad"]]
    line = masks[0] if masks else noise
    code, what = ("same-dropout", "dropout masks") if masks else ("same-noise", "random numbers")
    told = f"all ranks draw the same {what} in a step: their random generators are in the same "
    told += "state"
    place = seed_line(seed["lines"]) if seed else line
    seen = f"in {len(common)} of {len(common)} steps looked at"
    set_at = next((s["line"] for s in ranks.first.all("seed") if s["line"]), "")
    why = f"a library sets a seed at {set_at}" if set_at else "no line of the program sets a seed"
    why = f"seed {seed['value']} on all ranks" if seed else why
    # Frameworks, and programs without a seed, have masks so; then it is nobody's slip.
    softened = ranks.have_framework or (seed is None and (bool(masks) or not noise))
    yield Verdict(code, told, place, seen_at=line, evidence=(seen, why), softened=softened)


def _augmentations(ranks: Ranks) -> Iterator[Verdict]:
    draws = [
        {
            (a["dataset"], a["worker"], a["number"], name): state
            for a in rank.all("augment")
            for name, state in a["drawn"].items()
        }
        for rank in ranks
    ]
    same = _equal(draws)
    generators = sorted({str(key[3]) for key in same})
    if len(same) < ENOUGH:
        return
    first = ranks.first.all("augment")[0]
    about = next((p for p in ranks.first.all("pass") if p["dataset"] == first["dataset"]), None)
    seed = own_seed(ranks)
    calls = {f"{start}{name}.seed" for name in generators for start in ("", "np.", "numpy.")}
    calls |= {"np.random.seed", "numpy.random.seed"} if "numpy" in generators else set()
    line = "" if "torch" in generators else call_line(ranks.files, calls)
    line = line or (seed_line(seed["lines"]) if seed else "")
    told = "all ranks draw the same random numbers for their samples: the n-th sample of each rank "
    told += "is augmented alike"
    place = line or first["line"] or (about["made"] if about else "")
    seen = f"{len(same)} states of {', '.join(generators)} are equal when samples are read"
    facts = (seen, f"seed: {line}" if line else "no line of the program sets a seed")
    softened = not line or ranks.have_framework
    yield Verdict(
        "same-augmentation", told, place, seen_at=first["line"], evidence=facts, softened=softened
    )


def _equal(draws: Sequence[dict[Any, str]]) -> list[Any]:
    """List the keys with one value on all ranks."""
    return [key for key in draws[0] if len({drawn.get(key) for drawn in draws}) == 1]


def _evaluation(ranks: Ranks) -> Iterator[Verdict]:
    by_rank = {rank.number: read_passes(rank) for rank in ranks}
    first = ranks.first
    mine = by_rank[first.number]
    starts = sorted(p.about["t"] for p in mine.values() if p.trains)
    for key, one in mine.items() if starts else ():
        # WHY since the first: before training, data is looked at
        if one.trains or one.num_batches is None or key[2] > 1 or one.about["t"] < starts[0]:
            continue
        parts = [passes[key] for passes in by_rank.values() if key in passes]
        others = [part for part in parts if part.num_batches is not None]
        # Results may be joined until the next training begins.
        until = min((t for t in starts if t > one.ended_at), default=float("inf"))
        joining = [
            record
            for record in first.all("collective")
            if one.about["t"] <= record["t"] <= until
            # WHY via: FSDP calls those of a single tensor in its forward
            and record["op" if "_single" not in record["op"] else "via"] in _JOINING
        ]
        is_over = first.ended_well or until < float("inf")
        if len(others) == len(ranks):
            yield from _judge_pass(others, joining, ranks, is_over=is_over)
        elif one.about["replicas"] == ranks.world_size and len(set(one.indices)) < 0.75 * (
            one.about["size"] or 0
        ):
            yield _not_joined(one, ranks, "one rank alone evaluates, and has its share only")


def _not_joined(one: Pass, ranks: Ranks, why: str) -> Verdict:
    told = f"{why}: a metric that one rank prints, or that picks the best checkpoint, covers "
    told += f"1/{ranks.world_size} of the data"
    loop = last_line(one.about["line"]).rpartition(":")[2]
    return Verdict(
        "evaluation-not-joined",
        told,
        one.about["line"],
        seen_at=one.about["made"],
        evidence=(f"no reduce or gather follows the loop, which ends at line {loop}",),
        softened=not one.about["by_user"],  # the loop of a framework
    )


def _picking(ranks: Ranks) -> Iterator[Verdict]:
    """Yield a metric that each rank has of its own share, and that Lightning picks by."""
    first, other, *_ = ranks
    pairs = list(zip(first.all("metric"), other.all("metric"), strict=False))
    differing = [(a, b) for a, b in pairs if a["value"] != b["value"]]
    if len(differing) >= ENOUGH and all(a["line"] == b["line"] for a, b in pairs):
        mine, yours = differing[0]
        told = f"each rank logs {mine['name']} of its own share without sync_dist=True, and the "
        told += "best checkpoint, or the end, is chosen by it"
        seen = f"rank {first.number}: {mine['value']}, rank {other.number}: {yours['value']}"
        yield Verdict("evaluation-not-joined", told, mine["line"], evidence=(seen,))


def _judge_pass(
    parts: list[Pass], joining: list[Record], ranks: Ranks, *, is_over: bool
) -> Iterator[Verdict]:
    one, size = parts[0], parts[0].about["size"]
    # WHY keys: index 3 of a Subset is another sample on each rank
    is_part = any(p.about["base"] == "part" for p in parts)
    sets = [set(p.keys) if is_part or not p.indices else set(p.indices) for p in parts]
    if not all(sets) or len(sets[0] & sets[1]) >= 0.5 * len(sets[0]):
        return  # it is not known, or not split
    if not joining and is_over:
        why = "each rank evaluates its own share, and nothing joins the results"
        yield _not_joined(one, ranks, why)
    total = sum(len(p.indices) for p in parts)
    is_padded = bool(size) and not is_part and one.about["replicas"] == len(parts) and total > size
    # WHY: gather_for_metrics, and what a framework calls, drops what is there twice
    own = [record for record in joining if record["via"] in _JOINING]
    gathers = [record for record in own if "gather" in record["via"]]
    is_cut = any(drops_padding(record["line"], size) for record in gathers)
    if is_padded and own and not is_cut and not one.about["drop_last"]:
        is_prepared = bool(gathers) and one.about["sampler"] != "DistributedSampler"
        told = f"{total - size} of {size} samples are evaluated twice: the sampler fills up the "
        told += "last batches, and what joins the ranks' results counts them again"
        place = gathers[0]["line"] if is_prepared else place_of(one.about)
        line, seen = own[0]["line"], f"{total} samples evaluated, {size} in the dataset"
        yield Verdict("evaluation-padded", told, place, seen_at=line, evidence=(seen,))

"""Judges the data: does each rank get its own samples, each sample once, in a new order each epoch?

Passes are matched between ranks by the line of their DataLoader. Equal indices mean equal samples
only if the contents agree: ranks may have parts of their own. Contents may be augmented: one equal
column (a label, a text) of a batch is enough.
"""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ddp_doctor.audit import origins
from ddp_doctor.audit.records import Rank, Ranks, Record
from ddp_doctor.audit.verdict import Verdict

SAME = 0.9
"""Share of equal places from which two orders count as the same."""

FEWEST = 8
"""Samples: with fewer of them nothing is said."""

Key = tuple[str, int, int]
"""A pass on all ranks: line of the loader, which loader of that line, which pass over it."""


@dataclass(kw_only=True, slots=True)
class Pass:
    """One iteration of one rank over a loader."""

    about: Record
    trains: bool
    indices: list[int] = field(default_factory=list)
    keys: list[tuple[str, ...]] = field(default_factory=list)
    """One per sample: a hash of each column."""

    num_seen: int = 0
    num_batches: int | None = None
    """Of a pass that came to its end."""

    batch_size: int = 1
    ended_at: float = 0.0


def read_passes(rank: Rank) -> dict[Key, Pass]:
    """Put together what a rank's loaders gave in each pass."""
    trained = rank.trained_passes()
    names: dict[int, tuple[str, int]] = {}
    counts: Counter[str] = Counter()
    passes: dict[tuple[int, int], Pass] = {}
    for about in rank.all("pass"):
        loader, made = about["loader"], about["made"]
        if loader not in names:
            names[loader] = (made, counts[made])
            counts[made] += 1
        key = loader, about["number"]
        passes[key] = Pass(about=about, trains=key in trained)
    for batch in rank.all("batch"):
        of = passes[batch["loader"], batch["number"]]
        of.num_seen += 1
        of.indices += batch["indices"] or []
        of.batch_size = max(of.batch_size, batch["size"])
        columns = [[text[i : i + 8] for i in range(0, len(text), 8)] for text in batch["hashes"]]
        of.keys += list(zip(*columns, strict=True)) if columns else []
    for end in rank.all("end"):
        of = passes[end["loader"], end["number"]]
        of.num_batches, of.ended_at = end["batches"], end["t"]
    return {(*names[loader], number): one for (loader, number), one in passes.items()}


def judge_samples(ranks: Ranks) -> Iterator[Verdict]:
    """Yield what is wrong with the samples of each pass that trains."""
    by_key: dict[Key, dict[int, Pass]] = defaultdict(dict)
    for rank in ranks:
        for key, one in read_passes(rank).items():
            if one.trains:
                by_key[key][rank.number] = one
    for (made, which, number), by_rank in by_key.items():
        following = by_key.get((made, which, number + 1), {})
        beside = following or by_key.get((made, which, number - 1), {})
        found = [*_other_data((by_rank, beside), ranks), *_pairs(by_rank, ranks)]
        yield from (found or list(_coverage(by_rank, ranks)))[:1]
        yield from _repeated(by_rank)
        yield from _order(by_rank, following)
        yield from _uneven(by_rank, ranks)
    if not by_key:
        yield from _inputs(ranks)


def place_of(about: Record) -> str:
    """Give the line that decides which samples a pass has: of the dataset, sampler or loader."""
    if about["sampler"] == "_InfiniteConstantSampler":  # of an iterable dataset
        return str(about["reader"] or about["made"])
    is_given = about["sampler"] not in ("RandomSampler", "SequentialSampler")
    return (is_given and origins.made_line(about["made"], "sampler")) or str(about["made"])


def _are_same_set(x: Pass, y: Pass) -> bool:
    """Whether equal indices are equal samples on two ranks."""
    if not x.indices or not y.indices or "part" in (x.about["base"], y.about["base"]):
        return False
    mine, yours = (dict(zip(p.indices, p.keys, strict=False)) for p in (x, y))
    both = [i for i in mine if i in yours]
    if len(both) < 4:
        return bool(x.about["size"] == y.about["size"])
    return any(
        equal >= 0.98 and distinct * len(both) > 1
        for equal, distinct in _shares([(mine[i], yours[i]) for i in both])
    )


def _shares(pairs: Sequence[tuple[tuple[str, ...], tuple[str, ...]]]) -> list[tuple[float, float]]:
    """Give the share of equal contents, and of distinct ones, of each column."""
    found = []
    for column in range(min(len(key) for pair in pairs for key in pair)):
        num_equal = sum(mine[column] == yours[column] for mine, yours in pairs)
        distinct = {mine[column] for mine, _ in pairs}
        found.append((num_equal / len(pairs), len(distinct) / len(pairs)))
    return found


def _other_data(passes: Sequence[dict[int, Pass]], ranks: Ranks) -> Iterator[Verdict]:
    """Yield a sampler that splits over the ranks what is other data on each of them.

    Only contents that an index has again in the next pass count: others are augmented.
    """
    about = next(iter(passes[0].values())).about
    numbers = sorted(set(passes[0]) & set(passes[1]))[:2]
    if about["replicas"] != ranks.world_size or len(numbers) < 2:
        return
    (now, later), (theirs, later_theirs) = (
        [dict(zip(of[n].indices, of[n].keys, strict=False)) for of in passes] for n in numbers
    )
    repeated = [(now[i], later[i]) for i in now if i in later]
    mine, yours = now | later, theirs | later_theirs
    both = [(mine[i], yours[i]) for i in mine if i in yours]
    if min(len(repeated), len(both)) < FEWEST:
        return
    columns = list(zip(_shares(both), _shares(repeated), strict=False))
    # WHY any equal one: a column of the same samples may be random on each rank
    if any(equal > SAME and distinct * len(both) > 1 for (equal, distinct), _ in columns):
        return
    if any(
        equal < 0.1 and distinct > 0.5 and again == 1 for (equal, distinct), (again, _) in columns
    ):
        own, others = set(mine.values()), set(yours.values())
        is_shared = len(own & others) > 0.05 * len(own)
        splits = {"random_split", "train_test_split"}
        split = origins.call_line(ranks.files, splits) if is_shared else ""
        code = "samples-overlap" if is_shared else "samples-missing"
        told = "the sampler splits over the ranks what is other data on each of them: "
        told += "some samples come twice, and others never" if is_shared else "it is split twice"
        told += f", and each rank leaves out {ranks.world_size - 1}/{ranks.world_size} of its own"
        seen = f"{len(both)} indices were read on two ranks, and gave other samples"
        place, line = split or place_of(about), about["line"]
        yield Verdict(code, told, place, seen_at=line, evidence=(seen,))


def _pairs(by_rank: dict[int, Pass], ranks: Ranks) -> Iterator[Verdict]:
    for a, b in itertools.combinations(sorted(by_rank), 2):
        if not ranks.are_apart(ranks.by_number[a], ranks.by_number[b]):
            yield from _pair(a, by_rank[a], b, by_rank[b], ranks)


def _pair(a: int, x: Pass, b: int, y: Pass, ranks: Ranks) -> Iterator[Verdict]:
    by_index = _are_same_set(x, y)
    mine, yours = (p.indices if by_index else p.keys for p in (x, y))
    number = min(len(mine), len(yours))
    if number < FEWEST:
        return
    own, theirs = set(mine), set(yours)
    both = len(own & theirs)
    # Without indices, equal contents may be other samples: labels, tokens of a small vocabulary.
    is_varied = by_index or len(own) > 0.5 * len(mine)
    is_equal = sum(m == n for m, n in zip(mine, yours, strict=False)) > SAME * number
    repeats = 1 - len(own) / len(mine)
    where = f"pass {x.about['number']}, sampler {x.about['sampler']}"
    if is_equal and is_varied and len(own) >= min(FEWEST, number):
        told = f"ranks {a} and {b} train on the same samples in the same order: "
        told += f"{ranks.world_size} ranks do the work of one"
        place, line = place_of(x.about), x.about["line"]
        seen = f"{number} samples compared ({where})"
        yield Verdict("same-samples", told, place, seen_at=line, evidence=(seen,))
        return
    chance = 0.5 * len(own) * len(theirs) / max(x.about["size"] or 0, len(own | theirs))
    # WHY the batch: a sampler pads its last one
    is_much = both > ranks.world_size * max(x.batch_size, y.batch_size) // 2 and both >= max(
        chance, 0.2 * min(len(own), len(theirs))
    )
    replaces = repeats > 0.05 or "Weighted" in x.about["sampler"]
    if is_much and is_varied and not replaces:
        told = f"ranks {a} and {b} share samples within one epoch: the loader is not split over "
        told += "the ranks"
        place, line = origins.choice_line(x.about["chooser"]) or place_of(x.about), x.about["line"]
        seen = f"{both} of {min(len(own), len(theirs))} samples are shared ({where})"
        yield Verdict("samples-overlap", told, place, seen_at=line, evidence=(seen,))


def _coverage(by_rank: dict[int, Pass], ranks: Ranks) -> Iterator[Verdict]:
    """Yield a sampler that leaves out samples which no rank gets."""
    passes = list(by_rank.values())
    first = passes[0]
    is_known = all(p.num_batches and len(p.indices) >= p.num_batches for p in passes)
    if len(by_rank) < ranks.world_size or not is_known or first.about["base"] == "part":
        return
    declared = first.about["replicas"]
    size, used = first.about["size"] or 0, set().union(*(p.indices for p in passes))
    is_split = all(_are_same_set(first, other) for other in passes[1:])
    missing = size - len(used)
    is_wrong = declared is not None and declared != ranks.world_size
    if is_split and is_wrong and missing > ranks.world_size * first.batch_size:
        told = f"{missing} of {size} samples are used by no rank: "
        why = f"the sampler splits for {declared} ranks, and there are {ranks.world_size}"
        if first.about["is_split_twice"]:
            why = "they are split twice: by DistributedSampler and by prepare()"
        place, line = place_of(first.about), first.about["line"]
        seen = f"{len(used)} samples used in pass {first.about['number']}"
        yield Verdict("samples-missing", told + why, place, seen_at=line, evidence=(seen,))


def _repeated(by_rank: dict[int, Pass]) -> Iterator[Verdict]:
    """Yield an iterable dataset that every worker gives in full."""
    one = next(iter(by_rank.values()))
    workers = one.about["workers"]
    if one.indices or workers < 2 or len(one.keys) < FEWEST * workers:
        return
    counts = Counter(Counter(one.keys).values())
    num_distinct = sum(counts.values())
    if counts[workers] + counts[workers - 1] > SAME * num_distinct and counts[1] < num_distinct / 2:
        told = f"each sample comes {workers} times: each of the {workers} workers reads all of them"
        place, line = place_of(one.about), one.about["line"]
        seen = f"{num_distinct} different samples among {len(one.keys)}"
        yield Verdict("samples-repeated", told, place, seen_at=line, evidence=(seen,))


def _order(by_rank: dict[int, Pass], following: dict[int, Pass]) -> Iterator[Verdict]:
    number, one = next(iter(by_rank.items()))
    if (other := following.get(number)) is None:
        return
    about = one.about
    mine: Sequence[object] = one.indices or one.keys
    yours: Sequence[object] = other.indices or other.keys
    length = min(len(mine), len(yours))
    is_long = length >= max(FEWEST, min(3 * one.batch_size, len(mine)))
    if not is_long or mine[:length] != yours[:length] or len(set(mine)) <= length / 2:
        return
    is_in_order = bool(one.indices) and one.indices == sorted(one.indices)
    is_own = not about["has_set_epoch"] and about["base"] == "part"
    if is_in_order or is_own or not about["shuffles"]:
        return
    other_call = next(filter(None, map(origins.epoch_line, about["lines"])), "")
    why = "set_epoch(epoch) is not called"
    if not about["has_set_epoch"]:
        why, other_call = "its generator is seeded anew in each epoch", ""
    elif other_call:
        why = "this set_epoch() is of another sampler, or gets the same number in each epoch"
    told = f"two epochs have the same order, though the sampler shuffles: {why}"
    place = other_call or origins.loop_line(about["lines"]) or about["line"]
    seen = f"{length} samples of passes {about['number']} and {about['number'] + 1} are in "
    facts = (f"{seen}the same order ({about['sampler']})", f"loader: {about['made']}")
    yield Verdict("same-order", told, place, seen_at=about["line"], evidence=facts)


def _uneven(by_rank: dict[int, Pass], ranks: Ranks) -> Iterator[Verdict]:
    counts = {number: one.num_batches or one.num_seen for number, one in by_rank.items()}
    ended = [one.num_batches for one in by_rank.values() if one.num_batches]
    joins = any(rank.all("join") for rank in ranks)
    if len(by_rank) < 2 or joins or not ended or min(ended) >= max(counts.values()):
        return
    about = next(iter(by_rank.values())).about
    of = {number: [p.about["loader"], p.about["number"]] for number, p in by_rank.items()}
    ours = [[s["of"][:2] for s in ranks.by_number[n].all("step") if s["of"]] for n in of]
    made = {steps.count(key) for steps, key in zip(ours, of.values(), strict=True)}
    if len(made) == 1 and all(rank.ended_well for rank in ranks):
        return  # they agreed on the end
    told = "the ranks have other numbers of batches in an epoch: who has more waits for the others"
    seen = ", ".join(f"rank {number}: {count}" for number, count in counts.items())
    seen, place = f"batches in pass {about['number']}: {seen}", place_of(about)
    yield Verdict("uneven-steps", told, place, seen_at=about["line"], evidence=(seen,))


def _inputs(ranks: Ranks) -> Iterator[Verdict]:
    """Yield equal inputs of DDP's forward where no DataLoader is used."""
    inputs = [
        [x for step in rank.all("step") for x in step.get("inputs", []) if x is not None]
        for rank in ranks
    ]
    for number, (mine, yours) in enumerate(itertools.pairwise(inputs)):
        own, theirs = set(mine), set(yours)
        # WHY half of them: one rank may have drawn a few more, for an evaluation
        is_apart = ranks.are_apart(*list(ranks)[number : number + 2])
        if min(len(own), len(theirs)) >= 4 and len(own & theirs) > 0.5 * len(own) and not is_apart:
            step = next(s for s in ranks.first.all("step") if s.get("inputs"))
            seed, line = own_seed(ranks), step["forward_line"]
            told = f"ranks {number} and {number + 1} train on the same batches: "
            told += f"{ranks.world_size} ranks do the work of one"
            place = origins.seed_line(seed["lines"]) if seed else line
            seen = f"{len(own & theirs)} of {len(own)} inputs of DDP's forward are equal"
            yield Verdict("same-samples", told, place, seen_at=line, evidence=(seen,))
            return


def own_seed(ranks: Ranks) -> Record | None:
    """Give the last seed that the program itself sets, if all ranks set the same."""
    own = [[seed for seed in rank.all("seed") if seed["by_user"]] for rank in ranks]
    are_equal = all(own) and len({seeds[-1]["value"] for seeds in own}) == 1
    return own[0][-1] if are_equal else None

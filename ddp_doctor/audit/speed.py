"""Where the time of a step goes on each rank, and what would make it shorter. Advice only."""

from collections.abc import Iterator
from statistics import median

from ddp_doctor.audit.records import Rank, Ranks, Record
from ddp_doctor.audit.verdict import Verdict

PARTS = {
    "wait_s": "data",
    "forward_s": "forward",
    "backward_s": "backward and all-reduce",
    "optimizer_s": "optimizer",
    "collective_s": "own collectives",
}
SLOW = 1.3
"""Times the others' own work: then a rank is slow."""

LEAST_MS = 1.0
"""What a rank must be slower by in each step: less is noise."""

STEADY = 0.8
"""Share of the steps in which it must be slower: on a busy machine each rank is, now and then."""

MUCH = 0.2
"""Share of a step from which waiting for data is worth a word."""

FEWEST = 6
"""Steps: the first ones are warm-up."""


def split_times(rank: Rank) -> dict[str, float]:
    """Give the median milliseconds of a step, and of its parts."""
    steps = _steps_of(rank)
    if len(steps) < FEWEST:
        return {}
    times = {n: 1e3 * median(step[n] for step in steps) for n in (*PARTS, "own_s", "wall_s")}
    return times | {"other": max(0.0, 2 * times["wall_s"] - sum(times.values()))}


def _steps_of(rank: Rank) -> list[Record]:
    return [step for step in rank.all("step") if step["wall_s"]][2:]


def time_lines(ranks: Ranks) -> list[str]:
    rows = [(rank.number, times) for rank in ranks if (times := split_times(rank))]
    if not rows:
        return []
    lines = ["time of a step in ms (median); what DDP's forward does not cover is other"]
    for number, times in rows:
        names = PARTS | {"other": "other", "own_s": "the audit itself"}
        parts = [f"{text} {times[name]:.1f}" for name, text in names.items()]
        lines.append(f"  rank {number}: {times['wall_s']:.1f} = {', '.join(parts)}")
    return lines


def judge_speed(ranks: Ranks) -> Iterator[Verdict]:
    """Yield advice, each with its measured share."""
    times = {rank.number: split_times(rank) for rank in ranks}
    if len(times) > 1 and all(times.values()):
        yield from _slow_rank(ranks, times)
    first = times[ranks.first.number]
    about = next(iter(ranks.first.all("pass")), None)
    if first and about and (share := first["wait_s"] / first["wall_s"]) > MUCH:
        told = f"{share:.0%} of a step is spent waiting for data, "
        told += f"with num_workers={about['workers']}"
        seen = f"{first['wait_s']:.1f} of {first['wall_s']:.1f} ms"
        yield Verdict("slow-data", told, about["made"], evidence=(seen,))
    for wrap in ranks.first.all("ddp"):
        yield from _ddp(ranks.first, wrap, first)


def _slow_rank(ranks: Ranks, times: dict[int, dict[str, float]]) -> Iterator[Verdict]:
    # WHY not backward: in it the fast ranks wait for the slow one. In forward, too, if it begins
    # with a broadcast of the buffers.
    waits = any(wrap["broadcasts"] and wrap["num_norms"] for wrap in ranks.first.all("ddp"))
    parts = ["wait_s", "other", "forward_s"][: 3 - waits]
    waiting = ["backward_s", "optimizer_s", "collective_s", "own_s", "forward_s"][: 4 + waits]
    each = {
        rank.number: [1e3 * (s["wall_s"] - sum(s[w] for w in waiting)) for s in _steps_of(rank)]
        for rank in ranks
    }
    work = {number: median(steps) for number, steps in each.items()}
    slow = max(work, key=lambda n: work[n])
    rest = [median(row) for row in zip(*(each[n] for n in each if n != slow), strict=False)]
    others = median(rest)
    least_ms = max(LEAST_MS, 0.1 * times[slow]["wall_s"])
    pairs = list(zip(each[slow], rest, strict=False))
    if sum(a > max(SLOW * b, b + least_ms) for a, b in pairs) >= STEADY * len(pairs):
        part = max(
            parts,
            key=lambda p: times[slow][p] - median(t[p] for n, t in times.items() if n != slow),
        )
        told = f"rank {slow} is slow, and all others wait for it: {work[slow]:.1f} ms of own work "
        told += f"per step, the others {others:.1f}; most of it in "
        told += PARTS.get(part, "code outside the forward")
        place = ranks.by_number[slow].all("step")[0]["line"]
        seen = f"a step takes {times[slow]['wall_s']:.1f} ms"
        yield Verdict("slow-rank", told, place, evidence=(seen,))


def _ddp(rank: Rank, wrap: Record, times: dict[str, float]) -> Iterator[Verdict]:
    steps = list(rank.steps("g").values())
    is_only = len(rank.all("ddp")) == 1
    unused = any(g is None for step in steps for g in step["g"])
    is_plain = is_only and len(steps) > 3 and len(rank.all("optimizer")) == 1
    if wrap["find_unused"] and is_plain and not unused:
        told = "find_unused_parameters=True searches the graph in every step, and every parameter "
        told += "had a gradient"
        seen = f"{len(steps)} steps looked at"
        yield Verdict("find-unused-needless", told, wrap["line"], evidence=(seen,))
    needless = [
        s
        for s in steps[1:]
        if s["backwards"].get("sync", 0) > 1
        and not s["backwards"].get("no_sync")
        and not s["has_closure"]
        and len(s["backward_lines"]) == 1
    ]
    late = [s for s in steps[1:] if s["backwards"].get("late")]
    if late:
        told = "no_sync() covers the backward only: DDP decides in the forward, so all gradients "
        told += "are averaged all the same"
        seen = f"{late[0]['backwards']['late']} backwards of a step"
        line = late[0]["backward_line"]
        yield Verdict("no-sync-without-effect", told, line, evidence=(seen,))
    elif is_only and len(needless) > 2:
        number = needless[0]["backwards"]["sync"]
        share = times["backward_s"] / times["wall_s"] if times else 0.0
        told = f"the gradients are averaged {number} times per step: under no_sync() once would do"
        seen = f"backward with all-reduce takes {share:.0%} of a step"
        yield Verdict("no-sync-missing", told, needless[0]["backward_line"], evidence=(seen,))

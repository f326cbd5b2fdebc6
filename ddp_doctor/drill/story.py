"""Says what the records of a case mean: where each start began, and what went into the weights."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from ddp_doctor.drill.runs import Case, Facts, Process

Samples = Counter[object]
"""By name. Ranks that have datasets of their own may share a name: then both are counted."""

Uses = dict[tuple[int, int], tuple[Facts, list[Facts]]]
"""By rank and step of the whole run: the update, and what its forwards used."""


@dataclass(slots=True)
class Part:
    """One life of rank 0: it began after the step `base` of the whole run; None: unknown."""

    process: Process
    base: int | None = 0
    how: str = "weights"
    """By what that is known."""

    @property
    def end(self) -> int:
        return (self.base or 0) + len(self.process.all("update"))


def marks_of(process: Process, base: int) -> list[tuple[int, str, int]]:
    """Give optimizer, weights, and after how many steps of the whole run it had them.

    A program may change them between two steps, as one that clamps them does.
    """
    found, now = [], dict[int, str]()
    for record in process.all("update"):
        number, before = record["o"], record["before"]["the weights"]
        found += [(number, w, base + record["n"] - 1) for w in {now.get(number, before), before}]
        now[number] = record["w"]
    end = base + len(process.all("update"))
    return found + [(number, weights, end) for number, weights in now.items()]


def parts_of(case: Case, total: int) -> list[Part]:
    """Find where each life of rank 0 began, up to one of which that is unknown.

    Its first weights are looked for among those that the lives before it had. That holds for a
    program that is not deterministic too, because a checkpoint comes from the same run.
    """
    parts: list[Part] = []
    known: list[tuple[int, str, int]] = []
    for process in [p for p in case.processes() if p.rank == 0]:
        first, made = next(iter(process.all("update")), None), len(process.all("update"))
        part = Part(process)
        if parts:
            begun = None if first is None else (first["o"], first["before"]["the weights"])
            places = sorted(place for *mark, place in known if tuple(mark) == begun)
            # a step with learning rate 0 changes nothing: then there are two places
            fitting = [place for place in places if place + made == total]
            has_ended = case.starts[process.start]["status"] == 0
            if places:
                part.base = (fitting or places)[-1]
            elif made == total:
                part.how = "other weights"
            elif begun and has_ended and 0 < total - made <= known[-1][2]:
                part.base, part.how = total - made, "number of steps"
            else:
                part.base, part.how = None, "unknown" if begun else "no step"
        parts.append(part)
        if part.base is None:
            break
        known += marks_of(process, part.base)
    return parts


def uses_of(case: Case, parts: Sequence[Part]) -> Uses:
    """Collect the steps that went into the final weights: not those that were repeated."""
    ends = [part.base or 0 for part in parts[1:]] + [10**9]
    lives, done, begun = Counter[int](), Uses(), Uses()
    for process in case.processes():
        earlier = sum(part.process.start < process.start for part in parts)
        if process.rank is None or (life := max(lives[process.rank], earlier)) >= len(parts):
            continue
        lives[process.rank], updates = life + 1, {r["n"]: r for r in process.all("update")}
        used: dict[int, list[Facts]] = {}
        for record in process.all("use"):
            used.setdefault(record["n"], []).append(record)
        for number in range(1, len(updates) + 2):
            step = (parts[life].base or 0) + number
            if step <= ends[life]:
                target = done if number in updates else begun
                target[process.rank, step] = (updates.get(number, {}), used.get(number, []))
    # A rank may die in a step that the others end: its gradient, so its samples, are in theirs.
    ended = {step for _, step in done}
    return {key: value for key, value in begun.items() if key[1] in ended} | done


def samples_of(uses: Uses) -> Samples | None:
    """Count how often each sample went into the weights; None if a step's are not known."""
    found = Samples()
    for _, used in uses.values():
        names = [name for record in used for name in record["names"] or [None]]
        if not names or None in names:
            return None
        found.update(names)
    return found or None


def last_weights(case: Case) -> Facts:
    """Give the last weights of each rank and optimizer."""
    return {f"{p.rank} {r['o']}": r["w"] for p in case.processes() for r in p.all("update")}


def why_different(uses: Uses, reference: Uses) -> str:
    """Name the first step whose result differs, and what was different before it."""
    for step in sorted({step for _, step in uses}):
        keys = [key for key in reference if key[1] == step and uses.get(key, ({}, []))[0]]
        pairs = [(uses[key], reference[key]) for key in keys]
        if any(mine[0]["w"] != other[0]["w"] for mine, other in pairs):
            befores = [(mine[0]["before"], other[0]["before"]) for mine, other in pairs]
            found = [name for name in befores[0][0] if any(a[name] != b[name] for a, b in befores)]
            used = [sorted(str(r["names"]) for p in pairs for r in p[side][1]) for side in (0, 1)]
            found += ["the samples"] if used[0] != used[1] else []
            told = " and ".join(found) or "nothing that was observed"
            return f"step {step} is the first that differs; different before it: {told}"
    return ""

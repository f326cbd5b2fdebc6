"""The records of an observed program, by rank: what injected/ wrote, read back.

Owns reading: whole and while the program runs. A line that is not complete yet is left for later.
"""

import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

Record = dict[str, Any]  # Any: JSON; injected/ says which kind has which fields
_FEWEST_STEPS, _SHARE_OF_STEPS = 3, 0.8
_OF_RANKS = frozenset(("step", "init", "optimizer", "pass", "ddp", "by_hand"))
"""Kinds that only a training process has."""


class Rank:
    """What one rank did, by kind, in order."""

    def __init__(self, number: int, process: Record) -> None:
        self.number, self.process = number, process
        self._kinds: dict[str, list[Record]] = defaultdict(list)

    def add(self, record: Record) -> None:
        self._kinds[record["k"]].append(record)

    def all(self, kind: str) -> list[Record]:
        return self._kinds.get(kind, [])

    def by_step(self, kind: str) -> dict[tuple[str, str], list[Record]]:
        """Return the records of a kind at each line in each step, in their order.

        WHY by step: ranks may have sampled others. One step may do the same once per micro-batch.
        """
        found: dict[tuple[str, str], list[Record]] = {}
        for record in self.all(kind):
            found.setdefault((record["line"], str(record["next_steps"])), []).append(record)
        return found

    def last(self, kind: str) -> Record | None:
        return next(reversed(self.all(kind)), None)

    def steps(self, *fields: str) -> dict[tuple[int, int], Record]:
        """Return the steps that have these fields, by optimizer and number."""
        steps = (s for s in self.all("step") if all(s.get(name) for name in fields))
        return {(s["o"], s["n"]): s for s in steps}

    def trained_passes(self) -> set[tuple[int, int]]:
        """Give the loader and the number of each pass that trains.

        A step belongs to the newest batch's pass. If it takes batches of several loaders, those of
        the others come between steps, too: one in nearly every step, unlike those of evaluations.
        """
        steps = self.all("step")
        found = {(step["of"][0], step["of"][1]) for step in steps if step["of"]}
        times = sorted(step["t"] for step in steps)
        windows: dict[tuple[int, int], set[int]] = defaultdict(set)
        for batch in self.all("batch"):
            windows[batch["loader"], batch["number"]].add(bisect_right(times, batch["t"]))
        for key, at in windows.items():
            span = max(at) - min(at) + 1
            if len(at) >= _FEWEST_STEPS and len(at) >= _SHARE_OF_STEPS * span:
                found.add(key)
        return found

    @property
    def ended_well(self) -> bool:
        """Whether it came to its end without an exception."""
        end = self.last("exit")
        return end is not None and not end["error"] and not end["code"]

    @property
    def work_count(self) -> int:
        """Steps, or backwards of a program that has no optimizer of torch."""
        return max([self.step_count, *(int(r["n"]) for r in self.all("by_hand"))])

    @property
    def step_count(self) -> int:
        """Steps of the optimizer that did most."""
        return max((step["n"] for step in self.all("step")), default=0)


class Ranks:
    """All ranks of a program."""

    def __init__(self, ranks: dict[int, Rank]) -> None:
        self.by_number = dict(sorted(ranks.items()))
        declared = [init["world"] for rank in self for init in rank.all("init")]
        given = [int(rank.process["world"] or 1) for rank in self]
        self.world_size = max([len(ranks), *declared, *given], default=0)
        self.failures: list[str] = []
        """Parts of the judging that failed on these records."""

    def __iter__(self) -> Iterator[Rank]:
        return iter(self.by_number.values())

    def __len__(self) -> int:
        return len(self.by_number)

    @property
    def first(self) -> Rank:
        return next(iter(self))

    def smaller_group(self, first: Rank, other: Rank) -> Record | None:
        """Give a DDP object of the first rank that leaves out the other one, if there is one."""
        return next((d for d in first.all("ddp") if other.number not in d["ranks"]), None)

    def are_apart(self, first: Rank, other: Rank) -> bool:
        """Whether two ranks train models of their own on purpose, or parts of one.

        Then no sampler splits the data over all ranks; parts meet within the user's own forward.
        """
        trained = first.trained_passes()
        split = [p for p in first.all("pass") if p["replicas"] == self.world_size]
        is_split = any((p["loader"], p["number"]) in trained for p in split)
        meets = not first.all("ddp") and any(c["in_own_forward"] for c in first.all("collective"))
        return not is_split and (meets or self.smaller_group(first, other) is not None)

    @property
    def are_sharded(self) -> bool:
        """Whether each rank holds another part of the model, so that weights differ rightly."""
        return any(record["is_sharded"] for rank in self for record in rank.all("optimizer"))

    @property
    def have_framework(self) -> bool:
        """Whether a framework seeds, splits and evaluates for the program."""
        return any(record["frameworks"] for rank in self for record in rank.all("optimizer"))

    @property
    def files(self) -> list[str]:
        """List the program's own files that were seen at work."""
        kinds = ("optimizer", "pass", "ddp", "step", "seed")
        places = [record["line"] for kind in kinds for record in self.first.all(kind)]
        places += [step["backward_line"] for step in self.first.all("step")]
        files = dict.fromkeys(place.rpartition(":")[0] for place in places)
        return [file for file in files if file and "-packages/" not in file]


def read_ranks(folder: Path) -> Ranks:
    """Read the records of all processes. A process that is no rank belongs to its parent's rank."""
    files = filter(None, map(read_file, sorted(folder.glob("p*.jsonl"))))
    ranks: dict[int, Rank] = {}
    by_pid: dict[int, Rank] = {}
    others = []
    for records in sorted(files, key=lambda records: float(records[0]["t"])):
        process = records[0]
        if not _is_of_rank(records):
            others.append(records)
            continue
        number = _number_of(records, taken=ranks)
        rank = ranks.setdefault(number, Rank(number, process))  # a restarted rank: one of both
        by_pid[process["pid"]] = rank
        for record in records:
            rank.add(record)
    if len({len(rank.all("optimizer")) for rank in ranks.values()}) > 1:
        _number_by_line(ranks.values())
    for records in others:
        if parent := by_pid.get(records[0]["parent"]):
            for record in (r for r in records if r["k"] == "augment"):
                parent.add(record)
    return Ranks(ranks)


def _number_by_line(ranks: Iterable[Rank]) -> None:
    """Number the optimizers by their lines, alike on all ranks.

    WHY: one rank alone may have another one, such as that of a probe which it evaluates.
    """
    numbers: dict[tuple[str, int], int] = {}
    for rank in ranks:
        counts, new = Counter[str](), dict[int, int]()
        for made in rank.all("optimizer"):
            line = made["line"]
            new[made["o"]] = numbers.setdefault((line, counts[line]), len(numbers))
            counts[line] += 1
        for record in (*rank.all("optimizer"), *rank.all("step"), *rank.all("still")):
            record["o"] = new[record["o"]]
        for clip in rank.all("clip"):
            steps = clip["next_steps"].items()
            clip["next_steps"] = {str(new.get(int(o), o)): step for o, step in steps}


def _number_of(records: list[Record], *, taken: dict[int, Rank]) -> int:
    """Give the rank of a process: by its process group, else by the launcher, else the next."""
    declared = [record["rank"] for record in records if record["k"] == "init"]
    if declared:
        return int(declared[0])
    given = records[0]["rank"]
    return int(given) if given is not None and given.isdigit() else len(taken)


def read_file(path: Path) -> list[Record]:
    """Read the complete lines of one file.

    A program that starts itself anew (exec) keeps its process id: what trained last counts.
    """
    runs: list[list[Record]] = []
    for record in parsed(path.read_bytes()):
        if record["k"] == "process":
            runs.append([])
        for run in runs[-1:]:
            run.append(record)
    return ([run for run in runs if _is_of_rank(run)] or runs or [[]])[-1]


def _is_of_rank(records: Iterable[Record]) -> bool:
    return any(record["k"] in _OF_RANKS for record in records)


def parsed(content: bytes) -> Iterator[Record]:
    """Parse complete lines."""
    for line in content.split(b"\n")[:-1]:
        with suppress(ValueError):  # cut by a full disk
            yield json.loads(line)


class Follower:
    """Reads one file as it grows: how far its process is."""

    def __init__(self, path: Path) -> None:
        self._path, self._place = path, 0
        self.num_steps = self.num_passes = 0
        self.is_rank = self.is_watched = self.has_ended = False
        self.local_world_size = 1
        """Ranks on this host, as the launcher says; those of other hosts are not seen here."""

        self.stalls: list[Record] = []
        """The last records, if they are stalls."""

        self.heard_at = 0.0

    def follow(self, now: float) -> None:
        """Read what is new. now: seconds of any clock."""
        with self._path.open("rb") as file:
            file.seek(self._place)
            new = file.read()
        self._place += new.rfind(b"\n") + 1
        for record in parsed(new):
            kind = record["k"]
            self.heard_at = now
            self.is_rank = self.is_rank or kind in _OF_RANKS
            self.is_watched = self.is_watched or kind == "init"
            if kind == "process" and str(record.get("local_world") or "").isdigit():
                self.local_world_size = int(record["local_world"])
            if kind in ("step", "by_hand"):
                self.num_steps = max(self.num_steps, record["n"])
            elif kind == "pass":
                self.num_passes = max(self.num_passes, record["number"] + 1)
            self.has_ended = kind == "exit"
            self.stalls = [*self.stalls, record] if kind == "stall" else []

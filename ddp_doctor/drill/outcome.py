"""Runs one fault, and says what it cost by comparison with the undisturbed runs.

What was not observed is None, "not measured": never held against the program, nor for it.
"""

import json
import os
import re
import stat
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ddp_doctor.drill import story
from ddp_doctor.drill.injected import CHECKPOINTS, CUT_BYTES, OF_OUTPUT, SAVE_FAULTS
from ddp_doctor.drill.runs import KILLS_ALL, OTHER_RANKS, SLOW, Case, Facts
from ddp_doctor.drill.story import Part, Samples, Uses, last_weights, parts_of

ABORT = "terminate called without an active exception"
_TORN = r"corrupt|truncat|central directory|failed (finding|reading)|\bEOF|incomplete|checksum"
FAULTS = {  # and the words by which a log would name the cause; none: nobody is left to write them
    "kill-rank": r"SIGKILL|signal 9|code *:? *-9|killed",
    "kill-all": "",
    "term": r"SIGTERM|signal 15|preempt",
    "exception": "drill: an exception",
    "oom": "OutOfMemoryError|out of memory",
    "nan": r"\bnan\b|non-?finite|\binf\b",
    "hang": r"timed? ?out|\bhang|\bhung|\bstuck|unresponsive|no progress",
    "dead-worker": "DataLoader worker",
    "full-disk": r"File too large|No space|Errno 2[78]|failed writing|unexpected pos|iostream",
    "kill-in-save": r"SIGXFSZ|signal 25|code *:? *-25",
    "cut-checkpoint": _TORN + r"|deserializing|unexpected (end|pos)|sha256",
    "fewer-ranks": "",
    "more-ranks": "",
}
NO_CULPRIT = ("term", "cut-checkpoint")
NEEDS = {"dead-worker": "no DataLoader worker was busy", "cut-checkpoint": "no checkpoint file"}
NEEDS |= dict.fromkeys(OF_OUTPUT, "no forward of DDP was seen")
NEEDS |= dict.fromkeys(SAVE_FAULTS, "no rank itself saved anything from there on")
OTHER_HEADER = (AttributeError, TypeError)  # it is JSON, and of another form
WITHIN_S, LARGER = 2.0, 1.2
"""Files of one checkpoint are written within so long; the one to cut is so much larger."""


@dataclass(kw_only=True, slots=True)
class Reference:
    """The undisturbed runs. What differs between them is None."""

    start: Facts
    lines: set[str]
    """Of its log: a banner that names every rank names no culprit."""

    total: int
    weights: Facts | None
    samples: Samples | None
    uses: Uses
    can_judge_files: bool


class Drill:
    """One fault, from the first start to what it cost."""

    def __init__(self, case: Case, reference: Reference) -> None:
        self.case, self.reference, self.is_resized = case, reference, case.fault in OTHER_RANKS
        self.lost: list[str] = []
        self.unknown: list[str] = []
        self.notes: list[str] = []
        self.facts: Facts = {"fault": case.fault, "verdict": "not applicable", "lost": self.lost}
        self.facts |= {"not_measured": self.unknown, "notes": self.notes}
        self.fault: Facts = {}

    def run(self, command: Sequence[str], again: Sequence[str]) -> Facts:
        """Start the command, and once more if it did not come to its end."""
        case, total, facts = self.case, self.reference.total, self.facts
        if not again:
            self.notes.append("the command does not name its number of ranks")
            return facts
        first = case.start(command)
        self.fault = next((r for p in case.processes() for r in p.all("fault")), {})
        if not self.fault or (case.fault == "cut-checkpoint" and not self._cut_newest()):
            self.notes.append(NEEDS.get(case.fault, "the fault did not come"))
            facts["verdict"] = "not applicable" if case.fault in NEEDS else "not measured"
            return facts
        self._judge_end(first)
        made = max((p.end for p in parts_of(case, total) if p.base is not None), default=0)
        is_again = made < total or bool(first["why"]) or has_failed(case, 0)
        if is_again and ((second := case.start(again))["why"] or has_failed(case, 1)):
            how = second["why"] or f"status {second['status']}"
            (self.unknown if how == SLOW else self.lost).append(f"the next start: {how}")
        if refused := [r["path"] for p in case.processes() for r in p.all("outside")]:
            self.lost.clear()  # WHY: that may be what was to save its work
            self.unknown.append(f"all: a write to {refused[0]} was refused (--also FOLDER)")
            facts["verdict"] = "not measured"
            return facts
        parts = parts_of(case, total)
        has_idled = is_again and (len(parts) == 1 or parts[-1].how == "no step")
        if made == total and has_idled and not self.lost:
            parts, is_again = [p for p in parts if p.how != "no step"], False  # all was done before
        went_on = bool(parts) and parts[-1].base is not None and len(parts) > is_again
        self._judge_steps(parts, went_on, is_again)
        is_whole_run = went_on and (self.is_resized or parts[-1].end == total)
        self._judge_result(parts, story.uses_of(case, parts) if is_whole_run else {})
        self._judge_log()
        self.unknown += [r["what"] for p in case.processes() for r in p.all("missed")]
        facts["verdict"] = "not measured" if self.unknown else "nothing lost"
        facts["verdict"] = "lost" if self.lost else facts["verdict"]
        return facts

    def _judge_end(self, first: Facts) -> None:
        case, facts, why, orphans = self.case, self.facts, first["why"], first["orphans"]
        facts |= {"status": first["status"], "ended": why or f"status {first['status']}"}
        is_seen = not why and case.fault not in KILLS_ALL
        facts |= {"gone_s": first["gone_s"], "orphans": len(orphans) if is_seen else None}
        self.lost += ["hung"] if why == "hung" else []
        self.unknown += ["it still made steps at the limit"] if why == SLOW else []
        if len(orphans) > len(self.reference.start["orphans"]):  # a helper may always stay
            self.lost.append(f"{len(orphans)} orphans")
            self.notes.append(f"orphans: {'; '.join(orphans)}")
        found = [(seen, seen != case.torn and is_whole(p)) for p, seen in checkpoints_of(case)]
        broken = [os.path.relpath(p, case.folders[0]) for p, whole in found if whole is False]
        can, num_whole = self.reference.can_judge_files or None, sum(w is True for _, w in found)
        facts |= {"files_whole": can and num_whole, "files_broken": can and len(broken)}
        told = "cut by the drill" if case.torn else "broken"
        self.notes += [f"{told}: {', '.join(broken)}"] if broken else []

    def _judge_steps(self, parts: Sequence[Part], went_on: bool, is_again: bool) -> None:
        later, total = parts[1:], self.reference.total
        known = [f"step {(p.base or 0) + 1}{f' ({p.how})' * (p.how != 'weights')}" for p in later]
        where = [p.how if p.base is None else text for p, text in zip(later, known, strict=True)]
        told = ("" if is_again else "launcher: ") + (", ".join(where) or "no step")
        self.facts["next_start"] = told if is_again or later else "not needed"
        num_lost = sum(a.end - (b.base or 0) for a, b in zip(parts, later, strict=False))
        self.facts["steps_lost"] = num_lost if went_on else None
        if went_on and num_lost:
            self.lost.append(f"{num_lost} steps of work")
        if went_on and parts[-1].end != total and not self.is_resized:
            more, told = parts[-1].end - total, f"ended at step {parts[-1].end} of {total}"
            self.lost.append(f"made {more} steps again" if more > 0 else told)
        if not went_on and not self.lost:
            # WHY: a batch of NaN may be left out, and then all is done with a step less
            may_be_done = self.case.fault in OF_OUTPUT and self.facts["status"] == 0
            is_idle = is_again and told.endswith("no step") and not (self.unknown or may_be_done)
            self.lost += ["the next start: no step"] if is_idle else []
            self.unknown += [] if is_idle else ["where it continued"]

    def _judge_result(self, parts: Sequence[Part], uses: Uses) -> None:
        """Compare samples and weights. uses: empty if it did not come to its end."""
        reference, facts, mine = self.reference, self.facts, story.samples_of(uses)
        is_equal = bool(uses) and last_weights(self.case) == reference.weights
        facts |= dict.fromkeys(("samples_twice", "samples_never", "weights"))
        if mine is not None and reference.samples is not None:
            twice, never = (mine - reference.samples).total(), (reference.samples - mine).total()
            # WHY: a sampler pads the last batches of an epoch for the number of its ranks
            padded = max(reference.samples.values()) * parts[-1].process.world * self.is_resized
            if not is_equal or not twice + never:  # otherwise it contradicts the weights
                facts |= {"samples_twice": twice, "samples_never": never}
                if never or twice > padded:
                    self.lost.append(f"samples: {twice} twice, {never} never")
        before = [r for p in parts[:1] for r in p.process.all("update") if r["n"] < self.fault["n"]]
        known = {n: update["w"] for (rank, n), (update, _) in reference.uses.items() if not rank}
        has_drifted = any(r["w"] != known.get(r["n"]) for r in before)
        if any(not r["finite"] for p in parts[-1:] for r in p.process.all("update")[-1:]):
            facts["weights"] = "not finite"
            self.lost.append("the weights are NaN")
        elif uses and reference.weights is not None and not has_drifted and not self.is_resized:
            facts["weights"] = "equal" if is_equal else "differ"
            if not is_equal:
                self.lost.append("the weights differ")
                self.notes.append(story.why_different(uses, reference.uses))
        self.unknown += ["samples"] if facts["samples_twice"] is None else []
        # Another number of ranks sums gradients in another order: its weights are not compared.
        self.unknown += ["weights"] if facts["weights"] is None and not self.is_resized else []

    def _judge_log(self) -> None:
        """Say whether the program's log names cause and rank, in lines that it lacks otherwise."""
        case, words, rank = self.case, FAULTS[self.case.fault], self.fault["rank"]
        if case.fault in SAVE_FAULTS and not re.search(words, case.log(0), re.I):
            sizes = [path.stat().st_size for path, _ in files_of(case)]
            if CUT_BYTES not in sizes and not self.facts["files_broken"]:
                self.unknown.append("whether a write was cut")
        if case.torn and not any(p.all("read") for p in case.processes()):
            self.unknown.append("the cut file was never read")
        lines = case.log(len(case.starts) - 1 if case.torn else 0).splitlines()
        text = "\n".join(line for line in lines if line not in self.reference.lines)
        named = rf"\b(local_)?rank[ :=]*{rank}\b|\[rank{rank}\]|\bprocess {rank}\b"
        found = ["rank"] if case.fault not in NO_CULPRIT and re.search(named, text, re.I) else []
        found += ["cause"] if words and re.search(words, text, re.I) else []
        self.facts["log_names"] = (" and ".join(found) or "nothing") if words else None

    def _cut_newest(self) -> str:
        """Cut the newest checkpoint in half, of several files the largest."""
        files = [(path.stat(), path, seen) for path, seen in checkpoints_of(self.case)]
        found = sorted((about.st_mtime, about.st_size, path, seen) for about, path, seen in files)
        if found:
            newest = found[-1]
            beside = [f for f in found if f[2].parent == newest[2].parent]
            largest = max((f for f in beside if f[0] > newest[0] - WITHIN_S), key=lambda f: f[1])
            # otherwise it may be an earlier checkpoint in the same folder
            _, size, path, self.case.torn = largest if largest[1] > LARGER * newest[1] else newest
            os.truncate(path, size // 2)
        return self.case.torn


def has_failed(case: Case, number: int) -> bool:
    """Whether a start failed; gloo's abort at the exit of a rank that has finished is none."""
    return bool(case.starts[number]["status"]) and ABORT not in case.log(number)


def files_of(case: Case) -> list[tuple[Path, str]]:
    """Find the files that the program has written: the real path, and the program's."""
    found = []
    for number, folder in enumerate(case.folders):
        for path in (upper := case.home / f"upper{number}").rglob("*"):
            about = path.lstat()
            if stat.S_ISREG(about.st_mode) and about.st_mtime > case.made_at:
                found.append((path, os.path.join(folder, path.relative_to(upper))))
    return found


def checkpoints_of(case: Case) -> list[tuple[Path, str]]:
    """Find what was saved, or is named like a checkpoint."""
    saved = {r["path"] for p in case.processes() for r in p.all("save")}
    for old, new in [(r["old"], r["new"]) for p in case.processes() for r in p.all("moved")]:
        saved |= {new + path[len(old) :] for path in saved if f"{path}/".startswith(f"{old}/")}
    return [f for f in files_of(case) if f[1] in saved or f[1].endswith(CHECKPOINTS)]


def is_whole(path: Path) -> bool | None:
    """Whether a file is undamaged by its own format; None: unknown. Nothing is unpickled."""
    with path.open("rb") as file:
        head = file.read(8)
        try:
            if head[:2] == b"PK":  # torch's format, with a checksum of each part
                file.seek(-22, os.SEEK_END)  # of several in one file, as DCP writes, the last
                return file.read(4) == b"PK\5\6" and zipfile.ZipFile(file).testzip() is None
            if path.suffix == ".safetensors":
                length, size = int.from_bytes(head, "little"), path.stat().st_size
                parts = json.loads(file.read(min(length, size)))  # a damaged length is of any size
                ends = [v["data_offsets"][1] for k, v in parts.items() if k != "__metadata__"]
                return 8 + length + max(ends, default=0) == size
        except (zipfile.BadZipFile, LookupError, ValueError, OSError, EOFError, *OTHER_HEADER):
            return False
    return None if head else False

"""What one fault is said to have cost, from the records and logs of its starts."""

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from ddp_doctor.drill.outcome import Drill, Reference
from ddp_doctor.drill.runs import Case, Facts, Plan
from ddp_doctor.drill.story import parts_of, samples_of, uses_of
from tests.doctor_drill.test_story import case_of, life, write_records

WHOLE = life("a", "b", "c", "d")
BEFORE = {"the optimizer's state": "1", "the learning rate": [0.1], "the random numbers": 1}
ENDED = {"why": "", "wall_s": 1.0, "gone_s": 0.5, "silent_s": 0.1, "orphans": []}
Start = tuple[Facts, list[dict[str, Any]] | None, str]


@dataclass
class Played(Case):
    """A case whose starts do what the test says."""

    scripts: list[Start] = field(default_factory=list)

    def start(self, command: Sequence[str]) -> Facts:
        facts, records, log = self.scripts[len(self.starts)]
        if records is not None:
            write_records(self, 0, records)
        (self.home / f"log{len(self.starts)}").write_text(log)
        self.starts.append(ENDED | facts)
        return self.starts[-1]


def finished(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def more(record: dict[str, Any]) -> dict[str, Any]:
        return {"finite": True} | record | {"before": BEFORE | record["before"]}

    return [more(record) if record["k"] == "update" else record for record in records]


def reference_of(folder: Path) -> Reference:
    case = case_of(folder / "reference", {0: finished(WHOLE)})
    uses = uses_of(case, parts_of(case, 3))
    facts = {"total": 3, "weights": {"0 0": "d"}, "samples": samples_of(uses), "uses": uses}
    lines = {"rank 1 of 2 is ready"}
    return Reference(start=ENDED, lines=lines, can_judge_files=True, **facts)


def played(folder: Path, *starts: Start, fault: str = "kill-rank") -> Played:
    """Make a case whose starts are given: what they ended with, told, and printed."""
    plan = Plan([str(folder)], folder / "work", {}, hang_after_s=1, rank=1, step=3)
    scripts = [(end, told and finished(told), log) for end, told, log in starts]
    return Played(plan, "case", fault, scripts=scripts)


def drilled(folder: Path, *starts: Start, fault: str = "kill-rank", **reference: Any) -> Facts:
    case = played(folder, *starts, fault=fault)
    return Drill(case, replace(reference_of(folder), **reference)).run(["a"], ["a"])


FIRED = {"k": "fault", "n": 3, "rank": 1}
KILLED = ({"status": 1}, [*life("a", "b", "c"), FIRED], "rank 1 of 2 is ready\n")
FROM_STEP_2 = ({"status": 0}, life("b", "c", "d", uses={1: [2], 2: [3]}), "")


def test_a_start_that_continues_one_step_too_early_loses_that_step(tmp_path: Path) -> None:
    facts = drilled(tmp_path, KILLED, FROM_STEP_2)
    assert facts["verdict"] == "lost"
    assert facts["lost"] == ["1 steps of work"]
    assert (facts["next_start"], facts["weights"]) == ("step 2", "equal")
    assert (facts["samples_twice"], facts["samples_never"]) == (0, 0)
    assert facts["log_names"] == "nothing", "that line stands in the undisturbed log too"
    told = (KILLED[0], KILLED[1], "rank: 1 exitcode: -9, received signal 9\n")
    assert drilled(tmp_path / "2", told, FROM_STEP_2)["log_names"] == "rank and cause"


@pytest.mark.parametrize("begun", [[], None])
@pytest.mark.parametrize("status", [0, -15])  # of a shell, whose torchrun went on
def test_nothing_is_lost_where_all_was_done(status: int, begun: Any, tmp_path: Path) -> None:
    starts = [({"status": status}, [*WHOLE, FIRED], ""), ({"status": 0}, begun, "")]
    facts = drilled(tmp_path, *starts[: 2 if status else 1], fault="term")
    assert (facts["verdict"], facts["next_start"]) == ("nothing lost", "not needed")
    assert facts["weights"] == "equal"
    lost = drilled(tmp_path / "2", KILLED, starts[1])
    assert lost["lost"] == ["the next start: no step"], "a shell hides that it failed"
    skips = ({"status": 0}, *KILLED[1:])  # a batch of NaN, and so it makes a step less
    assert drilled(tmp_path / "3", skips, starts[1], fault="nan")["verdict"] == "not measured"


def test_samples_used_twice_or_never_are_counted_from_the_step_that_differs(tmp_path: Path) -> None:
    other = life("c", "x", uses={1: [1]})
    other[-1]["before"] |= {"the random numbers": 2}
    facts = drilled(tmp_path, KILLED, ({"status": 0}, other, ""))
    assert (facts["samples_twice"], facts["samples_never"]) == (1, 1)
    assert facts["weights"] == "differ"
    assert "step 3 is the first that differs" in facts["notes"][0]


def test_weights_are_compared_where_two_optimizers_take_turns(tmp_path: Path) -> None:
    def turns(*steps: str) -> list[dict[str, Any]]:
        pairs = enumerate((step.split() for step in steps), start=1)
        return [
            {"k": "update", "n": n, "o": n % 2, "w": after, "before": {"the weights": before}}
            for n, (before, after) in pairs
        ]

    case = case_of(tmp_path / "2", {0: finished(turns("d0 d1", "g0 g1", "d1 d2", "g1 g2"))})
    uses, weights = uses_of(case, parts_of(case, 4)), {"0 1": "d2", "0 0": "g2"}
    starts = [({"status": 1}, [*turns("d0 d1", "g0 g1"), FIRED], "")]
    starts += [({"status": 0}, turns("d1 d2", "g1 g2"), "")]
    facts = drilled(tmp_path, *starts, total=4, uses=uses, weights=weights, samples=None)
    assert (facts["lost"], facts["next_start"]) == ([], "step 3")
    assert facts["weights"] == "equal"


def test_what_differs_undisturbed_or_contradicts_weights_is_unknown(tmp_path: Path) -> None:
    facts = drilled(tmp_path, KILLED, FROM_STEP_2, weights=None, samples=None)
    assert facts["lost"] == ["1 steps of work"], "steps are found by weights all the same"
    assert facts["not_measured"] == ["samples", "weights"]
    facts = drilled(tmp_path / "2", KILLED, FROM_STEP_2, samples=Counter([7, 8, 9]))
    assert (facts["weights"], facts["samples_twice"]) == ("equal", None)
    assert facts["not_measured"] == ["samples"]


def test_weights_that_became_nan_are_lost(tmp_path: Path) -> None:
    records = life("a", "b", "x", "y")
    records[-1]["finite"] = False
    facts = drilled(tmp_path, ({"status": 0}, [*records, FIRED], "loss: nan"), fault="nan")
    assert (facts["weights"], facts["log_names"]) == ("not finite", "cause")
    assert "the weights are NaN" in facts["lost"]


def test_a_run_that_hung_or_does_not_start_again_lost_something(tmp_path: Path) -> None:
    hung = ({"status": None, "why": "hung"}, KILLED[1], "")
    facts = drilled(tmp_path, hung, ({"status": 1}, [], "no such file"))
    assert facts["lost"] == ["hung", "the next start: status 1"]
    assert (facts["orphans"], facts["steps_lost"], facts["weights"]) == (None, None, None)


def test_a_fault_that_did_not_come_or_missed_the_output_says_nothing(tmp_path: Path) -> None:
    facts = drilled(tmp_path, ({"status": 0}, WHOLE, ""), fault="dead-worker")
    assert facts["verdict"] == "not applicable"
    facts = drilled(tmp_path / "2", ({"status": 0}, WHOLE, ""))
    assert facts["verdict"] == "not measured"
    missed = {"k": "missed", "what": "no tensor that is known"}
    facts = drilled(tmp_path / "3", ({"status": 0}, [*WHOLE, FIRED, missed], ""), fault="nan")
    assert facts["not_measured"] == ["no tensor that is known"]
    assert facts["verdict"] == "not measured"


def test_a_write_was_cut_if_the_log_has_what_torch_says_of_it(tmp_path: Path) -> None:
    starts = [({"status": 0}, [*WHOLE, FIRED], "RuntimeError: basic_ios::clear: iostream error")]
    assert drilled(tmp_path, *starts, fault="full-disk")["verdict"] == "nothing lost"
    silent = drilled(tmp_path / "2", (*starts[0][:2], ""), fault="full-disk")
    assert silent["not_measured"] == ["whether a write was cut"]


def test_a_program_that_was_refused_to_save_in_its_need_is_not_accused(tmp_path: Path) -> None:
    refused = {"k": "outside", "path": "/scratch/emergency.pt"}
    killed = (*KILLED[:1], [*KILLED[1], refused], "drill: /scratch/emergency.pt is outside")
    facts = drilled(tmp_path, killed, ({"status": 1}, [], ""), fault="term")
    assert (facts["verdict"], facts["lost"], facts.get("steps_lost")) == ("not measured", [], None)
    assert "/scratch/emergency.pt" in facts["not_measured"][0]


def test_a_start_that_finds_all_done_keeps_what_the_launcher_restarted(tmp_path: Path) -> None:
    case = played(tmp_path, ({"status": 1}, KILLED[1], ""), ({"status": 0}, [], ""))
    write_records(case, 6, finished(FROM_STEP_2[1]), at_s=0.5)
    path = case.home / "records0/p7.jsonl"
    path.write_text(path.read_text().replace('"rank": 6', '"rank": 0'))
    facts = Drill(case, reference_of(tmp_path)).run(["a"], ["a"])
    assert (facts["lost"], facts["weights"]) == (["1 steps of work"], "equal")
    assert facts["next_start"] == "launcher: step 2"


@pytest.mark.parametrize("is_read", [True, False])
def test_a_cut_checkpoint_that_nobody_read_proves_nothing(is_read: bool, tmp_path: Path) -> None:
    second = ({"status": 0}, [*[{"k": "read"}] * is_read, *WHOLE], "skipped: last.pt is truncated")
    case = played(tmp_path, ({"status": -9}, KILLED[1], ""), second, fault="cut-checkpoint")
    (case.home / "upper0/last.pt").write_bytes(b"of nobody's format" * 300)
    os.utime(case.home / "upper0/last.pt", (case.made_at + 1, case.made_at + 1))
    facts = Drill(case, reference_of(tmp_path)).run(["a"], ["a"])
    assert (case.home / "upper0/last.pt").stat().st_size < 3000
    assert (facts["files_whole"], facts["files_broken"]) == (0, 1)
    assert ("the cut file was never read" in facts["not_measured"]) is not is_read
    assert facts["log_names"] == "cause"
    assert facts["lost"] == ["2 steps of work"]

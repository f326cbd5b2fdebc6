#!/usr/bin/env python3
"""Counts what audit finds in programs of many styles: found, on its line, false words.

    python benchmarks/audit_cases/run.py                     all lots, about 10 minutes
    python benchmarks/audit_cases/run.py --lot first tutorial    cases with this word in them
    python benchmarks/audit_cases/run.py --show              what is said of each case, too

The ranks are forked from one process under the observer; programs that start their own ranks, or
hang, run under the command itself. A false word is a mistake in a healthy program, or one of
another kind than the planted one.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.audit_cases import first, second, third  # noqa: E402  # WHY: the path above
from benchmarks.audit_cases.case import Case  # noqa: E402
from benchmarks.audit_cases.styles import NEEDS  # noqa: E402
from ddp_doctor.audit.command import judge  # noqa: E402
from ddp_doctor.audit.records import read_ranks  # noqa: E402
from tests.audit.observed_server import run_observed  # noqa: E402
from tests.harness.ranks import RankFailure, another_server, held_port, start_ranks  # noqa: E402

LIMIT_S = 120
LOTS = {
    lot.__name__.rpartition(".")[2]: (*lot.HEALTHY, *lot.MISTAKES) for lot in (first, second, third)
}
Said = list[tuple[str, int, str]]


def main() -> int:
    """Run the cases; print a table in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("words", nargs="*", help="parts of a style or of a name")
    parser.add_argument("--lot", choices=(*LOTS, "all"), default="all")
    parser.add_argument("--show", action="store_true")
    parser.add_argument("--json", type=Path, help="figures of each case: go on where it was left")
    options = parser.parse_args()
    known: dict[str, list[int]] = {}
    if options.json and options.json.exists():
        known = json.loads(options.json.read_text(encoding="utf-8"))
    chosen, num_skipped, unanswered = [], 0, list[str]()
    for lot, cases in LOTS.items():
        for case in cases if options.lot in (lot, "all") else ():
            told = f"{lot}: {case.style}, {case.name}"
            if any(word in told for word in options.words or [""]):
                chosen.append((told, case))
    with (
        tempfile.TemporaryDirectory(prefix="audit-cases-") as folder,
        another_server("tests.audit.observed_server"),
    ):
        for told, case in chosen:
            if importlib.util.find_spec(NEEDS.get(case.style, "torch")) is None:
                num_skipped += 1
            elif told not in known:
                place = Path(tempfile.mkdtemp(dir=folder))
                said = ask(case, place)
                known[told] = count(case, said, show=options.show)
                unanswered += [told] if said is None else []
                if options.json:
                    kept = {name: known[name] for name in known if name not in unanswered}
                    options.json.write_text(json.dumps(kept, indent=1), encoding="utf-8")
    rows: dict[str, list[list[int]]] = defaultdict(list)
    for told, case in chosen:
        if told in known:
            rows[case.kind if case.codes else "healthy"].append(known[told])
    healthy = rows.pop("healthy", [])
    print("| mistake | programs | found | on its line | false words |")
    print("| --- | --- | --- | --- | --- |")
    whole = [figures for some in rows.values() for figures in some]
    for kind, some in (*sorted(rows.items()), ("all mistakes", whole)):
        sums = [sum(column) for column in zip(*some, strict=True)]
        print(f"| {kind} | {len(some)} | {' | '.join(map(str, sums))} |")
    print(f"| none: healthy programs | {len(healthy)} | - | - | {sum(h[2] for h in healthy)} |")
    print(f"skipped, as their package is not installed: {num_skipped}")
    return 0


def ask(case: Case, folder: Path) -> Said | None:
    """Give the mistakes that audit names in a program; None: no answer."""
    script = folder / "train.py"
    script.write_text(case.source().replace("FREE_PORT", str(held_port())))
    if not (case.real or case.style == "spawn"):
        records = folder / "records"
        records.mkdir()
        with start_ranks(run_observed, 2, script, records) as running:
            try:
                finished = running.wait(LIMIT_S)
            except RankFailure as error:
                print(f"{case.style}, {case.name}: {error}")
                return None
        if any(finished.statuses):
            print(
                f"{case.style}, {case.name}: statuses {finished.statuses}\n{finished.output[-900:]}"
            )
        ranks = read_ranks(records)
        for error in {e["what"] for rank in ranks for e in rank.all("error")}:
            print(f"{case.style}, {case.name}: the observer failed: {error}")
        if not len(ranks):
            return None
        verdicts = judge(ranks, hung=False)
        for failure in ranks.failures:
            print(f"{case.style}, {case.name}: the judging failed: {failure}")
        return [(v.code, v.line, v.sentence) for v in verdicts if v.is_mistake]
    command = [sys.executable, str(ROOT / "ddp_training.py"), "audit", "--json"]
    launch = [sys.executable]
    if case.style != "spawn":
        launch += ["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    command += ["--hang_after", "20", "--", *launch, script.name]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        print(f"{case.style}, {case.name}: no answer within {LIMIT_S} s")
        return None
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        print(f"{case.style}, {case.name}: no JSON\n{done.stderr[-900:]}")
        return None
    if "error" in report:
        print(f"{case.style}, {case.name}: {report['error']}")
    mistakes = [v for v in report["verdicts"] if v["severity"] != "advice"]
    return [(v["code"], v["line"], v["sentence"]) for v in mistakes]


def count(case: Case, said: Said | None, *, show: bool) -> list[int]:
    """Judge one program: whether it is found, whether on its line, and the false words."""
    lines = case.lines()
    right = [(code, line) for code, line, _ in said or () if code in case.codes]
    wrong = [s for s in said or () if s[0] not in case.codes]
    is_line = any(line in lines for _, line in right)
    is_well = not wrong and (is_line or not case.codes) and said is not None
    if show or not is_well:
        told = "; ".join(f"{line} {code}: {text}" for code, line, text in said or ())
        wanted = f"{'/'.join(case.codes)} at {sorted(lines)}" if case.codes else "healthy"
        word = "ok " if is_well else "BAD"
        print(f"{word} {case.style}, {case.name} ({wanted}): {told}", flush=True)
    return [bool(right), is_line, len(wrong)]


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""How often explain is right when it says certain, likely or healthy, over logs of known truth.

    python benchmarks/explain_calibration.py FOLDER ...

A folder has NAME.log and beside it NAME.json, written by a person who knows how the job ended:
{"codes": ["cuda-oom"], ...}: the causes that would be right, as `explain --json` names them, or
"healthy" or "open"; none, if no entry of the catalogue is right. What explain calls unknown claims
nothing, and is only counted. The exit status is 0 only if certain is right in 95 of 100, likely in
70 of 100, and healthy always.
"""

import argparse
import io
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ddp_doctor.explain.command import run_explain  # WHY: the path above

BARS = {"certain": 0.95, "likely": 0.70, "healthy": 1.0, "open": 0.0, "unknown": 0.0}


def main() -> int:
    """Print a row for each level, and the logs in which a claim was wrong."""
    options = _read_options()
    totals, right = Counter[str](), Counter[str]()
    wrong = []
    for log, codes in logs_of(options.folder):
        level, code = ask(log)
        totals[level] += 1
        right[level] += code in codes
        if code not in codes and BARS[level]:
            wrong.append(f"{level}: {code} for {log}")
    print("| explain says | logs | right | bar |\n| --- | --- | --- | --- |")
    for level, bar in BARS.items():
        share = f"{right[level]} ({right[level] / totals[level]:.0%})" if totals[level] else "-"
        shown = f"{bar:.0%}" if bar else "no claim"
        print(f"| {level} | {totals[level]} | {share if bar else ''} | {shown} |")
    print(*wrong, sep="\n")
    return any(right[level] < bar * totals[level] for level, bar in BARS.items())


def logs_of(folders: list[Path]) -> Iterator[tuple[Path, list[str]]]:
    """Give each log, and the codes that would be right."""
    for folder in folders:
        for truth in sorted(folder.glob("*.json")):
            yield truth.with_suffix(".log"), json.loads(truth.read_text("utf-8"))["codes"]


def ask(log: Path) -> tuple[str, str]:
    """Return how sure explain is of a log, and of what."""
    run_explain([str(log)], wants_json=True, output=(output := io.StringIO()))
    report = json.loads(output.getvalue())
    if report["cause"] is None:
        return report["verdict"], report["verdict"]
    return report["confidence"], report["cause"]["code"]


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, nargs="+", help="with NAME.log and NAME.json")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

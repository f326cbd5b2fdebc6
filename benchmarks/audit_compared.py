#!/usr/bin/env python3
"""Which planted mistakes audit finds, and which ones torch, the frameworks and linters speak of.

    python benchmarks/audit_compared.py --lint "ruff check --select ALL --output-format concise" \\
        --lint "pylint --score n" --lint torchfix           about 3 minutes

Each mistake is one of tests/audit/programs.py: a program of two ranks, of plain torch, Accelerate,
Fabric, Lightning or Trainer. It runs once under audit's observer and with
TORCH_DISTRIBUTED_DEBUG=INFO; what the run prints, and what a linter says of the file, counts as
new if the healthy program of that style does not get the same line, numbers aside. So a new line
about something else (a long line, an unused name) counts for a linter: the codes are shown, and a
reader judges.
"""

import argparse
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.audit_cases.case import Case  # noqa: E402  # WHY: the path above
from benchmarks.audit_cases.styles import NEEDS  # noqa: E402
from ddp_doctor.audit.command import judge  # noqa: E402
from ddp_doctor.audit.records import read_ranks  # noqa: E402
from tests.audit.observed_server import run_observed  # noqa: E402
from tests.audit.programs import MISTAKES  # noqa: E402
from tests.harness.ranks import another_server, start_ranks  # noqa: E402

_SPEAKS = re.compile(r"[Ww]arn|WARN|[Ee]rror|ERROR|mismatch|not in sync")
_CODE = re.compile(r"\b([A-Z]{1,4}\d{3,4})\b")
_WORST = ("error", "warning")


def main() -> int:
    """Run every mistake; print a table in Markdown and the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", help="parts of the names of some mistakes")
    parser.add_argument("--lint", action="append", default=[], help="a linter's command line")
    parser.add_argument("--debug", default="INFO", help="TORCH_DISTRIBUTED_DEBUG")
    options = parser.parse_args()
    os.environ["TORCH_DISTRIBUTED_DEBUG"] = options.debug
    linters = [shlex.split(command) for command in options.lint]
    cases = [
        case
        for case in MISTAKES
        if importlib.util.find_spec(NEEDS.get(case.style, "torch")) is not None
        and (not options.names or any(name in case.name for name in options.names))
    ]
    heads = ["mistake", "style", "audit", "torch and the framework"]
    heads += [linter[0].rpartition("/")[2] for linter in linters]
    print("| " + " | ".join(heads) + " |")
    print("| --- " * len(heads) + "|")
    found: Counter[str] = Counter()
    with (
        tempfile.TemporaryDirectory(prefix="audit-compared-") as folder,
        another_server("tests.audit.observed_server"),
    ):
        compare(cases, linters, Path(folder), found)
    print(f"\n{len(cases)} mistakes; " + ", ".join(f"{k} {n}" for k, n in found.items()))
    return int(found["audit: right code and line"] < len(cases))


def compare(
    cases: Sequence[Case],
    linters: Sequence[Sequence[str]],
    folder: Path,
    found: Counter[str],
) -> None:
    """Print a line for each case, and count."""
    base: dict[str, tuple[Counter[str], list[Counter[str]]]] = {}
    for case in cases:
        if case.style not in base:
            healthy = Case("healthy", case.style)
            _, said, linted = ask(healthy, linters, folder / case.style)
            base[case.style] = (said, linted)
        known_said, known_linted = base[case.style]
        verdict, said, linted = ask(case, linters, folder / str(len(list(folder.iterdir()))))
        new = [line for line in said if line not in known_said]
        codes = [
            sorted(set(_CODE.findall(" ".join(mine - known))))
            for mine, known in zip(linted, known_linted, strict=True)
        ]
        found["audit: right code and line"] += verdict == "code and line"
        found["torch and framework: something new"] += bool(new)
        for linter, some in zip(linters, codes, strict=True):
            found[f"{linter[0].rpartition('/')[2]}: something new"] += bool(some)
        cells = [
            case.name,
            case.style,
            verdict,
            new[0][:90].replace("|", "/") if new else "nothing",
        ]
        cells += [", ".join(some) or "nothing" for some in codes]
        print("| " + " | ".join(cells) + " |", flush=True)


def ask(
    case: Case, linters: Sequence[Sequence[str]], folder: Path
) -> tuple[str, Counter[str], list[Counter[str]]]:
    """Give what audit says of a case, the warnings that its run prints, and those of linters."""
    records = folder / "records"
    records.mkdir(parents=True)
    script = folder / "train.py"
    script.write_text(case.source())
    with start_ranks(run_observed, 2, script, records) as running:
        outputs = running.wait(60).ok().outputs
    verdicts = [v for v in judge(read_ranks(records), hung=False) if v.severity in _WORST]
    right = [v for v in verdicts if v.code in case.codes]
    is_line = any(v.line in case.lines() for v in right)
    verdict = "code and line" if is_line else "code" if right else "nothing"
    said: Counter[str] = Counter()
    for output in outputs:
        said += Counter(shape(line) for line in output.splitlines() if _SPEAKS.search(line))
    linted = []
    for linter in linters:
        done = subprocess.run(
            [*linter, str(script)], capture_output=True, text=True, check=False, timeout=120
        )
        linted.append(Counter(shape(line) for line in done.stdout.splitlines()))
    return verdict, said, linted


def shape(line: str) -> str:
    """Give a line without the numbers that differ between runs, but with its codes."""
    line = re.sub(r"\S*/train\.py", "train.py", line)
    return re.sub(r"0x[0-9a-f]+|(?<![A-Z\d])\d+(?:\.\d+)?", "#", line).strip()


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Compare ddp_training.py with a bare DDP loop and with its peers, on the same work.

    benchmarks/setup.sh                                     once: about 2 minutes, 2 GB
    python benchmarks/compare_peers.py                      everything, 5 rounds: about 50 minutes
    python benchmarks/compare_peers.py --work tiny --quick  bare and ours only, 2 rounds

Owns the rounds: contenders take turns, in an order that rotates each round; the first round is not
counted; each run waits for an idle machine and is repeated if others used it meanwhile. The exit
status is 0 if every bar is cleared, 1 if one is missed, 2 if setup.sh was not run.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import verdict
from contender_run import BASELINE, CONTENDERS, OURS, Failed, Measured, run_contender
from machine import describe, wait_until_idle
from workloads import WORKLOADS, Workload, bench_home

_NUM_TRIES = 3


def main() -> int:
    """Measure, print, and say whether the bars are cleared."""
    options = _read_options()
    python = bench_home() / "venv/bin/python"
    if not python.exists():
        print(f"{python} is not there: run benchmarks/setup.sh first", file=sys.stderr)
        return 2
    machine = describe() | _versions(python)
    print(", ".join(f"{name} {value}" for name, value in machine.items()), flush=True)
    works: dict[str, object] = {}
    report = {"machine": machine, "command": sys.argv, "works": works}
    are_met = True
    for name in options.work:
        results = measure(WORKLOADS[name], options)
        are_met &= all(check["is_met"] for check in results["checks"])
        works[name] = results
        if options.json is not None:  # WHY in each turn: an hour's work is kept if the next fails
            options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0 if are_met else 1


def measure(workload: Workload, options: argparse.Namespace) -> dict[str, list[dict[str, object]]]:
    """Run all rounds of one work, print its table and verdict, and return everything."""
    contenders: list[str] = options.contenders
    rounds: list[dict[str, Measured]] = []
    rows: list[dict[str, object]] = []
    for number in range(-options.warm_up, options.rounds):
        start = number % len(contenders)
        clean: dict[str, Measured] = {}
        for contender in contenders[start:] + contenders[:start]:
            runs = _run_until_clean(
                contender, workload, repeats=number >= 0 and not options.no_wait
            )
            rows += [{"round": number, **asdict(run)} for run in runs]
            last = runs[-1]
            if isinstance(last, Measured) and (options.no_wait or not last.is_noisy):
                clean[contender] = last
        if number >= 0:
            rounds.append(clean)
    summary = verdict.summarize(rounds, contenders)
    print(verdict.table(workload, summary))
    checks = verdict.check(workload, rounds, contenders) if OURS in contenders else []
    for check in checks:
        print(f"  {check}", flush=True)
    if options.no_wait:
        print(
            "  --no_wait: taken on a machine in use, so these are no figures to quote", flush=True
        )
    return {
        "rows": rows,
        "summary": [{"contender": name, **row} for name, row in summary.items()],
        "checks": [asdict(check) for check in checks],
    }


def _run_until_clean(
    contender: str, workload: Workload, *, repeats: bool
) -> list[Measured | Failed]:
    """Run once, and again if others disturb it or it fails; the last run is what counts."""
    runs: list[Measured | Failed] = []
    for _ in range(_NUM_TRIES if repeats else 1):
        if repeats:
            wait_until_idle()
        run = run_contender(contender, workload)
        runs.append(run)
        print(_line(run, workload), flush=True)
        # WHY failures too: gloo can hang at a process's end; each is in the rows all the same.
        if isinstance(run, Measured) and not run.is_noisy:
            break
    return runs


def _line(run: Measured | Failed, workload: Workload) -> str:
    if isinstance(run, Failed):
        return f"  {workload.name} {run.contender}: FAILED, {run.reason}"
    return (
        f"  {workload.name} {run.contender}: {run.steady_samples_per_s:,.0f} samples/s, first step "
        f"{run.first_step_s:.2f} s, {run.peak_memory_mib:,.0f} MiB, {run.wall_s:.1f} s"
        + (f", noisy: others used {run.others_share:.2f} of a core" if run.is_noisy else "")
    )


def _versions(python: Path) -> dict[str, str]:
    """Ask the benchmarks' environment what is in it."""
    names = ["torch", "accelerate", "lightning", "transformers"]
    code = f"from importlib.metadata import version as v; print(*map(v, {names!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return dict(zip(names, done.stdout.split(), strict=True))


def _read_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds (default 5)")
    parser.add_argument("--warm_up", type=int, default=1, help="rounds before them (default 1)")
    parser.add_argument(
        "--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME"
    )
    parser.add_argument("--quick", action="store_true", help="2 rounds of bare and ours only")
    parser.add_argument(
        "--no_wait",
        action="store_true",
        help="take each run as it comes, on a busy machine too: to try a contender out",
    )
    parser.add_argument("--json", type=Path, help="write every run and the verdict to this file")
    options = parser.parse_args(argv)
    if options.quick:
        options.rounds, options.contenders = min(options.rounds, 2), [BASELINE, OURS]
    return options


if __name__ == "__main__":
    sys.exit(main())

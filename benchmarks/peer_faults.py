#!/usr/bin/env python3
"""Do the same faults to ddp_training.py, to a bare DDP loop and to its peers, and see what happens.

    benchmarks/setup.sh                                    once: about 2 minutes, 2 GB
    python benchmarks/peer_faults.py                       everything: about an hour
    python benchmarks/peer_faults.py --faults kill nan --contenders bare ddp_training.py
    python benchmarks/peer_faults.py --list                what there is

Owns the order of the runs and the files that are written. Two ranks on the CPU train on the digits
(faults/task.py); in one step something goes wrong (faults/incident.py); the same command is given
once more if the first did not come to its end. Whatever hangs is killed at a limit. The exit status
is 0 if every fault came; what a contender made of it is in the table.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from faults.cases import (
    BATCH_SIZE,
    CONTENDERS,
    FAULTS,
    HANG_LIMIT_S,
    NUM_SAMPLES,
    SAVE_EVERY,
    TOTAL_STEPS,
)
from faults.running import observe
from faults.table import Row, figures_of, markdown
from machine import ROOT, describe
from workloads import bench_home

_PACKAGES = ["torch", "torchdata", "accelerate", "lightning", "transformers"]


def main() -> int:
    """Run what is asked for, print it, and write the files."""
    options = _read_options()
    if options.list:
        print(_list())
        return 0
    home = bench_home()
    if not (home / "venv/bin/python").exists():
        print(f"{home}/venv is not there: run benchmarks/setup.sh first", file=sys.stderr)
        return 2
    facts = describe() | _versions(home / "venv/bin/python")
    print(", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)
    work = Path(tempfile.mkdtemp(prefix="faults-", dir=home))
    rows = _read_rows(options.json) if options.go_on else []
    done = {(row["fault"], row["contender"]) for row in rows}
    try:
        _lay_out_digits(work / "digits.npz")
        for name in options.faults:
            for contender in options.contenders:
                if FAULTS[name].concerns(contender) and (name, contender) not in done:
                    folder = work / f"{name}-{CONTENDERS.index(contender)}"
                    seen = observe(contender, FAULTS[name], home=home, folder=folder)
                    rows.append(figures_of(seen))
                    print(f"{name}, {contender}: {rows[-1]['happened']}", flush=True)
                    if options.json is not None:  # WHY in each turn: the next may fail
                        report = {"machine": facts, "command": sys.argv, "rows": rows}
                        options.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    finally:
        if options.keep:
            print(f"logs and outputs: {work}")
        else:
            shutil.rmtree(work, ignore_errors=True)
    names, order = list(FAULTS), list(CONTENDERS)
    rows.sort(key=lambda row: (names.index(row["fault"]), order.index(row["contender"])))
    table = markdown(rows, FAULTS)
    print(table)
    if options.markdown is not None:
        options.markdown.write_text(table, encoding="utf-8")
    return int(any(str(row["happened"]).startswith("no fault came") for row in rows))


def _list() -> str:
    lines = [f"{name:<18} {fault.title}" for name, fault in FAULTS.items()]
    work = f"{TOTAL_STEPS} steps, batch {BATCH_SIZE} per rank, a checkpoint every {SAVE_EVERY}"
    ends = f"contenders: {', '.join(CONTENDERS)}\nwork: {work}; limit {HANG_LIMIT_S:g} s"
    return "\n".join([*lines, ends])


def _lay_out_digits(path: Path) -> None:
    """Write the digits where every contender finds them; scikit-learn is not in their venv."""
    sys.path.append(str(ROOT))
    import numpy as np

    from hardened_ddp.data.sources.built_in import open_digits

    digits = open_digits(train=True)
    chosen = [digits[index] for index in range(NUM_SAMPLES)]
    np.savez(
        path,
        images=np.stack([image.numpy() for image, _ in chosen]),
        labels=np.array([int(label) for _, label in chosen]),
    )


def _read_rows(path: Path | None) -> list[Row]:
    """Give the rows that an earlier run wrote; none if there was none."""
    if path is None or not path.exists():
        return []
    rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))["rows"]
    return rows


def _versions(python: Path) -> dict[str, str]:
    code = f"from importlib.metadata import version as v; print(*map(v, {_PACKAGES!r}))"
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    return dict(zip(_PACKAGES, done.stdout.split(), strict=True))


def _read_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="name faults and contenders")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), metavar="NAME")
    parser.add_argument(
        "--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), metavar="NAME"
    )
    parser.add_argument("--json", type=Path, help="write every measurement to this file")
    parser.add_argument("--go_on", action="store_true", help="run only what --json has not yet")
    parser.add_argument("--markdown", type=Path, help="write the table to this file")
    parser.add_argument("--keep", action="store_true", help="keep logs and outputs")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())

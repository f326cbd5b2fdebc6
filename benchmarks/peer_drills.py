#!/usr/bin/env python3
"""Drill ddp_training.py and programs of others with `drill -- COMMAND`; print one table.

    benchmarks/setup.sh                             once: about 2 minutes, 2 GB
    python benchmarks/peer_drills.py --json FOLDER  two hours; goes on where it was left

The programs are those of faults/, without the faults that peer_faults.py puts into them: each as
the documents of its framework show it. A drill that ends without a report leaves no result.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from faults.cases import BATCH_SIZE, OURS, SAVE_EVERY
from machine import ROOT, describe
from peer_faults import _lay_out_digits, _versions
from workloads import bench_home

NUM_EPOCHS = 2
WORKERS = {"dead-worker": 2}
"""Of the DataLoader; none under the other faults."""

FAULTS = ("kill-rank", "kill-all", "term", "exception", "oom", "nan", "hang", "full-disk")
FAULTS += ("kill-in-save", "cut-checkpoint", "fewer-ranks", "dead-worker")
TORCHRUN = ("torchrun", "--standalone", "--nproc_per_node=2")
# WHY --multi_gpu: only so it starts several processes; that they train on the CPU, the program says
ACCELERATE = ("accelerate", "launch", "--multi_gpu", "--num_processes=2", "--num_machines=1")
ACCELERATE += ("--mixed_precision=no", "--dynamo_backend=no", "--main_process_port=0")
OWN = ("--dataset", "benchmarks.faults.task:dataset", "--model", "benchmarks.faults.task:model")
OWN += ("--batch_size", str(BATCH_SIZE), "--checkpoint_every_steps", str(SAVE_EVERY))
OWN += ("--run_name", "fault", "--eval_every", "0", "--lr_schedule", "constant")
# WHY: by default no forward of DDP runs, and a fault would come in the optimizer's step instead
OWN += ("--no_shared_memory",)
PROGRAMS = {
    "torch's tutorial": (*TORCHRUN, "--module", "benchmarks.faults.bare"),
    "IterableDataset": (*TORCHRUN, "--module", "benchmarks.faults.bare", "--iterable"),
    "torchdata": (*TORCHRUN, "--module", "benchmarks.faults.bare", "--stateful"),
    "Accelerate": (*TORCHRUN, "--module", "benchmarks.faults.with_accelerate"),
    "accelerate launch": (*ACCELERATE, "--module", "benchmarks.faults.with_accelerate"),
    "Fabric": (*TORCHRUN, "--module", "benchmarks.faults.with_fabric"),
    "Lightning": (*TORCHRUN, "--module", "benchmarks.faults.with_lightning"),
    "HF Trainer": (*TORCHRUN, "--module", "benchmarks.faults.with_trainer"),
    OURS: (*TORCHRUN, "ddp_training.py", *OWN),
}


def cell(row: dict[str, Any]) -> str:
    """Say in a few words what a fault cost."""
    if "status" not in row:
        return "-"
    told = "hangs; " if row["ended"] == "hung" else ""
    if row["weights"] == "not finite":
        return told + "weights become NaN"
    if any(lost.startswith("the next start") for lost in row["lost"]):
        return told + "no start succeeds"
    if row["next_start"] == "not needed" and not row["steps_lost"]:
        return "continues, nothing lost" + "; other weights" * (row["weights"] == "differ")
    if row["steps_lost"] is None:
        return told + "not measured"
    told += f"{row['steps_lost']} steps" if row["steps_lost"] else "nothing"
    twice, never = row["samples_twice"] or 0, row["samples_never"] or 0
    told += f"; {twice} twice, {never} never" * bool(twice + never)
    return told + "; other weights" * (row["weights"] == "differ")


def table(rows: dict[tuple[str, str], dict[str, Any]]) -> str:
    """Lay out a row for each fault."""
    lines = [f"| fault | {' | '.join(PROGRAMS)} |", "| --- " * (len(PROGRAMS) + 1) + "|"]
    for fault in FAULTS:
        cells = [cell(rows.get((who, fault), {})) for who in PROGRAMS]
        lines.append(f"| `{fault}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def drill(who: str, faults: Sequence[str], env: dict[str, str]) -> list[dict[str, Any]]:
    """Drill one program; give a row for each fault, none if there was no report."""
    words = [sys.executable, "ddp_training.py", "drill", "--json", "--faults", ",".join(faults)]
    words += ["--", *PROGRAMS[who], "--epochs", str(NUM_EPOCHS), "--output_dir", "out"]
    words += ["--num_workers", str(WORKERS.get(faults[0], 0))]
    with subprocess.Popen(words, cwd=ROOT, env=env, stdout=subprocess.PIPE) as process:
        try:
            told = process.communicate()[0]
        except BaseException:  # WHY: killed, the drill would leave its ranks behind
            process.terminate()
            raise
    try:
        report: dict[str, Any] = json.loads(told)
    except ValueError:
        report = {"error": f"no report, status {process.returncode}"}
    if "error" in report:
        print(f"{who}, {', '.join(faults)}: {report['error']}", flush=True)
    return list(report.get("faults", ()))


def main() -> int:
    """Run what is not in the folder of results yet; print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="folder of the results")
    parser.add_argument("--programs", nargs="*", choices=PROGRAMS, default=list(PROGRAMS))
    parser.add_argument("--faults", nargs="*", choices=FAULTS, default=list(FAULTS))
    options = parser.parse_args()
    options.json.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the folder below is removed
    home = bench_home()
    print(describe() | _versions(home / "venv/bin/python"), flush=True)
    with tempfile.TemporaryDirectory(prefix="drills-", dir=ROOT) as folder:
        _lay_out_digits(Path(folder) / "digits.npz")
        env = os.environ | {"PATH": f"{home / 'venv/bin'}:{os.environ['PATH']}"}
        env |= {"FAULT_FOLDER": folder, "FAULT_DATA": f"{folder}/digits.npz", "FAULT_KIND": ""}
        env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "1"}
        env |= {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
        for who in options.programs:
            todo = [f for f in options.faults if not (options.json / f"{who}, {f}.json").exists()]
            for group in ([f for f in todo if f not in WORKERS], [f for f in todo if f in WORKERS]):
                for row in drill(who, group, env) if group else ():
                    path = options.json / f"{who}, {row['fault']}.json"
                    path.write_text(json.dumps(row, indent=1), encoding="utf-8")
    rows, missing = {}, 0
    for who in PROGRAMS:
        for fault in FAULTS:
            path = options.json / f"{who}, {fault}.json"
            missing += not path.exists()
            if path.exists():
                rows[who, fault] = json.loads(path.read_text(encoding="utf-8"))
    print(table(rows))
    return int(missing > 0)


if __name__ == "__main__":
    sys.exit(main())

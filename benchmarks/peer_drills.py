#!/usr/bin/env python3
"""Drill ddp_training.py, a bare DDP loop and its peers with `drill -- COMMAND`; print one table.

    benchmarks/setup.sh                             once: about 2 minutes, 2 GB
    python benchmarks/peer_drills.py --json FOLDER  about an hour; goes on where it was left

The programs are those of faults/, without the faults that peer_faults.py puts into them.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from faults.cases import BATCH_SIZE, OURS, PEERS, SAVE_EVERY
from machine import ROOT, describe
from peer_faults import _lay_out_digits, _versions
from workloads import bench_home

NUM_EPOCHS = 2
WORKERS = {"dead-worker": 2}
"""Of the DataLoader; none under the other faults."""

FAULTS = ("kill-rank", "kill-all", "term", "exception", "oom", "nan", "hang", "full-disk")
FAULTS += ("kill-in-save", "cut-checkpoint", "fewer-ranks", "dead-worker")
CONTENDERS = {**PEERS, OURS: ""}


def command(contender: str, fault: str) -> list[str]:
    """Give the command of a contender; its outputs are in a folder of the repository's copy."""
    common = ["--epochs", str(NUM_EPOCHS), "--num_workers", str(WORKERS.get(fault, 0))]
    common += ["--output_dir", "out"]
    launcher = ["torchrun", "--standalone", "--nproc_per_node=2"]
    if contender in PEERS:
        return [*launcher, "--module", f"benchmarks.faults.{PEERS[contender]}", *common]
    own = ["--dataset", "benchmarks.faults.task:dataset", "--model", "benchmarks.faults.task:model"]
    own += ["--batch_size", str(BATCH_SIZE), "--checkpoint_every_steps", str(SAVE_EVERY)]
    own += ["--run_name", "fault", "--eval_every", "0", "--lr_schedule", "constant"]
    return [*launcher, "ddp_training.py", *own, *common]


def cell(row: dict[str, Any]) -> str:
    """Say in a few words what a fault cost."""
    if "status" not in row:
        return "-"
    told = "hangs; " if row["ended"] == "hung" else ""
    if row["weights"] == "not finite":
        return told + "weights become NaN"
    if any(lost.startswith("the next start") for lost in row["lost"]):
        return told + "no start succeeds"
    if row["next_start"] == "not needed" and not row["lost"]:
        return "continues, nothing lost"
    told += f"{row['steps_lost']} steps" if row["steps_lost"] else "nothing"
    twice, never = row["samples_twice"] or 0, row["samples_never"] or 0
    told += f"; {twice} twice, {never} never" * bool(twice + never)
    return told + "; other weights" * (row["weights"] == "differ")


def table(rows: dict[tuple[str, str], dict[str, Any]]) -> str:
    """Lay out a row for each fault."""
    lines = [f"| fault | {' | '.join(CONTENDERS)} |", "| --- " * (len(CONTENDERS) + 1) + "|"]
    for fault in FAULTS:
        cells = [cell(rows.get((who, fault), {})) for who in CONTENDERS]
        lines.append(f"| `{fault}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> int:
    """Run what is not in the folder of results yet; print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", type=Path, required=True, help="folder of the results")
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    options = parser.parse_args()
    options.json.mkdir(parents=True, exist_ok=True)
    home = bench_home()
    print(describe() | _versions(home / "venv/bin/python"), flush=True)
    with tempfile.TemporaryDirectory(prefix="drills-", dir=ROOT) as folder:
        _lay_out_digits(Path(folder) / "digits.npz")
        env = os.environ | {"PATH": f"{home / 'venv/bin'}:{os.environ['PATH']}"}
        env |= {"FAULT_FOLDER": folder, "FAULT_DATA": f"{folder}/digits.npz", "FAULT_KIND": ""}
        env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "1"}
        env |= {"HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
        for who in options.contenders:
            for group in ([f for f in FAULTS if f not in WORKERS], list(WORKERS)):
                result = options.json / f"{who}-{group[0]}.json"
                if not result.exists():
                    drill = [sys.executable, "ddp_training.py", "drill", "--json", "--faults"]
                    words = [*drill, ",".join(group), "--", *command(who, group[0])]
                    done = subprocess.run(words, cwd=ROOT, env=env, stdout=subprocess.PIPE)
                    result.write_bytes(done.stdout)
    rows = {}
    for who in CONTENDERS:
        for path in options.json.glob(f"{who}-*.json"):
            for row in json.loads(path.read_text(encoding="utf-8")).get("faults", ()):
                rows[who, row["fault"]] = row
    print(table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""How long a checkpoint of 1.2 GB holds up training: ours, torch.save and DCP.

    python benchmarks/checkpoint_stall.py --json stall.json     about 15 minutes, 8 GiB of memory

A model of 100 million parameters with AdamW trains under DDP, saves, and trains on. Methods take
turns over the rounds, each time in fresh processes. Run it with the project's Python; --folder must
lie on the disk that is asked about. With as many ranks as cores a background write has no core of
its own: --ranks 1 shows the other case.
Does not own: the steps and the arithmetic (stall_rank.py), the methods (checkpoint_methods.py).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import ROOT, CpuClock, describe, wait_until_idle

OURS = "ours"
METHODS = ("torch.save", "dcp.save", "dcp.async_save", OURS)
_TIMEOUT_S = 600.0
_COLUMNS = ("stall_s", "call_s", "done_s", "worst_step_ms", "quiet_step_ms")

Figures = dict[str, float]


def main() -> int:
    """Measure all rounds and print the table."""
    options = _read_options()
    machine = describe()
    print(", ".join(f"{name} {value}" for name, value in machine.items()), flush=True)
    rounds: list[dict[str, Figures]] = []
    rows: list[dict[str, Any]] = []
    for number in range(options.rounds):
        start = number % len(options.methods)
        figures: dict[str, Figures] = {}
        for method in options.methods[start:] + options.methods[:start]:
            if not options.no_wait:
                wait_until_idle()
            before = CpuClock.read()
            found = run_method(method, options)
            others = CpuClock.read().share_since(before)
            rows.append({"round": number, "method": method, "others_share": others, **found})
            figures[method] = {
                name: statistics.median(stall[name] for stall in found["later"])
                for name in _COLUMNS
            }
            cells = ", ".join(f"{name} {value:.3f}" for name, value in figures[method].items())
            print(f"  {method}: {cells}; others used {others:.2f} of a core", flush=True)
        rounds.append(figures)
    print(table(rounds, options))
    if options.json is not None:
        report = {"machine": machine, "command": sys.argv, "rows": rows}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def run_method(method: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train and save with one method in processes of its own; give what rank 0 measured."""
    with tempfile.TemporaryDirectory(prefix="checkpoint-stall-", dir=options.folder) as folder:
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *(f"--nproc_per_node={options.ranks}", "--module", "benchmarks.stall_rank"),
            *("--method", method, "--folder", folder),
            *("--checkpoints", str(options.checkpoints), "--layers", str(options.layers)),
        ]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            output, _ = process.communicate(timeout=_TIMEOUT_S)
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun passes it on to its ranks
                process.wait(60)
        if process.returncode != 0:
            raise SystemExit(f"{method} failed:\n{output[-3000:]}")
        found: dict[str, Any] = json.loads((Path(folder) / "stalls.json").read_text())
        return found


def table(rounds: list[dict[str, Figures]], options: argparse.Namespace) -> str:
    """Write the medians over rounds, and how much longer than ours each method stalls."""
    size_gb = 12 * options.layers * 3162 * 3163 / 1e9
    lines = [
        f"{size_gb:.1f} GB of state, {options.ranks} ranks; median over {len(rounds)} rounds of "
        f"{options.checkpoints} checkpoints; x = median of the rounds' ratios to ours",
        f"  {'':16}{'stall s':>18}{'save() s':>10}{'written s':>11}{'worst step ms':>15}"
        f"{'undisturbed ms':>16}",
    ]
    for method in options.methods:
        values = {
            name: statistics.median(figures[method][name] for figures in rounds)
            for name in _COLUMNS
        }
        ratio = _ratio_to_ours(rounds, method)
        lines.append(
            f"  {method:16}{values['stall_s']:>9.3f} {ratio:8}{values['call_s']:>10.3f}"
            f"{values['done_s']:>11.2f}{values['worst_step_ms']:>15.0f}"
            f"{values['quiet_step_ms']:>16.0f}"
        )
    return "\n".join(lines)


def _ratio_to_ours(rounds: list[dict[str, Figures]], method: str) -> str:
    if OURS not in rounds[0]:
        return ""
    # WHY a floor: a stall that is wholly hidden is noise around 0, and so would the ratio be.
    ratios = (
        figures[method]["stall_s"] / max(0.01, figures[OURS]["stall_s"]) for figures in rounds
    )
    return f"x{statistics.median(ratios):7.2f}"


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--checkpoints", type=int, default=3, help="measured ones in each process")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=10, help="of 10 million parameters each")
    parser.add_argument(
        "--folder", type=Path, help="where to write (default: the temporary folder)"
    )
    parser.add_argument("--no_wait", action="store_true", help="do not wait for an idle machine")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""What a step costs the host beside the bare DDP loop: CPU time of the main thread, as a ratio.

    python benchmarks/host_time.py                      about three minutes
    python benchmarks/host_time.py --work norms --rounds 3

On a GPU that is faster than the host, a step takes as long as the host needs to queue it. Here the
tensors are so small that the host is all there is: forward and backward cost their calls. One rank
reads its flag one step late, as on a GPU, but for the flag's copy to pinned memory; fp32, fused
AdamW, no loader workers. The bare loop is DDP's tutorial with the same model, samples and
optimizer. Each contender is a process that notes the CPU time of its main thread behind each
optimizer step; the middle one of the steps counts, so steps with a report do not. Contenders take
turns; ratios are taken within a round.

- norms: 160 parameters and 159 buffers that move, as a ResNet-50 has
- gpt: 12 layers

The exit status is 0 only if no ratio is above the bar.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORKS = ("norms", "gpt")
BAR = 1.10
WARM_UP, STEPS, BATCH_SIZE = 20, 200, 4
BARE, OURS = "bare", "ours"
_LIMIT_S = 300


def main() -> int:
    """Measure each work, and print its ratio beside the bar."""
    options = _read_options()
    if options.bare:
        from benchmarks.host_models import bare_loop

        bare_loop(options.bare)
        return 0
    is_missed = []
    for work in options.work:
        ratios, middles = measure(work, options.rounds)
        is_missed.append(statistics.median(ratios) > BAR)
        print(
            f"{work:6} {statistics.median(ratios):.3f} x ({min(ratios):.3f} to {max(ratios):.3f}; "
            f"{middles[OURS]:.2f}, bare {middles[BARE]:.2f} ms)   (bar {BAR:.2f})  "
            f"{'MISS' if is_missed[-1] else 'PASS'}",
            flush=True,
        )
    return 1 if any(is_missed) else 0


def measure(work: str, rounds: int) -> tuple[list[float], dict[str, float]]:
    """Return the ratio of each round, and the middle time of each contender in ms."""
    found: dict[str, list[float]] = {BARE: [], OURS: []}
    for index in range(rounds):
        for contender in (BARE, OURS) if index % 2 == 0 else (OURS, BARE):
            found[contender].append(1000 * run(contender, work))
    ratios = [ours / bare for ours, bare in zip(found[OURS], found[BARE], strict=True)]
    return ratios, {name: statistics.median(times) for name, times in found.items()}


def run(contender: str, work: str) -> float:
    """Run one contender once; return its CPU time per step in seconds."""
    with tempfile.TemporaryDirectory(prefix="host-time-") as folder:
        file = Path(folder) / "seconds.json"
        command: list[str] = [sys.executable]
        if contender == BARE:
            command += [str(Path(__file__).resolve()), "--bare", work]
        else:
            command += [str(ROOT / "ddp_training.py"), *flags_of(work), "--output_dir", folder]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "HOST_TIME": str(file)}
        done = subprocess.run(
            command,
            env=os.environ | env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
        if done.returncode or not file.exists():
            raise SystemExit(f"host_time.py: {contender}, {work} failed:\n{done.stdout}")
        return float(json.loads(file.read_text(encoding="utf-8")))


def flags_of(work: str) -> list[str]:
    """Return the arguments of ddp_training.py for one model."""
    of_work = f"{{work: {work}}}"
    flags = ["--no_config", "--cpu_only", "--num_workers", "0", "--no_progress", "--amp", "off"]
    flags += ["--model", "benchmarks.host_models:build", "--model_args", of_work]
    flags += ["--dataset", "benchmarks.host_models:Samples", "--dataset_args", of_work]
    flags += ["--task", "tokens"] if work == "gpt" else []
    flags += ["--batch_size", str(BATCH_SIZE), "--epochs", "1", "--eval_every", "0"]
    return [*flags, "--checkpoint_every_epochs", "0"]


class Clock:
    """Notes the CPU time of the thread that trains behind each optimizer step."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._times: list[float] = []

    def after_step(self, *_: Any) -> None:  # Any: of torch's hook
        """Take one step; after the last one, write down the middle time."""
        self._times.append(time.thread_time())
        if len(self._times) == WARM_UP + STEPS:
            times = self._times[WARM_UP:]
            steps = [after - before for before, after in pairwise(times)]
            Path(self._file).write_text(json.dumps(statistics.median(steps)), encoding="utf-8")


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", nargs="+", choices=WORKS, default=WORKS, help="default: all")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--bare", choices=WORKS, help="run the bare loop alone, in this process")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

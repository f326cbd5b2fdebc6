#!/usr/bin/env python3
"""From kill -9 of a rank to training again, against the time of a fresh start to its first step.

    python benchmarks/restart_time.py --rounds 5      under 3 minutes

Both are measured in one run of torchrun --max_restarts=1, from outside: a step is done when its
line stands in metrics.jsonl. The killed rank changes from round to round: 0, 1, 0, ...
Does not own: what is saved meanwhile; tests/training/test_survivor_save.py proves that no step is
lost.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import ROOT, describe, wait_until_idle

POLL_S = 0.005
LIMIT_S = 120.0
STEPS_BEFORE_KILL = 40
_COMMAND = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max_restarts=1"]
_COMMAND += ["ddp_training.py", "--cpu_only", "--model", "mlp", "--batch_size", "16"]
_COMMAND += ["--epochs", "1000", "--eval_every", "0", "--log_interval", "1", "--run_name", "run"]


def main() -> int:
    """Measure all rounds and print the ratios."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no_wait", action="store_true", help="do not wait for an idle machine")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    options = parser.parse_args()
    machine = describe()
    print(", ".join(f"{name} {value}" for name, value in machine.items()), flush=True)
    rounds: list[dict[str, Any]] = []
    for index in range(options.rounds):
        if not options.no_wait:
            wait_until_idle()
        fresh_s, again_s = _measure(victim=index % 2)
        ratio = again_s / fresh_s
        rounds.append({"victim": index % 2, "fresh_s": fresh_s, "again_s": again_s})
        print(
            f"rank {index % 2} killed: fresh start {fresh_s:.2f} s, training again after "
            f"{again_s:.2f} s, x {ratio:.2f}",
            flush=True,
        )
    ratios = [found["again_s"] / found["fresh_s"] for found in rounds]
    print(f"median x {statistics.median(ratios):.2f}, worst x {max(ratios):.2f}")
    if options.json is not None:
        report = {"machine": machine, "command": sys.argv, "rounds": rounds}
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def _measure(*, victim: int) -> tuple[float, float]:
    """Give the seconds to the first step, and from a kill to the next step after it."""
    with tempfile.TemporaryDirectory(prefix="restart-time-") as folder:
        metrics = Path(folder) / "run" / "metrics.jsonl"
        started_at = time.monotonic()
        with subprocess.Popen(
            [sys.executable, *_COMMAND, "--output_dir", folder],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as agent:
            try:
                fresh_s = _wait_for_lines(metrics, 1) - started_at
                _wait_for_lines(metrics, STEPS_BEFORE_KILL)
                os.kill(_pid_of_rank(agent.pid, victim), signal.SIGKILL)
                killed_at = time.monotonic()
                # WHY: the last lines of the dead attempt may still be on their way.
                _wait_until(lambda: _num_starts(Path(folder) / "run") == 2)
                again_s = _wait_for_lines(metrics, _num_lines(metrics) + 1) - killed_at
            finally:
                agent.terminate()
                agent.wait(LIMIT_S)
    return fresh_s, again_s


def _wait_for_lines(path: Path, count: int) -> float:
    _wait_until(lambda: _num_lines(path) >= count)
    return time.monotonic()


def _wait_until(condition: Any) -> None:  # Any: a function without arguments
    end = time.monotonic() + LIMIT_S
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"restart_time.py: nothing happened for {LIMIT_S:g} s")
        time.sleep(POLL_S)


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _num_starts(run: Path) -> int:
    """Count the starts of the run, by what rank 0 says in its log when it reads a checkpoint."""
    log = run / "logs" / "rank-0.log"
    return 1 + (log.read_text(encoding="utf-8").count("resuming") if log.exists() else 0)


def _pid_of_rank(agent: int, rank: int) -> int:
    """Find the child of agent that has this rank in its environment."""
    for children in Path(f"/proc/{agent}/task").glob("*/children"):
        for pid in children.read_text(encoding="ascii").split():
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            if f"RANK={rank}".encode() in variables:
                return int(pid)
    raise SystemExit(f"restart_time.py: torchrun has no rank {rank}")


if __name__ == "__main__":
    sys.exit(main())

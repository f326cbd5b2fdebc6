#!/usr/bin/env python3
"""What a step costs the host beside the bare DDP loop: CPU time of the main thread, as a ratio.

    python benchmarks/host_time.py                      about five minutes
    python benchmarks/host_time.py --work norms --ranks 1 --rounds 3

On a GPU that is faster than the host, a step takes as long as the host needs to queue it. Here the
tensors are so small that the host is all there is: forward and backward cost their calls. The ranks
read their flag one step late, as on a GPU, but for the flag's copy to pinned memory; fp32, fused
AdamW, no loader workers. The bare loop is DDP's tutorial with the same model, samples and
optimizer. Two ranks send their gradients by DDP's hooks, over gloo, whose own threads do what NCCL
leaves to the GPU. Each contender notes the CPU time of rank 0's main thread behind each optimizer
step. They take turns of 5 steps on one core, since the speed of a core may change by the second.
The middle step of a turn counts, so steps with a report do not; a round's ratio is the middle one
of its pairs of turns.

- norms: 160 parameters and 159 buffers that move, as a ResNet-50 has
- gpt: 12 layers

The exit status is 0 only if no ratio is above the bar.
"""

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORKS = ("norms", "gpt")
BAR = 1.10
WARM_UP, STEPS, TURN, BATCH_SIZE = 20, 200, 5, 4
CLOCK = "HOST_TIME"
"""The variable with what a contender's clock needs: its name, and the folder of its files."""

BARE, OURS = "bare", "ours"
_LIMIT_S, _END_LIMIT_S = 300, 40  # torchrun waits 30 s for its ranks


def main() -> int:
    """Measure each work, and print its ratio beside the bar."""
    options = _read_options()
    if options.bare:
        from benchmarks.host_models import bare_loop

        bare_loop(options.bare)
        return 0
    is_missed = []
    for work, ranks in itertools.product(options.work, options.ranks):
        ratios, middles = measure(work, ranks, options.rounds)
        is_missed.append(statistics.median(ratios) > BAR)
        print(
            f"{work:6}{ranks} ranks  {statistics.median(ratios):.3f} x ({min(ratios):.3f} to "
            f"{max(ratios):.3f}; {middles[OURS]:.2f}, bare {middles[BARE]:.2f} ms)   "
            f"(bar {BAR:.2f})  {'MISS' if is_missed[-1] else 'PASS'}",
            flush=True,
        )
    return 1 if any(is_missed) else 0


def measure(work: str, ranks: int, rounds: int) -> tuple[list[float], dict[str, float]]:
    """Return the ratio of each round, and the middle time of each contender in ms."""
    ratios: list[float] = []
    times: dict[str, list[float]] = {BARE: [], OURS: []}
    for _ in range(rounds):
        turns = run_both(work, ranks)
        pairs = zip(turns[OURS], turns[BARE], strict=True)
        ratios.append(statistics.median(ours / bare for ours, bare in pairs))
        for name, seconds in turns.items():
            times[name] += [1000 * each for each in seconds]
    return ratios, {name: statistics.median(each) for name, each in times.items()}


def run_both(work: str, ranks: int) -> dict[str, list[float]]:
    """Run both contenders once; return their CPU time per step in each turn, in seconds."""
    with tempfile.TemporaryDirectory(prefix="host-time-") as folder:
        commands = {
            BARE: [str(Path(__file__).resolve()), "--bare", work],
            OURS: [str(ROOT / "ddp_training.py"), *flags_of(work), "--output_dir", folder],
        }
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        launcher = launcher if ranks > 1 else []
        commands[OURS] += ["--no_shared_memory"] if ranks > 1 else []
        for name in commands:
            os.mkfifo(f"{folder}/turn-{name}")
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        running = {}
        for name, command in commands.items():
            clock = json.dumps([name, folder])
            env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, CLOCK: clock}
            with Path(folder, f"{name}.log").open("w", encoding="utf-8") as output:
                running[name] = subprocess.Popen(
                    [sys.executable, *launcher, *command],
                    env=os.environ | env,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
        turns = {}
        try:
            _await(running, work, Path(folder))
            for name in running:
                turns[name] = json.loads(Path(folder, f"{name}.json").read_text(encoding="utf-8"))
        finally:
            for process in running.values():
                process.terminate()  # WHY first: torchrun ends its ranks, which have sessions
            for process in running.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_END_LIMIT_S)
                process.kill()
        return turns


def _await(running: Mapping[str, subprocess.Popen[bytes]], work: str, folder: Path) -> None:
    """Wait until all have ended; raise SystemExit if one fails, for which the other would wait."""
    ends_at, failed = time.monotonic() + _LIMIT_S, list[str]()
    while not failed and any(process.poll() is None for process in running.values()):
        failed = [name for name, process in running.items() if process.poll()]
        if time.monotonic() > ends_at:
            failed = [name for name, process in running.items() if process.poll() is None]
        time.sleep(0.05)
    for name in running:
        if name in failed or not (failed or (folder / f"{name}.json").exists()):
            text = (folder / f"{name}.log").read_text(encoding="utf-8")
            raise SystemExit(f"host_time.py: {name}, {work} failed:\n{text}")


def flags_of(work: str) -> list[str]:
    """Return the arguments of ddp_training.py for one model."""
    of_work = f"{{work: {work}}}"
    flags = ["--no_config", "--cpu_only", "--num_workers", "0", "--amp", "off"]
    flags += ["--model", "benchmarks.host_models:build", "--model_args", of_work]
    flags += ["--dataset", "benchmarks.host_models:Samples", "--dataset_args", of_work]
    flags += ["--task", "tokens"] if work == "gpt" else []
    flags += ["--batch_size", str(BATCH_SIZE), "--epochs", "1", "--eval_every", "0"]
    return [*flags, "--checkpoint_every_epochs", "0"]


class Clock:
    """Notes the CPU time of the thread that trains behind each optimizer step, and passes turns."""

    def __init__(self) -> None:
        self._name, folder = json.loads(os.environ[CLOCK])
        self._file = Path(folder, f"{self._name}.json")
        self._is_off = os.environ.get("RANK", "0") != "0"
        other = BARE if self._name == OURS else OURS
        # WHY for both: to open a pipe for one waits for the other contender
        self._from, self._to = (
            os.open(f"{folder}/turn-{name}", os.O_RDWR) for name in (self._name, other)
        )
        self._num_steps = 0
        self._began_at = 0.0
        self._turn: list[float] = []
        self._turns: list[float] = []

    def after_step(self, *_: Any) -> None:  # Any: of torch's hook
        """Take one step; at the end of a turn let the other contender go on."""
        if self._is_off:
            return
        now = time.thread_time()
        self._turn.append(now - self._began_at)
        self._num_steps += 1
        if self._num_steps == WARM_UP:
            os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # this thread's alone
            if self._name == OURS:  # it starts later
                self._pass_turn()
            self._await_turn()
        elif self._num_steps > WARM_UP and len(self._turn) == TURN:
            self._turns.append(statistics.median(self._turn))
            if self._num_steps == WARM_UP + STEPS:
                self._file.write_text(json.dumps(self._turns), encoding="utf-8")
            if self._num_steps < WARM_UP + STEPS or self._name == BARE:
                self._pass_turn()
            if self._num_steps < WARM_UP + STEPS:
                self._await_turn()
        self._began_at = time.thread_time()

    def _pass_turn(self) -> None:
        os.write(self._to, b"1")

    def _await_turn(self) -> None:
        os.read(self._from, 1)
        self._turn = []


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", nargs="+", choices=WORKS, default=WORKS, help="default: all")
    parser.add_argument("--ranks", nargs="+", type=int, default=(1, 2), help="default: 1 and 2")
    parser.add_argument("--rounds", type=int, default=5, help="default: 5")
    parser.add_argument("--bare", choices=WORKS, help="run the bare loop alone, in this process")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""The part of gpu_report.py that measures speed: this project beside the bare loop, in turns.

Owns the rounds and their arithmetic: ratios are taken within a round, and their median counts.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.gpu.row import (
    MISS,
    OPEN,
    PASS,
    ROOT,
    TIMED_OUT,
    WITHIN_NOISE,
    Row,
    end_of,
    guarded,
    run,
)

WARM_UP = 40  # WHY so many: until then batches get pinned memory, which holds launches up
SMALL_WARM_UP = 2
# As in meter.py and works.py, which need torch; test_gpu_report.py compares them.
PROFILED = 5
STEPS = {"resnet50": 40, "gpt": 40, "mlp": 400}
BATCHES = {"resnet50": 128, "gpt": 8, "mlp": 256}
SMALL_STEPS = 3
SMALL_BATCHES = {"resnet50": 2, "gpt": 2, "mlp": 8}

SPEED_BARS = {"resnet50": 1.00, "gpt": 1.00, "mlp": 0.97}
MEMORY_BAR = 1.03
WAITS_BAR = 1.0
ROUNDS = 3
EAGER_SHARE = 0.45  # of a part's time, of which compiling takes the larger part
BARE, OURS = "bare loop", "ddp_training.py"

Figures = dict[str, float]


def measure_work(work: str, *, dry: bool, ends_at: float) -> Iterator[Row]:
    """Give the lines on one work, eager and compiled. ends_at: of time.monotonic()."""
    began_at = time.monotonic()
    for is_compiled in (False,) if dry else (False, True):
        name = f"{work}, {'compiled' if is_compiled else 'eager'}"
        # WHY a share: the slower half of the rounds would leave no time for the other one
        share_s = (ends_at - began_at) * (1.0 if is_compiled or dry else EAGER_SHARE)
        yield from guarded(
            name, partial(_measure_rounds, work, name, is_compiled, dry, began_at + share_s)
        )


def _measure_rounds(
    work: str, name: str, is_compiled: bool, dry: bool, ends_at: float
) -> Iterator[Row]:
    rounds: list[dict[str, Figures]] = []
    for index in range(1 if dry else ROUNDS):
        order = (BARE, OURS) if index % 2 == 0 else (OURS, BARE)
        found: dict[str, Figures] = {}
        for contender in order:
            left_s = ends_at - time.monotonic()
            figures = measure(contender, work, dry=dry, compiled=is_compiled, limit_s=left_s)
            if isinstance(figures, Row):
                yield Row(f"{name}, {contender}", figures.found, figures.verdict, figures.details)
                break
            found[contender] = figures
        if len(found) < len(order):
            break
        rounds.append(found)
    for row in rows_of(name, rounds, bar=SPEED_BARS[work]):
        # WHY without a verdict: how tiny models do on a CPU says nothing about a bar
        yield replace(row, verdict="") if dry and rounds else row


def measure(
    contender: str, work: str, *, dry: bool, compiled: bool, limit_s: float
) -> Figures | Row:
    """Run one contender once; return its figures, or the line that says why there are none."""
    name = f"{work}, {contender}"
    if limit_s < 5:
        return Row(name, "no time left in this part", OPEN)
    batch_size = (SMALL_BATCHES if dry else BATCHES)[work]
    timed = SMALL_STEPS if dry else STEPS[work]
    warm_up = SMALL_WARM_UP if dry else WARM_UP
    steps = warm_up + timed + 1 + PROFILED
    with tempfile.TemporaryDirectory(prefix="gpu-report-") as folder:
        file = Path(folder) / "figures.json"
        command = _command(contender, work, dry, compiled, steps, batch_size, Path(folder))
        wanted = {
            "file": str(file),
            "warm_up": warm_up,
            "steps": timed,
            "batch_size": batch_size,
            "started_at": time.time(),
        }
        done = run(command, limit_s=limit_s, env={"GPU_METER": json.dumps(wanted)})
        if done.status == TIMED_OUT:
            return Row(name, "no time left in this part", OPEN, end_of(done.output))
        if done.status or not file.exists():
            return Row(name, f"failed with status {done.status}", MISS, end_of(done.output))
        figures: Figures = json.loads(file.read_text(encoding="utf-8"))
        return figures


def rows_of(name: str, rounds: Sequence[dict[str, Figures]], *, bar: float) -> list[Row]:
    """Return the lines on the rounds of one work."""
    if not rounds:
        return [Row(f"{name}: speed", "not measured", OPEN)]

    def ratio(figure: str) -> float:
        ratios = [found[OURS][figure] / max(1e-9, found[BARE][figure]) for found in rounds]
        return statistics.median(ratios)

    def middle(contender: str, figure: str) -> float:
        return statistics.median(found[contender][figure] for found in rounds)

    def both(figure: str, form: str) -> str:
        return f"{middle(OURS, figure):{form}}, bare {middle(BARE, figure):{form}}"

    bare = [found[BARE]["samples_per_s"] for found in rounds]
    noise = (max(bare) - min(bare)) / max(1e-9, statistics.median(bare))
    speed = ratio("samples_per_s")
    # WHY: what lies within the noise of the bare loop itself says nothing; of one round it has none
    too_slow = WITHIN_NOISE if speed >= bar - noise else MISS if len(rounds) > 1 else OPEN
    memory, waits = ratio("peak_mib"), middle(OURS, "waits")
    kernels = middle(OURS, "kernels") - middle(BARE, "kernels")
    return [
        Row(
            f"{name}: samples/s, at least {bar:.2f} x bare",
            f"{speed:.3f} x ({both('samples_per_s', ',.0f')}; {len(rounds)} rounds, of which the "
            f"bare loop differs by {noise:.1%})",
            PASS if speed >= bar else too_slow,
        ),
        Row(
            f"{name}: peak memory, at most {MEMORY_BAR} x bare",
            f"{memory:.3f} x ({both('peak_mib', ',.0f')} MiB)",
            PASS if memory <= MEMORY_BAR else MISS,
        ),
        Row(
            f"{name}: waits for the device per step, at most {WAITS_BAR:.0f}",
            both("waits", ".1f"),
            PASS if waits <= WAITS_BAR else MISS,
        ),
        Row(
            f"{name}: kernels per step beyond the bare loop",
            f"{kernels:+.0f} ({both('kernels', ',.0f')})",
        ),
        Row(f"{name}: first step, s", both("first_step_s", ".1f")),
    ]


def _command(
    contender: str,
    work: str,
    dry: bool,
    compiled: bool,
    steps: int,
    batch_size: int,
    folder: Path,
) -> list[str | Path]:
    workers = 0 if dry or work == "mlp" else min(8, os.cpu_count() or 1)
    flags = ["--compile"] if compiled else []
    if contender == BARE:
        flags += ["--small"] if dry else []
        words = ["python", "-m", "benchmarks.gpu.bare", "--work", work, "--steps", str(steps)]
        return [*words, "--workers", str(workers), *flags]
    flags += ["--cpu_only"] if dry else ["--single_gpu"]
    flags += ["--channels_last"] if work == "resnet50" else []
    flags += ["--task", "tokens"] if work == "gpt" else ["--task", "classification"]
    about = f"work: {work}, small: {str(dry).lower()}"
    flags += ["--model", "benchmarks.gpu.meter:build", "--model_args", f"{{{about}}}"]
    flags += ["--dataset", "benchmarks.gpu.works:Samples"]
    flags += ["--dataset_args", f"{{{about}, num_samples: {steps * batch_size}}}"]
    flags += ["--batch_size", str(batch_size), "--epochs", "1", "--amp", "bf16"]
    flags += ["--num_workers", str(workers), "--eval_every", "0"]
    flags += ["--checkpoint_every_epochs", "0", "--output_dir", str(folder)]
    return ["python", ROOT / "ddp_training.py", "--no_config", *flags]

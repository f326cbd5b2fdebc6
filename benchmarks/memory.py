#!/usr/bin/env python3
"""How much memory a rank needs for a model of a given size: computed, and checked on the CPU.

    python benchmarks/memory.py                      the table for 100M, 1B and 3B parameters
    python benchmarks/memory.py --check              and two ranks with 100M: about 5 GB, 2 minutes
    python benchmarks/memory.py --parameters 7e9 --ranks 8

Computed for fp32 weights and AdamW, without activations, which depend on model and batch. --check
trains such a model on two ranks, saves, and resumes; each rank's peak of resident memory, less that
of a run with a tiny model, must be within 15 % of what is computed: the backward of a layer needs
some memory of its own, and the writer of a checkpoint reads a part of the weights where they are.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

SIZES = (100e6, 1e9, 3e9)
TOLERANCE = 0.15
_FLOAT = 4
_CHUNK = 1048576  # as shared_sum.CHUNK_BYTES; test_memory.py compares them
_TINY = 1e4
_LIMIT_S = 600
_STEPS, _SAVED_AT = 4, 2

TRAINING = ("weights", "gradients", "AdamW")
"""What is on the GPU, or on the CPU in a run without one."""

HOST = ("snapshot, rank 0", "shared sum")
"""What is in the host's memory in any case."""


def parts_of(num_parameters: float, *, num_ranks: int) -> dict[str, float]:
    """Return the bytes of each part of a rank's memory."""
    weights = num_parameters * _FLOAT
    return {
        "weights": weights,
        # views into DDP's buckets, so they are there once
        "gradients": weights,
        "AdamW": 2 * weights,
        # weights and optimizer state, copied for the writer; it stays for the next checkpoint
        "snapshot, rank 0": 3 * weights,
        # whatever the model's size: two slots for each rank of the machine, and a sum of its own
        "shared sum": (2 * num_ranks + 1) * _CHUNK,
    }


def peak_of(num_parameters: float, *, num_ranks: int, rank: int, saves: bool = True) -> float:
    """Return the bytes that a rank of a run on the CPU needs at its peak, beyond a tiny model's.

    A resume needs as much as a fresh start: its tensors become those of the run, one by one.
    """
    parts = parts_of(num_parameters, num_ranks=num_ranks)
    names = [*TRAINING, *(["snapshot, rank 0"] if saves and rank == 0 else [])]
    return sum(parts[name] for name in names)


def table(sizes: Sequence[float], *, num_ranks: int) -> str:
    """Return the table as Markdown, in GiB."""
    columns = [parts_of(size, num_ranks=num_ranks) for size in sizes]
    rows = [
        f"| {name} | " + " | ".join(_gib(column[name]) for column in columns) + " |"
        for name in columns[0]
    ]
    sums = [_gib(sum(column[name] for name in TRAINING)) for column in columns]
    rows.insert(len(TRAINING), "| **on the GPU, without activations** | " + " | ".join(sums) + " |")
    heads = " | ".join(f"{size / 1e6:,.0f}M" for size in sizes)
    return "\n".join([f"| GiB per rank | {heads} |", "| --- |" + " --- |" * len(sizes), *rows])


def main() -> int:
    """Print the table; check it where that is asked for."""
    options = _read_options()
    print(table(options.parameters, num_ranks=options.ranks))
    if not options.check:
        return 0
    num_parameters, is_missed = options.parameters[0], False
    with tempfile.TemporaryDirectory(prefix="memory-") as folder:
        tiny = peaks(_TINY, Path(folder) / "tiny")
        large = peaks(num_parameters, Path(folder) / "large")
    for (name, rank), found in large.items():
        expected = peak_of(num_parameters, num_ranks=2, rank=int(rank))
        beyond = found - tiny[name, rank]
        is_off = abs(beyond - expected) > TOLERANCE * expected
        is_missed |= is_off
        print(
            f"  {name:6} rank {rank}: computed {_gib(expected)} GiB, measured {_gib(beyond)} GiB  "
            f"{'MISS' if is_off else 'PASS'}"
        )
    return 1 if is_missed else 0


def peaks(num_parameters: float, folder: Path) -> dict[tuple[str, str], float]:
    """Train a model of that size on two ranks, save, resume; return the peaks, in bytes.

    By the start (fresh, resume) and the rank.
    """
    found: dict[tuple[str, str], float] = {}
    for name, steps in (("fresh", _STEPS), ("resume", 2 * _STEPS)):
        file = folder / f"{name}.json"
        folder.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc_per_node=2", str(ROOT / "ddp_training.py")]
        command += flags_of(num_parameters, folder, steps=steps)
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "MEMORY_FILE": str(file)}
        done = subprocess.run(
            command,
            env=os.environ | env,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
        if done.returncode:
            print(done.stdout, done.stderr, file=sys.stderr)
            raise SystemExit("memory.py: the run failed")
        found |= read_peaks(file, name)
    return found


def flags_of(num_parameters: float, folder: Path, *, steps: int) -> list[str]:
    """Return the arguments of ddp_training.py."""
    flags = ["--no_config", "--cpu_only", "--model", "benchmarks.memory_model:build"]
    flags += ["--model_args", f"{{num_parameters: {int(num_parameters)}}}", "--batch_size", "2"]
    flags += ["--max_steps", str(steps), "--checkpoint_every_steps", str(_SAVED_AT)]
    flags += ["--lr_schedule", "constant", "--eval_every", "0"]
    return [*flags, "--run_name", "run", "--output_dir", str(folder / "runs")]


def read_peaks(file: Path, name: str) -> dict[tuple[str, str], float]:
    """Read what the ranks of one start wrote."""
    found: dict[tuple[str, str], float] = {}
    for path in sorted(file.parent.glob(f"{file.name}.*")):
        seen: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))  # Any: JSON
        found[name, path.suffix[1:]] = seen["peak_bytes"]
    return found


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / 2**30:.2f}" if size_bytes < 100 * 2**30 else f"{size_bytes / 2**30:.0f}"


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--parameters", type=float, nargs="+", default=SIZES)
    parser.add_argument("--ranks", type=int, default=2, help="on one machine")
    parser.add_argument("--check", action="store_true", help="measure the first size on the CPU")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

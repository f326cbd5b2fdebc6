#!/usr/bin/env python3
"""Time and memory to the first sample index: WindowSampler against torch's DistributedSampler.

    python benchmarks/sampler_start.py --json sampler.json      under 2 minutes, 5 GiB at the most

Each measurement is a process of its own, because memory that was once used is seldom given back.
Measured is an epoch's start on rank 0 of 2 (build the sampler, take the first index), and the next
100,000 indices: what is not paid at the start is paid there. Run it with the project's Python.
Does not own: the sampler (hardened_ddp/data/sampler.py).
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from machine import ROOT, describe, wait_until_idle

NUM_NEXT = 100_000
# Above it torch's sampler needs a permutation and its list of Python numbers: 46 bytes each.
_LARGEST_FOR_TORCH = 10**8
_OURS, _TORCHS = "WindowSampler", "DistributedSampler"
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Start:
    """What one start of an epoch took."""

    first_index_s: float
    memory_mib: float
    """Growth of the peak of resident memory."""

    next_indices_s: float
    """For the next NUM_NEXT indices."""


def main() -> int:
    """Measure all sizes and print the table."""
    options = _read_options()
    if options.child:
        print(json.dumps(asdict(_measure_here(options.child, options.sizes[0]))))
        return 0
    machine = describe()
    print(", ".join(f"{name} {value}" for name, value in machine.items()), flush=True)
    report: dict[str, object] = {"machine": machine, "command": sys.argv}
    sizes: dict[str, object] = {}
    print(f"{'samples':>14} {'':20}{'first index s':>16}{'MiB':>10}{'next 100,000 s':>16}")
    for size in options.sizes:
        starts = {_OURS: _median_start(_OURS, size, options)}
        if size <= _LARGEST_FOR_TORCH:
            starts[_TORCHS] = _median_start(_TORCHS, size, options)
        sizes[str(size)] = {name: asdict(start) for name, start in starts.items()}
        print(_lines(size, starts), flush=True)
    if options.json is not None:
        report["sizes"] = sizes
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def _lines(size: int, starts: dict[str, Start]) -> str:
    lines = [
        f"{size:>14,} {name:20}{start.first_index_s:>16.4f}{start.memory_mib:>10,.1f}"
        f"{start.next_indices_s:>16.3f}"
        for name, start in starts.items()
    ]
    if _TORCHS not in starts:
        return "\n".join(
            [*lines, f"{'':15}{_TORCHS}: skipped, it would need {46 * size / 2**30:.0f} GiB"]
        )
    ours, torchs = starts[_OURS], starts[_TORCHS]
    pairs = (
        (ours.first_index_s, torchs.first_index_s, 16),
        (ours.memory_mib, torchs.memory_mib, 10),
        (ours.next_indices_s, torchs.next_indices_s, 16),
    )
    cells = "".join(
        f"{f'x {mine / max(other, 1e-9):.4f}':>{width}}" for mine, other, width in pairs
    )
    return "\n".join([*lines, f"{'':15}{'ratio':20}{cells}"])


def _median_start(sampler: str, size: int, options: argparse.Namespace) -> Start:
    """Measure in options.repeats processes, one after the other."""
    command = [sys.executable, __file__, "--child", sampler, "--sizes", str(size)]
    starts = []
    for _ in range(options.repeats):
        if not options.no_wait:
            wait_until_idle()
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        if done.returncode != 0:
            raise SystemExit(f"{sampler} of {size:,} samples failed:\n{done.stderr[-2000:]}")
        starts.append(Start(**json.loads(done.stdout)))
    return Start(
        statistics.median(start.first_index_s for start in starts),
        statistics.median(start.memory_mib for start in starts),
        statistics.median(start.next_indices_s for start in starts),
    )


def _measure_here(sampler: str, size: int) -> Start:
    """Start an epoch of size samples in this process."""
    open_sampler = _open_ours if sampler == _OURS else _open_torchs
    # WHY once before: the first use of torch and numpy costs memory that has nothing to do with it.
    next(open_sampler(1000))
    memory_before = _memory_mib("VmRSS")
    # WHY: the peak so far is that of the imports; 5 resets it to what is resident now.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    started_at = time.perf_counter()
    indices = open_sampler(size)
    next(indices)
    first_at = time.perf_counter()
    memory_mib = _memory_mib("VmHWM") - memory_before
    for _ in islice(indices, NUM_NEXT):
        pass
    return Start(first_at - started_at, max(0.0, memory_mib), time.perf_counter() - first_at)


def _open_ours(size: int) -> Iterator[int]:
    sys.path.insert(0, str(ROOT))
    from hardened_ddp.data.sampler import WindowSampler

    numbers: Any = range(size)  # Any: all it asks for is the length
    return iter(
        WindowSampler(
            numbers,
            num_replicas=2,
            rank=0,
            seed=0,
            global_batch=128,
            batch_size=64,
        )
    )


def _open_torchs(size: int) -> Iterator[int]:
    from torch.utils.data import DistributedSampler

    numbers: Any = range(size)  # Any: all it asks for is the length
    return iter(DistributedSampler(numbers, num_replicas=2, rank=0, seed=0))


def _memory_mib(field: str) -> float:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024
    return 0.0


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--sizes",
        nargs="+",
        type=lambda text: int(float(text)),
        default=[10**n for n in range(6, 10)],
    )
    parser.add_argument("--repeats", type=int, default=3, help="the median is taken (default 3)")
    parser.add_argument("--no_wait", action="store_true", help="do not wait for an idle machine")
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--child", choices=(_OURS, _TORCHS), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

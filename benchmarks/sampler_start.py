#!/usr/bin/env python3
"""Time and memory to the first sample index: WindowSampler, torch's sampler and torchdata's.

    python benchmarks/sampler_start.py --json sampler.json      under 2 minutes, 5 GiB at the most

Each measurement is a process of its own, because memory that was once used is seldom given back.
Measured is an epoch's start on rank 0 of 2 (build the sampler, take the first index), the same in
the middle of the epoch, as a resume does it, and the next 100,000 indices: what is not paid at the
start is paid there. torchdata takes part where it is installed: benchmarks/setup.sh does that.
Does not own: the sampler (hardened_ddp/data/batches/sampler.py).
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from machine import ROOT, describe, wait_until_idle

NUM_NEXT = 100_000
# Above it torch's sampler needs a permutation and its list of Python numbers: 46 bytes each.
_LARGEST_FOR_TORCH = 10**8
_OURS, _TORCHS = "WindowSampler", "DistributedSampler"
_TORCHDATAS = "StatefulDistributedSampler"
_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Start:
    """What one start of an epoch took."""

    first_index_s: float
    middle_index_s: float
    """To the first index of a resume in the middle of the epoch."""

    memory_mib: float
    """Growth of the peak of resident memory, by both starts."""

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
    heads = ("first index s", "middle s", "MiB", "next 100,000 s")
    print(f"{'samples':>14} {'':28}" + "".join(f"{head:>16}" for head in heads))
    for size in options.sizes:
        names = list(_OPEN) if size <= _LARGEST_FOR_TORCH else [_OURS]
        if find_spec("torchdata") is None:
            names = [name for name in names if name != _TORCHDATAS]
        starts = {name: _median_start(name, size, options) for name in names}
        sizes[str(size)] = {name: asdict(start) for name, start in starts.items()}
        print(_lines(size, starts), flush=True)
    if options.json is not None:
        report["sizes"] = sizes
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return 0


def _lines(size: int, starts: dict[str, Start]) -> str:
    """Give a line for each sampler, and ours as a ratio to each of the others."""
    lines = []
    for name, start in starts.items():
        figures = (
            start.first_index_s,
            start.middle_index_s,
            start.memory_mib,
            start.next_indices_s,
        )
        cells = "".join(f"{value:>16,.4f}" for value in figures)
        lines.append(f"{size:>14,} {name:28}{cells}")
        if name != _OURS:
            mine = tuple(asdict(starts[_OURS]).values())
            pairs = zip(mine, asdict(start).values(), strict=True)
            ratios = "".join(f"{f'x {ours / max(other, 1e-9):.4f}':>16}" for ours, other in pairs)
            lines.append(f"{'':15}{'ours to that':28}{ratios}")
    if len(starts) == 1:
        needed = f"{46 * size / 2**30:.0f} GiB"
        lines.append(f"{'':15}the others: left out, torch's permutation would need {needed}")
    return "\n".join(lines)


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
        statistics.median(start.middle_index_s for start in starts),
        statistics.median(start.memory_mib for start in starts),
        statistics.median(start.next_indices_s for start in starts),
    )


def _measure_here(sampler: str, size: int) -> Start:
    """Start an epoch of size samples in this process."""
    open_sampler = _OPEN[sampler]
    # WHY once before: the first use of torch and numpy costs memory that has nothing to do with it.
    next(open_sampler(1000, 0))
    memory_before = _memory_mib("VmRSS")
    # WHY: the peak so far is that of the imports; 5 resets it to what is resident now.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    started_at = time.perf_counter()
    indices = open_sampler(size, 0)
    next(indices)
    first_at = time.perf_counter()
    for _ in islice(indices, NUM_NEXT):
        pass
    next_at = time.perf_counter()
    del indices
    next(open_sampler(size, size // 4))  # of this rank's half, so the middle of the epoch
    middle_s = time.perf_counter() - next_at
    memory_mib = max(0.0, _memory_mib("VmHWM") - memory_before)
    return Start(first_at - started_at, middle_s, memory_mib, next_at - first_at)


def _open_ours(size: int, num_done: int) -> Iterator[int]:
    sys.path.insert(0, str(ROOT))
    from hardened_ddp.data.batches.sampler import WindowSampler

    numbers: Any = range(size)  # Any: all it asks for is the length
    sampler = WindowSampler(
        numbers, num_replicas=2, rank=0, seed=0, global_batch=128, batch_size=64
    )
    cursor = 2 * num_done // 128 * 128
    for window in sampler.windows(cursor):
        for indices in sampler.micro_batches(window):
            yield from indices.tolist()


def _open_torchs(size: int, num_done: int) -> Iterator[int]:
    """As one resumes with it: by passing over what is done."""
    from torch.utils.data import DistributedSampler

    numbers: Any = range(size)  # Any: all it asks for is the length
    return islice(iter(DistributedSampler(numbers, num_replicas=2, rank=0, seed=0)), num_done, None)


def _open_torchdatas(size: int, num_done: int) -> Iterator[int]:
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    numbers: Any = range(size)  # Any: all it asks for is the length
    sampler = StatefulDistributedSampler(numbers, num_replicas=2, rank=0, seed=0)
    sampler.load_state_dict({"yielded": num_done})
    return iter(sampler)


_OPEN = {_OURS: _open_ours, _TORCHS: _open_torchs, _TORCHDATAS: _open_torchdatas}


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
    parser.add_argument("--child", choices=tuple(_OPEN), help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

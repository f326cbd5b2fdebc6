#!/usr/bin/env python3
"""How many operations one optimizer step dispatches beyond the bare DDP loop, and what waits.

    python benchmarks/step_ops.py                       about two minutes
    python benchmarks/step_ops.py --work mlp --verbose  one model; each operation that differs

On a GPU an operation costs the host some microseconds, and a wait for the device all that it could
have queued meanwhile. Both are counted without a GPU: two ranks on the CPU train in the form that
GPUs use (ops_trace.py), in bf16, with torch's fused AdamW and gradients through DDP's hooks. The
bare loop is DDP's tutorial with the same model, precision and optimizer, and DDP's defaults.

- operations: dispatched by rank 0 in the step with most of them, from one forward to the next,
  minus those of the bare loop; without loading samples, and without what is on the host only. A
  step with a report is not one of them. A view counts, though it launches no kernel.
- allocations: results of those operations in memory of their own, in the same way.
- waits: reads of device values (item, tolist, nonzero and others) and copies that are not
  asynchronous, of the step with most of them, but for the one that reads the last step's flag.
- flags: how often a step reads one.
- evaluation: waits in a whole evaluation, over all its batches.

The widths are small: they change no count, apart from DDP's buckets, of which ours sends each with
the same operations as DDP. Waits that only a GPU shows, such as of a copy from memory that is not
pinned, are counted by gpu_report.py. The exit status is 0 only if no bar is missed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

WORKS = ("resnet50", "transformer", "mlp")
BARS = {"operations": 15, "allocations": 25, "waits": 0, "flags": 1, "evaluation": 1}
FLAG = "flag"
_LIMIT_S = 400


def flags_of(work: str) -> list[str]:
    """Return the arguments of ddp_training.py for one model."""
    of_work = f"{{work: {work}}}"
    flags = ["--cpu_only", "--no_shared_memory", "--amp", "bf16", "--num_workers", "0"]
    flags += ["--model", "benchmarks.ops_trace:build", "--model_args", of_work]
    flags += ["--dataset", "benchmarks.ops_models:Samples", "--dataset_args", of_work]
    # a digest is no part of a step: where it costs more than 1.5 % of one, it is not taken
    flags += ["--batch_size", "4", "--epochs", "1", "--log_interval", "4", "--digests", "off"]
    return [*flags, "--checkpoint_every_steps", "0", "--checkpoint_every_epochs", "0"]


def main() -> int:
    """Count each model's operations and waits, and print them beside the bars."""
    options = _read_options()
    is_missed = []
    for work in options.work:
        print(f"{work}", flush=True)
        with tempfile.TemporaryDirectory(prefix="step-ops-") as folder:
            seen = watch(work, Path(folder))
        figures = figures_of(seen)
        for name, (count, places) in figures.items():
            is_missed.append(count > BARS[name])
            verdict = "MISS" if is_missed[-1] else "PASS"
            print(f"  {name:12}{count:5}   (bar {BARS[name]})  {verdict}", flush=True)
            for place in places if is_missed[-1] or options.verbose else ():
                print(f"      {place}")
    return 1 if any(is_missed) else 0


def watch(work: str, folder: Path) -> dict[str, Any]:  # JSON
    """Train a model on 2 ranks and return what ops_trace.py counted on rank 0."""
    file = folder / "seen.json"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [str(ROOT / "ddp_training.py"), *flags_of(work), "--output_dir", str(folder)]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        command,
        cwd=folder,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path, "OPS_TRACE": str(file)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    if done.returncode or not file.exists():
        print(done.stdout, file=sys.stderr)
        raise SystemExit(f"step_ops.py: the run of {work} failed, or nothing was counted")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def figures_of(seen: Mapping[str, Any]) -> dict[str, tuple[int, list[str]]]:  # JSON
    """Return each figure of BARS, and what it consists of."""
    steps = [part for part in seen["parts"] if part["kind"] == "step"]
    evaluations = [part["waits"] for part in seen["parts"] if part["kind"] == "evaluation"]
    if not steps or not evaluations:
        raise SystemExit("step_ops.py: the run had no step without a report, or no evaluation")
    bare = Counter(seen["bare"]["operations"])
    most = max((Counter(step["operations"]) for step in steps), key=Counter.total)
    of_bare = Counter(seen["bare"]["allocations"])
    allocated = max((Counter(step["allocations"]) for step in steps), key=Counter.total)
    waits = [[wait for wait in step["waits"] if not _is_flag(wait)] for step in steps]
    flags = [[wait for wait in step["waits"] if _is_flag(wait)] for step in steps]
    return {
        "operations": (most.total() - bare.total(), _differences(most, bare)),
        "allocations": (allocated.total() - of_bare.total(), _differences(allocated, of_bare)),
        "waits": _longest(waits),
        "flags": _longest(flags),
        "evaluation": _longest(evaluations),
    }


def _differences(ours: Counter[str], bare: Counter[str]) -> list[str]:
    """Say how often each operation was dispatched more, or less, than by the bare loop."""
    names = sorted({*ours, *bare})
    return [f"{ours[n] - bare[n]:+5}  {n}" for n in names if ours[n] != bare[n]]


def _is_flag(wait: str) -> bool:
    return wait.startswith(FLAG + " ")


def _longest(found: Sequence[list[str]]) -> tuple[int, list[str]]:
    places = max(found, key=len)
    return len(places), places


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", nargs="+", choices=WORKS, default=WORKS, help="default: all")
    parser.add_argument("--verbose", action="store_true", help="list what differs")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""What a setting costs in a step, on the same samples: --step_retry on against off, or --ema.

    python benchmarks/protection.py                    some minutes
    python benchmarks/protection.py --of ema --work resnet
    torchrun --nproc_per_node=2 benchmarks/protection.py --rank   what it starts: all in one process

Two models, a tiny one and a ResNet-18, and two ways of the gradients: summed after backward
through shared memory (CPU ranks of one machine), and sent by DDP's hooks within it (several
machines, GPUs).
Each process holds both forms, on and off, of one model, and does blocks of steps in turns; so what
else the machine does hits both. All of it is started several times, and the blocks of all starts
count: where memory comes to lie differs from start to start, and favours one form or the other.
Two figures: the ratio on to off of the fastest fifth of the blocks (its upper end), which is what
the steps themselves cost, and has the bar, 1.01; and the median of the ratios of neighbouring
blocks with its quartiles, which shows how much else the machine did. Of --ema the bar is 1.03.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # WHY: started by its path, Python looks beside this file only

IMAGES = ["--dataset", "synthetic", "--eval_every", "0", "--num_workers", "0", "--cpu_only"]
WORKS = {
    # model and data; steps in a block
    "tiny": (["--model", "mlp", "--batch_size", "64", "--dataset_args"], "{image_size: 28}", 40),
    "resnet": (
        ["--model", "resnet18", "--batch_size", "16", "--dataset_args"],
        "{image_size: 64}",
        1,
    ),
}
FORMS = {"shared memory": [], "hooks": ["--no_shared_memory"]}
COMPARED = {
    # the flags with it, those without, and the bar
    "step_retry": (["--step_retry", "on"], ["--step_retry", "off"], 1.01),
    "ema": (["--ema", "0.999"], [], 1.03),
}


def main() -> int:
    """Start the ranks for each work and form, and print the table."""
    options = _read_options()
    if options.rank:
        return measure(options)
    misses, bar = 0, COMPARED[options.of][-1]
    for work, form in itertools.product(options.work, FORMS):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc_per_node={options.ranks}", __file__, "--rank", "--work", work]
        command += ["--form", form, "--pairs", str(options.pairs), "--of", options.of]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        on_s: list[float] = []
        off_s: list[float] = []
        for start in range(options.starts):
            first = ["--first", "off" if start % 2 else "on"]
            done = subprocess.run(
                [*command, *first], env=env, stdout=subprocess.PIPE, text=True, check=True
            )
            blocks_s = json.loads(done.stdout.splitlines()[-1])
            on_s += blocks_s["on"]
            off_s += blocks_s["off"]
        fast_on_s, fast_off_s = (statistics.quantiles(each, n=5)[0] for each in (on_s, off_s))
        ratios = [on / off for on, off in zip(on_s, off_s, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        ratio = fast_on_s / fast_off_s
        misses += ratio > bar
        print(
            f"{work:8}{form:15}{1000 * fast_off_s:9.3f} ms a step without, x {ratio:.4f} with "
            f"(pairs {middle:.4f}, quartiles {low:.4f} to {high:.4f}, {len(ratios)} pairs)  "
            f"{'PASS' if ratio <= bar else 'MISS'}",
            flush=True,
        )
    return 1 if misses else 0


def measure(options: argparse.Namespace) -> int:
    """Time both forms in turns; rank 0 prints the seconds as JSON. Collective: all ranks."""
    import torch

    import ddp_training
    from hardened_ddp.ranks.group import open_group
    from hardened_ddp.ranks.launch import read_launch
    from hardened_ddp.reporting.events import Events
    from hardened_ddp.settings.cli import parse
    from hardened_ddp.settings.layers import resolve
    from hardened_ddp.step.left_out import LeftOut
    from hardened_ddp.step.progress import Progress
    from hardened_ddp.step.step import Stepper

    flags, data, block = WORKS[options.work[0]]
    launch, device = read_launch(os.environ), torch.device("cpu")
    is_shared = options.form == "shared memory"
    group = open_group(launch, device=device, backend="gloo", timeout_s=60, shared_memory=is_shared)
    steppers = {}
    compared = dict(zip(("on", "off"), COMPARED[options.of], strict=False))
    for which in ("on", "off") if options.first == "on" else ("off", "on"):
        argv = [*IMAGES, *flags, data, *FORMS[options.form], *compared[which]]
        settings = resolve(parse(argv), world_size=launch.world_size)
        parts = ddp_training.build(settings, group, None, Events())  # collective
        steppers[which] = Stepper(
            parts, Progress(), left_out=LeftOut(parts), saver=SimpleNamespace(is_copying=False)
        )
    windows = list(itertools.islice(parts.train_loader.windows(0, 0), 8))

    def seconds(which: str) -> float:
        started_at = time.perf_counter()
        for number in range(block):
            window, batches = windows[number % len(windows)]
            steppers[which].train_step(window, batches)  # collective
        return (time.perf_counter() - started_at) / block

    blocks_s: dict[str, list[float]] = {"on": [], "off": []}
    for pair in range(-2, options.pairs):  # the first ones warm up
        order = ("on", "off") if pair % 2 else ("off", "on")
        for which in order:
            took_s = seconds(which)
            if pair >= 0:
                blocks_s[which].append(took_s)
    group.close()
    if launch.is_main:
        print(json.dumps(blocks_s))
    return 0


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--of", choices=COMPARED, default="step_retry", help="what is compared")
    parser.add_argument("--work", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument(
        "--pairs", type=int, default=40, help="of blocks in a start, one with and one without"
    )
    parser.add_argument("--starts", type=int, default=4)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--form", choices=FORMS, default="hooks", help=argparse.SUPPRESS)
    parser.add_argument("--first", default="on", help=argparse.SUPPRESS)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

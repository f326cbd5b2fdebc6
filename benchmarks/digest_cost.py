#!/usr/bin/env python3
"""What digests cost a step: --digests auto and on against off, on the same samples.

    python benchmarks/digest_cost.py                 four works, some minutes
    python benchmarks/digest_cost.py --work tiny     one of them

One process does blocks of steps of one model in turns, in the three forms. What counts is
its CPU time, so that other work on the machine disturbs little: the ratio to off of the fastest
fifth of the blocks (its upper end). Next to it the share of a step that the digests measure
themselves, by which --digests auto ends them if it is more than 1.5 %, the bar.
One rank: it has no sum over ranks, so a step is short, and other ranks than rank 0 pay less.
"""

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # WHY: started by its path, Python looks beside this file only

import torch  # noqa: E402

import ddp_training  # noqa: E402
from hardened_ddp.ranks.group import open_group  # noqa: E402
from hardened_ddp.ranks.launch import read_launch  # noqa: E402
from hardened_ddp.reporting.events import Events  # noqa: E402
from hardened_ddp.settings.cli import parse  # noqa: E402
from hardened_ddp.settings.layers import resolve  # noqa: E402
from hardened_ddp.step.left_out import LeftOut  # noqa: E402
from hardened_ddp.step.progress import Progress  # noqa: E402
from hardened_ddp.step.records import MOST_COST, Records  # noqa: E402
from hardened_ddp.step.step import Stepper  # noqa: E402

PEERS = "benchmarks.peers.work"
IMAGES = ["--dataset", "synthetic", "--dataset_args"]
TEXTS = ["--task", "tokens", "--dataset", f"{PEERS}:dataset", "--dataset_args", "{work: gpt}"]
OF_WORK = ["--model", f"{PEERS}:model", "--model_args"]
WORKS = {
    # the sizes of compare_peers.py; steps in a block
    "tiny": (
        [*IMAGES, "{image_size: 28, channels: 1}", *OF_WORK, "{work: tiny}", "--batch_size", "64"],
        40,
    ),
    "mnist": (
        [*IMAGES, "{image_size: 28, channels: 1}", *OF_WORK, "{work: mnist}", "--batch_size", "64"],
        4,
    ),
    "resnet": ([*IMAGES, "{image_size: 64}", "--model", "resnet18", "--batch_size", "32"], 1),
    "gpt": ([*TEXTS, *OF_WORK, "{work: gpt}", "--batch_size", "16"], 2),
}
FORMS = ("off", "auto", "on")


def main() -> int:
    """Measure each work, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", nargs="+", choices=WORKS, default=list(WORKS))
    parser.add_argument("--blocks", type=int, default=40, help="of each form")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| work | a step without, CPU | auto: ratio | measured by itself | on: ratio |")
    print("| --- | --- | --- | --- | --- |")
    misses = 0
    for work in options.work:
        blocks_s, shares = measure(work, options.blocks)
        off_s, auto_s, on_s = (statistics.quantiles(blocks_s[form], n=5)[0] for form in FORMS)
        is_over = shares["auto"] > MOST_COST
        misses += auto_s / off_s > 1 + MOST_COST and not is_over
        what = "ended" if is_over else "kept"
        print(
            f"| {work} | {1000 * off_s:.2f} ms | {auto_s / off_s:.4f} x | "
            f"{100 * shares['auto']:.2f} %: {what} | {on_s / off_s:.4f} x |",
            flush=True,
        )
    return 1 if misses else 0


def measure(work: str, num_blocks: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Time all forms in turns: CPU seconds of a step in each block, the digests' own shares."""
    flags, block = WORKS[work]
    argv = ["--cpu_only", "--eval_every", "0", "--num_workers", "0", "--no_ledger", *flags]
    group = open_group(
        read_launch(os.environ), device=torch.device("cpu"), backend="gloo", timeout_s=60
    )
    settings = resolve(parse(argv), world_size=1)
    parts = ddp_training.build(settings, group, None, Events())  # collective
    left_out, progress = LeftOut(parts), Progress()
    stepper = Stepper(parts, progress, left_out=left_out, saver=SimpleNamespace(is_copying=False))
    wall_s = dict.fromkeys(FORMS, 0.0)
    blocks_s: dict[str, list[float]] = {form: [] for form in FORMS}
    with tempfile.TemporaryDirectory() as folder:
        records = {}
        for form in FORMS:
            run = replace(parts.config.run, digests=form)
            own = replace(parts, config=replace(parts.config, run=run))
            records[form] = Records(own, progress, left_out)
            (Path(folder) / form).mkdir()
            records[form].open(Path(folder) / form)
        windows = list(itertools.islice(parts.train_loader.windows(0, 0), 8))
        for number in range(-2, num_blocks):  # the first ones warm up
            turn = number % len(FORMS)
            for form in (*FORMS[turn:], *FORMS[:turn]):
                # WHY not a stepper each: where memory comes to lie favours one or the other
                stepper.records = records[form]
                began_s, began_at = time.process_time(), time.perf_counter()
                for place in range(block):
                    window, batches = windows[place % len(windows)]
                    stepper.train_step(window, batches)  # collective
                wall_s[form] += time.perf_counter() - began_at
                if number >= 0:
                    blocks_s[form].append((time.process_time() - began_s) / block)
        shares = {form: records[form].cost_s / wall_s[form] for form in FORMS}
        for each in records.values():
            each.close()
    group.close()
    return blocks_s, shares


if __name__ == "__main__":
    sys.exit(main())

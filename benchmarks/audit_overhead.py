#!/usr/bin/env python3
"""What `audit` costs a program: CPU time of a step with and without the observer, in turns.

    python benchmarks/audit_overhead.py                 three models, 2 ranks, some minutes
    python benchmarks/audit_overhead.py --rounds 4

Each model trains in a plain DDP program of its own, in which nothing is this project's. It measures
its own steps: the CPU time of its process (time.process_time) for pieces of 32 steps, in which a
sampled step of the observer and its writing have their share. Other work on the machine slows down
a piece, never speeds it up, so of all pieces of all rounds the least counts. (The mean of 40 steps,
measured once, was 0.96 to 2.17 ms for one and the same program.) The observer's cost per step
hardly depends on the model, so it weighs most where a step is short, as in the MLP.

The exit status is 0 only if no model is over the bar.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BAR = 1.20
MODELS = {
    "MLP, 800 parameters": "mlp",
    "CNN, 28x28 images": "cnn",
    "transformer, 4 layers": "transformer",
}
_FIRST, _PIECE = 10, 32
_PIECES = {"mlp": 24, "cnn": 6, "transformer": 3}

PROGRAM = """
import sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

def build(name):
    if name == "mlp":
        return nn.Sequential(nn.Linear(20, 24), nn.ReLU(), nn.Linear(24, 10)), (20,), 16
    if name == "cnn":
        layers = [nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
        layers += [nn.Conv2d(16, 32, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(512, 10)), (1, 28, 28), 32
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
    layers = [nn.TransformerEncoder(layer, 4), nn.Flatten(), nn.Linear(64 * 128, 10)]
    return nn.Sequential(*layers), (64, 128), 8

torch.set_num_threads(1)
torch.manual_seed(0)
dist.init_process_group("gloo")
model, shape, batch_size = build(sys.argv[1])
ddp = DDP(model)
optimizer = torch.optim.AdamW(ddp.parameters())
last = FIRST + PIECE * int(sys.argv[2])
size = 2 * batch_size * (last + 1)
data = TensorDataset(torch.randn(size, *shape), torch.arange(size) % 10)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=batch_size, sampler=sampler)
times = []
for step, (x, y) in enumerate(loader):
    if step >= FIRST and (step - FIRST) % PIECE == 0:
        times.append(time.process_time())
    loss = nn.functional.cross_entropy(ddp(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
used = min(b - a for a, b in zip(times, times[1:])) / PIECE
if dist.get_rank() == 0:
    print(f"step_ms={1000 * used:.4f}", flush=True)
dist.destroy_process_group()
"""


def main() -> int:
    """Measure every model in turns; print a table in Markdown."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    figures: dict[str, list[float]] = {}
    print("| program | step without, ms of CPU | with audit | ratio | bar |")
    print("| --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory(prefix="overhead-") as folder:
        script = Path(folder) / "train.py"
        text = PROGRAM.replace("PIECE", str(_PIECE)).replace("FIRST", str(_FIRST))
        script.write_text(text, encoding="utf-8")
        for title, name in MODELS.items():
            plain, audited = [], []
            for _ in range(options.rounds):
                plain.append(step_ms(script, name, is_audited=False))
                audited.append(step_ms(script, name, is_audited=True))
            without, with_it = min(plain), min(audited)
            figures[title] = [without, with_it]
            verdict = "PASS" if with_it <= BAR * without else "MISS"
            print(
                f"| {title} | {without:.2f} | {with_it:.2f} | {with_it / without:.2f} "
                f"| {BAR:.2f} {verdict} |",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(figures), encoding="utf-8")
    return int(any(with_it > BAR * without for without, with_it in figures.values()))


def step_ms(script: Path, name: str, *, is_audited: bool) -> float:
    """Run the program once; give the CPU milliseconds of a step on rank 0."""
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    program += ["--nproc_per_node=2", str(script), name, str(_PIECES[name])]
    audit = [sys.executable, str(ROOT / "ddp_training.py"), "audit", "--steps", "1000", "--"]
    done = subprocess.run(
        [*(audit if is_audited else []), *program],
        cwd=script.parent,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    found = re.search(r"step_ms=([\d.]+)", done.stdout + done.stderr)
    if found is None:
        raise SystemExit(f"{name}: no figure\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return float(found[1])


if __name__ == "__main__":
    sys.exit(main())

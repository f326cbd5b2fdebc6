"""One rank of checkpoint_stall.py: trains, saves now and then, and times every step.

Owns the training loop and the arithmetic of one process. The stall is what a checkpoint costs the
training in all: the time of the steps from the save on, less as many undisturbed steps. So work
that a method hides beside the training, but that slows the training down, is counted.
"""

import argparse
import json
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.checkpoint_methods import METHODS, Method

WIDTH = 3162  # squared: 10 million parameters
BATCH_SIZE = 16  # with it a step takes 0.2 s or more on one core
NUM_QUIET = 6
NUM_BUSY = 10


@dataclass(frozen=True, slots=True)
class Stall:
    """What one checkpoint cost."""

    stall_s: float
    call_s: float
    """Until save returned."""

    done_s: float
    """Until it was written; looked at after each step."""

    worst_step_ms: float
    """Of the steps after save returned."""

    quiet_step_ms: float
    """Mean of the steps before."""

    outlasted: bool
    """Still being written after NUM_BUSY steps: then stall_s does not hold all of it."""


class Trainer:
    """The model, and one step of it."""

    def __init__(self, *, num_layers: int) -> None:
        torch.manual_seed(0)
        layers = [
            layer for _ in range(num_layers) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())
        ]
        self.network = nn.Sequential(*layers)
        self.ddp = DistributedDataParallel(self.network, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), fused=True)
        self.inputs = torch.randn(BATCH_SIZE, WIDTH)

    def step(self, method: Method | None = None) -> float:
        """Do one step and return its seconds. Collective: all ranks."""
        started_at = time.perf_counter()
        self.ddp(self.inputs).square().mean().backward()  # collective
        if method is not None:
            method.before_update()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - started_at


def main() -> None:
    """Measure and write rank 0's figures as JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", required=True, choices=METHODS)
    parser.add_argument("--checkpoints", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    try:
        trainer = Trainer(num_layers=options.layers)
        for _ in range(3):  # the optimizer's state, DDP's buckets, warm caches
            trainer.step()
        method = METHODS[options.method](trainer.network, trainer.optimizer, options.folder)
        # WHY one more, dropped: the first has buffers to allocate, which stay for the others.
        stalls = [measure(trainer, method, step=n) for n in range(options.checkpoints + 1)]
        if dist.get_rank() == 0:
            rows = [asdict(stall) for stall in stalls]
            text = json.dumps({"first": rows[0], "later": rows[1:]})
            (options.folder / "stalls.json").write_text(text, encoding="utf-8")
        dist.barrier()  # collective
    finally:
        dist.destroy_process_group()


def measure(trainer: Trainer, method: Method, *, step: int) -> Stall:
    """Train, save, train on. Collective: all ranks do the same number of steps."""
    # WHY the mean: the window below is a sum too, and its slow steps count.
    quiet_s = statistics.fmean(trainer.step() for _ in range(NUM_QUIET))
    dist.barrier()  # collective
    started_at = time.perf_counter()
    method.save(step)
    call_s = time.perf_counter() - started_at
    done_s = None if method.is_busy() else call_s
    worst_s = 0.0
    for _ in range(NUM_BUSY):
        worst_s = max(worst_s, trainer.step(method))
        if done_s is None and not method.is_busy():
            done_s = time.perf_counter() - started_at
    window_s = time.perf_counter() - started_at
    method.finish()
    return Stall(
        stall_s=window_s - NUM_BUSY * quiet_s,
        call_s=call_s,
        done_s=time.perf_counter() - started_at if done_s is None else done_s,
        worst_step_ms=1000 * worst_s,
        quiet_step_ms=1000 * quiet_s,
        outlasted=done_s is None,
    )


if __name__ == "__main__":
    main()

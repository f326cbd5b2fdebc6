"""The works that all contenders do, and the bars that this project has to clear on each.

Owns the numbers; no torch here, so that the drivers start at once. What they train is in
peers/work.py. Adam's learning rate and the like are the same for all and stand there too.
"""

import os
from dataclasses import dataclass
from pathlib import Path

NUM_RANKS = 2
NUM_EPOCHS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """One work: a model, its data and its batch."""

    name: str
    about: str
    data: str
    """The first part of the files' names in the data folder: mnist or noise. text: no file."""

    num_images: int
    """In those files; of texts: their number."""

    repeat: int
    """How often the images are repeated, to make an epoch long enough to time."""

    batch_size: int
    """Per rank."""

    steady_bar: float
    """Needed steady samples/s of ddp_training.py, as a multiple of the bare loop."""

    @property
    def samples_per_epoch(self) -> int:
        """Whole batches on all ranks, so that no contender pads, drops or has a short one."""
        global_batch = self.batch_size * NUM_RANKS
        return self.num_images * self.repeat // global_batch * global_batch

    @property
    def num_steps(self) -> int:
        """Optimizer steps of the whole run; a contender that does more or fewer is refused."""
        return self.samples_per_epoch // (self.batch_size * NUM_RANKS) * NUM_EPOCHS


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            name="tiny",
            about="MLP, 25,450 parameters, MNIST 28x28: a framework's own cost per step",
            data="mnist",
            num_images=5000,
            repeat=12,
            batch_size=64,
            steady_bar=1.45,
        ),
        Workload(
            name="mnist",
            about="CNN, 421,642 parameters, MNIST 28x28",
            data="mnist",
            num_images=5000,
            repeat=1,
            batch_size=64,
            steady_bar=1.05,
        ),
        Workload(
            name="resnet",
            about="ResNet-18, 11.2 million parameters, noise 64x64",
            data="noise",
            num_images=512,
            repeat=1,
            batch_size=32,
            steady_bar=1.20,
        ),
        Workload(
            name="gpt",
            about="GPT, 4 layers, 241,280 parameters, padded batches of texts of 16 to 128 bytes",
            data="text",
            num_images=640,
            repeat=1,
            batch_size=16,
            steady_bar=1.05,
        ),
    )
}


def bench_home() -> Path:
    """The folder that setup.sh fills: $BENCH_HOME, or ~/.cache/hardened-ddp-bench."""
    return Path(os.environ.get("BENCH_HOME", "~/.cache/hardened-ddp-bench")).expanduser()

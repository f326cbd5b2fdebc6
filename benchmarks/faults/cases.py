"""The faults, the contenders, and the commands that run them.

Owns the numbers of the work too; no torch here.
"""

from dataclasses import dataclass
from pathlib import Path

NUM_RANKS = 2
NUM_EPOCHS = 5
NUM_SAMPLES = 1408  # of the 1,437 digits: whole batches on 2 ranks and on 1, so nobody pads
BATCH_SIZE = 32
SAVE_EVERY = 5
HANG_LIMIT_S = 60.0
TOTAL_STEPS = NUM_SAMPLES // (BATCH_SIZE * NUM_RANKS) * NUM_EPOCHS

OURS, OURS_GOING_ON = "ddp_training.py", "ddp_training.py --continue_on_error"
# The second start gives the run's name and no other setting, as README.md shows.
OURS_BY_NAME = "ddp_training.py, continued by name"
PEERS = {
    "bare": "bare",
    "accelerate": "with_accelerate",
    "lightning": "with_lightning",
    "trainer": "with_trainer",
}
CONTENDERS = (*PEERS, OURS, OURS_BY_NAME, OURS_GOING_ON)
# What a contender calls a checkpoint, in its output folder; the newest by time is the one it loads.
CHECKPOINTS = {
    "bare": "snapshot.pt",
    "accelerate": "step_*",
    "lightning": "*.ckpt",
    "trainer": "checkpoint-*",
    **dict.fromkeys((OURS, OURS_BY_NAME, OURS_GOING_ON), "fault/checkpoints/step-*"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One thing that goes wrong in step FAULT_STEP on rank 1, and what is done after it."""

    name: str
    title: str
    kind: str
    """What incident.py does."""

    max_restarts: int = 0
    """Of torchrun."""

    num_workers: tuple[int, int] = (0, 0)
    """Of the DataLoader, before and after."""

    ranks_after: int = NUM_RANKS
    cuts_checkpoint: bool = False
    """Half of the newest checkpoint's largest file is gone before the second start."""

    is_stateful: bool = False
    can_go_on: bool = False
    """--continue_on_error is made for this, so ours runs with and without it."""

    limit_s: float = HANG_LIMIT_S
    """Without a step and without an end, since the fault or the last step: it hangs."""

    only_once: bool = False
    """The same command is not given again."""

    def concerns(self, contender: str) -> bool:
        """Say whether a contender differs under this fault from one that runs anyway."""
        if contender == OURS_BY_NAME:
            return self.ranks_after != NUM_RANKS
        return contender != OURS_GOING_ON or self.can_go_on


FAULTS = {
    fault.name: fault
    for fault in (
        Fault(name="sigterm", title="SIGTERM to rank 1", kind="sigterm"),
        Fault(name="kill", title="kill -9 of rank 1; the same command again", kind="kill"),
        Fault(
            name="kill_restart",
            title="kill -9 of rank 1; torchrun --max_restarts=1",
            kind="kill",
            max_restarts=1,
        ),
        Fault(
            name="cut_checkpoint",
            title="newest checkpoint cut in half, then resume",
            kind="kill",
            cuts_checkpoint=True,
        ),
        Fault(name="resize", title="resume on 1 rank instead of 2", kind="kill", ranks_after=1),
        Fault(
            name="stateful_same",
            title="torchdata's loader: resume with nothing changed",
            kind="kill",
            num_workers=(2, 2),
            is_stateful=True,
        ),
        Fault(
            name="stateful_workers",
            title="torchdata's loader: resume with 1 worker instead of 2",
            kind="kill",
            num_workers=(2, 1),
            is_stateful=True,
        ),
        Fault(
            name="stateful_resize",
            title="torchdata's loader: resume on 1 rank instead of 2",
            kind="kill",
            ranks_after=1,
            num_workers=(2, 2),
            is_stateful=True,
        ),
        Fault(
            name="out_of_memory",
            title="out of memory in forward on rank 1, once",
            kind="out_of_memory",
            can_go_on=True,
        ),
        Fault(
            name="backward",
            title="an error in backward on rank 1, once",
            kind="backward",
            can_go_on=True,
        ),
        Fault(
            name="hang",
            title="rank 1 hangs in forward, once; torchrun --max_restarts=1",
            kind="hang",
            max_restarts=1,
            limit_s=150.0,
        ),
        Fault(
            name="bad_sample",
            title="one sample can't be read, ever",
            kind="bad_sample",
            can_go_on=True,
        ),
        Fault(name="nan", title="NaN loss on rank 1, once", kind="nan", can_go_on=True),
        Fault(
            name="unused",
            title="a layer unused on rank 1 from step 34 on",
            kind="unused",
            can_go_on=True,
        ),
        Fault(name="agent", title="kill -9 of torchrun itself", kind="agent", only_once=True),
        Fault(
            name="worker",
            title="kill -9 of a DataLoader worker of rank 1",
            kind="worker",
            num_workers=(2, 2),
        ),
    )
}


def command(contender: str, fault: Fault, *, is_again: bool, home: Path, output: Path) -> list[str]:
    """Give the command of the first start, or of the one after the fault."""
    num_ranks = fault.ranks_after if is_again else NUM_RANKS
    num_workers = fault.num_workers[is_again]
    # WHY more epochs: who outlives torchrun must not be done by the time that one looks.
    epochs = 1000 if fault.kind == "agent" else NUM_EPOCHS
    launcher = [str(home / "venv/bin/torchrun"), "--standalone", f"--nproc_per_node={num_ranks}"]
    launcher += [f"--max_restarts={fault.max_restarts}"]
    common = ["--epochs", str(epochs), "--num_workers", str(num_workers)]
    common += ["--output_dir", str(output)]
    if contender in PEERS:
        is_stateful = fault.is_stateful and contender != "trainer"  # it has no such option
        module = ["--module", f"benchmarks.faults.{PEERS[contender]}"]
        return [*launcher, *module, *common, *(["--stateful"] if is_stateful else [])]
    if contender == OURS_BY_NAME and is_again:
        return [*launcher, "ddp_training.py", "--run_name", "fault", "--output_dir", str(output)]
    own = ["--dataset", "benchmarks.faults.task:dataset", "--model", "benchmarks.faults.task:model"]
    own += ["--batch_size", str(BATCH_SIZE), "--checkpoint_every_steps", str(SAVE_EVERY)]
    own += ["--run_name", "fault", "--eval_every", "0", "--lr_schedule", "constant"]
    if contender == OURS_GOING_ON:
        own.append("--continue_on_error")
    return [*launcher, "ddp_training.py", *own, *common]

"""The verdicts of an audit: how bad each is, what it means, and how to mend it in plain torch.

error: the result is wrong, or the program hangs. warning: the result is worse than it could be, or
is right by luck. advice: speed, or something that may be meant so; it never counts as a mistake.
docs/AUDIT.md shows this table; tests compare the two.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "advice"]


@dataclass(frozen=True, slots=True)
class Kind:
    """What all verdicts of one code have in common."""

    severity: Severity
    meaning: str
    fix: str


# Each code with its meaning, and below it the fix.
_ERRORS = """
no-process-group: the processes train without a process group, each its own model
    dist.init_process_group("nccl" or "gloo"), then wrap the model in DistributedDataParallel
gradients-not-averaged: the gradients differ between ranks at the optimizer's step
    wrap the complete model in DistributedDataParallel, call that object in training, and let the
    last backward of each step run outside no_sync()
weights-differ: the ranks hold different weights
    load weights before the DDP wrap, or on all ranks; change them on all ranks alike
learning-rates-differ: the ranks step with different learning rates
    give the scheduler a value that is equal on all ranks: all-reduce the metric first
same-samples: several ranks train on the same samples
    DataLoader(..., sampler=DistributedSampler(dataset)); an iterable dataset gives rank r every
    world_size-th sample, beginning with r
samples-overlap: the ranks' shares of an epoch overlap
    use one DistributedSampler on all ranks, with the same seed, and no shuffle=True besides
samples-missing: no rank uses some of the samples
    leave num_replicas and rank of DistributedSampler to the process group; give Accelerate's
    prepare() a loader without a DistributedSampler
samples-repeated: each worker of the DataLoader gives the whole dataset
    split it in __iter__ by torch.utils.data.get_worker_info(), and by rank
same-order: all epochs have the same order
    call sampler.set_epoch(epoch) at the start of each epoch
uneven-steps: the ranks have different numbers of batches
    DistributedSampler makes them equal; or drop_last=True, or `with model.join():`
gradients-not-zeroed: gradients add up over all steps
    call optimizer.zero_grad() once per step
accumulation-lost: of the batches of a step only the last one counts
    call optimizer.zero_grad() after the step, not before each batch
parameter-not-in-optimizer: a parameter is trained by DDP, and updated by no optimizer
    make the optimizer from model.parameters(), after the model has its last form
clipped-before-unscale: scaled gradients are clipped
    scaler.unscale_(optimizer) before clip_grad_norm_
clipped-before-all-reduce: each rank clips its own gradients
    clip once per step, after the last backward, which averages
clipped-after-step: gradients are clipped when the step is done
    clip between the last backward and optimizer.step()
evaluation-in-train-mode: dropout or BatchNorm is in train mode in an evaluation
    model.eval() before it, model.train() afterwards
train-mode-lost: the model trains on in the mode of evaluation
    model.train() after each evaluation, or at the start of each epoch
collectives-differ: the ranks call different collectives, or in another order
    every rank calls every collective: move it out of conditions on the rank
hang: no rank makes progress
    look at the lines where the ranks stand: the one that does not wait is the cause
exception: the program fails
    mend what the exception says; its traceback is in the program's own output
same-file: several ranks write one file
    write under `if dist.get_rank() == 0:`, or put the rank into the name
hard-coded-device: all ranks use the same GPU
    use the local rank: torch.cuda.set_device(int(os.environ["LOCAL_RANK"])), then "cuda"
"""
_WARNINGS = """
buffers-differ: the statistics of BatchNorm, or other buffers, differ between ranks
    leave broadcast_buffers=True, or use torch.nn.SyncBatchNorm.convert_sync_batchnorm; all-reduce
    what a buffer is computed from
accumulation-not-divided: the gradients of a step's batches are added, not averaged
    (loss / accumulation_steps).backward()
divided-twice: the gradients are divided once too often
    drop the division: DDP divides by the world size, Accelerate's accumulate() by the steps
scaled-by-world-size: the gradients are multiplied by the world size
    drop the factor: DDP's average is that of the whole batch; after an all-reduce of your own
    divide by the world size
schedule-too-long: the learning rate's schedule is planned for too many steps
    plan epochs * len(train_loader) of the divided loader, and scheduler.step() after each of them
schedule-too-short: the learning rate's schedule is planned for too few steps
    one scheduler.step() per planned step: for each batch, or epoch; what Accelerate prepares steps
    num_processes times, so plan it before the loader is prepared, or do not prepare it
parameter-never-moves: a parameter stays as it was made
    use it in the loss (is there a detach too many?), give it a learning rate, or set
    requires_grad=False
same-dropout: all ranks use the same dropout masks
    torch.manual_seed(seed + rank), after the model is made
same-noise: all ranks draw the same random numbers in training
    torch.manual_seed(seed + rank), after the model is made; or a torch.Generator per rank
same-augmentation: all ranks augment with the same random numbers
    torch.manual_seed(seed + rank) before the DataLoader starts; seed numpy and random, too
evaluation-not-joined: a metric covers one rank's share of the data
    dist.all_reduce sums and counts, then divide; in Lightning self.log(..., sync_dist=True)
evaluation-padded: some samples are evaluated twice
    Subset(dataset, range(rank, len(dataset), world_size)) for evaluation: no padding; with
    Accelerate gather_for_metrics instead of gather; or cut what is gathered to len(dataset)
no-sync-without-effect: no_sync() around backward alone does nothing
    put the forward inside, too: with model.no_sync(): loss_fn(model(x), y).backward()
"""
_ADVICE = """
slow-rank: one rank makes all others wait
    compare its data, its CPU load and its GPU clocks with those of the others
slow-data: the step waits for data
    more num_workers, persistent_workers=True, pin_memory=True, cheaper transforms
find-unused-needless: find_unused_parameters searches for nothing
    drop find_unused_parameters=True
no-sync-missing: gradients are averaged more often than steps are made
    with model.no_sync(): forward and backward of all batches but the last of a step
"""


def _read(severity: Severity, table: str) -> Iterator[tuple[str, Kind]]:
    for entry in table.strip().replace("\n    ", "\t").splitlines():
        head, *fix = entry.split("\t")
        code, _, meaning = head.partition(": ")
        yield code, Kind(severity, meaning, " ".join(fix))


CATALOGUE: Mapping[str, Kind] = {
    **dict(_read("error", _ERRORS)),
    **dict(_read("warning", _WARNINGS)),
    **dict(_read("advice", _ADVICE)),
}

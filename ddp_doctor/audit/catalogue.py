"""The verdicts of an audit: how bad each is, what it means, and how to mend it in plain torch.

error: the result is wrong, or the program hangs. warning: the result is worse than it could be, or
is right by luck. advice: speed, or something that may be meant so; it never counts as a mistake.
docs/AUDIT.md shows this table; tests compare the two.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Severity = Literal["error", "warning", "advice"]


@dataclass(frozen=True, slots=True)
class Kind:
    """What all verdicts of one code have in common."""

    severity: Severity
    meaning: str
    fix: str


SOURCE: Mapping[str, Kind] = {
    "bypasses-ddp": Kind(
        "error",
        "training calls model.module, so DDP does not average the gradients",
        "call the DDP object: loss_fn(model(x), y); model.module is for saving and evaluation",
    ),
    "set-epoch-missing": Kind(
        "error",
        "DistributedSampler gives the same order in every epoch",
        "call sampler.set_epoch(epoch) at the start of every epoch",
    ),
    "collective-on-one-rank": Kind(
        "error",
        "only one rank calls a collective, so it waits forever",
        "call it on all ranks: move it out of the condition",
    ),
    "ddp-forward-on-one-rank": Kind(
        "error",
        "only one rank calls DDP's forward, which has collectives of its own",
        "call model.module(x) under torch.no_grad() there, or call model(x) on all ranks",
    ),
    "save-on-all-ranks": Kind(
        "error",
        "all ranks write one file at the same time",
        "save under `if dist.get_rank() == 0:`, then dist.barrier() on all ranks",
    ),
    "local-rank-argument": Kind(
        "error",
        "the script expects --local_rank, which torchrun does not pass",
        'read it from the environment: local_rank = int(os.environ["LOCAL_RANK"])',
    ),
    "hard-coded-device": Kind(
        "error",
        "all ranks use the same GPU",
        'use the local rank: torch.cuda.set_device(int(os.environ["LOCAL_RANK"])), then "cuda"',
    ),
}
OBSERVED: Mapping[str, Kind] = {
    "no-process-group": Kind(
        "error",
        "the processes train without a process group, each its own model",
        'dist.init_process_group("nccl" or "gloo"), then wrap the model in DistributedDataParallel',
    ),
    "gradients-not-averaged": Kind(
        "error",
        "the gradients differ between ranks at the optimizer's step",
        "wrap the complete model in DistributedDataParallel, call that object in training, and let "
        "the last backward of each step run outside no_sync()",
    ),
    "weights-differ": Kind(
        "error",
        "the ranks hold different weights",
        "load weights before the DDP wrap, or on all ranks; change them on all ranks alike",
    ),
    "buffers-differ": Kind(
        "warning",
        "the statistics of BatchNorm, or other buffers, differ between ranks",
        "leave broadcast_buffers=True, or use torch.nn.SyncBatchNorm.convert_sync_batchnorm; "
        "all-reduce what a buffer is computed from",
    ),
    "learning-rates-differ": Kind(
        "error",
        "the ranks step with different learning rates",
        "give the scheduler a value that is equal on all ranks: all-reduce the metric first",
    ),
    "same-samples": Kind(
        "error",
        "several ranks train on the same samples",
        "DataLoader(..., sampler=DistributedSampler(dataset)); an iterable dataset gives rank r "
        "every world_size-th sample, beginning with r",
    ),
    "samples-overlap": Kind(
        "error",
        "the ranks' shares of an epoch overlap",
        "use one DistributedSampler on all ranks, with the same seed, and no shuffle=True besides",
    ),
    "samples-missing": Kind(
        "error",
        "no rank uses some of the samples",
        "leave num_replicas and rank of DistributedSampler to the process group",
    ),
    "samples-repeated": Kind(
        "error",
        "each worker of the DataLoader gives the whole dataset",
        "split it in __iter__ by torch.utils.data.get_worker_info(), and by rank",
    ),
    "same-order": Kind(
        "error",
        "all epochs have the same order",
        "call sampler.set_epoch(epoch) at the start of each epoch",
    ),
    "uneven-steps": Kind(
        "error",
        "the ranks have different numbers of batches",
        "DistributedSampler makes them equal; or drop_last=True, or `with model.join():`",
    ),
    "gradients-not-zeroed": Kind(
        "error",
        "gradients add up over all steps",
        "call optimizer.zero_grad() once per step",
    ),
    "accumulation-lost": Kind(
        "error",
        "of the batches of a step only the last one counts",
        "call optimizer.zero_grad() after the step, not before each batch",
    ),
    "accumulation-not-divided": Kind(
        "warning",
        "the gradients of a step's batches are added, not averaged",
        "(loss / accumulation_steps).backward()",
    ),
    "divided-twice": Kind(
        "warning",
        "the gradients are divided once too often",
        "drop the division: DDP divides by the world size, Accelerate's accumulate() by the steps",
    ),
    "scaled-by-world-size": Kind(
        "warning",
        "the gradients are multiplied by the world size",
        "drop the factor: DDP's average is that of the whole batch; after an all-reduce of your "
        "own divide by the world size",
    ),
    "parameter-not-in-optimizer": Kind(
        "error",
        "a parameter is trained by DDP, and updated by no optimizer",
        "make the optimizer from model.parameters(), after the model has its last form",
    ),
    "parameter-never-moves": Kind(
        "warning",
        "a parameter stays as it was made",
        "use it in the loss (is there a detach too many?), give it a learning rate, or set "
        "requires_grad=False",
    ),
    "clipped-before-unscale": Kind(
        "error",
        "scaled gradients are clipped",
        "scaler.unscale_(optimizer) before clip_grad_norm_",
    ),
    "clipped-before-all-reduce": Kind(
        "error",
        "each rank clips its own gradients",
        "clip once per step, after the last backward, which averages",
    ),
    "same-dropout": Kind(
        "warning",
        "all ranks use the same dropout masks",
        "torch.manual_seed(seed + rank), after the model is made",
    ),
    "same-augmentation": Kind(
        "warning",
        "all ranks augment with the same random numbers",
        "torch.manual_seed(seed + rank) before the DataLoader starts; seed numpy and random, too",
    ),
    "evaluation-in-train-mode": Kind(
        "error",
        "dropout or BatchNorm is in train mode in an evaluation",
        "model.eval() before it, model.train() afterwards",
    ),
    "evaluation-not-joined": Kind(
        "warning",
        "a metric covers one rank's share of the data",
        "dist.all_reduce sums and counts, then divide",
    ),
    "evaluation-padded": Kind(
        "warning",
        "some samples are evaluated twice",
        "Subset(dataset, range(rank, len(dataset), world_size)) for evaluation: no padding",
    ),
    "collectives-differ": Kind(
        "error",
        "the ranks call different collectives, or in another order",
        "every rank calls every collective: move it out of conditions on the rank",
    ),
    "hang": Kind(
        "error",
        "no rank makes progress",
        "look at the lines where the ranks stand: the one that does not wait is the cause",
    ),
    "exception": Kind(
        "error",
        "the program fails",
        "mend what the exception says; its traceback is in the program's own output",
    ),
    "same-file": Kind(
        "error",
        "several ranks write one file",
        "write under `if dist.get_rank() == 0:`, or put the rank into the name",
    ),
    "slow-rank": Kind(
        "advice",
        "one rank makes all others wait",
        "compare its data, its CPU load and its GPU clocks with those of the others",
    ),
    "slow-data": Kind(
        "advice",
        "the step waits for data",
        "more num_workers, persistent_workers=True, pin_memory=True, cheaper transforms",
    ),
    "find-unused-needless": Kind(
        "advice",
        "find_unused_parameters searches for nothing",
        "drop find_unused_parameters=True",
    ),
    "static-graph-possible": Kind(
        "advice",
        "the graph is the same in every step",
        "DistributedDataParallel(model, static_graph=True) instead of find_unused_parameters",
    ),
    "bucket-view-possible": Kind(
        "advice",
        "gradients are kept twice",
        "DistributedDataParallel(model, gradient_as_bucket_view=True)",
    ),
    "no-sync-without-effect": Kind(
        "warning",
        "no_sync() around backward alone does nothing",
        "put the forward inside, too: with model.no_sync(): loss_fn(model(x), y).backward()",
    ),
    "no-sync-missing": Kind(
        "advice",
        "gradients are averaged more often than steps are made",
        "with model.no_sync(): forward and backward of all batches but the last of a step",
    ),
}
CATALOGUE: Mapping[str, Kind] = {**SOURCE, **OBSERVED}

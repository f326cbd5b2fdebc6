"""Faults inside of a step: exceptions, memory, NaN, hangs; and full disks."""

import signal
from collections.abc import Iterator

from ddp_drills.fault import ALL, LAST, WATCHED, Fault
from ddp_drills.injections import Injection


def all_step_faults() -> Iterator[Fault]:
    """Yield all of them."""
    for family in (_errors, _memory, _numbers, _waits, _models, _places):
        yield from family()


def _errors() -> Iterator[Fault]:
    """An exception inside of a step, once."""
    kinds = {"forward": "raise", "loss": "too few", "backward": "raise"}
    groups = {"one": LAST, "some": (), "all": ALL}
    for phase, kind in kinds.items():
        for who, ranks in groups.items():
            yield Fault(
                name=f"raise-{phase}-{who}",
                text=f"{who} of the ranks raise an exception in {phase}, once".replace(
                    "one of the ranks raise", "one rank raises"
                ).replace("all of the", "all"),
                # Some: rank 0 and the last but one, which are the same where there are two.
                injections=(
                    Injection(kind=kind, phase=phase, ranks=ranks if who != "some" else (0, -2)),
                ),
                says=("retrying step",),
                min_ranks=1 if who == "all" else 2,
            )
    yield Fault(
        name="raise-optimizer",
        text="one rank raises an exception in the optimizer's step",
        injections=(Injection(kind="raise", phase="optimizer", ranks=LAST),),
        ends="stops",
        code="DDP-S01",
        says=("a fault of the drill",),
        min_ranks=2,
    )
    yield Fault(
        name="raise-evaluation",
        text="one rank raises an exception in the evaluation",
        injections=(Injection(kind="raise", phase="evaluation", ranks=LAST),),
        ends="stops",
        code="DDP-S01",
        says=("a fault of the drill",),
        min_ranks=2,
    )
    yield Fault(
        name="disk-error",
        text="the disk gives a read error (EIO), once",
        injections=(Injection(kind="disk", phase="data", ranks=LAST),),
    )


def _memory() -> Iterator[Fault]:
    """Out of memory."""
    for phase in ("forward", "backward"):
        yield Fault(
            name=f"memory-{phase}",
            text=f"one rank runs out of memory in {phase}, once: smaller micro-batches",
            injections=(Injection(kind="memory", phase=phase, ranks=LAST),),
            says=("at most from now on",),
            keeps="near weights",
        )
    yield Fault(
        name="memory-optimizer",
        text="one rank runs out of memory in the optimizer's step",
        injections=(Injection(kind="memory", phase="optimizer", ranks=LAST),),
        ends="stops",
        code="DDP-S02",
    )
    yield Fault(
        name="memory-evaluation",
        text="one rank runs out of memory in the evaluation",
        injections=(Injection(kind="memory", phase="evaluation", ranks=LAST),),
        ends="stops",
        code="DDP-S02",
    )


def _numbers() -> Iterator[Fault]:
    """NaN, and wrong numbers."""
    yield Fault(
        name="nan-once",
        text="the loss of one rank is NaN, once",
        injections=(Injection(kind="nan", phase="loss", ranks=LAST),),
        says=("retrying step", "the loss is nan"),
    )
    yield Fault(
        name="nan-repeated",
        text="the loss of one rank is NaN in every step from some step on",
        injections=(Injection(kind="nan", phase="loss", ranks=LAST, lasts=True),),
        ends="stops",
        code="DDP-S03",
        says=("the loss is nan",),
    )
    yield Fault(
        name="nan-gradient",
        text="the loss of one rank is finite, its gradient is NaN, once",
        injections=(Injection(kind="nan gradient", phase="backward", ranks=LAST),),
        says=("retrying step", "is not finite"),
    )
    yield Fault(
        name="bit-flip",
        text="a bit of a weight flips on one rank; replicas are compared every 10 steps",
        injections=(Injection(kind="bit", phase="update", step=17, ranks=LAST),),
        flags=("--check_replicas_every", "10"),
        says=("the replicas are not equal", "going back to the checkpoint"),
        min_ranks=2,
    )
    yield Fault(
        name="bit-flip-early",
        text="a bit of a weight flips before the first checkpoint with compared replicas",
        injections=(Injection(kind="bit", phase="update", ranks=LAST),),
        ends="stops",
        code="DDP-S05",
        says=("the replicas are not equal",),
        min_ranks=2,
    )
    yield Fault(
        name="unused-parameter",
        text="one rank stops using a layer at some step",
        injections=(Injection(kind="detach", phase="layer", ranks=LAST, lasts=True),),
        says=("find_unused_parameters is on from now",),
        keeps="equal replicas",
        min_ranks=2,
    )


def _waits() -> Iterator[Fault]:
    """A rank that is slow or hangs."""
    yield Fault(
        name="straggler",
        text="one rank takes a second longer for one step",
        injections=(Injection(kind="sleep", phase="forward", ranks=LAST, seconds=1.0),),
    )
    yield Fault(
        name="lock-of-python",
        text="native code holds the GIL for a second, on one rank",
        injections=(Injection(kind="hold the GIL", phase="forward", ranks=LAST),),
    )
    for phase, kind, text in (
        ("data", "hang", "reading a sample hangs"),
        ("forward", "hang", "forward hangs"),
        ("collective", "collective", "the model calls a collective that the others don't"),
    ):
        yield Fault(
            name=f"hang-{phase}",
            text=f"{text}, on one rank",
            injections=(
                Injection(kind=kind, phase="data" if phase == "data" else "forward", ranks=LAST),
            ),
            # WHY the second one: else reading a sample may take two minutes
            flags=(*WATCHED, "--loader_timeout_s", "1.5"),
            ends="stops",
            code="DDP-G05",
            says=(", step 7, ", "rank 0 waits in all-reduce"),
            min_ranks=2,
        )
    yield Fault(
        name="stuck-collective",
        text="a rank is killed, and its connections stay open: the all-reduce never ends, as on "
        "NCCL",
        injections=(Injection(kind="die in silence", phase="backward", ranks=LAST),),
        flags=("--no_shared_memory", *WATCHED),
        ends="stops",
        says=("the state after step 7 is saved",),
        min_ranks=2,
    )
    yield Fault(
        name="slow-storage",
        text="reading a sample takes 33 seconds on one rank, which is allowed to take any time",
        injections=(Injection(kind="sleep", phase="data", ranks=LAST, seconds=33.0),),
        flags=("--loader_timeout_s", "0", *WATCHED),
        # WHY not its end: the watch may tell it after the few steps that are left
        says=("slow storage: rank",),
    )


def _models() -> Iterator[Fault]:
    """What a model does beside its numbers: collectives of its own, buffers."""
    yield Fault(
        name="forward-collective",
        text="the model calls a collective in each forward, as SyncBatchNorm does",
        injections=(Injection(kind="collective", phase="forward", step=0, ranks=ALL, lasts=True),),
        says=("the model's forward runs collectives (all_reduce in",),
        min_ranks=2,
    )
    yield Fault(
        name="uneven-collective",
        text="the model calls a collective in each forward, and a rank could lack a forward: "
        "refused",
        injections=(Injection(kind="collective", phase="forward", step=0, ranks=ALL, lasts=True),),
        flags=("--continue_on_error",),
        ends="stops",
        code="DDP-M01",
        says=("in which all ranks wait for each other",),
        min_ranks=2,
    )
    yield Fault(
        name="synced-norm-tail",
        text="the model normalises over all ranks, as SyncBatchNorm; an epoch ends with unequal "
        "shares",
        injections=(Injection(kind="normalise", phase="forward", step=0, ranks=ALL, lasts=True),),
        # WHY: of the 69 samples that the digits leave for the last step of 2 ranks, one has 18
        # micro-batches of 2 and the other 17
        flags=("--batch_size", "2", "--accumulation_steps", "18"),
        says=("the model's forward runs collectives (all_reduce in",),
        keeps="equal replicas",
        min_ranks=2,
    )
    yield Fault(
        name="late-buffer",
        text="a buffer of the model begins to change at some step, differently on each rank",
        injections=(Injection(kind="move a buffer", phase="forward", ranks=ALL, lasts=True),),
        flags=("--check_replicas_every", "5"),
        says=("buffers began to change in forward",),
        keeps="equal replicas",
        min_ranks=2,
    )


def _places() -> Iterator[Fault]:
    """The disk, files, and the output."""
    yield Fault(
        name="disk-full",
        text="the disk is full for a while: no checkpoint can be written",
        injections=(
            Injection(kind="pause", phase="forward", ranks=(0,), victim=0),
            Injection(kind="pause", phase="forward", step=24, ranks=(0,), victim=0),
        ),
        outside="full disk",
        says=("no new checkpoint, training continues",),
    )
    for word, text in (
        ("torn", "the newest checkpoint is truncated to half"),
        ("flipped", "a bit of the newest checkpoint flips"),
    ):
        yield Fault(
            name=f"{word}-checkpoint",
            text=f"a run is stopped, then {text}",
            injections=(Injection(kind="pause", phase="forward", step=12, ranks=(0,), victim=0),),
            signal=signal.SIGTERM,
            outside=f"{word} checkpoint",
            ends="saves",
            says=("passed over the checkpoint",),
        )
    yield Fault(
        name="closed-output",
        text="the reader of the output closes the pipe",
        injections=(Injection(kind="close output", phase="update", ranks=ALL),),
    )

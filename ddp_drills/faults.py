"""The list of all faults: of whole ranks, inside of a step, and of data."""

import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from ddp_drills.fault import ALL, HANGS, LAST, WATCHED, Fault
from ddp_drills.injections import Injection

# Two workers, for training only: each takes a second or more to start.
_LOADS = ("--num_workers", "2", "--loader_timeout_s", "2", "--eval_every", "0")
# In all-reduce, or in agreement on a stop: which one comes first depends on the pace.
_WAITS = "rank 0 waits in a"
_stops = partial(Fault, ends="stops", min_ranks=2)


def all_faults() -> list[Fault]:
    """List all faults, in the order of the table."""
    of_ranks = (_signals, _first_and_all, _starts, _launchers)
    of_steps = (_errors, _memory, _numbers, _waits, _models, _places)
    return [fault for family in (*of_ranks, *of_steps, _workers, _samples) for fault in family()]


def find(name: str) -> Fault | None:
    return next((fault for fault in all_faults() if fault.name == name), None)


def _once(kind: str, phase: str) -> tuple[Injection, ...]:
    """Have it happen on the last rank, once."""
    return (Injection(kind=kind, phase=phase, ranks=LAST),)


def _moment(phase: str) -> tuple[Injection, ...]:
    """Let the last rank pause in a phase, so that the fault happens there."""
    if phase == "checkpoint":
        return ()
    if phase != "sum":
        return _once("pause", phase)
    late = Injection(kind="pause while another rank waits", phase="forward", ranks=(0,))
    return (Injection(kind="pass", phase="backward", ranks=LAST), late)


_PHASES = {
    "data": "while it reads samples",
    "forward": "in forward",
    "backward": "in backward",
    "sum": "while it waits for the others' gradients",
    "optimizer": "before it updates the weights",
    "evaluation": "in the evaluation",
    "checkpoint": "while it writes a checkpoint",
}


_AFTER_BACKWARD = {"optimizer": "optimizer's step", "evaluation": "evaluation"}


def _signals() -> Iterator[Fault]:
    """A signal to one rank, in each phase."""
    for word, number, text in (
        ("kill", signal.SIGKILL, "is killed"),
        ("segfault", signal.SIGSEGV, "crashes (SIGSEGV)"),
        ("abort", signal.SIGABRT, "aborts (SIGABRT)"),
        ("stop", signal.SIGSTOP, "is stopped (SIGSTOP)"),
        ("sigterm", signal.SIGTERM, "gets SIGTERM"),
    ):
        for phase, where in _PHASES.items():
            code, says, flags = _expected(number, phase)
            yield Fault(
                name=f"{word}-{phase}",
                text=f"a rank {text} {where}",
                injections=_moment(phase),
                signal=number,
                outside="at a checkpoint" if phase == "checkpoint" else "",
                ends="saves" if number == signal.SIGTERM else "stops",
                code=code,
                says=says,
                flags=flags,
                min_ranks=2,
            )


def _expected(number: int, phase: str) -> tuple[str, tuple[str, ...], tuple[str, ...]]:
    """Return the expected code and texts after such a signal, and the settings of its drill."""
    if number == signal.SIGTERM:
        return "", ("SIGTERM: stopping",), ()
    if number != signal.SIGSTOP:
        return "DDP-G04", ("lost another rank",), ()
    if phase in ("evaluation", "checkpoint"):
        # WHY no code: the watch (G05) and the timeout (G04) notice it at about the same time.
        return "", ("ERROR [DDP-G0",), HANGS
    return "DDP-G05", ("the process is stopped (SIGSTOP)", _WAITS), WATCHED


def _first_and_all() -> Iterator[Fault]:
    """SIGKILL to rank 0, and to all ranks."""
    first = (Injection(kind="pause", phase="forward", ranks=(0,), victim=0),)
    yield _stops(
        name="kill-rank-0",
        text="rank 0, which serves the store and writes checkpoints, is killed in forward",
        injections=first,
        signal=signal.SIGKILL,
        code="DDP-G04",
        says=("lost another rank",),
    )
    yield Fault(
        name="kill-all",
        text="all ranks are killed at once, as by a power failure",
        injections=first,
        signal=signal.SIGKILL,
        outside="all ranks",
        ends="stops",
    )


def _starts() -> Iterator[Fault]:
    for outside, text, told in (
        ("port taken", "another program listens on the port of the rendezvous", "is taken"),
        ("unresolvable host", "the name of rank 0's host can't be resolved", "tried rank-0"),
        ("missing rank", "one rank never starts", "never joined"),
    ):
        yield _stops(
            name=outside.replace(" ", "-"),
            text=text,
            outside=outside,
            code="DDP-G01",
            says=(told,),
            flags=HANGS,
        )
    yield _stops(
        name="other-data",
        text="the dataset of one rank has one sample less",
        injections=(Injection(kind="shorter", phase="open", step=0, ranks=LAST, lasts=True),),
        code="DDP-G02",
        says=("the ranks would not train the same model",),
    )


def _launchers() -> Iterator[Fault]:
    yield Fault(
        name="torchrun-restart",
        text="a rank under torchrun --max_restarts is killed",
        injections=_once("pause", "forward"),
        signal=signal.SIGKILL,
        outside="torchrun",
        ends="restarts",
        code="DDP-G04",
        says=("resuming",),
        min_ranks=2,
    )
    yield _stops(
        name="torchrun-killed",
        text="torchrun itself is killed: its ranks save and exit",
        injections=_once("pause", "forward"),
        signal=signal.SIGKILL,
        outside="torchrun killed",
        says=("SIGTERM: stopping",),
    )


def _errors() -> Iterator[Fault]:
    kinds = {"forward": "raise", "loss": "too few", "backward": "raise"}
    groups: tuple[tuple[str, str, tuple[int, ...]], ...] = (
        ("one", "one rank raises", LAST),
        # Rank 0 and the last but one, which are the same where there are two.
        ("some", "some of the ranks raise", (0, -2)),
        ("all", "all ranks raise", ALL),
    )
    for phase, kind in kinds.items():
        for who, told, ranks in groups:
            yield Fault(
                name=f"raise-{phase}-{who}",
                text=f"{told} an exception in {phase}, once",
                injections=(Injection(kind=kind, phase=phase, ranks=ranks),),
                says=("retrying step",),
                min_ranks=1 if who == "all" else 2,
            )
    for phase, where in _AFTER_BACKWARD.items():
        yield _stops(
            name=f"raise-{phase}",
            text=f"one rank raises an exception in the {where}",
            injections=_once("raise", phase),
            code="DDP-S01",
            says=("a fault of the drill",),
        )
    yield Fault(
        name="disk-error",
        text="the disk gives a read error (EIO), once",
        injections=_once("disk", "data"),
    )


def _memory() -> Iterator[Fault]:
    for phase in ("forward", "backward"):
        yield Fault(
            name=f"memory-{phase}",
            text=f"one rank runs out of memory in {phase}, once: smaller micro-batches",
            injections=_once("memory", phase),
            says=("at most from now on",),
            keeps="near weights",
        )
    for phase, where in _AFTER_BACKWARD.items():
        yield Fault(
            name=f"memory-{phase}",
            text=f"one rank runs out of memory in the {where}",
            injections=_once("memory", phase),
            ends="stops",
            code="DDP-S02",
        )


def _numbers() -> Iterator[Fault]:
    yield Fault(
        name="nan-once",
        text="the loss of one rank is NaN, once",
        injections=_once("nan", "loss"),
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
        injections=_once("nan gradient", "backward"),
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
    yield _stops(
        name="bit-flip-early",
        text="a bit of a weight flips before the first checkpoint with compared replicas",
        injections=_once("bit", "update"),
        code="DDP-S05",
        says=("the replicas are not equal",),
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
    yield Fault(
        name="straggler",
        text="one rank takes a second longer for one step",
        injections=(Injection(kind="sleep", phase="forward", ranks=LAST, seconds=1.0),),
    )
    yield Fault(
        name="lock-of-python",
        text="native code holds the GIL for a second, on one rank",
        injections=_once("hold the GIL", "forward"),
    )
    for phase, kind, text in (
        ("data", "hang", "reading a sample hangs"),
        ("forward", "hang", "forward hangs"),
        ("collective", "collective", "the model calls a collective that the others don't"),
    ):
        yield _stops(
            name=f"hang-{phase}",
            text=f"{text}, on one rank",
            injections=(
                Injection(kind=kind, phase="data" if phase == "data" else "forward", ranks=LAST),
            ),
            # WHY the second one: else reading a sample may take two minutes
            flags=(*WATCHED, "--loader_timeout_s", "1.5"),
            code="DDP-G05",
            says=(", step 7, ", _WAITS),
        )
    yield _stops(
        name="stuck-collective",
        text="a rank is killed, and its connections stay open: the all-reduce never ends, as on "
        "NCCL",
        injections=_once("die in silence", "backward"),
        flags=("--no_shared_memory", *WATCHED),
        says=("the state after step 7 is saved",),
    )
    yield Fault(
        name="slow-storage",
        text="reading a sample takes 33 seconds on one rank, which is allowed to take any time",
        injections=(Injection(kind="sleep", phase="data", ranks=LAST, seconds=33.0),),
        flags=("--loader_timeout_s", "0", *WATCHED),
    )


def _models() -> Iterator[Fault]:
    """What a model does beside its numbers: collectives of its own, buffers."""
    collective = Injection(kind="collective", phase="forward", step=0, ranks=ALL, lasts=True)
    yield Fault(
        name="forward-collective",
        text="the model calls a collective in each forward, as SyncBatchNorm does",
        injections=(collective,),
        says=("the model's forward runs collectives (allreduce in",),
        min_ranks=2,
    )
    yield _stops(
        name="uneven-collective",
        text="the model calls a collective in each forward, and a rank could lack a forward: "
        "refused",
        injections=(collective,),
        flags=("--continue_on_error",),
        code="DDP-M01",
        says=("in which all ranks wait for each other",),
    )
    yield Fault(
        name="synced-norm-tail",
        text="the model normalises over all ranks, as SyncBatchNorm; an epoch ends with unequal "
        "shares",
        injections=(replace(collective, kind="normalise"),),
        # WHY: of the 69 samples that the digits leave for the last step of 2 ranks, one has 18
        # micro-batches of 2 and the other 17
        flags=("--batch_size", "2", "--accumulation_steps", "18"),
        says=("the model's forward runs collectives (allreduce in",),
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


def _workers() -> Iterator[Fault]:
    """Faults of a DataLoader worker."""
    for name, kind, text in (
        ("worker-kill", "kill itself", "is killed, as by the OOM killer"),
        ("worker-segfault", "segfault", "crashes in native code"),
        ("worker-bus", "bus", "gets SIGBUS, as when /dev/shm is full"),
        ("worker-exit", "exit", "exits with status 3"),
        ("worker-hang", "hang", "hangs"),
        ("memory-data", "host memory", "runs out of memory"),
    ):
        yield Fault(
            name=name,
            text=f"a DataLoader worker {text}, once",
            injections=(Injection(kind=kind, phase="worker", step=100, ranks=LAST),),
            flags=_LOADS,
            says=("No sample is lost",),
        )
    yield Fault(
        name="worker-unpicklable",
        text="the dataset can't be sent to the DataLoader workers",
        injections=(Injection(kind="unpicklable", phase="start", step=0, lasts=True),),
        flags=_LOADS,
        says=("the dataset or its collate can't be sent to a worker",),
    )


def _samples() -> Iterator[Fault]:
    for word, kind, text in (
        ("sample", "unreadable", "can't be read"),
        ("shape", "shape", "has another shape than the others"),
        ("label", "label", "has a label out of range"),
        ("input", "nan", "contains NaN"),
    ):
        injections = (Injection(kind=kind, phase="sample", lasts=True),)
        yield Fault(
            name=f"bad-{word}",
            text=f"a sample {text}",
            injections=injections,
            ends="stops",
            code="DDP-D02",
            says=("can't read sample SAMPLE",),
        )
        yield Fault(
            name=f"bad-{word}-left-out",
            text=f"a sample {text}, with --continue_on_error",
            injections=injections,
            flags=("--continue_on_error",),
            leaves_out=True,
            keeps="equal replicas",
            says=("left out sample SAMPLE",),
        )

"""The table of faults: what happens, and what is to come of it.

Owns: Fault, and the list of all of them by name. No torch: the list is told at once.
Does not own: how a fault happens (deeds.py inside of a rank, outside.py from outside), whether it
came as expected (compare.py).
"""

import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from hardened_ddp.drill.acts import Act

LAST = (-1,)
ALL: tuple[int, ...] = ()
HANGS = ("--timeout_s", "5")
LOADS = ("--num_workers", "2", "--loader_timeout_s", "2")
GOES_ON = ("--continue_on_error",)

Ends = Literal["goes on", "saves", "stops", "restarts"]
Keeps = Literal["same weights", "equal replicas"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One fault, and its expected verdict."""

    name: str
    text: str
    """What happens."""

    acts: tuple[Act, ...] = ()
    ends: Ends = "goes on"
    """saves: leaves with status 0 and a checkpoint; stops: with an error; restarts: by torchrun."""

    code: str = ""
    """The error that the user reads."""

    says: tuple[str, ...] = ()
    """Words that the user reads besides; SAMPLE stands for the number of the bad sample."""

    keeps: Keeps = "same weights"
    """equal replicas: rounding differs, because something was summed in another order or form."""

    leaves_out: bool = False
    """A sample is left out, and the ledger and the report say so."""

    flags: tuple[str, ...] = ()
    """Settings of this drill, beside those of the work."""

    signal: int = 0
    """Sent to the victim while it pauses."""

    outside: str = ""
    """What else is done, of outside.py."""

    min_ranks: int = 1

    @property
    def verdict(self) -> str:
        """Say in a line what is expected."""
        kept = "the same weights" if self.keeps == "same weights" else "equal replicas"
        if self.leaves_out:
            return "goes on without the sample, and says so; equal replicas"
        match self.ends:
            case "goes on":
                return f"goes on by itself to {kept}"
            case "saves":
                return f"saves, status 0; the same command goes on to {kept}"
            case "restarts":
                return f"torchrun starts it again; to {kept}"
        told = f"stops with {self.code}" if self.code else "ends"
        return f"{told}; the same command goes on to {kept}"


def find(name: str) -> Fault | None:
    """Give the fault of this name."""
    return next((fault for fault in all_faults() if fault.name == name), None)


def all_faults() -> list[Fault]:
    """List all faults, in the order of the table."""
    families = (_strikes, _errors, _memory, _workers, _samples, _numbers, _waits, _places, _starts)
    return [fault for family in families for fault in family()]


def _moment(phase: str) -> tuple[Act, ...]:
    """Have the last rank hold still in a phase, so that it can be struck there."""
    if phase == "checkpoint":
        return ()
    if phase != "sum":
        return (Act(kind="pause", phase=phase, ranks=LAST),)
    late = Act(kind="pause while another rank waits", phase="forward", ranks=(0,))
    return (Act(kind="pass", phase="backward", ranks=LAST), late)


_PHASES = {
    "data": "while it reads samples",
    "forward": "in forward",
    "backward": "in backward",
    "sum": "while it waits for the others' gradients",
    "optimizer": "before it updates the weights",
    "evaluation": "in the evaluation",
    "checkpoint": "while it writes a checkpoint",
}


def _strikes() -> Iterator[Fault]:
    """A signal to one rank, in each phase."""
    for word, number, text in (
        ("kill", signal.SIGKILL, "is killed"),
        ("segfault", signal.SIGSEGV, "crashes (SIGSEGV)"),
        ("abort", signal.SIGABRT, "aborts (SIGABRT)"),
        ("stop", signal.SIGSTOP, "is stopped for good (SIGSTOP)"),
        ("sigterm", signal.SIGTERM, "gets SIGTERM"),
    ):
        for phase, where in _PHASES.items():
            is_hang, is_kind = number == signal.SIGSTOP, number == signal.SIGTERM
            yield Fault(
                name=f"{word}-{phase}",
                text=f"a rank {text} {where}",
                acts=_moment(phase),
                signal=number,
                outside="at a checkpoint" if phase == "checkpoint" else "",
                ends="saves" if is_kind else "stops",
                code="" if is_kind else "DDP-G04",
                says=("SIGTERM: stopping",) if is_kind else ("lost another rank",),
                flags=HANGS if is_hang else (),
                min_ranks=2,
            )
    first = (Act(kind="pause", phase="forward", ranks=(0,), victim=0),)
    yield Fault(
        name="kill-rank-0",
        text="rank 0, which serves the store and writes checkpoints, is killed in forward",
        acts=first,
        signal=signal.SIGKILL,
        ends="stops",
        code="DDP-G04",
        says=("lost another rank",),
        min_ranks=2,
    )
    yield Fault(
        name="kill-all",
        text="all ranks are killed at once, as when the power fails",
        acts=first,
        signal=signal.SIGKILL,
        outside="strike all",
        ends="stops",
    )


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
                # WHY so: all but the last, which is rank 0 where there are two.
                acts=(Act(kind=kind, phase=phase, ranks=ranks if who != "some" else (0, -2)),),
                says=("the window is done again",),
                min_ranks=1 if who == "all" else 2,
            )
    yield Fault(
        name="raise-optimizer",
        text="one rank raises an exception in the optimizer's step",
        acts=(Act(kind="raise", phase="optimizer", ranks=LAST),),
        ends="stops",
        code="DDP-S01",
        says=("a fault of the drill",),
        min_ranks=2,
    )
    yield Fault(
        name="raise-evaluation",
        text="one rank raises an exception in the evaluation",
        acts=(Act(kind="raise", phase="evaluation", ranks=LAST),),
        ends="stops",
        code="DDP-S01",
        says=("a fault of the drill",),
        min_ranks=2,
    )
    yield Fault(
        name="disk-error",
        text="a read error of the disk, once (EIO): it is tried again",
        acts=(Act(kind="disk", phase="data", ranks=LAST),),
    )


def _memory() -> Iterator[Fault]:
    """Not enough memory."""
    for phase in ("forward", "backward"):
        yield Fault(
            name=f"memory-{phase}",
            text=f"one rank is out of memory in {phase}, once: smaller micro-batches",
            acts=(Act(kind="memory", phase=phase, ranks=LAST),),
            says=("at most from now on",),
            keeps="equal replicas",
        )
    yield Fault(
        name="memory-optimizer",
        text="one rank is out of memory in the optimizer's step",
        acts=(Act(kind="memory", phase="optimizer", ranks=LAST),),
        ends="stops",
        code="DDP-S02",
    )
    yield Fault(
        name="memory-evaluation",
        text="one rank is out of memory in the evaluation",
        acts=(Act(kind="memory", phase="evaluation", ranks=LAST),),
        ends="stops",
        code="DDP-S02",
    )
    yield Fault(
        name="memory-data",
        text="a process that loads samples is out of memory, once",
        acts=(Act(kind="memory of Python", phase="worker", step=100, ranks=LAST),),
        flags=LOADS,
        says=("No sample is lost",),
    )


def _workers() -> Iterator[Fault]:
    """What can become of a process that loads samples."""
    for word, kind, text in (
        ("kill", "die", "is killed, as for memory"),
        ("segfault", "segfault", "crashes in native code"),
        ("bus", "bus", "gets SIGBUS, as where /dev/shm is full"),
        ("exit", "leave", "ends by itself with status 3"),
        ("hang", "hang", "hangs"),
    ):
        yield Fault(
            name=f"worker-{word}",
            text=f"a process that loads samples {text}, once",
            acts=(Act(kind=kind, phase="worker", step=100, ranks=LAST),),
            flags=LOADS,
            says=("No sample is lost",),
        )
    yield Fault(
        name="worker-unpicklable",
        text="the dataset can't be sent to the processes that load",
        acts=(Act(kind="unpicklable", phase="start", step=0, lasts=True),),
        flags=LOADS,
        says=("the dataset can't be sent to a worker",),
    )


def _samples() -> Iterator[Fault]:
    """One sample is bad, always."""
    for word, kind, text, code in (
        ("sample", "unreadable", "can't be read", "DDP-D02"),
        ("shape", "shape", "has another shape than the others", "DDP-D02"),
        ("label", "label", "has a label out of range", "DDP-S01"),
        ("input", "not a number", "has NaN in it", "DDP-S03"),
    ):
        acts = (Act(kind=kind, phase="sample", lasts=True),)
        yield Fault(
            name=f"bad-{word}",
            text=f"a sample {text}",
            acts=acts,
            ends="stops",
            code=code,
            says=("SAMPLE",),
        )
        yield Fault(
            name=f"bad-{word}-left-out",
            text=f"a sample {text}, and --continue_on_error",
            acts=acts,
            flags=GOES_ON,
            leaves_out=True,
            keeps="equal replicas",
            says=("left out sample SAMPLE",),
        )


def _numbers() -> Iterator[Fault]:
    """Numbers that are none, or that are wrong."""
    yield Fault(
        name="nan-once",
        text="the loss of one rank is NaN, once",
        acts=(Act(kind="not a number", phase="loss", ranks=LAST),),
        says=("the window is done again", "the loss is nan"),
    )
    yield Fault(
        name="nan-repeated",
        text="the loss of one rank is NaN in each step from some step on",
        acts=(Act(kind="not a number", phase="loss", ranks=LAST, lasts=True),),
        ends="stops",
        code="DDP-S03",
        says=("the loss is nan",),
    )
    yield Fault(
        name="nan-gradient",
        text="the loss of one rank is a number, its gradient is NaN, once",
        acts=(Act(kind="no gradient that is a number", phase="backward", ranks=LAST),),
        says=("the window is done again",),
    )
    yield Fault(
        name="bit-flip",
        text="a bit of a weight flips on one rank",
        acts=(Act(kind="bit", phase="update", ranks=LAST),),
        ends="stops",
        min_ranks=2,
    )
    yield Fault(
        name="unused-parameter",
        text="one rank does not use a layer any more from some step on",
        acts=(Act(kind="detach", phase="layer", ranks=LAST, lasts=True),),
        says=("find_unused_parameters is on from now",),
        keeps="equal replicas",
        min_ranks=2,
    )


def _waits() -> Iterator[Fault]:
    """A rank that is slow, or comes no more."""
    yield Fault(
        name="straggler",
        text="one rank needs a second more for a step",
        acts=(Act(kind="sleep", phase="forward", ranks=LAST, seconds=1.0),),
    )
    yield Fault(
        name="lock-of-python",
        text="native code holds Python's lock for a second, on one rank",
        acts=(Act(kind="lock", phase="forward", ranks=LAST),),
    )
    for phase, kind, text in (
        ("data", "hang", "reading a sample hangs"),
        ("forward", "hang", "forward hangs"),
        ("collective", "collective", "a model calls a collective that the others don't"),
    ):
        yield Fault(
            name=f"hang-{phase}",
            text=f"{text}, on one rank",
            acts=(
                Act(kind=kind, phase="data" if phase == "data" else "forward", ranks=LAST),
            ),
            flags=HANGS,
            ends="stops",
            code="DDP-G04",
            min_ranks=2,
        )


def _places() -> Iterator[Fault]:
    """Disks, files, and where a run speaks to."""
    yield Fault(
        name="disk-full",
        text="no checkpoint can be written for a while: the disk is full",
        acts=(
            Act(kind="pause", phase="forward", ranks=(0,), victim=0),
            Act(kind="pause", phase="forward", step=24, ranks=(0,), victim=0),
        ),
        outside="full disk",
        says=("no new checkpoint, training goes on",),
    )
    for word, text in (
        ("torn", "the newest checkpoint is cut in half"),
        ("flipped", "a bit of the newest checkpoint flips"),
    ):
        yield Fault(
            name=f"{word}-checkpoint",
            text=f"a run is stopped, and {text}",
            acts=(Act(kind="pause", phase="forward", step=12, ranks=(0,), victim=0),),
            signal=signal.SIGTERM,
            outside=f"{word} checkpoint",
            ends="saves",
            says=("passed over the checkpoint",),
        )
    yield Fault(
        name="closed-output",
        text="nobody reads the output any more, as after: | head",
        acts=(Act(kind="close output", phase="update", ranks=ALL),),
    )


def _starts() -> Iterator[Fault]:
    """Ranks that can't start together, and the launcher."""
    yield Fault(
        name="port-taken",
        text="the port where the ranks meet is taken by another program",
        outside="port taken",
        ends="stops",
        code="DDP-G01",
        says=("is taken",),
        flags=HANGS,
        min_ranks=2,
    )
    yield Fault(
        name="missing-rank",
        text="one rank never comes",
        outside="missing rank",
        ends="stops",
        code="DDP-G01",
        says=("never came",),
        flags=HANGS,
        min_ranks=2,
    )
    yield Fault(
        name="other-data",
        text="one rank has another dataset: a sample less",
        acts=(Act(kind="shorter", phase="open", step=0, ranks=LAST, lasts=True),),
        ends="stops",
        code="DDP-G02",
        says=("the ranks would not train the same model",),
        min_ranks=2,
    )
    yield Fault(
        name="torchrun-restart",
        text="a rank under torchrun --max_restarts is killed",
        acts=(Act(kind="pause", phase="forward", ranks=LAST),),
        signal=signal.SIGKILL,
        outside="torchrun",
        ends="restarts",
        code="DDP-G04",
        says=("going on in",),
        min_ranks=2,
    )
    yield Fault(
        name="torchrun-killed",
        text="torchrun itself is killed: its ranks save and leave",
        acts=(Act(kind="pause", phase="forward", ranks=LAST),),
        signal=signal.SIGKILL,
        outside="torchrun killed",
        ends="stops",
        says=("SIGTERM: stopping",),
        min_ranks=2,
    )

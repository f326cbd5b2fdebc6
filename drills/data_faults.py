"""Faults of data: processes that load it, and samples that are bad."""

from collections.abc import Iterator

from drills.fault import LAST, Fault
from drills.injections import Injection

LOADS = ("--num_workers", "2", "--loader_timeout_s", "2", "--eval_every", "0")
"""Two processes that load, for training alone: each takes a second or more to start."""

GOES_ON = ("--continue_on_error",)


def all_data_faults() -> Iterator[Fault]:
    """Give all of them."""
    yield from _workers()
    yield from _samples()


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
            injections=(Injection(kind=kind, phase="worker", step=100, ranks=LAST),),
            flags=LOADS,
            says=("No sample is lost",),
        )
    yield Fault(
        name="memory-data",
        text="a process that loads samples is out of memory, once",
        injections=(Injection(kind="memory of Python", phase="worker", step=100, ranks=LAST),),
        flags=LOADS,
        says=("No sample is lost",),
    )
    yield Fault(
        name="worker-unpicklable",
        text="the dataset can't be sent to the processes that load",
        injections=(Injection(kind="unpicklable", phase="start", step=0, lasts=True),),
        flags=LOADS,
        says=("the dataset can't be sent to a worker",),
    )


def _samples() -> Iterator[Fault]:
    """One sample is bad, always."""
    for word, kind, text in (
        ("sample", "unreadable", "can't be read"),
        ("shape", "shape", "has another shape than the others"),
        ("label", "label", "has a label out of range"),
        ("input", "not a number", "has NaN in it"),
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
            text=f"a sample {text}, and --continue_on_error",
            injections=injections,
            flags=GOES_ON,
            leaves_out=True,
            keeps="equal replicas",
            says=("left out sample SAMPLE",),
        )

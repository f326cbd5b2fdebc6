"""Faults of data: DataLoader workers, and bad samples."""

from collections.abc import Iterator

from ddp_drills.fault import LAST, Fault
from ddp_drills.injections import Injection

LOADS = ("--num_workers", "2", "--loader_timeout_s", "2", "--eval_every", "0")
"""Two workers, for training only: each takes a second or more to start."""

CONTINUES = ("--continue_on_error",)


def all_data_faults() -> Iterator[Fault]:
    """Yield all of them."""
    yield from _workers()
    yield from _samples()


def _workers() -> Iterator[Fault]:
    """Faults of a DataLoader worker."""
    for word, kind, text in (
        ("kill", "kill itself", "is killed, as by the OOM killer"),
        ("segfault", "segfault", "crashes in native code"),
        ("bus", "bus", "gets SIGBUS, as when /dev/shm is full"),
        ("exit", "exit", "exits with status 3"),
        ("hang", "hang", "hangs"),
    ):
        yield Fault(
            name=f"worker-{word}",
            text=f"a DataLoader worker {text}, once",
            injections=(Injection(kind=kind, phase="worker", step=100, ranks=LAST),),
            flags=LOADS,
            says=("No sample is lost",),
        )
    yield Fault(
        name="memory-data",
        text="a DataLoader worker runs out of memory, once",
        injections=(Injection(kind="host memory", phase="worker", step=100, ranks=LAST),),
        flags=LOADS,
        says=("No sample is lost",),
    )
    yield Fault(
        name="worker-unpicklable",
        text="the dataset can't be sent to the DataLoader workers",
        injections=(Injection(kind="unpicklable", phase="start", step=0, lasts=True),),
        flags=LOADS,
        says=("the dataset or its collate can't be sent to a worker",),
    )


def _samples() -> Iterator[Fault]:
    """One sample is bad at every read."""
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
            flags=CONTINUES,
            leaves_out=True,
            keeps="equal replicas",
            says=("left out sample SAMPLE",),
        )

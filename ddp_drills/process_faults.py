"""Faults of whole ranks: signals in each phase, ranks that can't start together, the launcher."""

import signal
from collections.abc import Iterator

from ddp_drills.fault import HANGS, LAST, TWO_HOSTS, WATCHED, Fault
from ddp_drills.injections import Injection


def all_process_faults() -> Iterator[Fault]:
    """Yield all of them."""
    yield from _signals()
    yield from _first_and_all()
    yield from _starts()
    yield from _launchers()


def _moment(phase: str) -> tuple[Injection, ...]:
    """Let the last rank pause in a phase, so that the fault happens there."""
    if phase == "checkpoint":
        return ()
    if phase != "sum":
        return (Injection(kind="pause", phase=phase, ranks=LAST),)
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
    return "DDP-G05", ("the process is stopped (SIGSTOP)", "rank 0 waits in all-reduce"), WATCHED


def _first_and_all() -> Iterator[Fault]:
    """SIGKILL to rank 0, and to all ranks."""
    first = (Injection(kind="pause", phase="forward", ranks=(0,), victim=0),)
    yield Fault(
        name="kill-rank-0",
        text="rank 0, which serves the store and writes checkpoints, is killed in forward",
        injections=first,
        signal=signal.SIGKILL,
        ends="stops",
        code="DDP-G04",
        says=("lost another rank",),
        min_ranks=2,
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
    """Ranks that can't start together."""
    yield Fault(
        name="port-taken",
        text="another program listens on the port of the rendezvous",
        outside="port taken",
        ends="stops",
        code="DDP-G01",
        says=("is taken",),
        flags=HANGS,
        min_ranks=2,
    )
    yield Fault(
        name="unresolvable-host",
        text="the name of rank 0's host can't be resolved",
        outside="unresolvable host",
        ends="stops",
        code="DDP-G01",
        says=("can't be resolved",),
        flags=HANGS,
        min_ranks=2,
    )
    yield Fault(
        name="missing-rank",
        text="one rank never starts",
        outside="missing rank",
        ends="stops",
        code="DDP-G01",
        says=("never joined",),
        flags=HANGS,
        min_ranks=2,
    )
    yield Fault(
        name="other-data",
        text="the dataset of one rank has one sample less",
        injections=(Injection(kind="shorter", phase="open", step=0, ranks=LAST, lasts=True),),
        ends="stops",
        code="DDP-G02",
        says=("the ranks would not train the same model",),
        min_ranks=2,
    )


def _launchers() -> Iterator[Fault]:
    """Faults under torchrun."""
    yield Fault(
        name="torchrun-restart",
        text="a rank under torchrun --max_restarts is killed",
        injections=(Injection(kind="pause", phase="forward", ranks=LAST),),
        signal=signal.SIGKILL,
        outside="torchrun",
        ends="restarts",
        code="DDP-G04",
        says=("resuming",),
        min_ranks=2,
    )
    yield Fault(
        name="torchrun-killed",
        text="torchrun itself is killed: its ranks save and exit",
        injections=(Injection(kind="pause", phase="forward", ranks=LAST),),
        signal=signal.SIGKILL,
        outside="torchrun killed",
        ends="stops",
        says=("SIGTERM: stopping",),
        min_ranks=2,
    )
    yield Fault(
        name="dead-host",
        text="the host of an elastic run dies, and torchrun on another one takes over",
        injections=(Injection(kind="pause", phase="forward", ranks=LAST),),
        signal=signal.SIGKILL,
        outside=TWO_HOSTS,
        ends="restarts",
        says=("an earlier attempt of this job",),
    )

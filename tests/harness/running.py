"""Forked ranks and programs under way, and how they ended.

Owns: waiting with a limit, signals to single ranks, and what a failure shows: of each rank its
status, its traceback or the stack it hung in, and its output.
Does not own: starting them (ranks.py), the news of their end (rank_link.py).
"""

import contextlib
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from tests.harness.processes import deadline, kill, kill_group, limit_of, read_process
from tests.harness.rank_link import RankLink
from tests.harness.rank_server import ERRORS_NAME, PIDS_NAME, STACK_SIGNAL
from tests.harness.ranks import POLL_S, Completed, tail

T = TypeVar("T")
STACK_LIMIT_S = 2.0


class RankFailure(AssertionError):
    """One or more ranks failed, hung or were killed; finished says how each of them ended."""

    def __init__(self, reason: str, finished: "Finished") -> None:
        super().__init__(f"{reason}\n{finished.describe()}")
        self.finished = finished


@dataclass(frozen=True, slots=True)
class Finished:
    """How the ranks ended, in rank order."""

    statuses: tuple[int, ...]
    """Exit statuses; -N where signal N ended the rank."""

    outputs: tuple[str, ...]
    """What each rank wrote to stdout and stderr."""

    errors: tuple[str, ...]
    """Traceback of a test's function, or the stack of a rank that hung; else empty."""

    values: tuple[Any, ...]  # Any: what a test's function returns
    """What a test's function returned; None where it did not."""

    @property
    def output(self) -> str:
        return "".join(self.outputs)

    def ok(self) -> Self:
        """Return this, or raise RankFailure if a rank's status is not 0."""
        if any(self.statuses):
            bad = [str(rank) for rank, status in enumerate(self.statuses) if status]
            raise RankFailure(f"rank {', '.join(bad)} failed", self)
        return self

    def describe(self) -> str:
        """Tell of each rank that failed; of all if none did."""
        ranks = [rank for rank, status in enumerate(self.statuses) if status]
        return "\n".join(map(self._describe_rank, ranks or range(len(self.statuses))))

    def _describe_rank(self, rank: int) -> str:
        status = self.statuses[rank]
        how = signal.Signals(-status).name if status < 0 else f"status {status}"
        parts = [f"--- rank {rank} ended with {how}", self.errors[rank]]
        if self.outputs[rank]:
            parts += ["its output:", tail(self.outputs[rank])]
        return "\n".join(part.rstrip() for part in parts if part)


class Running:
    """Ranks under way. Use it in a with statement: leaving that kills what is left."""

    def __init__(self, link: RankLink, folder: Path, pids: Sequence[int]) -> None:
        self.pids = tuple(pids)
        self._link = link
        self._folder = folder

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self.living():
            self.kill_all()

    def living(self) -> list[int]:
        """Return the ranks that have not ended."""
        self._link.take_news(0.0)
        return [rank for rank, pid in enumerate(self.pids) if pid not in self._link.statuses]

    def statuses(self) -> list[int | None]:
        """Return how each rank ended; None: it has not."""
        self._link.take_news(0.0)
        return [self._link.statuses.get(pid) for pid in self.pids]

    def output(self, rank: int) -> str:
        """Return what a rank has written up to now; of a program, stderr comes last."""
        return _text_of(self._folder / f"output-{rank}.txt") + _text_of(self._folder / ERRORS_NAME)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a signal to one rank, unless that has ended."""
        if rank in self.living():
            kill(self.pids[rank], number)

    def kill_all(self) -> None:
        """Kill all ranks with their children, and wait until the ranks are gone."""
        for rank in self.living():
            kill(self.pids[rank])  # WHY beside the group: a rank just forked has none of its own
        for pid in self.pids:
            kill_group(pid)
        while self.living():
            self._link.take_news(POLL_S)

    def wait_for(self, condition: Callable[[], T | None], *, timeout_s: float, what: str) -> T:
        """Poll until condition gives something true, and return that.

        Raises RankFailure if all ranks end before, or after timeout_s.
        """
        end = deadline(timeout_s)
        while True:
            has_ended = not self.living()
            if found := condition():
                return found
            if has_ended:
                raise RankFailure(f"all ranks ended before {what}", self._finished())
            if time.monotonic() > end:
                self._fail(f"{limit_of(timeout_s):g} s went by without {what}")
            self._link.take_news(POLL_S)

    def wait(self, timeout_s: float) -> Finished:
        """Wait for the end of all ranks. Raises RankFailure with their stacks after timeout_s."""
        end = deadline(timeout_s)
        while living := self.living():
            left_s = end - time.monotonic()
            if left_s <= 0:
                names = ", ".join(map(str, living))
                self._fail(f"rank {names} did not end in {limit_of(timeout_s):g} s")
            self._link.take_news(left_s)
        return self._finished()

    def _fail(self, reason: str) -> None:
        self._ask_for_stacks()
        self.kill_all()
        raise RankFailure(reason, self._finished())

    def _ask_for_stacks(self) -> None:
        """Have each living rank write where it is; a stopped one never will."""
        paths = [self._folder / f"stack-{rank}.txt" for rank in self.living()]
        for rank in self.living():
            kill(self.pids[rank], STACK_SIGNAL)
        sizes: list[int] = []
        end = time.monotonic() + STACK_LIMIT_S
        while time.monotonic() < end:
            last, sizes = sizes, [len(_text_of(path)) for path in paths]
            if all(sizes) and sizes == last:
                return
            self._link.take_news(POLL_S)

    def _finished(self) -> Finished:
        ranks = range(len(self.pids))
        results = [_read_result(self._folder / f"result-{rank}.pickle") for rank in ranks]
        stacks = [_text_of(self._folder / f"stack-{rank}.txt") for rank in ranks]
        return Finished(
            tuple(self._link.statuses[pid] for pid in self.pids),
            tuple(self.output(rank) for rank in ranks),
            tuple(
                result.get("error", stack) for result, stack in zip(results, stacks, strict=True)
            ),
            tuple(result.get("value") for result in results),
        )


class Program:
    """A forked program under way. Use it in a with statement: leaving that kills what is left."""

    def __init__(
        self,
        argv: Sequence[str],
        running: Running,
        folder: Path,
        temporary: tempfile.TemporaryDirectory[str],
    ) -> None:
        self._argv = tuple(argv)
        self._running = running
        self._folder = folder
        self._temporary = temporary
        self._started_at = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._running.living():
            self._running.kill_all()
            for _, pid in self._forked():
                kill(pid)
        self._temporary.cleanup()

    @property
    def pid(self) -> int:
        return self._running.pids[0]

    @property
    def stdout(self) -> str:
        return _text_of(self._folder / "output-0.txt")

    @property
    def stderr(self) -> str:
        return _text_of(self._folder / ERRORS_NAME)

    def pid_of_rank(self, rank: int) -> int | None:
        """Return the process id of a rank of this torchrun; None if it doesn't live."""
        for number, pid in reversed(self._forked()):
            process = read_process(pid)
            if number == rank and process and process.is_alive and process.parent == self.pid:
                return pid
        return None

    def living_ranks(self) -> list[int]:
        """List the process ids of the ranks that live, also of those that torchrun has left."""
        found = (read_process(pid) for rank, pid in self._forked() if rank >= 0)
        return [process.pid for process in found if process and process.is_alive]

    def status(self) -> int | None:
        """Return how the program ended; None: it has not."""
        return self._running.statuses()[0]

    def kill(self) -> None:
        """Kill the program if it still runs."""
        self._running.kill_all()

    def signal(self, number: int) -> None:
        """Send a signal to the program itself."""
        self._running.kill(0, number)

    def wait_for(self, condition: Callable[[], T | None], *, timeout_s: float, what: str) -> T:
        """Poll until condition gives something true, and return that. See Running."""
        return self._running.wait_for(condition, timeout_s=timeout_s, what=what)

    def wait(self, *, timeout_s: float) -> Completed:
        """Wait for the end of the program. Raises RankFailure after timeout_s."""
        [status] = self._running.wait(timeout_s).statuses
        wall_s = time.monotonic() - self._started_at
        return Completed(self._argv, status, self.stdout, self.stderr, wall_s)

    def _forked(self) -> list[tuple[int, int]]:
        """List rank (or -1) and process id of all that it has forked, oldest first."""
        lines = _text_of(self._folder / PIDS_NAME).splitlines()
        return [(int(rank), int(pid)) for rank, pid in map(str.split, lines)]


def _read_result(path: Path) -> dict[str, Any]:
    """Read {"value": ...} or {"error": traceback}; nothing if the rank left neither."""
    with contextlib.suppress(OSError, EOFError, pickle.UnpicklingError):
        found: dict[str, Any] = pickle.loads(path.read_bytes())
        return found
    return {}


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""

"""One drill: the quiet run, the struck run, the comparison.

Owns the order of a run's starts: the same command again until it is finished. Does not own: how
ranks are started (processes.py), what strikes them (outside.py), what is expected (faults.py).
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from drills.compare import Attempt, Record, Verdict, judge
from drills.fault import Fault
from drills.injections import Board
from drills.outside import Outside, occupied
from drills.processes import Ranks, Starter, free_port
from drills.work import Work
from hardened_ddp.reporting.summary import finished_at

QUIET = Fault(name="quiet", text="nothing happens")
MOST_STARTS = 3
"""Of one run; of one with several faults, so many more."""

START_LIMIT_S = 120.0
"""Of one start, and ten times what the quiet run took: more is a hang."""

OUTPUT_NAME = "output.txt"
_POLL_S = 0.001
StarterOf = Callable[[Path, Fault], Starter]
"""Gives what starts the ranks of a drill in a folder."""


class Drills:
    """Runs drills of one work in folder, with one quiet run for all of them."""

    def __init__(self, work: Work, folder: Path, starter_of: StarterOf) -> None:
        self.work, self.folder = work, folder
        self._starter_of = starter_of
        self._quiet: Record | None = None

    def run(self, fault: Fault) -> Verdict:
        """Do one drill, and say what came of it. Its folder has the name of the fault."""
        quiet = self.quiet()
        return judge(fault, self._record(fault), quiet)

    def said_by(self, fault: Fault, *, most: int = 6000) -> str:
        """Give the last of what the ranks of a drill that was done have said."""
        path = self.folder / fault.name / OUTPUT_NAME
        return path.read_text(encoding="utf-8", errors="replace")[-most:] if path.exists() else ""

    def quiet(self) -> Record:
        """Give the run that nothing happens to. Raises RuntimeError if it fails by itself."""
        if self._quiet is None:
            record = self._record(QUIET)
            last = record.attempts[-1]
            if len(record.attempts) > 1 or not last.is_finished:
                raise RuntimeError(f"the run fails without any fault:\n{record.output[-4000:]}")
            self._quiet = record
        return self._quiet

    def _record(self, fault: Fault) -> Record:
        """Start the command, and again until it is finished."""
        folder = self.folder / fault.name
        folder.mkdir(parents=True)
        (folder / "board").mkdir()
        board = Board((folder / "board").resolve())
        board.set_injections(fault.injections)
        run = folder / "runs" / "drill"
        record = Record(run, board, self.work.num_ranks)
        flags = [*self.work.command(board.folder, folder / "runs"), *fault.flags]
        starter = self._starter_of(folder, fault)
        outside = Outside(fault, board, run, num_ranks=self.work.num_ranks)
        most_starts = MOST_STARTS + max(0, len(fault.injections) - 2)
        while len(record.attempts) < most_starts and finished_at(run) is None:
            for path in board.folder.glob("digest-*"):
                path.unlink()
            is_first = not record.attempts
            is_kept_out = is_first and fault.outside in ("port taken", "missing rank")
            outside.has_struck |= is_kept_out
            port = free_port()
            with occupied(port) if is_kept_out and "port" in fault.outside else nullcontext():
                missing = int(is_kept_out and "rank" in fault.outside)
                ranks = starter(flags, num_ranks=self.work.num_ranks, port=port, missing=missing)
                self._watch(ranks, outside, record)
            if finished_at(run) is None:
                outside.mend()
        record.has_struck = outside.has_struck or board.num_struck() > 0 or board.has("sample")
        return record

    def _watch(self, ranks: Ranks, outside: Outside, record: Record) -> None:
        """Wait for the end of one start, and strike meanwhile."""
        began_at = time.monotonic()
        quiet_s = 0.0 if self._quiet is None else self._quiet.wall_s
        limit_s = START_LIMIT_S + 10 * quiet_s
        try:
            while None in ranks.statuses and time.monotonic() - began_at < limit_s:
                outside.look(ranks)
                outside.act_as_launcher(ranks)
                time.sleep(_POLL_S)
        finally:
            statuses, wall_s = tuple(ranks.statuses), time.monotonic() - began_at
            record.problems += ranks.end()
        if None in statuses:
            record.problems.append(f"it did not end within {limit_s:.0f} s, and was killed")
        record.attempts.append(Attempt(statuses, finished_at(record.run) is not None, wall_s))
        record.output = ranks.output()

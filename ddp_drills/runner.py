"""One drill: the undisturbed run, the run with the fault, the comparison.

The same command is started again until the run is finished.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from ddp_drills.compare import Attempt, Record, Verdict, judge
from ddp_drills.fault import Fault
from ddp_drills.injections import Board
from ddp_drills.outside import Outside, occupied
from ddp_drills.processes import HOST, Ranks, Start
from ddp_drills.work import Work
from hardened_ddp.ranks.launchers_env import hold_port
from hardened_ddp.reporting.summary import finished_at

NO_FAULT = Fault(name="undisturbed", text="nothing happens")
MAX_STARTS = 3  # of one run; with several faults, one more for each
CAN_NOT_START = ("port taken", "missing rank", "unresolvable host")
NO_HOST = "rank-0.invalid"  # A name that no name server may know
START_LIMIT_S = 120.0  # of one start, plus ten times what the undisturbed run took: more is a hang
OUTPUT_NAME = "output.txt"
_POLL_S = 0.005


class Drills:
    """Runs drills of one work in folder, with one undisturbed run for all of them."""

    def __init__(self, work: Work, folder: Path, starter: Callable[[Start], Ranks]) -> None:
        self.work, self.folder = work, folder
        self._starter = starter
        self._reference: Record | None = None

    def run(self, fault: Fault) -> Verdict:
        """Run one drill and return its verdict. Its folder has the name of the fault."""
        reference = self.reference()  # first: its time is a limit of the drill's
        return judge(fault, self._record(fault), reference)

    def output_of(self, fault: Fault) -> str:
        path = self.folder / fault.name / OUTPUT_NAME
        return path.read_text(encoding="utf-8", errors="replace")[-6000:] if path.exists() else ""

    def reference(self) -> Record:
        """Return the undisturbed run. Raises RuntimeError if it fails by itself."""
        if self._reference is None:
            record = self._record(NO_FAULT)
            last = record.attempts[-1]
            if len(record.attempts) > 1 or not last.is_finished:
                raise RuntimeError(f"the run fails without any fault:\n{record.output[-4000:]}")
            self._reference = record
        return self._reference

    def _record(self, fault: Fault) -> Record:
        """Start the command again and again until the run is finished."""
        folder = self.folder / fault.name
        (folder / "board").mkdir(parents=True)
        board = Board((folder / "board").resolve())
        board.set_injections(fault.injections)
        run = folder / "runs" / "drill"
        record = Record(run, board, self.work.num_ranks)
        flags = [*self.work.command(board.folder, folder / "runs"), *fault.flags]

        outside = Outside(fault, board, run, num_ranks=self.work.num_ranks)
        max_starts = MAX_STARTS + max(0, len(fault.injections) - 2)
        max_starts = 1 if fault is NO_FAULT else max_starts  # it should not need another one
        while len(record.attempts) < max_starts and finished_at(run) is None:
            for path in board.folder.glob("digest-*"):
                path.unlink()
            can_not_start = not record.attempts and fault.outside in CAN_NOT_START
            outside.has_acted |= can_not_start
            cause = fault.outside if can_not_start else ""
            is_taken = cause == "port taken"
            with hold_port() as holder, occupied(holder) if is_taken else nullcontext():
                start = Start(
                    flags=flags,
                    log=folder / OUTPUT_NAME,
                    num_ranks=self.work.num_ranks,
                    port=holder.getsockname()[1],
                    outside=fault.outside,
                    missing=int(cause == "missing rank"),
                    host=NO_HOST if cause == "unresolvable host" else HOST,
                )
                self._watch(self._starter(start), outside, record)
            if finished_at(run) is None:
                outside.prepare_next_start()
        record.has_fault = outside.has_acted or board.num_injected() > 0 or board.has("sample")
        return record

    def _watch(self, ranks: Ranks, outside: Outside, record: Record) -> None:
        """Wait for the end of one start; cause faults from outside meanwhile."""
        began_at = time.monotonic()
        usual_s = 0.0 if self._reference is None else self._reference.wall_s
        limit_s = START_LIMIT_S + 10 * usual_s
        try:
            while None in ranks.statuses and time.monotonic() - began_at < limit_s:
                outside.look(ranks)
                outside.act_as_launcher(ranks)
                time.sleep(_POLL_S)
        finally:
            statuses, wall_s = tuple(ranks.statuses), time.monotonic() - began_at
            record.problems += ranks.end()
        if None in statuses:
            record.problems.append(f"it did not end within {limit_s:.0f} s and was killed")
        record.attempts.append(Attempt(statuses, finished_at(record.folder) is not None, wall_s))
        record.output = ranks.output()

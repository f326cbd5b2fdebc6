"""Drills and replays on forked ranks: as their commands do, without an import of torch per rank.

Owns: ForkedRanks, which is to ddp_drills/runner.py what its own processes are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddp_drills.processes import SCRIPT, Start, await_end
from ddp_drills.runner import Drills
from ddp_drills.work import Work
from tests.harness.processes import descendants_of, kill
from tests.harness.ranks import CHILDREN, Running, start_program, start_training, train


class ForkedRanks:
    """Ranks of the fork server, or a torchrun with its own, as Ranks has them."""

    def __init__(self, running: Running, log: Path, *, by_torchrun: bool) -> None:
        self._running, self._log, self._by_torchrun = running, log, by_torchrun
        self._before = log.read_text(encoding="utf-8") if log.exists() else ""

    @property
    def statuses(self) -> list[int | None]:
        return self._running.statuses()

    def pid_of(self, rank: int) -> int | None:
        if self._by_torchrun:
            return self._running.pid if rank < 0 else self._running.pid_of_rank(rank)
        return self._running.pids[rank] if rank in self._running.living() else None

    def output(self) -> str:
        outputs = [self._running.output(rank) for rank in range(len(self._running.pids))]
        self._log.write_text(self._before + "".join(outputs), encoding="utf-8")
        return self._before + "".join(outputs)

    def end(self) -> list[str]:
        left = [] if self._running.living() else await_end(self._living)
        for pid in self._living():
            kill(pid)
        self._running.kill_all()
        return [f"process {pid} was left" for pid in left]

    def _living(self) -> list[int]:
        """Find the ranks and the processes that they have started."""
        if self._by_torchrun:
            return self._running.living_ranks()
        return descendants_of(*(child.keeper for child in CHILDREN))


def forked_drills(
    folder: Path, *, work: Work | None = None, flags: Sequence[str] = (), **facts: Any
) -> Drills:
    """Prepare drills in folder, of work or of one with these facts."""
    work = work or Work(**facts)
    return Drills(replace(work, flags=(*work.flags, "--cpu_only", *flags)), folder, start_forked)


def start_forked(start: Start) -> Any:  # Any: what behaves as Ranks
    """Start what a drill starts: in the place of ddp_drills.processes.start_ranks."""
    if start.outside.startswith("torchrun"):
        argv = ["torchrun", "--standalone", f"--nproc_per_node={start.num_ranks}"]
        argv += ["--max_restarts=3", str(SCRIPT), *start.flags]
        return ForkedRanks(start_program(argv), start.log, by_torchrun=True)
    env = {"MASTER_PORT": str(start.port), "MASTER_ADDR": start.host}
    started = start_training(start.flags, start.num_ranks, env=env, missing=start.missing)
    return ForkedRanks(started, start.log, by_torchrun=False)


def run_trainer_forked(
    argv: Sequence[str | Path], ranks: int, env: Mapping[str, str], log: Path
) -> int:
    """In the place of run_trainer of the command replay: its ranks need not import torch."""
    done = train(argv, ranks, env=env, launcher="torchrun" if ranks > 1 else "none")
    log.write_text(done.output, encoding="utf-8")
    return max(map(int, done.statuses))

"""Drills on forked ranks: the same as the command drill does, without an import of torch per rank.

Owns: ForkedRanks, which is to drills/runner.py what its own processes are.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from drills.fault import Fault
from drills.processes import Launcher, Starter, await_end
from drills.runner import OUTPUT_NAME, Drills
from drills.work import Work
from tests.processes import kill, list_pids, read_process
from tests.ranks import start_training
from tests.running import Running


class ForkedRanks:
    """Ranks of the fork server, as drills/processes.py has them."""

    def __init__(self, running: Running, log: Path) -> None:
        self._running, self._log = running, log
        self._before = log.read_text(encoding="utf-8") if log.exists() else ""

    @property
    def statuses(self) -> list[int | None]:
        return self._running.statuses()

    def pid_of(self, rank: int) -> int | None:
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
        """Find the processes of the ranks' groups: each rank leads one."""
        found = (read_process(pid) for pid in list_pids())
        return [p.pid for p in found if p and p.is_alive and p.group in self._running.pids]


class Forked:
    """Starts forked ranks. See Starter of drills/processes.py."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def __call__(
        self, flags: Sequence[str], *, num_ranks: int, port: int, missing: int = 0
    ) -> ForkedRanks:
        env = {"MASTER_PORT": str(port)}
        return ForkedRanks(start_training(flags, num_ranks, env=env, missing=missing), self._log)


def forked_drills(
    folder: Path,
    *,
    num_ranks: int = 2,
    flags: Sequence[str] = (),
    model: str = "mlp",
    work: Work | None = None,
) -> Drills:
    """Prepare drills in folder, of work or of that model; what needs a real torchrun gets one."""
    work = work or Work(num_ranks=num_ranks, model=model)
    return Drills(replace(work, flags=(*work.flags, "--cpu_only", *flags)), folder, _starter_of)


def _starter_of(folder: Path, fault: Fault) -> Starter:
    if fault.outside.startswith("torchrun"):
        return Launcher(os.environ, folder / OUTPUT_NAME, by_torchrun=True)
    return Forked(folder / OUTPUT_NAME)

"""Drills on forked ranks: the same as the command drill does, without an import of torch per rank.

Owns: ForkedRanks, which is to ddp_drills/runner.py what its own processes are.
"""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ddp_drills.fault import TWO_HOSTS, Fault
from ddp_drills.other_host import OnTwoHosts
from ddp_drills.processes import HOST, SCRIPT, Ranks, Starter, await_end
from ddp_drills.runner import OUTPUT_NAME, Drills
from ddp_drills.work import Work
from tests.harness.processes import kill, list_pids, read_process
from tests.harness.ranks import Program, start_program, start_training
from tests.harness.running import Running


class ForkedRanks:
    """Ranks of the fork server, as ddp_drills/processes.py has them."""

    def __init__(self, running: Running, log: Path) -> None:
        self._running, self._log = running, log
        self._before = log.read_text(encoding="utf-8") if log.exists() else ""

    @property
    def statuses(self) -> list[int | None]:
        return self._running.statuses()

    def pid_of(self, rank: int) -> int | None:
        return self._running.pids[rank] if rank in self._running.living() else None

    def cut(self) -> None:
        """They share this machine with all others."""

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


class ForkedTorchrun:
    """A forked torchrun with its ranks, as ddp_drills/processes.py has them."""

    def __init__(self, launched: Program, log: Path) -> None:
        self._launched, self._log = launched, log
        self._before = log.read_text(encoding="utf-8") if log.exists() else ""

    @property
    def statuses(self) -> list[int | None]:
        return [self._launched.status()]

    def pid_of(self, rank: int) -> int | None:
        return self._launched.pid if rank < 0 else self._launched.pid_of_rank(rank)

    def cut(self) -> None:
        """They share this machine with all others."""

    def output(self) -> str:
        output = self._before + self._launched.stdout + self._launched.stderr
        self._log.write_text(output, encoding="utf-8")
        return output

    def end(self) -> list[str]:
        left = [] if None in self.statuses else await_end(self._launched.living_ranks)
        for pid in self._launched.living_ranks():
            kill(pid)
        self._launched.kill()
        return [f"process {pid} was left" for pid in left]


class Forked:
    """Starts forked ranks. See Starter of ddp_drills/processes.py."""

    def __init__(self, log: Path, *, by_torchrun: bool) -> None:
        self._log, self._by_torchrun = log, by_torchrun

    def __call__(
        self,
        flags: Sequence[str],
        *,
        num_ranks: int,
        port: int,
        missing: int = 0,
        host: str = HOST,
    ) -> Ranks:
        if self._by_torchrun:
            argv = ["torchrun", "--standalone", f"--nproc_per_node={num_ranks}"]
            argv += ["--max_restarts=3", str(SCRIPT), *flags]
            return ForkedTorchrun(start_program(argv), self._log)
        env = {"MASTER_PORT": str(port), "MASTER_ADDR": host}
        return ForkedRanks(start_training(flags, num_ranks, env=env, missing=missing), self._log)


def forked_drills(
    folder: Path,
    *,
    num_ranks: int = 2,
    flags: Sequence[str] = (),
    model: str = "mlp",
    work: Work | None = None,
) -> Drills:
    """Prepare drills in folder, of work or of that model."""
    work = work or Work(num_ranks=num_ranks, model=model)
    return Drills(replace(work, flags=(*work.flags, "--cpu_only", *flags)), folder, _starter_of)


def _starter_of(folder: Path, fault: Fault) -> Starter:
    if fault.outside == TWO_HOSTS:
        return OnTwoHosts(os.environ, folder / OUTPUT_NAME)
    return Forked(folder / OUTPUT_NAME, by_torchrun=fault.outside.startswith("torchrun"))

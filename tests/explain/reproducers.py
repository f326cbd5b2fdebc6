"""Programs that fail for real, for each cause that can be had on a CPU; explain is tested on them.

    python -m tests.explain.reproducers FOLDER [NAME ...]     write the log of each to FOLDER

Owns the way they run: torch is imported once, each rank is forked, and an exception ends in the
hook that torch installs, so that a log has the prefixes of a real one. What fails is in the modules
failing_*.py.
"""

import importlib
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

MODULES = ("graph", "launch", "data", "memory", "groups", "precision", "checkpoints", "sharded")
_TIMEOUT = timedelta(seconds=20)


@dataclass(frozen=True, slots=True)
class Reproducer:
    """A failure, and what explain must say of it."""

    name: str
    code: str
    run: Callable[[], Any]  # Any: what it returns is not used
    """Called on each rank, in a folder for the case."""

    num_ranks: int = 1
    has_group: bool = False
    guilty: int | None = None
    """The rank that is at fault, where the log can say it."""


ALL: dict[str, Reproducer] = {}


def reproduces(
    code: str, *, num_ranks: int = 1, guilty: int | None = None, group: bool = False
) -> Callable[[Callable[[], Any]], None]:
    """Register what fails: a function by its own name, an expression by that of its cause."""

    def register(run: Callable[[], Any]) -> None:
        name = code.replace("-", "_") if run.__name__ == "<lambda>" else run.__name__
        while name in ALL:
            name += "_too"
        ALL[name] = Reproducer(name, code, run, num_ranks, group or num_ranks > 1, guilty)

    return register


def throw(error: BaseException) -> None:
    raise error


def load() -> dict[str, Reproducer]:
    """Import all modules of failures."""
    for name in MODULES:
        importlib.import_module(f"tests.explain.failing_{name}")
    return ALL


def write_log(case: Reproducer, log: Path) -> None:
    """Run a case in forked ranks and write what they print to log."""
    folder = Path(tempfile.mkdtemp(prefix="case-"))
    pids = []
    for rank in range(case.num_ranks):
        pid = os.fork()
        if pid == 0:
            _be_rank(case, rank, folder, log)
        pids.append(pid)
    statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    shutil.rmtree(folder, ignore_errors=True)
    with log.open("a", encoding="utf-8") as file:
        for rank, status in enumerate(statuses):
            if status:
                file.write(
                    f"E1122 08:08:33.{rank}23000 1234 torch/distributed/elastic/multiprocessing/"
                    f"api.py:869] failed (exitcode: {status}) local_rank: {rank} "
                    f"(pid: {pids[rank]}) of binary: /usr/bin/python3\n"
                )


def _be_rank(case: Reproducer, rank: int, folder: Path, log: Path) -> None:
    """Run one rank; never return."""
    status = 1
    try:
        output = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        print(f"step 10 loss 2.31 rank {rank}", flush=True)
        if case.has_group:
            _join(rank, case.num_ranks)
        case.run()
        status = 0
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        kind, value, stack = sys.exc_info()
        # the frames of this file are no part of the program that fails
        while stack is not None and stack.tb_frame.f_code.co_filename == __file__:
            stack = stack.tb_next
        try:
            assert kind is not None
            assert value is not None
            sys.excepthook(kind, value.with_traceback(stack), stack)
        except BaseException:
            traceback.print_exc()
    finally:
        sys.stderr.flush()
        sys.stdout.flush()
        os._exit(status)


def _join(rank: int, num_ranks: int) -> None:
    import torch.distributed as dist

    store = dist.FileStore("group", num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=_TIMEOUT)


def main(folder: Path, names: list[str]) -> None:
    """Write the logs of the cases with these names, or of all."""
    import torch
    import torch._dynamo  # WHY here: DDP and the optimizers import it, in each rank that has one

    torch.set_num_threads(1)
    cases = load()
    for name in names or cases:
        log = folder / f"{name}.log"
        log.unlink(missing_ok=True)
        write_log(cases[name], log)


if __name__ == "__main__":
    # WHY by its name: the failing modules import this one as tests.explain.reproducers
    from tests.explain.reproducers import main as run

    run(Path(sys.argv[1]).resolve(), sys.argv[2:])

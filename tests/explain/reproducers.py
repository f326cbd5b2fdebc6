"""Programs that fail for real, for each cause that can be had on a CPU; explain is tested on them.

    python -m tests.explain.reproducers FOLDER [NAME ...]     write the log of each to FOLDER

They are in failing.txt: `=== name: cause`, then how many ranks of a process group it has, and the
rank that is at fault, where the log can say it. What they share stands before the first one. Owns
the way they run: torch is imported once, each rank is forked, and an exception ends in the hook
that torch installs, so that a log has the prefixes of a real one.
"""

import os
import re
import shutil
import sys
import tempfile
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType

_SHARED, *_PROGRAMS = re.split(
    r"^=== ", Path(__file__).with_name("failing.txt").read_text(encoding="utf-8"), flags=re.M
)
_HEADER = re.compile(r"(\w+): ([\w-]+)(?:, (\d) ranks?)?(?:, guilty (\d))?")
_TIMEOUT = timedelta(seconds=20)


@dataclass(frozen=True, slots=True)
class Reproducer:
    """A failure, and what explain must say of it."""

    name: str
    code: str
    source: str
    num_ranks: int
    has_group: bool
    guilty: int | None

    def run(self) -> None:
        """Be a rank of the program, in a folder for the case."""
        job = sys.modules["job"] = ModuleType("job")  # in which pickle finds its classes
        path = Path("job.py").absolute()
        path.write_text(self.source, encoding="utf-8")  # a traceback shows its lines
        for text, name in ((_SHARED, "shared.py"), (self.source, str(path))):
            exec(compile(text, name, "exec"), job.__dict__)


def load() -> dict[str, Reproducer]:
    """Read all programs."""
    found = {}
    for program in _PROGRAMS:
        header, _, source = program.partition("\n")
        match = _HEADER.fullmatch(header)
        assert match, header
        name, code, ranks, guilty = match.groups()
        guilty_rank = None if guilty is None else int(guilty)
        assert name not in found, name
        found[name] = Reproducer(name, code, source, int(ranks or 1), bool(ranks), guilty_rank)
    return found


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
    # WHY: a rank that raises at once would leave while another one still connects to it
    store.set(f"connected-{rank}", "")
    store.wait([f"connected-{other}" for other in range(num_ranks)])


def main(folder: Path, names: list[str]) -> None:
    """Write the logs of the cases with these names, or of all."""
    import torch
    import torch._dynamo  # WHY here: DDP and the optimizers import it, in each rank that has one

    torch.set_num_threads(1)
    exec(_SHARED, {})  # what it imports is there for all ranks
    cases = load()
    for name in names or cases:
        log = folder / f"{name}.log"
        log.unlink(missing_ok=True)
        write_log(cases[name], log)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve(), sys.argv[2:])

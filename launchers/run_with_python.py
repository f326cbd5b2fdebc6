#!/usr/bin/env python3
"""Run a script on several processes of this machine with only Python: no torchrun, no MPI.

    python launchers/run_with_python.py                       one process per GPU, 2 without a GPU
    python launchers/run_with_python.py --nproc 4 ddp_training.py --cpu_only --epochs 2

What a launcher does, in one file: choose a free port; start the processes; set each one's rank in
environment variables; wait; and when one of them fails, end the others, because they would wait for
it in their next collective.

The processes are started by "spawn": a new Python that imports this file again. WHY not fork: in a
forked process, the threads and the CUDA state of its parent are broken.
On one machine, rank and local rank are the same number.
"""

import os
import signal
import sys
from multiprocessing import connection
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hardened_ddp.ranks.launchers_env import hold_port
from hardened_ddp.reporting.ending import RECORD, read_endings
from launchers.running import begin_rank, make_parser, read_arguments, run_script

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
# How long ranks may take to save when another process has failed, or the user stops the run.
GRACE_S = 30.0


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return the variables with a process's rank; torchrun sets the same ones."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),  # all ranks are on this one machine
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",  # the host of rank 0, and
        "MASTER_PORT": str(port),  # the port on which it waits for the others
        "HARDENED_DDP_LAUNCHER": "spawn",
    }


def run_rank(rank: int, world_size: int, port: int, lesson: bool, words: list[str]) -> None:
    """Run one rank: this is called in the new process."""
    os.environ.update(rank_environment(rank, world_size, port))
    from hardened_ddp.errors import HardenedError
    from hardened_ddp.ranks.launch import read_launch

    try:
        begin_rank(read_launch(os.environ), words, with_lesson=lesson)
    except HardenedError as error:
        print(f"run_with_python.py: error {error}", file=sys.stderr)
        sys.exit(error.exit_status)
    run_script(words)


def start_and_wait(num_ranks: int, port: int, *, lesson: bool, words: list[str]) -> int:
    """Start the ranks, wait for all of them, and return the exit status."""
    import torch.multiprocessing as mp

    arguments = (num_ranks, port, lesson, words)
    ranks = mp.start_processes(  # type: ignore[no-untyped-call]  # torch gives it no types
        run_rank, args=arguments, nprocs=num_ranks, join=False, start_method="spawn"
    )

    def pass_on(number: int, frame: FrameType | None = None) -> None:
        for process in ranks.processes:
            if process.is_alive():
                os.kill(process.pid, number)

    # A signal to this launcher is meant for the ranks: they save and exit by themselves.
    for number in STOP_SIGNALS:
        signal.signal(number, pass_on)
    while living := [process.sentinel for process in ranks.processes if process.is_alive()]:
        if any(process.exitcode for process in ranks.processes):
            pass_on(signal.SIGTERM)  # one failed: the others can't continue without it
            break
        connection.wait(living)
    try:
        # join kills after GRACE_S what still runs, and raises the error of the process that failed,
        # with its traceback.
        while not ranks.join(grace_period=GRACE_S):
            continue
    except mp.ProcessExitedException as error:
        print(f"run_with_python.py: rank {error.error_index} failed: {error}", file=sys.stderr)
        return error.exit_code if error.exit_code > 0 else 128 - error.exit_code
    except mp.ProcessRaisedException as error:
        print(f"run_with_python.py: rank {error.error_index} failed: {error}", file=sys.stderr)
        return 1
    return 0


def main(argv: list[str]) -> int:
    parser = make_parser("run_with_python.py", __doc__)
    parser.add_argument("--nproc", type=int, default=0, help="processes; 0: one per GPU, else 2")
    parser.add_argument("--no_lesson", action="store_true", help="only run the script")
    options, words = read_arguments(parser, argv)
    if options.nproc < 0:
        parser.error(f"--nproc {options.nproc}: needs a number of processes")

    # One thread for each rank, as torchrun does it. WHY here: torch reads it when it is imported.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    num_ranks = options.nproc
    try:
        if num_ranks == 0:
            import torch

            num_ranks = 2 if "--cpu_only" in words else torch.cuda.device_count() or 2
        with hold_port() as holder, TemporaryDirectory(prefix="hardened-ddp-") as folder:
            record = Path(folder) / "endings.jsonl"
            os.environ[RECORD] = str(record)
            port = holder.getsockname()[1]
            status = start_and_wait(num_ranks, port, lesson=not options.no_lesson, words=words)
            noted, _ = read_endings(record)  # WHY: a rank ends with 0 after a stop, too
            return status if noted is None else noted
    except ModuleNotFoundError as error:
        from hardened_ddp.settings.typed_command import missing_package

        if (missing := missing_package(error)) is None:
            raise
        print(f"run_with_python.py: error {missing}", file=sys.stderr)
        return missing.exit_status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

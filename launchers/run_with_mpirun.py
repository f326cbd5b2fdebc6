#!/usr/bin/env python3
"""Run a script under mpirun (Open MPI, MPICH and others with Hydra).

    mpirun -np 2 python launchers/run_with_mpirun.py
    mpirun -np 2 python launchers/run_with_mpirun.py ddp_training.py --cpu_only --epochs 2
    mpirun --host a:4,b:4 -np 8 python launchers/run_with_mpirun.py --folder /shared/rendezvous

mpirun starts the processes, also on other machines, and sets each one's rank in its own variables:
OMPI_COMM_WORLD_RANK (Open MPI) or PMI_RANK (Hydra). MPI itself is not used here: PyTorch's ranks
communicate over NCCL or gloo. Only the rendezvous address is missing; mpirun does not set it:

    one machine         127.0.0.1, and a port computed from the name of the mpirun job
    several machines    rank 0 chooses a port and writes its host and port into a file, in a folder
                        that all machines share; the others read it there
"""

import os
import socket
import sys
import time
import zlib
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hardened_ddp.errors import HardenedError, LaunchError
from hardened_ddp.ranks.launch import Launch, read_launch
from hardened_ddp.ranks.launchers_env import (
    command_words,
    hold_port,
    names_of_mpi,
    with_arguments,
)
from launchers.running import ROOT, begin_rank, make_parser, read_arguments, run_script

POLL_S = 0.05


def job_name() -> str:
    """Return a name of this mpirun job: the same on all its machines, and unique.

    Open MPI gives all ranks of a job values that no other job has. Hydra does not.
    """
    names = ("PMIX_NAMESPACE", "OMPI_MCA_orte_precondition_transports", "OMPI_MCA_orte_hnp_uri")
    text = " ".join(os.environ.get(name, "") for name in names)
    if not text.strip():
        raise LaunchError(
            "this mpirun gives its ranks no name of the job, so they can't find the file of rank 0",
            fix="give all ranks MASTER_ADDR, the host of rank 0, and MASTER_PORT, with -genv",
        )
    return f"{zlib.crc32(text.encode()):08x}"


def own_address() -> str:
    """Return the address of this machine for the others: the one of its host name."""
    return os.environ.get("MASTER_ADDR") or socket.gethostbyname(socket.gethostname())


def agree_on_rendezvous(rank: int, folder: Path, timeout_s: float) -> tuple[str, str]:
    """Return the address and port of rank 0, from a file in a folder that all ranks share."""
    path = folder / f"mpirun-{job_name()}"
    if rank == 0:
        address = own_address()
        if address.startswith("127."):
            raise LaunchError(
                f"the name of rank 0's host, {socket.gethostname()}, resolves to {address}, where "
                "no other machine can reach it",
                fix="correct /etc/hosts, or give rank 0 the address of its network card: -x "
                "MASTER_ADDR=... of mpirun",
            )
        holder = hold_port()
        port = holder.getsockname()[1]
        holder.detach()  # WHY: it is held until this process, which will listen on it, ends
        folder.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".new")
        aside.write_text(f"{address} {port}\n", encoding="utf-8")
        aside.replace(path)  # WHY rename: the others must never read an incomplete file
        return address, str(port)
    end = time.monotonic() + timeout_s
    while not path.is_file():
        if time.monotonic() > end:
            raise LaunchError(
                f"rank {rank} on {socket.gethostname()} waited {timeout_s:g} s for {path}, which "
                "rank 0 writes: rank 0 did not start, or this machine does not share that folder",
                fix="name a folder that all machines share, with --folder before the script",
            )
        time.sleep(POLL_S)
    address, port_text = path.read_text(encoding="utf-8").split()
    return address, port_text


def find_launch(folder: Path, timeout_s: float) -> tuple[Launch, Path | None]:
    """Return this rank's Launch; on several machines agree on the rendezvous address first."""
    names, note = names_of_mpi(os.environ) or {}, None
    own = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    rank, size, here = (os.environ.get(names.get(name, "")) for name in own)
    if rank is not None and size != here and "MASTER_PORT" not in os.environ:
        address, port = agree_on_rendezvous(int(rank), folder, timeout_s)
        os.environ.update({"MASTER_ADDR": address, "MASTER_PORT": port})
        note = folder / f"mpirun-{job_name()}" if rank == "0" else None
    launch = read_launch(os.environ)
    if launch.launcher == "none":
        raise LaunchError(
            "this process was not started by mpirun (no OMPI_COMM_WORLD_RANK, no PMI_RANK)",
            fix=with_arguments(command_words("mpi", 2, env={})),
        )
    return launch, note


def main(argv: list[str]) -> None:
    parser = make_parser("run_with_mpirun.py", __doc__)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / ".rendezvous")
    parser.add_argument("--wait_s", type=float, default=60.0, help="how long to wait for rank 0")
    parser.add_argument("--no_lesson", action="store_true", help="only run the script")
    options, words = read_arguments(parser, argv)

    launch, note = find_launch(options.folder, options.wait_s)
    begin_rank(launch, words, with_lesson=not options.no_lesson)
    # If all ranks have joined the lesson, all of them have read the file.
    if note is not None and not options.no_lesson:
        note.unlink(missing_ok=True)
    run_script(words)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except HardenedError as error:
        print(f"run_with_mpirun.py: error {error}", file=sys.stderr)
        sys.exit(error.exit_status)

"""Programs that are started wrongly, or ended from outside."""

import argparse
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DistributedSampler

from tests.explain.reproducers import reproduce, reproduces, throw

SECOND = timedelta(seconds=1)


@reproduces("launch-environment")
def launch_environment(rank: int, folder: Path) -> None:
    os.environ.pop("RANK", None)
    dist.init_process_group("gloo")


@reproduces("launch-environment")
def launch_environment_key(rank: int, folder: Path) -> None:
    os.environ.pop("LOCAL_RANK", None)
    int(os.environ["LOCAL_RANK"])


@reproduces("launch-port")
def launch_port(rank: int, folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        dist.TCPStore("127.0.0.1", taken.getsockname()[1], 1, is_master=True, timeout=SECOND)


@reproduces("launch-client-timeout")
def launch_client_timeout(rank: int, folder: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dist.TCPStore("127.0.0.1", closed.getsockname()[1], 2, is_master=False, timeout=SECOND)


@reproduces("launch-rendezvous")
def launch_rendezvous(rank: int, folder: Path) -> None:
    from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError

    raise RendezvousTimeoutError("")


@reproduces("launch-local-rank-flag")
def launch_local_rank_flag(rank: int, folder: Path) -> None:
    parser = argparse.ArgumentParser(prog="train.py")
    parser.add_argument("--epochs")
    parser.parse_args(["--local-rank=1"])


@reproduces("launch-spawn-guard")
def launch_spawn_guard(rank: int, folder: Path) -> None:
    script = folder / "train.py"
    script.write_text(
        "import multiprocessing as mp\n"
        "p = mp.get_context('spawn').Process(target=print)\np.start()\np.join()\n"
    )
    subprocess.run([sys.executable, "-S", str(script)], check=False)


@reproduces("launch-import")
def launch_import(rank: int, folder: Path) -> None:
    import no_such_package  # type: ignore[import-not-found]  # noqa: F401


@reproduces("stop-sighup")
def stop_sighup(rank: int, folder: Path) -> None:
    from torch.distributed.elastic.multiprocessing.api import SignalException

    raise SignalException(f"Process {os.getpid()} got signal: 1", sigval=signal.SIGHUP)


@reproduces("stop-sigterm")
def stop_sigterm(rank: int, folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    signal.pause()


@reproduces("stop-interrupt")
def stop_interrupt(rank: int, folder: Path) -> None:
    # WHY: what a shell starts in its background has SIGINT ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()


@reproduces("killed-sigkill", num_ranks=2, guilty=1)
def killed_sigkill_peer(rank: int, folder: Path) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(4))


@reproduces("killed-segfault")
def killed_segfault_faulthandler(rank: int, folder: Path) -> None:
    import ctypes
    import faulthandler

    faulthandler.enable()
    ctypes.string_at(0)


@reproduces("killed-sigfpe", num_ranks=2, guilty=1)
def killed_sigfpe(rank: int, folder: Path) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGFPE)
    dist.all_reduce(torch.ones(4))


def _fail_with_key(index: int) -> None:
    raise KeyError(f"shard {index}")


@reproduces("python-keyerror", guilty=0)
def spawned_key_error(rank: int, folder: Path) -> None:
    torch.multiprocessing.start_processes(_fail_with_key, nprocs=1, start_method="fork")


reproduce(
    "launch-ranks-missing",
    lambda folder: dist.TCPStore("127.0.0.1", 0, 3, is_master=True, timeout=SECOND),
)
reproduce("launch-name", lambda folder: socket.getaddrinfo("no-such-node.invalid", 29500))
reproduce(
    "launch-arguments",
    lambda folder: argparse.ArgumentParser(prog="train.py").parse_args(["--nproc_per_node=2"]),
)
reproduce("launch-no-group", lambda folder: dist.barrier())
reproduce(
    "launch-command",
    lambda folder: subprocess.run(["bash", "-c", "no-such-torchrun train.py"], check=False),
)
reproduce(
    "launch-command",
    lambda folder: subprocess.run([sys.executable, "-S", "no_such_train.py"], check=False),
)
reproduce("stop-aborted", lambda folder: os.abort())
reproduce("killed-sigkill", lambda folder: os.kill(os.getpid(), signal.SIGKILL))
reproduce("killed-segfault", lambda folder: os.kill(os.getpid(), signal.SIGSEGV))
reproduce("killed-bus", lambda folder: os.kill(os.getpid(), signal.SIGBUS))
reproduce(
    "data-pickle",
    lambda folder: multiprocessing.get_context("spawn").Process(target=lambda: None).start(),
)
reproduce("launch-no-group", lambda folder: DistributedSampler([1]))  # type: ignore[arg-type]
reproduce(
    "launch-group-twice",
    lambda folder: dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1),
    group=True,
)
reproduce("launch-rank-range", lambda folder: DistributedSampler([1], 2, 2))  # type: ignore[arg-type]
reproduce("openmp-threads", lambda folder: throw(RuntimeError("can't start new thread")))

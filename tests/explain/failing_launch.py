"""Programs that are started wrongly, or ended from outside."""

import argparse
import importlib
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
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError
from torch.utils.data import DistributedSampler

from tests.explain.reproducers import reproduces, throw

SECOND = timedelta(seconds=1)


@reproduces("launch-environment")
def launch_environment() -> None:
    os.environ.pop("RANK", None)
    dist.init_process_group("gloo")


@reproduces("launch-port")
def launch_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        dist.TCPStore("127.0.0.1", taken.getsockname()[1], 1, is_master=True, timeout=SECOND)


@reproduces("launch-client-timeout")
def launch_client_timeout() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        dist.TCPStore("127.0.0.1", closed.getsockname()[1], 2, is_master=False, timeout=SECOND)


@reproduces("launch-local-rank-flag")
def launch_local_rank_flag() -> None:
    parser = argparse.ArgumentParser(prog="train.py")
    parser.add_argument("--epochs")
    parser.parse_args(["--local-rank=1"])


@reproduces("launch-init-method")
def launch_init_method() -> None:
    dist.init_process_group("gloo", init_method="tpc://10.0.0.1:29500", rank=0, world_size=2)


@reproduces("launch-spawn-guard")
def launch_spawn_guard() -> None:
    Path("train.py").write_text(
        "import multiprocessing as mp\n"
        "p = mp.get_context('spawn').Process(target=print)\np.start()\np.join()\n"
    )
    subprocess.run([sys.executable, "-S", "train.py"], check=False)


@reproduces("stop-interrupt")
def stop_interrupt() -> None:
    # WHY: what a shell starts in its background has SIGINT ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(os.getpid(), signal.SIGINT)
    signal.pause()


@reproduces("killed-sigkill", num_ranks=2, guilty=1)
def killed_sigkill_peer() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(torch.ones(4))


@reproduces("killed-segfault")
def killed_segfault_faulthandler() -> None:
    import ctypes
    import faulthandler

    faulthandler.enable()
    ctypes.string_at(0)


def _fail_with_key(index: int) -> None:
    raise KeyError(f"shard {index}")


@reproduces("python-keyerror", guilty=0)
def spawned_key_error() -> None:
    torch.multiprocessing.start_processes(_fail_with_key, nprocs=1, start_method="fork")


reproduces("launch-ranks-missing")(
    lambda: dist.TCPStore("127.0.0.1", 0, 3, is_master=True, timeout=SECOND)
)
reproduces("launch-environment")(lambda: int(os.environ["LOCAL_RANK"]))
reproduces("launch-name")(lambda: socket.getaddrinfo("no-such-node.invalid", 29500))
reproduces("launch-arguments")(
    lambda: argparse.ArgumentParser(prog="train.py").parse_args(["--nproc_per_node=2"])
)
reproduces("launch-no-group")(lambda: dist.barrier())
reproduces("launch-command")(
    lambda: subprocess.run(["bash", "-c", "no-such-torchrun train.py"], check=False)
)
reproduces("launch-command")(
    lambda: subprocess.run([sys.executable, "-S", "no_such_train.py"], check=False)
)
reproduces("stop-aborted")(lambda: os.abort())
reproduces("killed-sigkill")(lambda: os.kill(os.getpid(), signal.SIGKILL))
reproduces("killed-sigfpe")(lambda: os.kill(os.getpid(), signal.SIGFPE))
reproduces("killed-bus")(lambda: os.kill(os.getpid(), signal.SIGBUS))
reproduces("data-pickle")(
    lambda: multiprocessing.get_context("spawn").Process(target=lambda: None).start()
)
reproduces("launch-group-twice", group=True)(
    lambda: dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
)
reproduces("launch-rank-range")(lambda: DistributedSampler([1], 2, 2))  # type: ignore[arg-type]
reproduces("openmp-threads")(lambda: throw(RuntimeError("can't start new thread")))
reproduces("launch-rendezvous")(lambda: throw(RendezvousTimeoutError("")))
reproduces("launch-import")(lambda: importlib.import_module("no_such_package"))
reproduces("stop-sighup")(
    lambda: throw(SignalException(f"Process {os.getpid()} got signal: 1", signal.SIGHUP))
)
reproduces("stop-sigterm")(lambda: (os.kill(os.getpid(), signal.SIGTERM), signal.pause()))

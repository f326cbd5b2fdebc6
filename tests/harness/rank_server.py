"""The process that ranks of tests are forked from: torch is imported once, and not per rank.

Owns: the imports, the fork, and the news of how a child ended. There is one for all processes of
pytest. Each that connects (rank_link.py) gets a fork of it as a server of its own, which has one
thread, starts no GPU and runs no tensor code, so that a fork of it is a clean process. A request
names a folder with job-RANK.json files, the answer holds the pids.
A rank ends after its threads and atexit handlers, without the 0.4 s of CPU time that taking 3000
modules down would cost it; the end of an interpreter is for tests of real commands (commands.py).
When its socket closes, because pytest ended in whatever way, a server kills its children and
removes the folder of their jobs; the first one, when its stdin closes, that of its log.
"""

import atexit
import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import linecache
import os
import pickle
import pkgutil
import platform
import random
import select
import shutil
import signal
import socket
import sys
import threading
import traceback
import weakref
from pathlib import Path
from typing import Any, NoReturn

from tests.harness.processes import SESSION_MARK

ERRORS_NAME = "errors.txt"
"""In the folder of a program: its stderr."""

PIDS_NAME = "pids.txt"
"""There too: a line for each process that it forked, with RANK (or -1) and process id."""

STACK_SIGNAL = signal.SIGRTMIN + 7  # used by no library that we know
MAX_MESSAGE_BYTES = 64 * 1024
_PR_SET_PDEATHSIG = 1
_ENV_START = 47  # field 50 of /proc/PID/stat, the first behind the name being field 3
_HEAVY = (
    "numpy",
    "torch",
    "torch.distributed",
    "torch.distributed.run",
    "torch.distributed.elastic.rendezvous.static_tcp_rendezvous",
    "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend",
    "torch.nn.parallel",
    "torch.utils.data",
    "torch._dynamo",  # DDP and the optimizers import it at their first use
    "torch.profiler._cupti_monitor",
    "torch.utils.tensorboard",
    "multiprocessing.sharedctypes",
    "encodings.idna",
    "safetensors.torch",
    "psutil",
    "yaml",
    "tqdm",
    "pytest",
    "tests.harness.ranks",
    "tests.harness.forked_programs",
    "ddp_training",
    "ddp_drills.wrappers",
    "tests.plugins",
)
# What torch.manual_seed keeps the stack of, which each rank calls.
_IN_STACKS = ("torch.random", "torch.cuda.random", "torch.cuda", "torch.xpu.random", "torch.xpu")
_IN_STACKS += ("torch.mtia", "torch._compile", "torch._dynamo.eval_frame")
_IN_STACKS += ("ddp_training", "hardened_ddp.ranks.seeding", "tests.harness.rank_server")


def main() -> NoReturn:
    """Import, fork on request; end, in a child after its job."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    preload()
    if channel := accept(listener):
        hello = json.loads(channel.recv(MAX_MESSAGE_BYTES))
        show_mark(hello["mark"])
        channel.send(json.dumps({"server": os.getpid()}).encode())
        if job := serve(channel, Path(hello["folder"])):
            run_job(*job)
    else:
        shutil.rmtree(sys.argv[2], ignore_errors=True)
    end_process(0)


def accept(listener: socket.socket) -> socket.socket | None:
    """Fork a server for each connection, until stdin closes. Returns that, or None at the end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the servers
    waiter = select.poll()
    waiter.register(listener, select.POLLIN)
    waiter.register(sys.stdin, select.POLLIN)
    while True:
        ready = {fd for fd, _ in waiter.poll()}
        if sys.stdin.fileno() in ready:
            return None
        channel, _ = listener.accept()
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            listener.close()
            return channel
        channel.close()


def show_mark(mark: str) -> None:
    """Have /proc show this mark in the environment of this process and of all its forks.

    WHY so: it shows the memory in which the environment was at the start of the first server.
    """
    shown = Path("/proc/self/environ").read_bytes()
    begins_at = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[_ENV_START])
    name = f"{SESSION_MARK}=".encode()
    place = shown.index(name) + len(name)
    assert len(shown[place:].partition(b"\0")[0]) == len(mark)
    ctypes.memmove(begins_at + place, mark.encode(), len(mark))


def preload() -> None:
    """Import what ranks need. What can't be imported here fails in the test that needs it."""
    gc.disable()  # WHY: a quarter of the time of these imports goes into it
    for name in _HEAVY:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    # WHY broad: a module that is broken must not take the tests of the others with it
    with contextlib.suppress(Exception):
        package = importlib.import_module("hardened_ddp")
        for module in pkgutil.walk_packages(
            package.__path__, "hardened_ddp.", onerror=lambda _: None
        ):
            with contextlib.suppress(Exception):
                importlib.import_module(module.name)
        read_files()
    leave_out_finalizers()
    gc.collect()
    gc.freeze()  # WHY: a collection in a child would write to, and so copy, all those pages
    gc.enable()


def read_files() -> None:
    """Read what each rank would read: digits, sources for their hash and for a stack, uname."""
    from hardened_ddp.data.sources import digits
    from hardened_ddp.training.building import code_hash

    code_hash()
    digits.read_table(digits.find_file())
    platform.platform()  # it asks the command uname
    for name in _IN_STACKS:
        linecache.getlines(str(importlib.import_module(name).__file__))


def leave_out_finalizers() -> None:
    """Have no child run what our imports have registered for the end of the process.

    It would take down torch's operators one by one: 50 ms, and a copy of 30 MB of our pages.
    """
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        finalizer.atexit = False
    atexit.unregister(sys.modules["torch._dynamo.utils"].dump_compile_times)


def serve(channel: socket.socket, jobs: Path) -> tuple[Path, int] | None:
    """Fork until the socket closes. Returns (folder, rank) in a child, None in the server."""
    waiter = select.poll()
    waiter.register(channel, select.POLLIN)
    children: dict[int, int] = {}  # pidfd -> pid
    while True:
        for fd, _ in waiter.poll():
            if fd in children:
                pid = children.pop(fd)
                waiter.unregister(fd)
                os.close(fd)
                _, status, used = os.wait4(pid, 0)
                news = {
                    "pid": pid,
                    "status": os.waitstatus_to_exitcode(status),
                    "cpu_s": used.ru_utime + used.ru_stime,
                }
                with contextlib.suppress(OSError):
                    channel.send(json.dumps(news).encode())
                continue
            raw = channel.recv(MAX_MESSAGE_BYTES)
            if not raw:
                for pid in children.values():
                    os.kill(pid, signal.SIGKILL)
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(pid, signal.SIGKILL)
                shutil.rmtree(jobs, ignore_errors=True)
                return None
            request = json.loads(raw)
            if name := request.get("import"):
                importlib.import_module(name)
                continue
            pids = []
            for rank in range(request["world_size"]):
                pid = os.fork()
                if pid == 0:
                    for inherited in (channel.detach(), *children):
                        os.close(inherited)
                    return Path(request["folder"]), rank
                pids.append(pid)
                fd = os.pidfd_open(pid)
                children[fd] = pid
                waiter.register(fd, select.POLLIN)
            channel.send(json.dumps({"pids": pids}).encode())


def run_job(folder: Path, rank: int) -> NoReturn:
    """Become the rank that the job describes, do it, and end."""
    job = json.loads((folder / f"job-{rank}.json").read_text(encoding="utf-8"))
    os.setsid()
    if host := job.get("host"):
        importlib.import_module("ddp_drills.two_hosts").enter(**host)
    # WHY: a rank must not outlive the server, however that ends
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    _redirect(folder / f"output-{rank}.txt")
    stack = (folder / f"stack-{rank}.txt").open("w", encoding="utf-8")
    faulthandler.register(STACK_SIGNAL, file=stack)
    faulthandler.enable()
    os.environ.clear()
    os.environ.update(job["env"])
    os.chdir(job["cwd"])
    sys.path[:] = job["sys_path"]
    random.seed()
    sys.modules["numpy"].random.seed()
    match job["kind"]:
        case "script":
            status = run_script(job["argv"])
        case "program":
            # WHY here: that module needs this one
            programs = importlib.import_module("tests.harness.forked_programs")
            status = programs.run_program(job["argv"], folder)
        case _:
            status = run_target(job, folder, rank)
    end_process(status)


def end_process(status: int) -> NoReturn:
    """End as an interpreter does, but for taking its modules down."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def run_script(argv: list[str]) -> int:
    """Run ddp_training.py as if it had been typed."""
    sys.argv = ["ddp_training.py", *argv]
    status: int = importlib.import_module("ddp_training").main(argv)
    return status


def run_target(job: dict[str, Any], folder: Path, rank: int) -> int:
    """Call a test's function and leave its result, or its traceback, in a file."""
    status = 0
    try:
        target: Any = importlib.import_module(job["module"])
        for name in job["name"].split("."):
            target = getattr(target, name)
        arguments = pickle.loads((folder / "arguments.pickle").read_bytes())
        raw = pickle.dumps({"value": target(*arguments)})
    except SystemExit as leaving:
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        raw = pickle.dumps({"error": traceback.format_exc()})
    except BaseException:  # WHY broad: whatever a test raises is its result
        status = 1
        raw = pickle.dumps({"error": traceback.format_exc()})
    (folder / f"result-{rank}.pickle").write_bytes(raw)
    return status


def _redirect(path: Path) -> None:
    """Send stdout and stderr to one file, line by line as to a terminal; no input."""
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(nothing)
    os.close(output)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # it is a text file


if __name__ == "__main__":
    main()

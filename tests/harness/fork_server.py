"""The process that ranks of tests are forked from: torch is imported once, and not per rank.

    python -m tests.harness.fork_server DESCRIPTOR FOLDER    a listening socket; where its log is

It forks a keeper for each connection. The keeper has the rank as its child, tells its process id
and its end, and kills what the rank leaves behind when the connection closes, however pytest ended.
A rank ends without atexit handlers, as a child of multiprocessing: that saves 0.4 s of CPU time.

A rank may be a program, a command line of python or torchrun. torchrun's agent is torch's own, with
its rendezvous, restarts and signals, also within hardened-ddp; its ranks are forked from it instead
of started. All other programs that a program starts are real ones.
"""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import multiprocessing
import os
import pickle
import pkgutil
import platform
import random
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TextIO
from unittest import mock

from tests.harness.processes import ROOT, adopt_orphans, kill_descendants

# In the folder of a program: its stderr, and a line with RANK and process id of each rank of it.
ERRORS_NAME, PIDS_NAME = "errors.txt", "pids.txt"
MAX_MESSAGE_BYTES = 64 * 1024
_STARTS_WITHIN_S = 10.0
_HANDLED = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# Beside all modules of hardened_ddp: what a run imports when it needs it, and what tests need.
_RENDEZVOUS = "torch.distributed.elastic.rendezvous"
_IMPORTED_LATE = (
    *("torch.distributed.run", f"{_RENDEZVOUS}.static_tcp_rendezvous"),
    *(f"{_RENDEZVOUS}.c10d_rendezvous_backend", "torch.profiler._cupti_monitor"),
    "torch._dynamo",  # DDP and the optimizers import it at their first use
    *("torch.utils.tensorboard", "multiprocessing.sharedctypes", "encodings.idna"),
    *("safetensors.torch", "psutil", "pytest", "tests.harness.ranks", "ddp_training"),
    *("ddp_drills.wrappers", "tests.plugins"),
)
_FORK = multiprocessing.get_context("fork")
_MADV_COLLAPSE = 25  # of <linux/mman.h>
# WHY: without a script's globals, DDP's destructor would hold the GIL and wait for a thread of gloo
# that may need it; in a process of its own that happens while the process ends.
_kept: list[object] = []


def main() -> None:
    """Import, then fork a keeper for each connection, until stdin closes."""
    listener = socket.socket(fileno=int(sys.argv[1]))
    preload()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel buries the keepers
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        channel, _ = listener.accept()
        request = json.loads(channel.recv(MAX_MESSAGE_BYTES))
        if name := request.get("import"):
            foreign_code = importlib.import_module("hardened_ddp.data.foreign_code")
            with contextlib.suppress(Exception):  # WHY broad: as in preload
                # WHY: some import torchvision, whose binary may not fit torch
                foreign_code.import_extra(name.partition(".")[0], what="a test")
                importlib.import_module(name)
        elif os.fork() == 0:
            listener.close()
            keep(channel, Path(request["folder"]), request["rank"])
        channel.close()
    shutil.rmtree(sys.argv[2], ignore_errors=True)


def preload() -> None:
    """Import what ranks need. What can't be imported here fails in the test that needs it."""
    gc.disable()  # WHY: a quarter of the time of these imports goes into it
    package = importlib.import_module("hardened_ddp")
    modules = pkgutil.walk_packages(package.__path__, "hardened_ddp.", onerror=lambda _: None)
    imports = [*_IMPORTED_LATE, *(module.name for module in modules)]
    acts = [partial(importlib.import_module, name) for name in imports]
    for act in (*acts, read_files, use_large_pages):
        # WHY broad: a module that is broken must not take the tests of the others with it
        with contextlib.suppress(Exception):
            act()
    gc.collect()
    gc.freeze()  # WHY: a collection in a child would write to, and so copy, all those pages
    gc.enable()


def use_large_pages() -> None:
    """Put this memory into pages of 2 MiB where the kernel can: a fork copies a table of pages."""
    for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines():
        area, rights = line.split()[:2]
        first, end = (int(word, 16) for word in area.split("-"))
        if rights == "rw-p":
            size = ctypes.c_size_t(end - first)
            ctypes.CDLL(None).madvise(ctypes.c_void_p(first), size, _MADV_COLLAPSE)


def read_files() -> None:
    """Read what each rank would read: digits, sources for their hash, settings, uname."""
    from hardened_ddp.data.sources import built_in
    from hardened_ddp.settings.cli import parse
    from hardened_ddp.settings.layers import resolve
    from hardened_ddp.settings.record import code_hash

    code_hash()
    resolve(parse([], edited_file=str(ROOT / "config.yaml")))  # compiles many a pattern
    built_in.read_table(built_in.find_file())
    platform.platform()  # it asks the command uname


def keep(channel: socket.socket, folder: Path, rank: int) -> NoReturn:
    """Fork a rank, tell of its end, and kill what is left of it when the connection closes."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    adopt_orphans()
    process = _FORK.Process(target=be_rank, args=(channel, folder, rank))
    process.start()
    with contextlib.suppress(OSError):
        channel.send(json.dumps({"keeper": os.getpid(), "pid": process.pid}).encode())
        # WHY not its sentinel: what the rank has forked holds that open, too
        if channel not in select.select([os.pidfd_open(process.pid), channel], [], [])[0]:
            process.join()
            channel.send(json.dumps({"status": process.exitcode}).encode())
            # What the rank left behind has this process for a parent now: let nobody stay a zombie.
            signal.signal(signal.SIGCHLD, signal.SIG_IGN)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            channel.recv(1)
    kill_descendants(os.getpid())
    os._exit(0)


def be_rank(channel: socket.socket, folder: Path, rank: int) -> None:
    """Become the rank that the job describes, do it, and end."""
    channel.close()
    os.setsid()
    job = pickle.loads((folder / f"job-{rank}.pickle").read_bytes())
    if host := job.get("host"):
        importlib.import_module("tests.two_hosts").enter(**host)
    output = folder / f"output-{rank}.txt"
    _redirect(output, folder / job.get("errors", output))
    faulthandler.enable()
    _change_place(job["cwd"], job["env"])
    sys.path[:] = job["sys_path"]
    target, arguments = pickle.loads(job["call"])
    result = pickle.dumps(target(*arguments))
    (folder / f"result-{rank}.pickle").write_bytes(result)


def run_script(argv: list[str]) -> NoReturn:
    """Be ddp_training.py."""
    sys.argv = ["ddp_training.py", *argv]
    sys.exit(importlib.import_module("ddp_training").main(argv))


def run_program(argv: Sequence[str], folder: Path) -> None:
    """Be the program of a command line of python or torchrun. folder: of its pids."""
    program, *words = argv
    if Path(program).name == "torchrun":
        words = ["-m", "torch.distributed.run", *words]
    starts = "torch.distributed.elastic.multiprocessing.api.get_subprocess_handler"
    with mock.patch(starts, partial(ForkedRank, folder / PIDS_NAME)):
        if words[:2] == ["-m", "torch.distributed.run"]:
            sys.argv = ["torchrun", *words[2:]]
            importlib.import_module("torch.distributed.run").main()
        else:
            be_python(words)


def be_python(words: Sequence[str]) -> None:
    """Run what stands behind python in a command line."""
    while words[0] == "-u":
        words = words[1:]
    first, *rest = words
    libraries = [path for path in sys.path if _is_below(path, sys.prefix, sys.base_prefix)]
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    start = os.getcwd() if first in ("-m", "-c") else str(Path(first).resolve().parent)
    sys.path[:] = [start, *added, *libraries]
    if start != str(ROOT):
        _forget_this_checkout()
    if first == "-m":
        sys.argv = rest
        _kept.append(runpy.run_module(rest[0], run_name="__main__", alter_sys=True))
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.modules["__main__"] = module = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(module))
    else:
        sys.argv = [first, *rest]
        _kept.append(runpy.run_path(first, run_name="__main__"))


class ForkedRank:
    """A rank of a forked torchrun: what its agent has as a SubprocessHandler, and its Popen."""

    def __init__(self, pids: Path, *, args: Any, env: Any, stdout: Any, stderr: Any, **_: object):
        self.proc = self
        is_ready, ready = os.pipe()
        work = (args, {**os.environ, **env}, (stdout, stderr), ready)
        while True:
            self._process = _FORK.Process(target=_be_rank_of_torchrun, args=work)
            self._process.start()
            # WHY wait: only then the agent can signal it as a group. It may never come: where a
            # thread of the agent was resolving a name, the lock for that stays taken in the fork.
            if select.select([is_ready], [], [], _STARTS_WITHIN_S)[0]:
                break
            self._process.kill()
            self._process.join()
        os.close(is_ready)
        os.close(ready)
        self.pid = self._process.pid
        with pids.open("a", encoding="utf-8") as file:
            file.write(f"{env['RANK']} {self.pid}\n")

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("a forked rank", timeout or 0.0)
        return self.poll()

    def close(self, death_sig: signal.Signals | None = None) -> None:
        if self.pid is not None and self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, death_sig or signal.SIGTERM)


def _be_rank_of_torchrun(
    words: Sequence[str], env: Mapping[str, str], streams: tuple[str | None, str | None], ready: int
) -> None:
    """Leave behind what is the agent's, and be the program."""
    os.setsid()
    with contextlib.suppress(OSError):
        socket.getaddrinfo("localhost", 0)
    for number in _HANDLED:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.write(ready, b"x")
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    for target, path in enumerate(streams, 1):
        if path:
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), target)
    # WHY anew: the agent's know of the agent's, such as whether one can seek in it
    sys.stdout, sys.stderr = _text_file(1), _text_file(2)
    _change_place(os.getcwd(), env)
    be_python(words)


def _change_place(folder: str, env: Mapping[str, str]) -> None:
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    tempfile.tempdir = None  # it is TMPDIR's
    random.seed()
    sys.modules["numpy"].random.seed()


def _redirect(output: Path, errors: Path) -> None:
    """Send stdout and stderr to files, line by line as to a terminal; no input."""
    for target, path in ((0, Path(os.devnull)), (1, output), (2, errors)):
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND if target else os.O_RDONLY
        os.dup2(descriptor := os.open(path, flags), target)
        os.close(descriptor)
    sys.stdout, sys.stderr = _text_file(1), _text_file(2)


def _text_file(descriptor: int) -> TextIO:
    return open(descriptor, "w", buffering=1, encoding="utf-8", closefd=False)


def _forget_this_checkout() -> None:
    """Have a program of another folder import its own modules, and not those of the server.

    Those of benchmarks/ too: they run other checkouts.
    """
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        # but for a virtual environment that lies in it
        is_ours = file and _is_below(file, ROOT) and not _is_below(file, sys.prefix)
        if is_ours and name != "__main__":
            _kept.append(sys.modules.pop(name))
    importlib.invalidate_caches()


def _is_below(path: str, *folders: Path | str) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in folders)


if __name__ == "__main__":
    main()

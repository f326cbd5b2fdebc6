"""Programs in forked processes: what a command line of python or torchrun does, without imports.

    with start_program(["torchrun", "--nproc_per_node=2", "ddp_training.py"]) as program: ...
    completed = run_program(["python", "benchmarks/step_path.py"], timeout_s=60)    both of ranks.py

An import of torch costs a process two seconds of CPU time; a fork of the server has it. The Python
programs that such a program starts with subprocess are forked from it in turn: so torchrun's agent
is torch's own, with its rendezvous, restarts and signals, and each rank is its child process. Only
the start and the end of an interpreter are left out; a test that is about these runs a real command
(commands.py).
Owns: what a forked process does to become another program. Does not own: the server.
What goes wrong here: the program starts others otherwise than by Popen. They are real then.
"""

import atexit
import contextlib
import faulthandler
import importlib
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
import types
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TextIO

from tests.harness.processes import ROOT
from tests.harness.rank_server import ERRORS_NAME, PIDS_NAME, STACK_SIGNAL, end_process

_STARTS_WITHIN_S = 10.0
_HANDLED = (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
# of Popen._execute_child behind env: startupinfo, creationflags, shell, six ends of pipes,
# restore_signals, gid, gids, uid, umask, start_new_session; newer versions have more
_NUM_SHARED = 15
_execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]
# WHY: without a script's globals, DDP's destructor would hold the GIL and wait for a thread of gloo
# that may need it; in a process of its own that happens while the process ends.
_kept: list[object] = []
_forgotten: dict[str, types.ModuleType] = {}


def words_of_python(argv: Sequence[str]) -> list[str] | None:
    """Give what stands behind the name of Python in a command line; None if it is another's."""
    program, *words = argv
    name = Path(program).name
    if name == "torchrun":
        return [name, *words]
    if program != sys.executable and name not in ("python", "python3"):
        return None
    while words[:1] == ["-u"]:
        words = words[1:]
    return words if words and (words[0] in ("-m", "-c") or words[0][0] != "-") else None


def run_program(argv: Sequence[str], folder: Path) -> int:
    """Be the program of a command line; give its status. folder: of its stderr and its pids."""
    words = words_of_python(argv)
    if words is None:
        raise ValueError(f"not a command of python: {argv}")
    with (folder / ERRORS_NAME).open("wb") as file:
        os.dup2(file.fileno(), 2)

    def fork_or_execute(popen: Any, *given: Any) -> None:  # Any: of a private method
        _fork_or_execute(folder / PIDS_NAME, popen, *given)

    # WHY not Popen itself: torch has imported it by its name
    subprocess.Popen._execute_child = fork_or_execute  # type: ignore[attr-defined]
    return _be(words)


def _fork_or_execute(
    pids: Path,
    popen: Any,  # Any: with the private names of a Popen
    args: Any,
    executable: Any,
    preexec_fn: Any,
    close_fds: bool,
    pass_fds: Iterable[int],
    cwd: Any,
    env: Any,
    *more: Any,
) -> None:
    """Do what Popen._execute_child does, and fork where another Python is to be started."""
    _, _, shell, *pipes, _, _, _, _, _, start_new_session = more[:_NUM_SHARED]
    words = None
    if not (shell or executable or preexec_fn or isinstance(args, str | bytes | os.PathLike)):
        words = words_of_python([os.fsdecode(word) for word in args])
    if words is None:
        given = (args, executable, preexec_fn, close_fds, pass_fds, cwd, env)
        _execute(popen, *given, *more)
        return
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    p2cread, _, _, c2pwrite, _, errwrite = pipes
    start = partial(_start, words, (p2cread, c2pwrite, errwrite), pass_fds, cwd, env)
    popen.pid = _fork(start, in_new_session=start_new_session)
    with pids.open("a", encoding="utf-8") as file:
        file.write(f"{(env or os.environ).get('RANK', -1)} {popen.pid}\n")
    popen._child_created = True
    popen._close_pipe_fds(*pipes)


def _fork(start: Callable[[], NoReturn], *, in_new_session: bool) -> int:
    """Fork a process that calls start; give its process id."""
    while True:
        is_ready, ready = os.pipe()
        pid = os.fork()
        if pid == 0:
            if in_new_session:
                os.setsid()
            # WHY: where a thread of the parent was resolving a name, its lock stays taken here
            with contextlib.suppress(OSError):
                socket.getaddrinfo("localhost", 0)
            os.write(ready, b"x")
            start()
        os.close(ready)
        # WHY wait: before that the caller can't signal it as a group
        has_started = select.select([is_ready], [], [], _STARTS_WITHIN_S)[0]
        os.close(is_ready)
        if has_started:
            return pid
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _start(
    words: Sequence[str], streams: Sequence[int], pass_fds: Iterable[int], cwd: Any, env: Any
) -> NoReturn:
    """In the forked process: leave behind what was its parent's, and be the program."""
    status = 1
    with contextlib.suppress(BaseException):
        try:
            for target, source in enumerate(streams):
                if source != -1:
                    os.dup2(source, target)
            # WHY anew: the parent's know of the parent's, such as whether one can seek in it
            sys.stdout, sys.stderr = _text_file(1), _text_file(2)
            kept = sorted({0, 1, 2, *pass_fds})
            for low, high in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
                os.closerange(low + 1, high)
            for number in _HANDLED:
                signal.signal(number, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            faulthandler.unregister(STACK_SIGNAL)
            atexit._clear()  # the parent's temporary folders are its own to remove
            if cwd is not None:
                os.chdir(cwd)
            if env is not None:
                os.environ.clear()
                os.environ.update({os.fsdecode(k): os.fsdecode(v) for k, v in env.items()})
            random.seed()
            sys.modules["numpy"].random.seed()
            status = _be(words)
        except BaseException:  # WHY broad: nothing may return into the parent's frames
            traceback.print_exc()
    end_process(status)


def _text_file(descriptor: int) -> TextIO:
    return open(descriptor, "w", buffering=1, encoding="utf-8", closefd=False)


def _be(words: Sequence[str]) -> int:
    """Run what stands behind python in a command line."""
    first, *rest = words
    tempfile.tempdir = None  # it is TMPDIR's
    libraries = [path for path in sys.path if _is_below(path, sys.prefix, sys.base_prefix)]
    added = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    is_file = first not in ("-m", "-c", "torchrun")
    start = str(Path(first).resolve().parent) if is_file else os.getcwd()
    sys.path[:] = [start, *added, *libraries]
    _know_this_checkout(start == str(ROOT))
    if is_file:
        sys.argv = [first, *rest]
        return status_of(lambda: _kept.append(runpy.run_path(first, run_name="__main__")))
    if first == "torchrun":
        # WHY by a call: torch's agent calls inspect.stack(), which takes seconds where the code of
        # a frame is not that of an imported file
        sys.argv = [first, *rest]
        return status_of(importlib.import_module("torch.distributed.run").main)
    if first == "-m":
        sys.argv = rest
        return status_of(
            lambda: _kept.append(runpy.run_module(rest[0], run_name="__main__", alter_sys=True))
        )
    sys.argv = ["-c", *rest[1:]]
    sys.modules["__main__"] = module = types.ModuleType("__main__")
    return status_of(lambda: exec(compile(rest[0], "<string>", "exec"), vars(module)))


def status_of(work: Callable[[], object]) -> int:
    """Do work; return the exit status of a process that does only that."""
    try:
        work()
    except SystemExit as leaving:
        if isinstance(leaving.code, str):
            print(leaving.code, file=sys.stderr)
        return leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:  # WHY broad: as at the top of an interpreter
        traceback.print_exc()
        return 1
    return 0


def _know_this_checkout(is_known: bool) -> None:
    """Have a program of another folder import its own modules, and not those of the server.

    Those of benchmarks/ too: they run other checkouts.
    """
    if is_known:
        sys.modules.update(_forgotten)
        return
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and name != "__main__" and is_of_checkout(file):
            _forgotten[name] = sys.modules.pop(name)
    importlib.invalidate_caches()


def is_of_checkout(file: str, prefix: str = sys.prefix) -> bool:
    """Tell whether a file is of this checkout, and not of a virtual environment that lies in it."""
    return _is_below(file, ROOT) and not _is_below(file, prefix)


def _is_below(path: str, *folders: Path | str) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in folders)

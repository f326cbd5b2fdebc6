"""Ranks for tests: real processes that talk over gloo, forked from one server that has torch.

    results = run_ranks(target, 2, "argument")             a function on each of 2 ranks
    finished = train(["--epochs", "1"], 2).ok()            ddp_training.py on 2 ranks
    with start_training([...], 2) as running: ...          the same, to be signalled and killed
    completed = run_command(["torchrun", ...], timeout_s=60)
    completed = run_program(["torchrun", ...], timeout_s=60)   the same in a forked process
    with start_program(["torchrun", ...]) as program: ...      the same, to be signalled and killed

Owns: starting ranks, torchrun's environment for them, and the one fork server of the session.
Does not own: the server (rank_server.py, rank_link.py), ranks under way (running.py), real commands
(commands.py), what a test leaves behind (leftovers.py).
What goes wrong here: a rank hangs. Then all are asked for their stacks, killed, and shown.
"""

import atexit
import os
import pickle
import shlex
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from hardened_ddp.ranks.network import hold_port, port_of
from tests.harness.processes import ROOT, clean_environment
from tests.harness.rank_link import RankLink, RankServer
from tests.harness.ranks import Completed, run_command, start_command
from tests.harness.running import Finished, Program, RankFailure, Running

__all__ = [
    "Completed",
    "Finished",
    "Program",
    "RankFailure",
    "Running",
    "held_port",
    "run_command",
    "run_program",
    "run_ranks",
    "start_command",
    "start_program",
    "start_ranks",
    "start_training",
    "train",
    "train_as_typed",
]

_server: RankServer | None = None
_shared: tuple[bytes, Path] | None = None  # address and log of another process's server
_link: RankLink | None = None
_all_running: list[Running] = []
_holders: list[socket.socket] = []


def run_ranks(
    target: Callable[..., Any],  # Any: a test's own function
    world_size: int,
    *args: Any,
    timeout_s: float = 60.0,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call target(*args) on each rank, and return what they returned, in rank order.

    Raises RankFailure if a rank raises, leaves with another status than 0, or hangs.
    """
    with start_ranks(target, world_size, *args, env=env) as running:
        return list(running.wait(timeout_s).ok().values)


def start_ranks(
    target: Callable[..., Any],  # Any: a test's own function
    world_size: int,
    *args: Any,
    env: Mapping[str, str] | None = None,
) -> Running:
    """Start target(*args) on each rank, with torchrun's variables in os.environ.

    target is a function at the top level of a test module.
    """
    port = held_port()
    jobs = [
        {
            "kind": "call",
            "module": target.__module__,
            "name": target.__qualname__,
            # WHY loopback: gloo would look for the address of the host's name, and may find none
            "env": clean_environment(
                {"GLOO_SOCKET_IFNAME": "lo", **_launch(rank, world_size, port), **(env or {})}
            ),
            "cwd": str(Path.cwd()),
            "sys_path": [str(ROOT), *sys.path],
        }
        for rank in range(world_size)
    ]
    return _start(jobs, pickle.dumps(args))


def start_training(
    argv: Sequence[str | Path],
    world_size: int = 1,
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    launcher: Literal["torchrun", "none"] = "torchrun",
    missing: int = 0,
) -> Running:
    """Start ddp_training.py with these arguments on each rank, as the given launcher would.

    missing: so many of the last ranks never come.
    """
    if launcher == "none" and world_size != 1:
        raise ValueError(f"without a launcher there is one rank, and not {world_size}")
    port = held_port()
    jobs = []
    for rank in range(world_size - missing):
        variables = _launch(rank, world_size, port) if launcher != "none" else {}
        jobs.append(
            {
                "kind": "script",
                "argv": [str(word) for word in argv],
                "env": clean_environment({**variables, **(env or {})}),
                "cwd": str(cwd or ROOT),
                "sys_path": [str(ROOT), *sys.path],
            }
        )
    return _start(jobs)


def train(
    argv: Sequence[str | Path], world_size: int = 1, *, timeout_s: float = 120.0, **how: Any
) -> Finished:
    """Run ddp_training.py to its end; how: see start_training. Does not raise if a rank fails."""
    with start_training(argv, world_size, **how) as running:
        return running.wait(timeout_s)


def start_program(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    host: Mapping[str, Any] | None = None,
) -> Program:
    """Start a command line of python or torchrun in a forked process: see forked_programs.py.

    host: of TwoHosts.
    """
    words = [str(word) for word in argv]
    temporary = tempfile.TemporaryDirectory(prefix="program-")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    job = {
        "kind": "program",
        "argv": words,
        "env": clean_environment({"PATH": path, "TMPDIR": temporary.name, **(env or {})}),
        "cwd": str(cwd or ROOT),
        "sys_path": sys.path,
        "host": host,
    }
    folder, running = _start_in_folder([job])
    return Program(words, running, folder, temporary)


def run_program(
    argv: Sequence[str | Path],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    host: Mapping[str, Any] | None = None,
) -> Completed:
    """Run such a command line to its end. Raises RankFailure, with its output, after timeout_s."""
    with start_program(argv, env=env, cwd=cwd, host=host) as program:
        return program.wait(timeout_s=timeout_s)


def train_as_typed(command: str, *more: str | Path, cwd: Path | None = None) -> Finished:
    """Run a command line of torchrun or python with ddp_training.py, and more, on forked ranks."""
    from torch.distributed.run import get_args_parser  # WHY here: most tests need no torch

    program, *words = shlex.split(command)
    launcher: Literal["torchrun", "none"] = "torchrun" if program == "torchrun" else "none"
    world_size = 1
    if launcher == "torchrun":
        parsed = get_args_parser().parse_args(words)
        world_size = int(parsed.nproc_per_node)
        words = [parsed.training_script, *parsed.training_script_args]
    if words[0] != "ddp_training.py":
        raise ValueError(f"not a command of ddp_training.py: {command}")
    return train([*words[1:], *more], world_size, launcher=launcher, cwd=cwd)


def held_port() -> int:
    """Return a TCP port that stays free for who is told it, until the test ends."""
    _holders.append(hold_port())
    return port_of(_holders[-1])


def release_ports() -> None:
    """Give back the ports of a test."""
    while _holders:
        _holders.pop().close()


def kill_running() -> list[int]:
    """Kill the ranks that a test left running. Returns their process ids."""
    left = [running for running in _all_running if running.living()]
    _all_running.clear()
    pids = [running.pids[rank] for running in left for rank in running.living()]
    for running in left:
        running.kill_all()
    return pids


def import_in_server(name: str) -> None:
    """Import a module once for the ranks to come, and not in each of them.

    For what is large and only some tests need: the more modules the dearer each fork.
    """
    _connect().import_module(name)


def share_server() -> tuple[bytes, str]:
    """Start the fork server. Returns what use_server needs in another process."""
    server = _start_server()
    return server.address, str(server.log)


def use_server(address: bytes, log: str) -> None:
    """Have ranks forked from the server of another process."""
    global _shared
    _shared = (address, Path(log))


def server_pids() -> set[int]:
    """Return the process ids of the fork servers that run for this process."""
    pids = {_server.pid} if _server else set()
    return pids | ({_link.server_pid} if _link else set())


def cpu_seconds() -> float:
    """Return the CPU time of all ranks that have ended."""
    return _link.cpu_s if _link else 0.0


def close_server() -> None:
    """End the fork server with all its ranks."""
    global _link, _server
    if _link is not None:
        _link.close()
        _link = None
    if _server is not None:
        _server.close()
        _server = None


def _start_server() -> RankServer:
    global _server
    if _server is None:
        _server = RankServer()
        atexit.register(close_server)
    return _server


def _connect() -> RankLink:
    global _link
    if _link is None:
        address, log = _shared or (_start_server().address, _start_server().log)
        _link = RankLink(address, log)
        atexit.register(close_server)
    return _link


def _start(jobs: Sequence[Mapping[str, Any]], arguments: bytes = b"") -> Running:
    return _start_in_folder(jobs, arguments)[1]


def _start_in_folder(
    jobs: Sequence[Mapping[str, Any]], arguments: bytes = b""
) -> tuple[Path, Running]:
    link = _connect()
    folder, pids = link.start_ranks(jobs, arguments)
    running = Running(link, folder, pids)
    _all_running.append(running)
    return folder, running


def _launch(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return what torchrun puts into the environment of a rank on its one node."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        "GROUP_WORLD_SIZE": "1",
        "ROLE_NAME": "default",
        "ROLE_RANK": str(rank),
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "3",
        # WHY the port: each start is a torchrun of its own
        "TORCHELASTIC_RUN_ID": f"tests-{port}",
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }

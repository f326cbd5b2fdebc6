"""Ranks for equal_weights.py, forked from a process that has torch loaded: it saves the imports.

`Ranks` starts this file as a script, and writes jobs to it: a folder, a script, flags, a number of
ranks. For each job the script forks the ranks, waits for them, and answers with their statuses.
It imports nothing of the script's checkout, so one process serves any. What goes wrong here: a rank
that never ends; all are killed after LIMIT_S, and with them whatever they have started.
"""

import contextlib
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path

LIMIT_S = 240.0
_AFTER_A_FAILURE_S = 60.0
_POLL_S = 0.01
_HEAVY = ("torch", "torch.distributed", "torch.nn.parallel", "torch._dynamo", "torch.utils.data")
_HEAVY += ("torch.utils.tensorboard", "sklearn.datasets", "safetensors.torch", "psutil", "yaml")


class Ranks:
    """A process to fork ranks from; one job at a time. Use it in a with statement."""

    def __init__(self) -> None:
        self._server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            text=True,
        )

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *error: object) -> None:
        self._server.communicate()

    def train(self, folder: Path, script: Path, flags: Sequence[str], ranks: int) -> list[int]:
        """Run the script with these flags in a folder, and give the exit status of each rank."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        job = {"folder": str(folder), "script": str(script), "flags": flags, "ranks": ranks}
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        statuses: list[int] = json.loads(self._server.stdout.readline())
        return statuses


def serve() -> None:
    """Do one job after the other, until there is no more. In a rank: run the script and return."""
    for name in _HEAVY:
        with contextlib.suppress(ImportError):  # then the script says what is missing
            importlib.import_module(name)
    for line in iter(sys.stdin.readline, ""):
        job = json.loads(line)
        with socket.socket() as holder:
            holder.bind(("127.0.0.1", 0))
            # WHY after bind: rank 0 can listen on the port, and until then nobody else gets it
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            pids = []
            for rank in range(job["ranks"]):
                pid = os.fork()
                if pid == 0:
                    _be_rank(rank, holder.getsockname()[1], **job)
                    return
                pids.append(pid)
            print(json.dumps(_wait(pids)), flush=True)


def _be_rank(
    rank: int, port: int, *, folder: str, script: str, flags: list[str], ranks: int
) -> None:
    """Become a rank as torchrun would start it; its output goes to the file log."""
    os.setsid()
    os.chdir(folder)
    null, log = os.open(os.devnull, os.O_RDONLY), os.open("log", os.O_WRONLY | os.O_APPEND)
    for target, source in ((0, null), (1, log), (2, log)):
        os.dup2(source, target)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    sys.path.insert(0, str(Path(script).parent))  # ours stays behind it, for failing_parts
    sys.argv = [script, *flags]
    runpy.run_path(script, run_name="__main__")


def _wait(pids: Sequence[int]) -> list[int]:
    """Wait for the ranks; -N: signal N. What lives after the limit is killed."""
    statuses: dict[int, int] = {}
    end = time.monotonic() + LIMIT_S
    while len(statuses) < len(pids):
        for pid in set(pids) - statuses.keys():
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                statuses[pid] = os.waitstatus_to_exitcode(status)
                if statuses[pid] != 0:  # the others stop by themselves, and save
                    end = min(end, time.monotonic() + _AFTER_A_FAILURE_S)
        if time.monotonic() > end:
            _kill(set(pids) - statuses.keys())
        time.sleep(_POLL_S)
    _kill(pids)  # what they have left behind
    return [statuses[pid] for pid in pids]


def _kill(leaders: Collection[int]) -> None:
    """Kill the sessions of these ranks."""
    for pid in leaders:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    serve()

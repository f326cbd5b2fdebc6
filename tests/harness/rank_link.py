"""Our end of the fork server: the first process of it, and a connection to a fork of our own.

Owns: the server process, the folder of its jobs, and what is known of the ranks that it forked.
Does not own: what runs in a rank, and what a test learns of it (ranks.py).
"""

import json
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.harness.processes import (
    ROOT,
    clean_environment,
    deadline,
    kill_group,
    read_process,
    session_mark,
)
from tests.harness.rank_server import MAX_MESSAGE_BYTES

START_LIMIT_S = 60.0  # imports of torch and the package, on a machine that does other things too
CLOSE_LIMIT_S = 10.0
CLOSE_POLL_S = 0.01


class RankServer:
    """The first server. The processes of pytest that share it find it by address and log."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="rank-server-"))
        self.log = self._folder / "log.txt"
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind("")  # the kernel finds a name, which is no file
            listener.listen()
            self.address: bytes = listener.getsockname()
            descriptor = str(listener.fileno())
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "tests.harness.rank_server",
                        descriptor,
                        str(self._folder),
                    ],
                    stdin=subprocess.PIPE,  # WHY: it closes at our end, however that comes
                    stdout=log,
                    stderr=log,
                    env=clean_environment({"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}),
                    cwd=ROOT,
                    pass_fds=[listener.fileno()],
                    start_new_session=True,  # WHY: Ctrl-C is for pytest, which then ends this
                )
        self.pid = self._process.pid

    def close(self) -> None:
        """End the server and remove its log."""
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(CLOSE_LIMIT_S)
        except subprocess.TimeoutExpired:
            kill_group(self.pid)
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


class RankLink:
    """Our own server, forked from the first one, and the news from it."""

    def __init__(self, address: bytes, log: Path) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.statuses: dict[int, int] = {}
        self.cpu_s = 0.0  # of all ranks that have ended
        self.server_pid = 0
        self._log = log
        self._pids: list[int] = []
        self._num_jobs = 0
        self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._channel.connect(address)
        except ConnectionRefusedError as error:
            raise self._server_ended() from error
        hello = {"mark": session_mark(), "folder": str(self.folder)}
        self._channel.send(json.dumps(hello).encode())
        self._take_until(lambda: self.server_pid)

    def start_ranks(
        self, jobs: Sequence[Mapping[str, Any]], arguments: bytes = b""
    ) -> tuple[Path, tuple[int, ...]]:
        """Fork one rank per job. Returns the folder of their output, and their process ids."""
        self._num_jobs += 1
        folder = self.folder / f"{self._num_jobs:04d}"
        folder.mkdir()
        (folder / "arguments.pickle").write_bytes(arguments)
        for rank, job in enumerate(jobs):
            (folder / f"job-{rank}.json").write_text(json.dumps(job), encoding="utf-8")
        self._pids = []
        request = {"folder": str(folder), "world_size": len(jobs)}
        self._channel.send(json.dumps(request).encode())
        self._take_until(lambda: self._pids)
        return folder, tuple(self._pids)

    def import_module(self, name: str) -> None:
        """Have the server import a module, so that the ranks to come need not."""
        self._channel.send(json.dumps({"import": name}).encode())

    def take_news(self, wait_s: float) -> None:
        """Read what the server has sent; wait for at most wait_s if that is nothing."""
        while select.select([self._channel], [], [], wait_s)[0]:
            raw = self._channel.recv(MAX_MESSAGE_BYTES)
            if not raw:
                raise self._server_ended()
            news = json.loads(raw)
            if "server" in news:
                self.server_pid = news["server"]
            elif "pids" in news:
                self._pids = news["pids"]
                for pid in self._pids:
                    self.statuses.pop(pid, None)  # WHY: the system uses a number again
            else:
                self.statuses[news["pid"]] = news["status"]
                self.cpu_s += news["cpu_s"]
            wait_s = 0.0

    def close(self) -> None:
        """End our server, its ranks and their files."""
        self._channel.close()
        end = deadline(CLOSE_LIMIT_S)
        while (process := read_process(self.server_pid)) and process.is_alive:
            if time.monotonic() > end:
                kill_group(self.server_pid)
            time.sleep(CLOSE_POLL_S)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _take_until(self, has_come: Callable[[], object]) -> None:
        """Take news until what we wait for is among it."""
        end = deadline(START_LIMIT_S)
        while not has_come():
            if time.monotonic() > end:
                raise RuntimeError(f"the fork server did not answer in {START_LIMIT_S:g} s")
            self.take_news(1.0)

    def _server_ended(self) -> RuntimeError:
        """Make the error that shows why: what the server wrote."""
        log = self._log.read_text(encoding="utf-8", errors="replace")
        return RuntimeError(f"the fork server ended\n{log}")

"""Our end of the fork server: it is started at the first request, and ended with the session.

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.processes import ROOT, clean_environment, deadline, kill_group
from tests.rank_server import MAX_MESSAGE_BYTES

START_LIMIT_S = 60.0  # imports of torch and the package, on a machine that does other things too
CLOSE_LIMIT_S = 10.0


class RankLink:
    """The server process, and the news from it."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="ranks-"))
        self.statuses: dict[int, int] = {}
        self.cpu_s = 0.0  # of all ranks that have ended
        self._pids: list[int] = []
        self._num_jobs = 0
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, (self.folder / "server.txt").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.rank_server", str(theirs.fileno()), str(self.folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=clean_environment({"OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}),
                cwd=ROOT,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # WHY: Ctrl-C is for pytest, which then ends the server
            )

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
        end = deadline(START_LIMIT_S)
        while not self._pids:
            if time.monotonic() > end:
                raise RuntimeError(f"the fork server did not answer in {START_LIMIT_S:g} s")
            self.take_news(1.0)
        return folder, tuple(self._pids)

    def take_news(self, wait_s: float) -> None:
        """Read what the server has sent; wait for at most wait_s if that is nothing."""
        while select.select([self._channel], [], [], wait_s)[0]:
            raw = self._channel.recv(MAX_MESSAGE_BYTES)
            if not raw:
                log = (self.folder / "server.txt").read_text(encoding="utf-8", errors="replace")
                raise RuntimeError(f"the fork server ended: {self.process.wait()}\n{log}")
            news = json.loads(raw)
            if "pids" in news:
                self._pids = news["pids"]
                for pid in self._pids:
                    self.statuses.pop(pid, None)  # WHY: the system uses a number again
            else:
                self.statuses[news["pid"]] = news["status"]
                self.cpu_s += news["cpu_s"]
            wait_s = 0.0

    def close(self) -> None:
        """End the server, its ranks and their files."""
        self._channel.close()
        try:
            self.process.wait(CLOSE_LIMIT_S)
        except subprocess.TimeoutExpired:
            kill_group(self.process.pid)
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

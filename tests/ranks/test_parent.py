"""A rank ends with the process that started it, and with nothing less."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.harness.processes import ROOT, clean_environment, deadline

RANK = """
import signal, sys
from hardened_ddp.ranks.launch import end_with_parent
end_with_parent()
print("ready", flush=True)
if "pause" in sys.argv:
    signal.pause()
for line in sys.stdin:
    print(line.strip(), flush=True)
"""


def start_rank(*words: str) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", RANK, *words],
        cwd=ROOT,
        env=clean_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_rank_outlives_the_thread_that_started_it() -> None:
    """A thread pool, Ray or a notebook starts ranks from threads that end at once."""
    started: list[subprocess.Popen[str]] = []
    ids: list[int] = []

    def launch() -> None:
        ids.append(threading.get_native_id())
        started.append(start_rank())

    thread = threading.Thread(target=launch)
    thread.start()
    thread.join()
    end = deadline(10)
    while Path(f"/proc/self/task/{ids[0]}").exists() and time.monotonic() < end:
        time.sleep(0.001)
    with started[0] as rank:
        answer, _ = rank.communicate("still here\n", timeout=60)
        assert answer == "still here\n"
    assert rank.returncode == 0


def test_a_rank_ends_with_the_process_that_started_it() -> None:
    reader, writer = os.pipe()
    launcher = os.fork()
    if launcher == 0:
        rank = start_rank("pause")
        os.write(writer, f"{rank.pid}\n".encode())
        os._exit(0)
    os.waitpid(launcher, 0)
    os.close(writer)
    with os.fdopen(reader) as told:
        pid = int(told.readline())
    end = deadline(10)
    while Path(f"/proc/{pid}/cmdline").exists() and time.monotonic() < end:
        if not Path(f"/proc/{pid}/cmdline").read_bytes():  # a zombie that nobody collected yet
            break
        time.sleep(0.01)
    else:
        assert not Path(f"/proc/{pid}").exists(), "the rank lives on"

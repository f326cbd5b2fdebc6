"""Which process made a file, and whether it is still alive. What is decided: checkpoint/disk.py.

WHY a mark: a pid is reused after a while, means another process after a reboot, and another one in
each container. WHY a count in the file of a lock: the file
system is the only thing that two hosts are sure to share. Their clocks may differ, the times of a
file are cached, and hosts made from one image may have one name.
"""

import hashlib
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hardened_ddp.ranks.threads import AwakeTime, HelperThread

log = logging.getLogger(__name__)

BEAT_EVERY_S = 3.0
# A count that stays the same for so long belongs to a process that is dead or stopped.
SILENT_AFTER_S = 15.0
_WATCH_FACTOR = 2  # a holder that still counts after so many times SILENT_AFTER_S stays
_LOOK_EVERY_S = 0.25
_WIDTH = 12
_BEFORE = b'{"beats": '

_STATE_FIELD = 0  # of those that stat_fields returns
_PARENT_FIELD = 1
START_FIELD = 19


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessMark:
    """Identifies a process across hosts, containers and reboots."""

    host: str
    pid: int
    started: str  # clock ticks between boot and start
    boot: str
    namespace: str  # of process ids: two containers on one host have two
    machine: str  # its id, hashed because it is not meant to be published; empty if it has none

    @property
    def place(self) -> str:
        """The boot and the namespace, short enough for a file name."""
        return _short_hash(f"{self.host}|{self.machine}|{self.boot}|{self.namespace}")


def this_process() -> ProcessMark:
    pid = os.getpid()
    machine = _text_of(Path("/etc/machine-id"))
    return ProcessMark(
        host=socket.gethostname(),
        pid=pid,
        started=stat_fields(pid)[START_FIELD],
        boot=_text_of(Path("/proc/sys/kernel/random/boot_id")),
        namespace=os.readlink("/proc/self/ns/pid"),
        machine=_short_hash(f"ddp-{machine}") if machine else "",
    )


def is_gone(mark: ProcessMark) -> bool | None:
    """Return whether that process has ended; None if it can't be seen from here.

    WHY None after another boot on a host of the same name: that may be another machine.
    """
    if mark.place != this_process().place:
        return None
    return is_pid_gone(mark.pid, started=mark.started)


def is_pid_gone(pid: int, *, started: str) -> bool:
    fields = stat_fields(pid)
    if fields:
        return fields[_STATE_FIELD] in "ZX" or fields[START_FIELD] != started
    try:
        os.kill(pid, 0)  # WHY: /proc may hide the processes of others
    except OSError as error:  # if it is not permitted, the process lives
        return isinstance(error, ProcessLookupError)
    return False


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name, or nothing."""
    # WHY after the last bracket: the name before it may contain blanks and brackets
    return _text_of(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


def ancestors() -> Iterator[int]:
    """Give the pid of the parent of this process, then of its parent, as far as they are seen."""
    pid = os.getppid()
    while fields := stat_fields(pid):
        yield pid
        pid = int(fields[_PARENT_FIELD])


def is_earlier_boot(mark: ProcessMark, here: ProcessMark) -> bool:
    """Return whether mark may be of this machine before it was started again.

    Only may be: machines made from one image share names, and sometimes the machine's id too.
    """
    return (mark.host, mark.machine) == (here.host, here.machine) and mark.boot != here.boot


def with_count(body: bytes, count: int = 0) -> bytes:
    """Put the count before the other members of a JSON object, at a fixed place and width."""
    return b"%s%*d, %s" % (_BEFORE, _WIDTH, count, body.removeprefix(b"{"))


class LockHeartbeat:
    """Counts up in an open lock file. A count of 0 says that its file system can't do it."""

    def __init__(self, descriptor: int, *, every_s: float = BEAT_EVERY_S) -> None:
        # WHY its own: the thread may hang in a write while the lock is released
        self._descriptor = os.dup(descriptor)
        self._every_s = every_s
        self._count = 0
        self._end = threading.Event()
        self._beat()
        self._thread = HelperThread(self._run, name="lock-heartbeat")
        self._thread.start()

    def stop(self) -> None:
        """End the thread, which may hang in a write: then do not wait for it."""
        self._end.set()
        self._thread.join(self._every_s)

    def _run(self) -> None:
        while not self._end.wait(self._every_s):
            self._beat()
        os.close(self._descriptor)

    def _beat(self) -> None:
        try:
            os.pwrite(self._descriptor, b"%*d" % (_WIDTH, self._count + 1), len(_BEFORE))
            os.fsync(self._descriptor)  # WHY: other hosts see it only then, on NFS
            self._count += 1
        except OSError as error:
            log.debug("no heartbeat in the run lock: %s", error)


def is_silent(read: Callable[[], bytes | None], *, silent_after_s: float) -> bool:
    """Watch a lock that may belong to another host; return whether it does not change any more.

    read: gives its content; None: it is gone. Waits for twice as long at most.
    """
    content = read()
    watched, changed_s = AwakeTime(4 * _LOOK_EVERY_S), 0.0
    while content is not None:
        now_s = watched.passed_s()
        if now_s - changed_s >= silent_after_s:
            return True
        if now_s >= _WATCH_FACTOR * silent_after_s:
            return False
        time.sleep(_LOOK_EVERY_S)
        if (found := read()) != content:
            content, changed_s = found, now_s
    return True


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""

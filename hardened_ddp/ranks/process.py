"""Which process made a file, and whether it is still alive.

Owns: ProcessMark, which a process writes beside its files to identify itself.
Does not own: what is decided from it (run_lock.py, files.py).
What goes wrong here: a pid alone is ambiguous. It is reused after a while, means another process
after a reboot, and another one in each container; so a mark holds the start time, the boot and the
namespace too. Outside Linux those are empty, and only the pid is compared. A host's name is
ambiguous as well: machines made from one image, or containers, may all be called the same.
"""

import hashlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path

_STATE_FIELD = 0
_START_FIELD = 19


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessMark:
    """Identifies a process across hosts, containers and reboots."""

    host: str
    pid: int
    started: str
    """Clock ticks between boot and start; empty if the system doesn't say."""
    boot: str
    namespace: str
    """The namespace of process ids: two containers on one host have two."""
    machine: str
    """The machine's id, hashed because it is not meant to be published; empty if it has none."""

    @property
    def place(self) -> str:
        """The boot and the namespace, short enough for a file name."""
        return _short_hash(f"{self.host}|{self.machine}|{self.boot}|{self.namespace}")


def this_process() -> ProcessMark:
    """Return the mark of the running process."""
    pid = os.getpid()
    fields = stat_fields(pid)
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    machine = _text_of(Path("/etc/machine-id"))
    return ProcessMark(
        host=socket.gethostname(),
        pid=pid,
        started=fields[_START_FIELD] if fields else "",
        boot=_text_of(Path("/proc/sys/kernel/random/boot_id")),
        namespace=namespace,
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
    """Return whether the process of this pid and start time, seen from here, has ended."""
    fields = stat_fields(pid)
    if fields:
        return fields[_STATE_FIELD] in "ZX" or fields[_START_FIELD] != started
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False


def stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name, or nothing."""
    # WHY after the last bracket: the name before it may contain blanks and brackets
    return _text_of(Path(f"/proc/{pid}/stat")).rpartition(")")[2].split()


def is_earlier_boot(mark: ProcessMark, here: ProcessMark) -> bool:
    """Return whether mark may be of this machine before it was started again.

    Only may be: machines made from one image share names, and sometimes the machine's id too.
    """
    return (mark.host, mark.machine) == (here.host, here.machine) and mark.boot != here.boot


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""

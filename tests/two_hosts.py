"""Two hosts on one machine: two network namespaces with addresses of their own, and a cable.

Owns: making them, running a command on one of them, cutting the cable, and taking all of it away.
A host has its own interfaces, name, /etc/hosts, and ids of the machine and its boot; the disk is
the same, as a shared disk is.
"""

import ctypes
import os
import secrets
import shlex
import shutil
import subprocess
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

ADDRESSES = ("10.77.0.1", "10.77.0.2")
BINDS = {
    "/etc/hosts": "hosts",
    "/etc/resolv.conf": "resolv.conf",
    "/etc/nsswitch.conf": "nsswitch.conf",
    "/etc/machine-id": "machine-id-{}",
    "/proc/sys/kernel/random/boot_id": "boot-id-{}",
}
PROGRAMS = ("ip", "nsenter", "unshare")
# As in <sched.h> and <sys/mount.h>; the module os has them from Python 3.12 on.
_NEW_MOUNTS, _NEW_NAME, _NEW_NET = 0x00020000, 0x04000000, 0x40000000
_BIND, _RECURSIVE, _PRIVATE = 0x1000, 0x4000, 0x40000


def why_not() -> str:
    """Say why no hosts can be made here; empty if they can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"not installed on this machine: {', '.join(missing)} (see .ci/run)"
    if os.geteuid() != 0:
        return "only root can make network namespaces"
    name = f"ddp-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, timeout=60)
    if tried.returncode:
        return f"no network namespaces here: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True, timeout=60)
    return ""


class TwoHosts:
    """Hosts 0 and 1, called node0 and node1. Use it in a with statement: leaving that ends them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._id = secrets.token_hex(3)
        self.namespaces = tuple(f"ddp-{self._id}-{index}" for index in (0, 1))
        self.interfaces = tuple(f"ddp{self._id}{index}" for index in (0, 1))

    def __enter__(self) -> Self:
        self.folder.mkdir()
        names = "".join(f"{a} node{i}\n" for i, a in enumerate(ADDRESSES))
        (self.folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        # WHY: else each name that is not found waits for a name server that is not there
        (self.folder / "resolv.conf").write_text("")
        (self.folder / "nsswitch.conf").write_text("hosts: files\n")
        for index in (0, 1):
            (self.folder / f"machine-id-{index}").write_text(f"{index:032x}\n")
            (self.folder / f"boot-id-{index}").write_text(f"{uuid.uuid4()}\n")
        try:
            for namespace in self.namespaces:
                _ip("netns", "add", namespace)
            cable = [f"link add {self.interfaces[0]} netns {self.namespaces[0]} type veth"]
            cable += [f"peer name {self.interfaces[1]} netns {self.namespaces[1]}"]
            _ip(*" ".join(cable).split())
            for index, namespace in enumerate(self.namespaces):
                place = f"{ADDRESSES[index]}/24"
                _ip("-n", namespace, "addr", "add", place, "dev", self.interfaces[index])
                _ip("-n", namespace, "link", "set", "lo", "up")
                _ip("-n", namespace, "link", "set", self.interfaces[index], "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for namespace in self.namespaces:
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, timeout=60)

    def on(self, index: int, *argv: str | Path, name: str = "") -> list[str]:
        """Give the words that run a command on a host; name: another one for it."""
        host = self.host(index, name=name)
        binds = "; ".join(
            f"mount --bind {shlex.quote(file)} {target}" for target, file in host["binds"].items()
        )
        script = f'set -e; hostname {host["name"]}; {binds}; exec "$@"'
        enter = ["nsenter", f"--net={host['namespace']}"]
        enter += ["unshare", "--mount", "--uts", "bash", "-c", script, "bash"]
        return [*enter, *map(str, argv)]

    def host(self, index: int, *, name: str = "") -> dict[str, Any]:
        """Give the arguments of enter, for a process that is forked instead of started."""
        return {
            "namespace": f"/run/netns/{self.namespaces[index]}",
            "name": name or f"node{index}",
            "binds": {to: str(self.folder / file.format(index)) for to, file in BINDS.items()},
        }

    def cut(self) -> None:
        """Cut the cable: nothing arrives any more, and nobody is told."""
        _ip("-n", self.namespaces[1], "link", "set", self.interfaces[1], "down")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=60)


def enter(namespace: str, name: str, binds: Mapping[str, str]) -> None:
    """Put this process on a host, as on() does with a command. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(function: str, *arguments: int | bytes | None) -> None:
        if getattr(libc, function)(*arguments):
            raise OSError(ctypes.get_errno(), f"{function}{arguments}")

    net = os.open(namespace, os.O_RDONLY)
    call("setns", net, _NEW_NET)
    os.close(net)
    call("unshare", _NEW_MOUNTS | _NEW_NAME)
    call("mount", b"none", b"/", None, _RECURSIVE | _PRIVATE, None)
    for target, file in binds.items():
        call("mount", file.encode(), target.encode(), None, _BIND, None)
    call("sethostname", name.encode(), len(name))

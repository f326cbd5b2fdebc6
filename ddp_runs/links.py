"""The links between hosts, by plain connections: what is reached, clocks, latency, rates.

Each host has a Listener, on a port that the kernel chooses, as gloo and NCCL listen; the others
connect to it. It tells its clock, and counts what is sent to it.
Does not own: which host asks which other one (cluster.py).
"""

import contextlib
import socket
import struct
import time
from functools import partial
from pathlib import Path

from ddp_runs.machine import MIB
from hardened_ddp.ranks.threads import HelperThread

LIMIT_S = 4.0
"""Of one connection, and of each answer."""

_CLOCK, _COUNT = b"c", b"n"
_SEND_S, _MOST_BYTES, _PIECE_BYTES = 0.5, 512 * MIB, 256 * 1024
_CLOCK_READINGS = 9


class Listener:
    """Answers other hosts, in threads of its own. Use it in a with statement: leaving ends it."""

    def __init__(self) -> None:
        is_dual = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if is_dual else socket.AF_INET
        self._server = socket.create_server(("", 0), family=family, dualstack_ipv6=is_dual)
        self.port: int = self._server.getsockname()[1]
        HelperThread(self._accept, name="listener", uses_gpu=False).start()

    def __enter__(self) -> "Listener":
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(OSError):  # it wakes the thread, which close() does not
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed: this is over
            while True:
                connection, _ = self._server.accept()
                work = partial(_answer, connection)
                HelperThread(work, name="answer", uses_gpu=False).start()


def _answer(connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError):
        connection.settimeout(3 * LIMIT_S)
        kind = connection.recv(1)
        while kind == _CLOCK:
            connection.sendall(struct.pack("!d", time.time()))
            kind = connection.recv(1)
        num_bytes = 0
        while kind == _COUNT and (piece := connection.recv(_PIECE_BYTES)):
            num_bytes += len(piece)
        if num_bytes:
            connection.sendall(struct.pack("!Q", num_bytes))


def read_clock(address: str, port: int) -> tuple[float, float]:
    """Return by how many seconds another clock is ahead, and the latency. Raises OSError."""
    found = []
    with socket.create_connection((address, port), timeout=LIMIT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(_CLOCK_READINGS):
            asked_at, began = time.time(), time.monotonic()
            connection.sendall(_CLOCK)
            [there] = struct.unpack("!d", _receive(connection, 8))
            latency_s = time.monotonic() - began
            found.append((latency_s, there - asked_at - latency_s / 2))
    latency_s, ahead_s = min(found)  # the least disturbed one; exact to half of the latency
    return ahead_s, latency_s


def measure_rate(address: str, port: int) -> float:
    """Send for half a second; return the bytes per second that arrived. Raises OSError."""
    piece, num_sent = bytes(_PIECE_BYTES), 0
    with socket.create_connection((address, port), timeout=3 * LIMIT_S) as connection:
        began = time.monotonic()
        connection.sendall(_COUNT)
        while time.monotonic() < began + _SEND_S and num_sent < _MOST_BYTES:
            connection.sendall(piece)
            num_sent += len(piece)
        connection.shutdown(socket.SHUT_WR)
        [arrived] = struct.unpack("!Q", _receive(connection, 8))  # WHY: much of it is in buffers
        return float(arrived / (time.monotonic() - began))


def _receive(connection: socket.socket, num_bytes: int) -> bytes:
    """Read so many bytes. Raises OSError if the other side closes before."""
    with connection.makefile("rb") as file:
        content = file.read(num_bytes)
    if len(content) < num_bytes:
        raise OSError("the other host closed the connection")
    return content


def address_towards(host: str, port: int) -> str:
    """Return this host's address on the network over which it reaches another one, if it does."""
    with contextlib.suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # it sends nothing
            return str(probe.getsockname()[0])
    return ""


def interface_of(address: str) -> tuple[str, float]:
    """Return the interface with an address, and the bytes per second it should give; 0: unknown."""
    try:
        import psutil
    except ImportError:  # which the check of packages says
        return "unknown", 0.0
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            with contextlib.suppress(OSError, ValueError):  # a virtual one has no speed
                megabits = int(Path(f"/sys/class/net/{name}/speed").read_text())
                return name, max(0.0, megabits * 1e6 / 8)
            return name, 0.0
    return "unknown", 0.0

"""The links between hosts, by plain connections: what is reached, and how fast.

Each host has a Listener, on a port that the kernel chooses, as gloo and NCCL listen; the others
connect to it. It counts what is sent to it.
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

LIMIT_S = 4.0  # of one connection, and of each answer
_SEND_S, _MOST_BYTES, _PIECE_BYTES = 0.5, 512 * MIB, 256 * 1024


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
        num_bytes = 0
        while piece := connection.recv(_PIECE_BYTES):
            num_bytes += len(piece)
        connection.sendall(struct.pack("!Q", num_bytes))


def measure_rate(address: str, port: int) -> float:
    """Send for half a second; return the bytes per second that arrived. Raises OSError."""
    piece, num_sent = bytes(_PIECE_BYTES), 0
    with socket.create_connection((address, port), timeout=3 * LIMIT_S) as connection:
        began = time.monotonic()
        while time.monotonic() < began + _SEND_S and num_sent < _MOST_BYTES:
            connection.sendall(piece)
            num_sent += len(piece)
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as file:
            told = file.read(8)  # WHY: much of what was sent may be in buffers
        if len(told) < 8:
            raise OSError("the other host closed the connection")
        return float(struct.unpack("!Q", told)[0] / (time.monotonic() - began))


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

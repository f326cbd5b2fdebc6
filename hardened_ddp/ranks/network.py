"""Ports and addresses: a port that stays free, and why an address can't be reached from here."""

import socket
import time

from hardened_ddp.ranks.threads import call_within

_CONNECT_LIMIT_S = 2.0
_ANSWER_LIMIT_S = 4.0
_TRY_EVERY_S = (0.05, 1.0)  # at first, and at most


def hold_port() -> socket.socket:
    """Take a port of this machine, which is that of the returned socket, until that is closed.

    WHY not look one up and free it: another process may get it before rank 0 listens on it. As this
    socket was bound without SO_REUSEADDR, nobody gets its port from the kernel; as it has that
    option now, who is told the port and has the option too (as torch and socket.create_server) can
    listen on it.
    """
    holder = socket.socket()
    holder.bind(("", 0))
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return holder


def port_of(holder: socket.socket) -> int:
    port: int = holder.getsockname()[1]
    return port


def await_listener(host: str, port: int, *, end: float) -> str:
    """Wait until host:port accepts connections; return "", or why not by the time end. Rank-local.

    end: by time.monotonic().
    WHY before torch's own wait: torch prints several lines for each try, with none that says what
    to do, and name servers that don't answer block a try for half a minute.
    """
    pause_s = _TRY_EVERY_S[0]
    while reason := why_unreachable(host, port):
        if time.monotonic() >= end:
            return reason
        time.sleep(min(pause_s, max(0.0, end - time.monotonic())))
        pause_s = min(2 * pause_s, _TRY_EVERY_S[1])
    return ""


def why_unreachable(host: str, port: int) -> str:
    """Return why host:port can't be reached; empty: it can be."""
    try:
        # WHY with a limit: a name server that does not answer blocks for half a minute
        call_within(
            lambda: socket.create_connection((host, port), _CONNECT_LIMIT_S).close(),
            _ANSWER_LIMIT_S,
        )
    except OSError as error:  # no such name, refused, no answer, no route
        return error.strerror or str(error)
    return ""


def own_addresses() -> str:
    """List the addresses of this machine, by interface, so that a wrong one is obvious."""
    import psutil  # WHY here: only a failure needs it

    families = (socket.AF_INET, socket.AF_INET6)
    found = [
        f"{name} {entry.address.partition('%')[0]}"
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in families
    ]
    return f"This machine is {', '.join(found)}"

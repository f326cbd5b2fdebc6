"""Ports and addresses: a port that stays free, and why an address can't be reached from here."""

import logging
import socket
import time

from hardened_ddp.ranks.threads import call_within

log = logging.getLogger(__name__)

FIRST_NOTICE_S = 10.0
NOTICE_EVERY_S = 60.0
_CONNECT_LIMIT_S = 2.0
_RESOLVE_LIMIT_S = 4.0
_TRY_EVERY_S = (0.05, 1.0)  # at first, and at most


class Notices:
    """Tells what a wait is for: after FIRST_NOTICE_S, then every NOTICE_EVERY_S."""

    def __init__(self, end: float) -> None:
        """end: of the wait, by time.monotonic()."""
        self._began_at, self._end = time.monotonic(), end
        self._due_at = self._began_at + FIRST_NOTICE_S

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._due_at

    def tell(self, text: str) -> None:
        now = time.monotonic()
        waited, left = f"waited {now - self._began_at:.0f} s", f"{self._end - now:.0f} s"
        log.warning("%s %s. Giving up in %s (--timeout_s)", waited, text, left)
        self._due_at = now + NOTICE_EVERY_S


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


def await_listener(host: str, port: int, *, end: float, notices: Notices | None) -> str:
    """Wait until host:port accepts connections; return "", or why not by the time end. Rank-local.

    end: by time.monotonic(). notices: None on ranks that leave the telling to another one.
    WHY before torch's own wait: torch prints several lines for each try, with none that says what
    to do, and name servers that don't answer block a try for half a minute.
    """
    pause_s = _TRY_EVERY_S[0]
    while reason := why_unreachable(host, port):
        if time.monotonic() >= end:
            return reason
        if notices is not None and notices.is_due:
            notices.tell(f"for rank 0 at {host}:{port}: {reason}. {own_addresses()}")
        time.sleep(min(pause_s, max(0.0, end - time.monotonic())))
        pause_s = min(2 * pause_s, _TRY_EVERY_S[1])
    return ""


def why_unreachable(host: str, port: int) -> str:
    """Return why host:port can't be reached, one reason for each address; empty: it can be."""
    try:
        found = call_within(
            lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM), _RESOLVE_LIMIT_S
        )
    except TimeoutError:
        return f"the name {host} can't be resolved here (the name server does not answer)"
    except OSError as error:
        return f"the name {host} can't be resolved here ({error.strerror})"
    reasons = []
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.settimeout(_CONNECT_LIMIT_S)
                probe.connect(address)
            return ""
        except TimeoutError:
            reason = "no answer (a firewall, a cut cable, or the wrong network)"
        except ConnectionRefusedError:
            reason = "refused: nothing listens on that port, so rank 0 did not start there"
        except OSError as error:
            reason = error.strerror or str(error)
        reasons.append(f"{address[0]}: {reason}")
    return "; ".join(dict.fromkeys(reasons))


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

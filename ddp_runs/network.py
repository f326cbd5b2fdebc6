"""Checks of host names and addresses, which the rendezvous on one node needs."""

import contextlib
import json
import socket
import subprocess
import sys

from ddp_runs.check import Check

_LOOKUP_LIMIT_S = 5.0
_CONNECT_LIMIT_S = 2.0
_LOOKUP = (
    "import json, socket, sys; "
    "print(json.dumps([i[4][0] for i in socket.getaddrinfo(sys.argv[1], None)]))"
)


class LookupFailure(Exception):
    """A name could not be turned into an address."""


def check_loopback() -> Check:
    """Check that this machine can connect to itself, by address and by the name localhost."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            address = server.getsockname()
            with socket.create_connection(address, timeout=_CONNECT_LIMIT_S):
                pass
    except OSError as error:
        detail = f"no connection to 127.0.0.1: {error}"
        return Check("loopback", "FAIL", detail, "ip link set lo up; look for a firewall on lo")
    try:
        addresses = look_up("localhost")
    except LookupFailure as error:
        advice = "echo '127.0.0.1 localhost' | sudo tee -a /etc/hosts"
        return Check("loopback", "FAIL", f"localhost: {error}", advice)
    return judge_localhost(addresses)


def judge_localhost(addresses: list[str]) -> Check:
    """Return whether localhost means this machine."""
    detail = f"127.0.0.1 answers; localhost is {', '.join(addresses)}"
    if any(not address.startswith("127.") and address != "::1" for address in addresses):
        advice = "let localhost be 127.0.0.1 in /etc/hosts"
        return Check("loopback", "FAIL", detail, advice)
    return Check("loopback", "ok", detail)


def check_hostname(name: str | None = None) -> Check:
    """Check that this machine's host name resolves to this machine; other nodes use that name."""
    name = socket.gethostname() if name is None else name
    advice = f"add '127.0.0.1 {name}' to /etc/hosts, or give torchrun --standalone"
    try:
        addresses = look_up(name)
    except LookupFailure as error:
        return Check("hostname", "warn", f"{name}: {error}", advice)
    strange = [address for address in addresses if not _is_own(address)]
    detail = f"{name} is {', '.join(addresses)}"
    if strange:
        detail += f"; {', '.join(strange)} is not an address of this machine"
        return Check("hostname", "warn", detail, advice)
    return Check("hostname", "ok", detail)


def look_up(name: str, *, limit_s: float = _LOOKUP_LIMIT_S) -> list[str]:
    """Resolve a name to addresses. Raises LookupFailure, also after limit_s.

    WHY a process: a name server that is down blocks the call for minutes, and it can't be
    interrupted.
    """
    command = [sys.executable, "-I", "-c", _LOOKUP, name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise LookupFailure(f"no answer from the name server in {limit_s:g} s") from error
    if done.returncode != 0:
        raise LookupFailure(done.stderr.strip().rpartition("\n")[2] or "can't be looked up")
    addresses: list[str] = json.loads(done.stdout)
    return sorted(set(addresses))


def _is_own(address: str) -> bool:
    """Return whether this machine can listen on address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family) as probe:
        probe.bind((address, 0))
        return True
    return False

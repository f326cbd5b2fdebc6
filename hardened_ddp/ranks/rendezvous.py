"""The rendezvous: the key-value store through which the ranks of one attempt find each other.

Owns the TCPStore: who serves it, on which address, and which ranks joined which round. A rendezvous
that fails says what was tried, which ranks are missing, and why, as far as one machine can see it.
Does not own: the process group that is formed over it (group.py).
What goes wrong here: a port is taken; rank 0 is elsewhere; a firewall; the same rank twice.

WHY rounds: torchrun keeps one store over all restarts, and a restarted rank that reads the
addresses which a dead attempt left there hangs or fails. A restart count would distinguish the
attempts on one node; with elastic nodes the counts differ. So rank 0 gives each round a random id,
each rank joins with its own random token, and rank 0 opens the round by repeating the tokens: what
a dead attempt left never holds the token of a living rank.
"""

import json
import os
import socket
import time
import uuid
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hardened_ddp.errors import GroupError, LaunchError
from hardened_ddp.ranks.launch import Launch

POLL_S = 0.01
# How often rank 0, while it waits, checks whether another rank reported a conflict.
_LOOK_EVERY_S = 1.0
_CONNECT_LIMIT_S = 2.0


def open_store(launch: Launch, timeout: timedelta) -> dist.Store:
    """Connect to the key-value store that the launcher, or else rank 0, serves. Rank-local.

    Raises GroupError if the port is taken, or the store does not answer.
    """
    is_server = launch.is_main and not launch.agent_owns_store
    try:
        return dist.TCPStore(
            launch.master_addr,
            launch.master_port,
            launch.world_size,
            is_server,
            timeout,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=_listen(launch) if is_server else None,
        )
    except RuntimeError as error:
        where = f"{launch.master_addr}:{launch.master_port}"
        raise GroupError(
            f"rank {launch.rank} on {socket.gethostname()} tried {where} for "
            f"{timeout.total_seconds():g} s, where rank 0 of {launch.world_size} should be: "
            f"{why_unreachable(launch.master_addr, launch.master_port)}. {_own_addresses()}",
            fix="start rank 0 on that address, or correct it: --master_addr of torchrun, else "
            "MASTER_ADDR; from this machine python ddp_training.py doctor looks at the network",
        ) from error


def rendezvous(store: dist.Store, launch: Launch, timeout_s: float) -> dist.Store:
    """Wait until every rank has joined; return the part of the store that belongs to this round.

    Collective: all ranks. Raises LaunchError on every rank if two processes have the same rank, or
    the ranks have different world sizes; GroupError if a rank does not join within timeout_s.
    """
    end = time.monotonic() + timeout_s
    round_id = (
        _open_round(store, launch, end) if launch.is_main else _join_round(store, launch, end)
    )
    if round_id is None:
        joined = _who_joined(store, launch)
        missing = [rank for rank in range(launch.world_size) if rank not in joined]
        there = ", ".join(f"rank {rank} ({who})" for rank, who in joined.items())
        raise GroupError(
            f"rank {launch.rank} waited {timeout_s:g} s at {launch.master_addr}:"
            f"{launch.master_port} and these of {launch.world_size} ranks never joined: "
            # If none is missing, all joined a dead attempt's round: this attempt has no rank 0.
            f"{missing or [0]}. Joined: {there}",
            fix="look at the log of those ranks: they did not start, or can't reach that address",
        )
    return dist.PrefixStore(round_id, store)


def _open_round(store: dist.Store, launch: Launch, end: float) -> str | None:
    """Announce a round and wait until all have joined; then open it, or refuse it. On rank 0."""
    round_id = uuid.uuid4().hex
    current = {"round_id": round_id, "world_size": launch.world_size, "who": _me()}
    store.set("round", json.dumps(current))
    keys = [f"{round_id}/joined/{rank}" for rank in range(1, launch.world_size)]
    while True:
        rest_s = max(POLL_S, min(_LOOK_EVERY_S, end - time.monotonic()))
        have_all_joined = True
        try:
            store.wait(keys, timedelta(seconds=rest_s))
        except RuntimeError:
            have_all_joined = False
        if (conflict := _read(store, f"{round_id}/conflict")) is not None:
            store.set(f"{round_id}/refused", json.dumps(conflict))
            time.sleep(20 * POLL_S)  # WHY: the others read it, and the store ends with this rank
            raise _conflict_error(conflict)
        if have_all_joined:
            tokens = [_read(store, key)["token"] for key in keys]
            store.set(f"{round_id}/open", json.dumps(tokens))
            return round_id
        if time.monotonic() >= end:
            return None


def _join_round(store: dist.Store, launch: Launch, end: float) -> str | None:
    """Join the newest round, again and again, until a round is opened with this rank's token."""
    token, round_id = uuid.uuid4().hex, ""
    while time.monotonic() < end:
        current = _read(store, "round")
        if current is not None and current["round_id"] != round_id:
            round_id = current["round_id"]
            _join(store, launch, current, token)
        if round_id:
            if token in (_read(store, f"{round_id}/open") or ()):
                return round_id
            if (conflict := _read(store, f"{round_id}/refused")) is not None:
                raise _conflict_error(conflict)
        time.sleep(POLL_S)
    return None


def _join(store: dist.Store, launch: Launch, current: Any, token: str) -> None:
    """Join the current round, or report the conflict that prevents it.

    WHY not raise: the round may be left from a dead attempt. Its rank 0 decides, if it is alive.
    """
    round_id, mine = current["round_id"], json.dumps({"token": token, "who": _me()})
    conflict = ""
    if current["world_size"] != launch.world_size:
        conflict = f"{_me()} has WORLD_SIZE={launch.world_size}, but "
        conflict += f"{current['who']} joined first with {current['world_size']}"
    else:
        found = store.compare_set(f"{round_id}/joined/{launch.rank}", "", mine).decode()
        if found != mine:
            both = f"{_me()} and {json.loads(found)['who']}"
            conflict = f"{both} both have RANK={launch.rank}"
    if conflict:
        store.set(f"{round_id}/conflict", json.dumps(conflict))


def _conflict_error(conflict: str) -> LaunchError:
    return LaunchError(
        f"{conflict}: the ranks can't tell each other apart",
        fix="start each rank once, and let the launcher number them: torchrun, srun, mpirun, "
        "or python launchers/run_with_python.py",
    )


def _who_joined(store: dist.Store, launch: Launch) -> dict[int, str]:
    """Return the process that joined the newest round, by rank."""
    current = _read(store, "round")
    if current is None:
        return {launch.rank: _me()}
    joins = {
        rank: _read(store, f"{current['round_id']}/joined/{rank}")
        for rank in range(1, launch.world_size)
    }
    joined = {rank: str(found["who"]) for rank, found in joins.items() if found is not None}
    return {0: str(current["who"]), **joined}


def _read(store: dist.Store, key: str) -> Any:  # Any: JSON
    return json.loads(store.get(key)) if store.check([key]) else None


def _me() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def why_unreachable(host: str, port: int) -> str:
    """Return why host:port can't be reached, one reason for each address. Rank-local."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError as error:
        return f"the name {host} can't be resolved here ({error.strerror})"
    reasons = []
    for family, kind, protocol, _, address in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.settimeout(_CONNECT_LIMIT_S)
                probe.connect(address)
            reason = "something answers now, but not as the store of this run"
        except TimeoutError:
            reason = "no answer (a firewall, a cut cable, or the wrong network)"
        except ConnectionRefusedError:
            reason = "refused: nothing listens on that port, so rank 0 did not start there"
        except OSError as error:
            reason = error.strerror or str(error)
        reasons.append(f"{address[0]}: {reason}")
    return "; ".join(dict.fromkeys(reasons))


def _listen(launch: Launch) -> int:
    """Open the socket on which rank 0 serves the store, and return its descriptor.

    WHY not leave it to TCPStore: it listens on all interfaces, and its protocol has no password.
    Also, a port that is taken gives a clear message here.
    """
    is_local = launch.num_nodes == 1 and launch.master_addr in ("127.0.0.1", "localhost")
    is_dual = not is_local and socket.has_dualstack_ipv6()
    try:
        listener = socket.create_server(
            ("127.0.0.1" if is_local else "", launch.master_port),
            family=socket.AF_INET6 if is_dual else socket.AF_INET,
            backlog=512,
            dualstack_ipv6=is_dual,
        )
    except OSError as error:
        raise GroupError(
            f"port {launch.master_port} of this machine is taken ({error.strerror}), so rank 0 "
            "can't serve the store for the rendezvous",
            fix="torchrun --standalone --nproc_per_node=N ddp_training.py (it takes a free "
            "port), or another --master_port; with srun or mpirun another MASTER_PORT",
        ) from error
    return listener.detach()


def _own_addresses() -> str:
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

"""The meeting point: the key-value store through which the ranks of one attempt find each other.

Owns the TCPStore: who serves it, on which address, and who has come to which meeting. A meeting
that fails says what was tried, which ranks are missing, and why, as far as one machine can see it.
Does not own: the process group that is formed over it (group.py).
What goes wrong here: a port is taken; rank 0 is elsewhere; a firewall; the same rank twice.

WHY meetings: torchrun keeps one store over all restarts, and a restarted rank that reads the
addresses which a dead attempt left there hangs or fails. A count of restarts would tell attempts
apart on one node; with elastic nodes the counts differ. So rank 0 names each meeting by a random
word, each rank answers with a random word of its own, and rank 0 opens the meeting by repeating
the answers: what a dead attempt left never holds the answer that a living rank just gave.
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
# How often rank 0, while it waits, looks whether another rank can't answer.
_LOOK_EVERY_S = 1.0
_CONNECT_LIMIT_S = 2.0


def open_store(launch: Launch, timeout: timedelta) -> dist.Store:
    """Connect to the key-value store that the launcher, or else rank 0, serves. Rank-local.

    Raises GroupError if the port is taken, or nobody answers there.
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
    """Wait until every rank has come; give the part of the store that is this meeting's alone.

    Collective: all ranks. Raises LaunchError on every rank if two processes take themselves for
    the same one, or for ranks of worlds of different size; GroupError if a rank does not come
    within timeout_s.
    """
    end = time.monotonic() + timeout_s
    meeting = _invite(store, launch, end) if launch.is_main else _answer(store, launch, end)
    if meeting is None:
        came = _who_came(store, launch)
        missing = [rank for rank in range(launch.world_size) if rank not in came]
        there = ", ".join(f"rank {rank} ({who})" for rank, who in came.items())
        raise GroupError(
            f"rank {launch.rank} waited {timeout_s:g} s at {launch.master_addr}:"
            f"{launch.master_port} and these of {launch.world_size} ranks never came: "
            # All answered an invitation that nobody opened: it is that of a dead attempt.
            f"{missing or [0]}. There: {there}",
            fix="look at the log of those ranks: they did not start, or can't reach that address",
        )
    return dist.PrefixStore(meeting, store)


def _invite(store: dist.Store, launch: Launch, end: float) -> str | None:
    """Name a meeting, wait for all answers, and open it, or refuse it. On rank 0."""
    meeting = uuid.uuid4().hex
    invitation = {"meeting": meeting, "world_size": launch.world_size, "who": _me()}
    store.set("invitation", json.dumps(invitation))
    keys = [f"{meeting}/hello/{rank}" for rank in range(1, launch.world_size)]
    while True:
        rest_s = max(POLL_S, min(_LOOK_EVERY_S, end - time.monotonic()))
        have_all_come = True
        try:
            store.wait(keys, timedelta(seconds=rest_s))
        except RuntimeError:
            have_all_come = False
        if (conflict := _read(store, f"{meeting}/conflict")) is not None:
            store.set(f"{meeting}/refused", json.dumps(conflict))
            time.sleep(20 * POLL_S)  # WHY: the others read it, and the store ends with this rank
            raise _refusal(conflict)
        if have_all_come:
            answers = [_read(store, key)["answer"] for key in keys]
            store.set(f"{meeting}/open", json.dumps(answers))
            return meeting
        if time.monotonic() >= end:
            return None


def _answer(store: dist.Store, launch: Launch, end: float) -> str | None:
    """Answer the newest invitation until one of the meetings is opened with this answer."""
    answer, meeting = uuid.uuid4().hex, ""
    while time.monotonic() < end:
        invitation = _read(store, "invitation")
        if invitation is not None and invitation["meeting"] != meeting:
            meeting = invitation["meeting"]
            _say_hello(store, launch, invitation, answer)
        if meeting:
            if answer in (_read(store, f"{meeting}/open") or ()):
                return meeting
            if (conflict := _read(store, f"{meeting}/refused")) is not None:
                raise _refusal(conflict)
        time.sleep(POLL_S)
    return None


def _say_hello(store: dist.Store, launch: Launch, invitation: Any, answer: str) -> None:
    """Answer an invitation, or say why this rank can't.

    WHY not raise: the invitation may be what a dead attempt left. Its rank 0 decides, if it lives.
    """
    meeting, mine = invitation["meeting"], json.dumps({"answer": answer, "who": _me()})
    conflict = ""
    if invitation["world_size"] != launch.world_size:
        conflict = f"{_me()} has WORLD_SIZE={launch.world_size}, but "
        conflict += f"{invitation['who']} came first with {invitation['world_size']}"
    else:
        found = store.compare_set(f"{meeting}/hello/{launch.rank}", "", mine).decode()
        if found != mine:
            both = f"{_me()} and {json.loads(found)['who']}"
            conflict = f"{both} both have RANK={launch.rank}"
    if conflict:
        store.set(f"{meeting}/conflict", json.dumps(conflict))


def _refusal(conflict: str) -> LaunchError:
    return LaunchError(
        f"{conflict}: the ranks can't tell each other apart",
        fix="start each rank once, and let the launcher number them: torchrun, srun, mpirun, "
        "or python launchers/run_with_python.py",
    )


def _who_came(store: dist.Store, launch: Launch) -> dict[int, str]:
    """Say which process came as which rank to the newest meeting."""
    invitation = _read(store, "invitation")
    if invitation is None:
        return {launch.rank: _me()}
    answers = {
        rank: _read(store, f"{invitation['meeting']}/hello/{rank}")
        for rank in range(1, launch.world_size)
    }
    came = {rank: str(found["who"]) for rank, found in answers.items() if found is not None}
    return {0: str(invitation["who"]), **came}


def _read(store: dist.Store, key: str) -> Any:  # Any: JSON
    return json.loads(store.get(key)) if store.check([key]) else None


def _me() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def why_unreachable(host: str, port: int) -> str:
    """Say why nothing can be reached at host:port, one reason for each address. Rank-local."""
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
    """Listen where rank 0 serves the store, and give the descriptor.

    WHY not TCPStore itself: it listens on all interfaces, and its protocol has no password. And
    a port that is taken is told here in plain words.
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
            "can't serve the store that the ranks meet at",
            fix="torchrun --standalone --nproc_per_node=N ddp_training.py (it takes a free "
            "port), or another --master_port; with srun or mpirun another MASTER_PORT",
        ) from error
    return listener.detach()


def _own_addresses() -> str:
    """List the addresses of this machine, by interface: a wrong one is then seen at once."""
    import psutil  # WHY here: only a failure needs it

    families = (socket.AF_INET, socket.AF_INET6)
    found = [
        f"{name} {entry.address.partition('%')[0]}"
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family in families
    ]
    return f"This machine is {', '.join(found)}"

"""The rendezvous: the key-value store through which the ranks of one attempt find each other.

A rendezvous that fails says what was tried, which ranks are missing, and why, as far as one machine
can see it.

WHY rounds: torchrun keeps one store over all restarts, and a restarted rank that reads the
addresses which a dead attempt left there hangs or fails. With elastic nodes the restart counts
differ. So rank 0 gives each round a random id, each rank joins with its own random token, and rank
0 opens the round by repeating the tokens: what a dead attempt left never holds the token of a
living rank. Only rank 0 reads what each of them wrote: one thread serves the store.
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
from hardened_ddp.ranks.launchers_env import command_words, with_arguments
from hardened_ddp.ranks.threads import call_within
from hardened_ddp.settings.typed_command import own_command
from hardened_ddp.settings.wording import listed

POLL_S = 0.01
# Times the number of ranks: how often each one asks whether its round is open.
_POLL_PER_RANK_S = 1e-3
_LEAST_CONNECT_S = 2.0
_CONNECT_LIMIT_S, _ANSWER_LIMIT_S = 2.0, 4.0
_TRY_EVERY_S = (0.05, 1.0)  # at first, and at most
_LATE_S = 5.0  # for the ranks that come after those that conflict: they would find no store
_SHOWN = 16


def open_store(launch: Launch, timeout: timedelta) -> dist.Store:
    """Connect to the store that the launcher, or else rank 0, serves. Raises GroupError."""
    is_server = launch.is_main and not launch.agent_owns_store
    end = time.monotonic() + timeout.total_seconds()
    descriptor = _listen(launch) if is_server else None
    host, port = launch.master_addr, launch.master_port
    reason = await_listener(host, port, end=end)
    try:
        if reason:
            raise RuntimeError(reason)
        store = dist.TCPStore(
            host,
            port,
            launch.world_size,
            is_server,
            timedelta(seconds=max(_LEAST_CONNECT_S, end - time.monotonic())),
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=descriptor,
        )
    except RuntimeError as error:
        if reason and descriptor is not None:
            os.close(descriptor)
        reason = reason or "something answers there, but not as the store of this run"
        raise GroupError(
            f"rank {launch.rank} on {socket.gethostname()} tried {host}:{port} for "
            f"{timeout.total_seconds():g} s, where rank 0 of {launch.world_size} should be: "
            f"{reason}",
            fix="start rank 0 on that address, or correct it (--master_addr of torchrun, else "
            f"MASTER_ADDR); the network of this machine is looked at by: {own_command('doctor')}",
        ) from error
    store.set_timeout(timeout)
    return store


def rendezvous(
    store: dist.Store, launch: Launch, timeout_s: float, *, backend: str = "gloo", gpu: str = ""
) -> dist.Store:
    """Wait until every rank has joined; return the part of the store that belongs to this round.

    Collective: all ranks. gpu: the id of this rank's GPU, if no other rank may use it.
    Raises LaunchError on every rank if two have the same number or GPU, or they have different
    world sizes or backends; GroupError if a rank does not join within timeout_s.
    """
    end = time.monotonic() + timeout_s
    me = {
        "who": f"rank {launch.rank} (process {os.getpid()} on {socket.gethostname()})",
        "facts": f"WORLD_SIZE={launch.world_size} and backend {backend}",
        "alone": [f"RANK={launch.rank}", *([f"the GPU {gpu}"] if gpu else [])],
        "token": uuid.uuid4().hex,
    }
    meet = _open_round if launch.is_main else _join_round
    round_id, conflict = meet(store, launch, end, me)
    if conflict:
        raise LaunchError(
            conflict,
            fix="start each rank once, all with the same launcher and settings, and as many on a "
            "host as it has GPUs. Where one would use gloo, see on its host why it has no GPU: "
            "nvidia-smi, CUDA_VISIBLE_DEVICES, and python -c 'import torch; torch.cuda.init()'; or "
            "leave all GPUs unused: --cpu_only",
        )
    if not round_id:
        raise GroupError(
            f"rank {launch.rank} waited {timeout_s:g} s at {launch.master_addr}:"
            f"{launch.master_port}; of {launch.world_size} ranks these never joined: "
            f"{_who_is_missing(store, launch)}",
            fix="read the log of those ranks: they did not start, or can't reach that address",
        )
    return dist.PrefixStore(round_id, store)


def _open_round(
    store: dist.Store, launch: Launch, end: float, me: dict[str, Any]
) -> tuple[str, str]:
    """Announce a round, and open it when all have joined; return its id, and what conflicts."""
    round_id = uuid.uuid4().hex
    current = {**me, "round_id": round_id}
    store.set("round", json.dumps(current))
    _join(store, launch, current, me)
    conflict = ""
    # WHY not wait at the store: torch warns twice of each wait that times out
    while store.add(f"{round_id}/here", 0) < launch.world_size and time.monotonic() < end:
        if not conflict and (conflict := _read(store, f"{round_id}/conflict") or ""):
            end = min(end, time.monotonic() + _LATE_S)
        time.sleep(_poll_s(launch))
    if conflict := conflict or _read(store, f"{round_id}/conflict") or "":
        store.set(f"{round_id}/refused", json.dumps(conflict))
        # WHY: the others read it, and the store ends with this rank
        time.sleep(20 * POLL_S + 2 * _poll_s(launch))
        return round_id, conflict
    keys = [f"{round_id}/joined/{rank}" for rank in range(launch.world_size)]
    if not store.check(keys):
        return "", ""
    # WHY a key for each: one text with all tokens would be sent to each of N ranks
    opened = [f"{round_id}/open/{json.loads(each)['token']}" for each in store.multi_get(keys)]
    store.multi_set(opened, ["1"] * len(opened))  # type: ignore[attr-defined]  # no stub
    return round_id, ""


def _join_round(
    store: dist.Store, launch: Launch, end: float, me: dict[str, Any]
) -> tuple[str, str]:
    """Join the newest round, again and again, until a round is opened with this rank's token."""
    round_id = ""
    while time.monotonic() < end:
        current = _read(store, "round")
        if current is not None and current["round_id"] != round_id:
            round_id = current["round_id"]
            _join(store, launch, current, me)
        if round_id and store.check([f"{round_id}/open/{me['token']}"]):
            return round_id, ""
        if round_id and (conflict := _read(store, f"{round_id}/refused")):
            return round_id, conflict
        # WHY not wait at the store: torch makes a native stack trace of each wait that times out
        time.sleep(_poll_s(launch))
    return "", ""


def _join(store: dist.Store, launch: Launch, current: Any, me: dict[str, Any]) -> None:
    """Join a round, or write what forbids it.

    WHY not raise: the round may be left from a dead attempt. Its rank 0 decides, if it is alive.
    """
    round_id, conflict = current["round_id"], ""
    if me["facts"] != current["facts"]:
        conflict = f"{me['who']} has {me['facts']}, and {current['who']} has {current['facts']}"
    for what in me["alone"]:
        first = json.loads(store.compare_set(f"{round_id}/{what}", "", json.dumps(me)))
        if not conflict and first["token"] != me["token"]:
            conflict = f"{first['who']} and {me['who']} both have {what}"
    key = "conflict" if conflict else f"joined/{launch.rank}"
    store.set(f"{round_id}/{key}", json.dumps(conflict or me))
    store.add(f"{round_id}/here", 1)


def _poll_s(launch: Launch) -> float:
    return max(POLL_S, launch.world_size * _POLL_PER_RANK_S)


def _who_is_missing(store: dist.Store, launch: Launch) -> str:
    """Say who has not joined the newest round, and who has."""
    current = _read(store, "round")
    if current is None:
        return "[0]"
    if not launch.is_main:
        # WHY: N ranks that ask for N keys each would keep the store busy for minutes
        return f"the log of {current['who']} tells which"
    joined = {0: str(current["who"])}
    for rank in range(1, launch.world_size):
        if (found := _read(store, f"{current['round_id']}/joined/{rank}")) is not None:
            joined[rank] = str(found["who"])
    missing = [rank for rank in range(launch.world_size) if rank not in joined]
    return f"[{listed(missing, _SHOWN)}]. Joined: {listed(list(joined.values()), _SHOWN)}"


def _read(store: dist.Store, key: str) -> Any:  # Any: JSON
    return json.loads(store.get(key)) if store.check([key]) else None


def _listen(launch: Launch) -> int:
    """Open the socket on which rank 0 serves the store, and return its descriptor.

    WHY not leave it to TCPStore: it listens on all interfaces, and its protocol has no password.
    Also, a port that is taken gives a clear message here.
    """
    is_local = launch.num_nodes == 1 and launch.master_addr in ("127.0.0.1", "localhost")
    # WHY not always dual: torch looks up the name of each client, on the thread that serves all. As
    # IPv6 addresses (::ffff:10.0.0.2) they are not in /etc/hosts, and a name server that does not
    # answer would delay every rank.
    is_dual = ":" in launch.master_addr
    try:
        listener = socket.create_server(
            ("127.0.0.1" if is_local else "", launch.master_port),
            family=socket.AF_INET6 if is_dual else socket.AF_INET,
            backlog=512,
            dualstack_ipv6=is_dual,
        )
    except OSError as error:
        fix = "set MASTER_PORT to another port for all ranks; torchrun takes it as --master_port"
        if launch.num_nodes == 1 and launch.launcher in ("torchrun", "none"):
            alone = command_words("torchrun", launch.world_size, env={})
            fix = f"torchrun takes a free one: {with_arguments(alone)}"
        raise GroupError(
            f"port {launch.master_port} of this machine is taken ({error.strerror}), so rank 0 "
            "can't serve the store for the rendezvous",
            fix=fix,
        ) from error
    return listener.detach()


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

"""The meeting point: the key-value store through which the ranks of one attempt find each other.

Owns the TCPStore: who serves it, on which address, under which prefix, and who has come. A meeting
that fails says what was tried, which ranks are missing, and why, as far as one machine can see it.
Does not own: the process group that is formed over it (group.py).
What goes wrong here: a port is taken; rank 0 is elsewhere; a firewall; the same rank twice.
"""

import os
import socket
import time
from datetime import timedelta

import torch.distributed as dist

from hardened_ddp.errors import GroupError, LaunchError
from hardened_ddp.ranks.launch import Launch

# How often a waiting rank looks whether another one has refused the meeting.
_LOOK_EVERY_S = 1.0
_CONNECT_LIMIT_S = 2.0


def open_store(launch: Launch, timeout: timedelta, *, purpose: str = "") -> dist.Store:
    """Connect to the key-value store through which ranks find each other.

    WHY the prefix: torchrun keeps one store over all restarts; without it a restarted rank reads
    the addresses that the dead attempt left there, and hangs or fails.
    """
    is_server = launch.is_main and not launch.agent_owns_store
    try:
        tcp_store = dist.TCPStore(
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
    return dist.PrefixStore(f"{purpose}attempt-{launch.attempt}", tcp_store)


def wait_for_all(store: dist.Store, launch: Launch, timeout_s: float) -> None:
    """Wait until every rank has said hello; name those that did not. Collective: all ranks.

    Raises LaunchError on every rank if two processes take themselves for the same one, or for
    ranks of worlds of different size; GroupError if a rank does not come within timeout_s.
    """
    me = f"process {os.getpid()} on {socket.gethostname()}"
    _claim(store, "world", f"{launch.world_size}", says="WORLD_SIZE", me=me)
    _claim(store, f"hello/{launch.rank}", me, says=f"RANK={launch.rank}", me=me)
    keys = [f"hello/{rank}" for rank in range(launch.world_size)]
    end = time.monotonic() + timeout_s
    while True:
        try:
            rest = max(0.01, min(_LOOK_EVERY_S, end - time.monotonic()))
            store.wait(keys, timedelta(seconds=rest))
            return
        except RuntimeError as error:
            _look_for_refusal(store)
            if time.monotonic() < end:
                continue
            came = [rank for rank, key in enumerate(keys) if store.check([key])]
            missing = [rank for rank in range(launch.world_size) if rank not in came]
            raise GroupError(
                f"rank {launch.rank} waited {timeout_s:g} s at {launch.master_addr}:"
                f"{launch.master_port} and these of {launch.world_size} ranks never came: "
                f"{missing}. There: {', '.join(_who(store, rank) for rank in came)}",
                fix="look at the log of those ranks: they did not start, or can't reach that "
                "address",
            ) from error


def is_reachable(launch: Launch) -> bool:
    """Say whether the store's machine still answers. Rank-local; takes no longer than a moment.

    WHY: a call to a store behind a cut cable waits for ever.
    """
    try:
        address = (launch.master_addr, launch.master_port)
        socket.create_connection(address, timeout=_CONNECT_LIMIT_S).close()
    except OSError:
        return False
    return True


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


def _claim(store: dist.Store, key: str, mine: str, *, says: str, me: str) -> None:
    """Write what all must agree on, or this rank alone may write; refuse the meeting if taken."""
    found = store.compare_set(key, "", mine).decode()
    if found == mine:
        return
    if key == "world":
        text = f"{me} has {says}={mine}, but another rank came first with {found}"
    else:
        text = f"{me} and {found} both have {says}"
    store.set("refused", text)
    _look_for_refusal(store)


def _look_for_refusal(store: dist.Store) -> None:
    if store.check(["refused"]):
        raise LaunchError(
            f"{store.get('refused').decode()}: the ranks can't tell each other apart",
            fix="start each rank once, and let the launcher number them: torchrun, srun, mpirun, "
            "or python launchers/run_with_python.py",
        )


def _who(store: dist.Store, rank: int) -> str:
    return f"rank {rank} ({store.get(f'hello/{rank}').decode()})"


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

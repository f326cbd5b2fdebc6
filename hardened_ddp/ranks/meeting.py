"""The meeting point: the key-value store through which the ranks of one attempt find each other.

Owns the TCPStore: who serves it, on which address, under which prefix, and who has come.
Does not own: the process group that is formed over it (group.py).
"""

import socket
from datetime import timedelta

import torch.distributed as dist

from hardened_ddp.errors import GroupError
from hardened_ddp.ranks.launch import Launch


def open_store(launch: Launch, timeout: timedelta) -> dist.Store:
    """Connect to the key-value store through which ranks find each other.

    WHY the prefix: torchrun keeps one store over all restarts; without it a restarted rank reads
    the addresses that the dead attempt left there, and hangs or fails.
    """
    is_server = launch.is_main and not launch.agent_owns_store
    listen_fd = None
    if is_server and launch.num_nodes == 1 and launch.master_addr in ("127.0.0.1", "localhost"):
        # WHY: TCPStore itself listens on all interfaces, and its protocol has no password.
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", launch.master_port))
        except OSError as error:
            raise GroupError(
                f"port {launch.master_port} of this machine is taken ({error.strerror}), so rank 0 "
                "can't serve the store that the ranks meet at",
                fix="torchrun --standalone --nproc_per_node=N ddp_training.py (it takes a free "
                "port), or another --master_port",
            ) from error
        listener.listen(512)
        listen_fd = listener.detach()
    tcp_store = dist.TCPStore(
        launch.master_addr,
        launch.master_port,
        launch.world_size,
        is_server,
        timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listen_fd,
    )
    return dist.PrefixStore(f"attempt-{launch.attempt}", tcp_store)


def wait_for_all(store: dist.Store, launch: Launch, timeout_s: float) -> None:
    """Wait until every rank has said hello; name those that did not. Collective: all ranks."""
    store.set(f"hello/{launch.rank}", f"{socket.gethostname()} rank {launch.rank}")
    keys = [f"hello/{rank}" for rank in range(launch.world_size)]
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        missing = [rank for rank, key in enumerate(keys) if not store.check([key])]
        raise GroupError(
            f"rank {launch.rank} waited {timeout_s:g} s at {launch.master_addr}:"
            f"{launch.master_port} and these of {launch.world_size} ranks never came: {missing}",
            fix="look at the log of those ranks: they did not start, or can't reach that address",
        ) from error

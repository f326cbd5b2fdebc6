"""A port that is free, and stays so until the process that it is for listens on it."""

import socket


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
    """Return the port of a socket."""
    port: int = holder.getsockname()[1]
    return port

"""The limit of open files of this process, which many ranks and many batches in flight reach.

What goes wrong here: a limit of 1,024, the usual default. gloo connects every rank with each other
one, and each batch that a loader worker sends is an open file.
"""

import resource

from hardened_ddp.errors import LaunchError

_WANTED = 65536
_SOCKETS_PER_PEER = 2  # a group for gradients and one for control; with NCCL only the second
_FOR_THE_REST = 256


def raise_open_file_limit(*, world_size: int = 1) -> None:
    """Raise the limit as far as allowed. Rank-local. Raises LaunchError if that is too little."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _WANTED if hard == resource.RLIM_INFINITY else min(hard, _WANTED)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    needed = _SOCKETS_PER_PEER * (world_size - 1) + _FOR_THE_REST
    if max(soft, wanted) < needed and world_size > 1:
        raise LaunchError(
            f"each of {world_size} ranks opens about {needed} files and connections, and this "
            f"process may open {max(soft, wanted)}: the ranks could not connect to each other",
            fix=f"raise the hard limit of open files to {needed}: ulimit -Hn, LimitNOFILE of the "
            "service that starts the job, or docker run --ulimit nofile=65536",
        )

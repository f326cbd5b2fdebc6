"""A lost peer: torch's errors that mean it, and the cause that the peer published.

Owns telling a lost peer from other errors, and reading its cause. A rank that fails writes the
reason to the store (Group.publish_failure); all that the others see is a closed connection.
"""

import re
import time

from hardened_ddp.errors import PeerLostError, first_line
from hardened_ddp.ranks.group import LISTEN_LIMIT_S, Group
from hardened_ddp.ranks.patient_store import poll_s

# The error messages of gloo and NCCL when another rank died, left or no longer answers.
_LOST_PEER = re.compile(
    r"Connection (closed|reset) by peer|Timed out waiting|Application timeout caused|"
    r"Socket closed|Broken pipe|NCCL|connectFullMesh failed|Read error|Connection refused|"
    r"wait timeout|recvValue failed|sendBytes failed|recvVector failed"
)


def lost_peer(error: BaseException, group: Group) -> PeerLostError | None:
    """Return a PeerLostError with the peer's own cause if error means a lost peer, else None."""
    if group.world_size == 1 or not isinstance(error, RuntimeError):
        return None
    if not _LOST_PEER.search(str(error)):
        return None
    group.is_broken = True
    failures = _await_failures(group)
    causes = "; ".join(f"rank {rank}: {text}" for rank, text in failures.items())
    return PeerLostError(
        f"rank {group.launch.rank} lost another rank ({first_line(error)})"
        + (
            f". Cause: {causes}"
            if causes
            else ". It left no error message: it was killed from outside, or it hangs"
        ),
        fix="read the log of the rank that failed first",
    )


def _await_failures(group: Group) -> dict[int, str]:
    """Read the peers' failures; wait a moment for a peer that is about to write its own."""
    end = time.monotonic() + LISTEN_LIMIT_S
    while True:
        # WHY before reading: a process that has ended has already written its reason
        has_dead_peer = group.shared is not None and group.shared.has_dead_peer()
        found = group.published_failures()
        if found or has_dead_peer or time.monotonic() > end:
            return found
        time.sleep(poll_s(group.world_size))

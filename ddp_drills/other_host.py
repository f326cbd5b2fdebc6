"""A drill on two hosts: an elastic run on one, and an agent on the other that can take over.

The hosts are network namespaces of this machine, with a disk that they share (two_hosts.py); the
rendezvous is on the second one, which stays.
Does not own: when the first host dies (outside.py).
"""

import shlex
import sys
import uuid
from collections.abc import Mapping, Sequence

from ddp_drills.processes import MARK, SCRIPT, Processes, Start, clean
from ddp_drills.two_hosts import ADDRESSES, TwoHosts

# torch 2.13's agents wait for each other for ever when a node joins and they share this store
_ENV = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
# An agent that is silent for 8 s is dead; by default for 15 s.
_QUICK = "keep_alive_interval=1,keep_alive_max_attempt=8"
# A host that dies takes its shared memory with it.
_OWN_MEMORY = ("bash", "-c", 'mount -t tmpfs shm /dev/shm; exec "$@"', "bash")
_STORE = """
import sys, time
from torch.distributed import TCPStore
store = TCPStore("node1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
time.sleep(3600)
"""
# $1: exists when the first host is about to die; $2, $3: python and port; then the agent's command
_SPARE = f"""
"$2" -c {shlex.quote(_STORE)} "$3" & store=$!
tries=0
while [ ! -e "$1" ]; do
  tries=$((tries + 1))
  if [ $tries -gt 12000 ]; then kill $store; exit 1; fi  # 10 minutes: the drill itself is gone
  sleep 0.05
done
shift 3; "$@"; status=$?
kill $store; wait $store; exit $status
"""


class AgentsOfTwoHosts(Processes):
    """torchrun on both hosts. What a drill asks of the ranks is of those on the first one."""

    def __init__(self, hosts: TwoHosts, commands: Sequence[Sequence[str]], **how: object) -> None:
        self._hosts = hosts
        super().__init__(commands, **how)  # type: ignore[arg-type]  # as they are declared there

    @property
    def statuses(self) -> list[int | None]:
        """The status of the second agent: the first host dies."""
        return super().statuses[1:]

    def cut(self) -> None:
        """Cut the cable between the hosts: nothing arrives any more, and nobody is told."""
        self._hosts.cut()

    def end(self) -> list[str]:
        left = super().end()
        self._hosts.__exit__(None, None, None)
        return left


def start_on_two_hosts(env: Mapping[str, str], start: Start) -> AgentsOfTwoHosts:
    """Start an elastic run of one host, and an agent on another one."""
    mark, folder, port = uuid.uuid4().hex, start.log.parent, str(start.port)
    words = ["-m", "torch.distributed.run", "--nnodes=1:1", f"--nproc_per_node={start.num_ranks}"]
    words += ["--max_restarts=3", "--rdzv_backend=c10d", f"--rdzv_endpoint=node1:{port}"]
    words += [f"--rdzv_id={mark}", f"--rdzv_conf={_QUICK},is_host=0"]
    agents = [
        [sys.executable, *words, f"--local_addr={address}", str(SCRIPT), *start.flags]
        for address in ADDRESSES
    ]
    dies = str((folder / "board" / "pause-0").resolve())
    spare = ["bash", "-c", _SPARE, "bash", dies, sys.executable, port, *agents[1]]
    (folder / "hosts").mkdir(exist_ok=True)
    hosts = TwoHosts((folder / "hosts").resolve()).__enter__()
    own = {**clean(env), **_ENV, MARK: mark, "TMPDIR": str(folder)}
    return AgentsOfTwoHosts(
        hosts,
        [hosts.on(0, *_OWN_MEMORY, *agents[0]), hosts.on(1, *_OWN_MEMORY, *spare)],
        environments=[own, own],
        log=start.log,
        mark=mark,
        is_torchrun=True,
    )

"""The process group of a run, and the collectives over it.

All collectives are here but those that sum gradients (gradients/, shared_sum.py). With one rank
there is no group, and each method returns what one rank would agree on with itself.

All ranks reach every collective, in the same order (calls are marked # collective); work that only
rank 0 does goes through run_on_main, so that its error reaches all ranks; values travel as JSON
bytes, never as pickles. When a peer is lost, torch raises a plain RuntimeError at the next
collective: lost_peer turns it into PeerLostError.
"""

import ctypes
import json
import logging
import re
import socket
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hardened_ddp import errors
from hardened_ddp.errors import ANY_FAILURE, GroupError, PeerLostError, first_line
from hardened_ddp.ranks.device import choose_backend, gpu_id
from hardened_ddp.ranks.launch import Launch
from hardened_ddp.ranks.phase import Phase, Tracker
from hardened_ddp.ranks.rendezvous import open_store, rendezvous
from hardened_ddp.ranks.resources import raise_open_file_limit
from hardened_ddp.ranks.shared_sum import SharedSum, open_shared_sum
from hardened_ddp.ranks.store import HEARD, RunStore, poll_s, publish_failure, read_failures
from hardened_ddp.ranks.threads import AwakeTime
from hardened_ddp.settings.config import Backend
from hardened_ddp.settings.typed_command import own_command

log = logging.getLogger(__name__)

# How long a rank that lost a peer polls for the reason, and a failed one for its readers.
LISTEN_LIMIT_S = 2.0
# Longer values are broadcast by their rank. WHY: what is gathered is padded to the longest, so 1 MB
# of one rank would be 1 GB on each of 1,000 ranks.
_GATHERED_BYTES = 4096
_NO_LIMIT = timedelta(days=365)
_LONGEST_GAP_S, _LONGEST_NAP_S = 1.0, 0.005
# The error messages of gloo and NCCL when another rank died, left or no longer answers.
_LOST_PEER = re.compile(
    r"Connection (closed|reset) by (remote )?peer|Timed out waiting|Application timeout caused|"
    r"Socket closed|Broken pipe|connectFullMesh failed|Read error|Connection (refused|timed out)|"
    r"wait timeout|recvValue failed|sendBytes failed|recvVector failed|ncclRemoteError|"
    r"Watchdog caught collective operation timeout|timed out in blocking wait|NCCL timeout in|"
    r"NCCL communicator (was aborted|encountered error)|Some NCCL operations have failed"
)
# What this rank did itself, also if NCCL left for it.
_OWN_ERROR = re.compile(
    "out of memory|nccl(UnhandledCuda|Internal)Error|ncclInvalid(Usage|Argument)"
)


class Group:
    """All ranks of the run. Made by open_group; close it on every normal path."""

    def __init__(
        self,
        launch: Launch,
        device: torch.device,
        *,
        timeout_s: float = float("inf"),
        tracker: Tracker | None = None,
    ) -> None:
        self.launch = launch
        self.timeout_s = timeout_s
        self.device = device
        self.world_size = launch.world_size
        self.is_main, self.is_local_main = launch.is_main, launch.is_local_main
        self.tracker = tracker or Tracker()
        self.store = RunStore()
        self.control: dist.ProcessGroup | None = None  # of gloo, for JSON and CPU tensors
        # Sums CPU tensors if all ranks are on one machine; None: gloo sums them.
        self.shared: SharedSum | None = None
        self._agreement: dist.Work | None = None  # the last one that start_max began
        self._has_published = False
        self.is_broken = False  # A rank failed: collectives may be in flight that never finish
        self.is_adopted = False  # the process group belongs to the user's program, which ends it

    @property
    def backend(self) -> str:
        return str(dist.get_backend()) if self.world_size > 1 else "none"

    def sum_(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum tensor over the ranks, in place, and return it. Collective: all ranks."""
        with self.tracker.within(Phase.ALL_REDUCE):
            if self.shared is not None and tensor.is_cpu:
                self.shared.sum_([tensor])  # collective
            elif self.world_size > 1:
                dist.all_reduce(tensor, group=self._group_of(tensor))  # collective
        return tensor

    def sum_each_(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sum tensors of one device and dtype over the ranks, in place. Collective."""
        flat = self.sum_(torch.cat([tensor.reshape(-1) for tensor in tensors]))  # collective
        parts = torch.split(flat, [tensor.numel() for tensor in tensors])
        for tensor, part in zip(tensors, parts, strict=True):
            tensor.copy_(part.view_as(tensor))

    def start_max(self, tensor: torch.Tensor) -> "dist.Work | None":
        """Start the maximum of a CPU tensor over the ranks, for finish to wait. Collective."""
        if self.world_size == 1:
            return None
        assert self.control is not None
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        options.timeout = _NO_LIMIT  # finish has one, in time awake
        self._agreement = self.control.allreduce([tensor], options)  # collective
        return self._agreement

    def finish(self, work: "dist.Work") -> None:
        """Wait for what start_max began. Collective: all ranks. Raises RuntimeError."""
        limit_s, waited, nap_s = self.timeout_s, AwakeTime(_LONGEST_GAP_S), 1e-5
        with self.tracker.within(Phase.AGREEMENT):
            while not work.is_completed():
                if waited.passed_s() > limit_s:
                    raise RuntimeError(f"Timed out waiting {limit_s:g} s for the other ranks")
                time.sleep(nap_s)
                nap_s = min(2 * nap_s, _LONGEST_NAP_S)
            work.wait()  # collective

    def broadcast_(self, tensor: torch.Tensor, *, source: int = 0) -> torch.Tensor:
        """Give every rank the tensor of rank source, in place. Collective: all ranks."""
        if self.world_size > 1:
            with self.tracker.within(Phase.BROADCAST):
                dist.broadcast(tensor, src=source, group=self._group_of(tensor))  # collective
        return tensor

    def gather_json(self, value: Any) -> list[Any]:  # Any: JSON
        """Give every rank the values of all ranks, in rank order. Collective: all ranks."""
        if self.world_size == 1:
            return [value]
        mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        with self.tracker.within(Phase.GATHER):
            dist.all_gather(lengths, torch.tensor([len(mine)]), group=self.control)  # collective
            sizes = [int(length) for length in lengths]
            padded = torch.zeros(min(max(sizes), _GATHERED_BYTES), dtype=torch.uint8)
            parts = [torch.empty_like(padded) for _ in sizes]
            start = mine[: len(padded)]
            padded[: len(start)] = start
            dist.all_gather(parts, padded, group=self.control)  # collective
            for rank, size in enumerate(sizes):
                if size > len(padded):
                    parts[rank] = mine if rank == self.launch.rank else mine.new_empty(size)
                    dist.broadcast(parts[rank], src=rank, group=self.control)  # collective
        return [json.loads(p[:n].numpy().tobytes()) for p, n in zip(parts, sizes, strict=True)]

    def run_on_main(self, work: Callable[[], Any], *, what: str) -> Any:  # Any: JSON
        """Run work on rank 0; every rank gets its JSON result or its error. Collective."""
        return self._run_on(self.is_main, work, what=what)[0]

    def run_on_local_main(self, work: Callable[[], Any], *, what: str) -> None:
        """Run work once on each node; an error there is an error everywhere. Collective."""
        self._run_on(self.is_local_main, work, what=what)

    def check_equal(self, facts: Mapping[str, str]) -> None:
        """Raise RankMismatchError where a rank's facts differ from rank 0's. Collective."""
        everyone = self.gather_json(dict(facts))  # collective
        problems = [
            f"rank {rank}: {name} is {theirs.get(name)!r}, rank 0 has {value!r}"
            for rank, theirs in enumerate(everyone)
            for name, value in everyone[0].items()
            if theirs.get(name) != value
        ]
        if problems:
            raise errors.RankMismatchError(
                "the ranks would not train the same model: " + "; ".join(problems),
                fix="give every node the same code, settings and data, then start again. A dataset "
                "must not be split by rank: each rank trains on its own part of all samples",
            )

    def publish_failure(self, text: str) -> None:
        """Write the reason for this rank's failure to the store, for its peers."""
        self.is_broken = True
        self._has_published = publish_failure(self.store, self.launch.rank, text)

    def leave(self) -> None:
        """Tell the others at once that this rank joins no further collective.

        WHY: they would wait for it while it saves. Over gloo they notice when this process ends.
        """
        self.is_broken = True
        if self.shared is not None:
            self.shared.leave()

    def close(self) -> None:
        """Leave the process group. Rank-local for gloo; all ranks for NCCL."""
        if self.shared is not None:
            self.shared.close()
        if self.is_adopted:
            if self.control is not None and not self.is_broken:
                dist.destroy_process_group(self.control)
        elif dist.is_initialized() and not (self.is_broken and self.backend == "nccl"):
            # WHY not then: NCCL would wait here for data that the dead rank never sends.
            dist.destroy_process_group()
        if self._has_published and self.is_main and not self.launch.agent_owns_store:
            others = range(1, self.world_size)
            self.store.wait([HEARD.format(rank) for rank in others], LISTEN_LIMIT_S)
        if self._agreement is not None and not self._agreement.is_completed():
            # WHY: the destructor would join a thread that waits for a stopped rank, without limit.
            # With one more reference the group is never destroyed; the process ends anyway.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.control))
        self.store, self.control = RunStore(), None

    def _group_of(self, tensor: torch.Tensor) -> "dist.ProcessGroup | None":
        """Choose the group for a tensor: NCCL moves only CUDA tensors."""
        return None if tensor.device.type == self.device.type else self.control

    def _run_on(self, is_worker: bool, work: Callable[[], Any], *, what: str) -> list[Any]:
        if self.world_size == 1:
            return [work()]
        outcome: dict[str, Any] = {}
        if is_worker:
            try:
                outcome = {"value": work()}
            except errors.HardenedError as error:
                outcome = {"kind": type(error).__name__, "error": error.message, "fix": error.fix}
            except ANY_FAILURE as error:  # WHY broad: any failure must reach the ranks that wait
                log.exception("%s failed", what)
                outcome = {"error": f"{type(error).__name__}: {error}"}
        outcomes = self.gather_json(outcome)  # collective
        for rank, other in enumerate(outcomes):
            if "error" in other:
                # WHY by name: what travels between ranks is JSON, never a pickled exception.
                kind = getattr(errors, other.get("kind", ""), errors.MainRankError)
                raise kind(
                    f"{what} failed on rank {rank}: {other['error']}",
                    fix=other.get("fix", "") or f"read the traceback in the log of rank {rank}",
                )
        return [other.get("value") for other in outcomes]


def open_group(
    launch: Launch,
    *,
    device: torch.device,
    backend: Backend,
    timeout_s: float,
    shared_memory: bool = True,
    tracker: Tracker | None = None,
) -> Group:
    """Rendezvous with all ranks and form the process group. Collective: all ranks.

    With shared_memory, CPU ranks that are all on one machine sum through it. tracker: of this rank.
    Raises GroupError that names the ranks which did not join within timeout_s, or what is wrong
    with the master address.
    """
    group = Group(launch, device, timeout_s=timeout_s, tracker=tracker)
    if launch.world_size == 1:
        return group
    raise_open_file_limit()
    name = choose_backend(device, backend)
    timeout = timedelta(seconds=timeout_s)
    try:
        store = open_store(launch, timeout)
        gpu = gpu_id(device) if name == "nccl" else ""
        store = rendezvous(store, launch, timeout_s, backend=name, gpu=gpu)  # collective
        group.store = RunStore(store)
        dist.init_process_group(  # collective
            name,
            store=store,
            rank=launch.rank,
            world_size=launch.world_size,
            timeout=timeout,
            device_id=device if name == "nccl" else None,
        )
        group.control = dist.new_group(backend="gloo", timeout=timeout)  # collective
        is_one_machine = launch.local_world_size == launch.world_size
        if shared_memory and is_one_machine and device.type == "cpu":
            group.shared = open_shared_sum(  # collective
                group.gather_json,
                rank=launch.rank,
                world_size=launch.world_size,
                timeout_s=timeout_s,
            )
    except RuntimeError as error:
        raise _why_not_met(error, launch) from error
    return group


def _why_not_met(error: RuntimeError, launch: Launch) -> GroupError:
    where, n = f"{launch.master_addr}:{launch.master_port}", launch.world_size - 1
    others = "the other rank" if n == 1 else f"the other {n} ranks"
    reason, last = first_line(error), str(error).partition("Last error:")[2].split()
    if last:
        reason = f"{' '.join(last)} ({reason})"
    fix = "check that this port is free and reachable from every node; the network of this machine "
    fix += f"is looked at by: {own_command('doctor')}"
    if "NCCL" in reason:
        fix = f"what that means, and what helps: {own_command('explain', 'LOG')}. Where an address "
        fix += "can't be reached: NCCL_SOCKET_IFNAME on all nodes names the interface of their "
        fix += "common network (ip -br addr). With NCCL_DEBUG=INFO NCCL says what it tried"
    return GroupError(f"rank {launch.rank} could not meet {others} at {where}: {reason}", fix=fix)


def place_in_group(launch: Launch) -> Launch:
    """Return a launch with the rank in the process group, if there is one already."""
    if not dist.is_initialized():
        return launch
    return replace(launch, rank=dist.get_rank(), world_size=dist.get_world_size())


def adopt_group(
    launch: Launch, *, device: torch.device, timeout_s: float, tracker: Tracker | None = None
) -> Group:
    """Make a Group of the process group that the user's program has made. Collective: all ranks."""
    launch = place_in_group(launch)
    group = Group(launch, device, timeout_s=timeout_s, tracker=tracker)
    group.is_adopted = True
    if launch.world_size == 1:
        return group
    timeout = timedelta(seconds=timeout_s)
    group.control = dist.new_group(backend="gloo", timeout=timeout)  # collective
    found = group.gather_json([socket.gethostname(), uuid.uuid4().hex])  # collective
    hosts = [host for host, _ in found]
    here = [rank for rank, host in enumerate(hosts) if host == hosts[launch.rank]]
    group.launch = replace(
        launch,
        local_rank=here.index(launch.rank),
        local_world_size=len(here),
        num_nodes=len(set(hosts)),
    )
    group.is_local_main = group.launch.is_local_main
    # WHY a store at all: without it no rank reads why another one failed, and no hang is judged
    find = getattr(dist.distributed_c10d, "_get_default_store", None)
    if find is not None:
        # WHY a part of its own: the store may serve several attempts, and several protects
        group.store = RunStore(dist.PrefixStore(f"hardened_ddp/{found[0][1]}", find()))
    return group


def lost_peer(error: BaseException, group: Group, *, is_dead: bool = False) -> PeerLostError | None:
    """Return a PeerLostError with the peer's own cause if error means a lost peer, else None.

    is_dead: its process is known to have ended.
    """
    text = str(error) if isinstance(error, RuntimeError) else ""
    is_lost = _LOST_PEER.search(text) and not _OWN_ERROR.search(text)
    if group.world_size == 1 or not is_lost:
        return None
    group.is_broken = True
    failures = _await_failures(group, is_dead=is_dead)
    why = "It left no error message: it was killed from outside, or it hangs"
    if failures:
        why = "Cause: " + "; ".join(f"rank {rank}: {text}" for rank, text in failures.items())
    return PeerLostError(
        f"rank {group.launch.rank} lost another rank ({first_line(error)}). {why}",
        fix="read the log of the rank that failed first",
    )


def nccl_trace() -> str:
    """Return what torch has recorded of this rank's last NCCL collectives: JSON, empty if none."""
    record = getattr(getattr(torch, "_C", None), "_distributed_c10d", None)
    dump = getattr(record, "_dump_nccl_trace_json", None)  # where torch is built with NCCL
    return str(dump(), "utf-8") if dump is not None else ""


def _await_failures(group: Group, *, is_dead: bool) -> dict[int, str]:
    """Read the peers' failures; wait a moment for a peer that is about to write its own."""
    end = time.monotonic() + LISTEN_LIMIT_S
    while True:
        # WHY before reading: a process that has ended has already written its reason
        is_dead = is_dead or (group.shared is not None and group.shared.has_dead_peer())
        found = read_failures(group.store, reader=group.launch.rank)
        if found or is_dead or time.monotonic() > end:
            return found
        time.sleep(poll_s(group.world_size))

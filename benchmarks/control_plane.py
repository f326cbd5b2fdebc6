#!/usr/bin/env python3
"""What the control plane costs with thousands of ranks, played on one machine.

    python benchmarks/control_plane.py --ranks 1000
    python benchmarks/control_plane.py --ranks 4000

Each simulated rank is a thread with a connection of its own to a real TCPStore in another process,
and runs the real code: rendezvous, heartbeats and alarms, the verdict on a rank that hangs, failure
reports, and the sampler. 256 ranks are a process, because a thousand threads spend most of their
time on the GIL.
The agreement on a stop, an all-reduce of gloo, is played by 64 ranks at the pace of all of them.
What it can't show: the network between hosts; the connections of gloo and NCCL between 1,000 ranks;
1,000 Python interpreters that start; and the time limit of each question to the store, a thread of
its own, which takes a real rank 0.1 ms. All processes share the cores of this machine with each
other and the store, so times are upper limits.
"""

import argparse
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from itertools import chain, count, islice
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # a warning for each client without a name

import psutil
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hardened_ddp.data.batches.sampler import MAX_KEPT_ORDER, WindowSampler
from hardened_ddp.guard.hang_consensus import HangConsensus
from hardened_ddp.guard.hang_rules import Report
from hardened_ddp.guard.stop import CHECK_PER_RANK_S, StopRequest
from hardened_ddp.ranks import store as run_store
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.launch import Launch
from hardened_ddp.ranks.phase import Phase
from hardened_ddp.ranks.rendezvous import rendezvous
from hardened_ddp.ranks.resources import raise_open_file_limit
from hardened_ddp.ranks.store import RunStore, poll_s, publish_failure, read_failures

LIMIT_S = 300.0
STEADY_S = 10.0
TICK_S = 1.0
FORK_RANKS = 256
GLOO_RANKS = 64
STEP_S = 0.05
LIMIT_OF_PHASE_S = 60.0
PATIENCE_S = 540.0
IMAGENET, MANY_SAMPLES = 1_281_167, 1_000_000_000
STEPS = 200


def serve(told: Connection) -> None:
    """Serve the store in a process of its own, whose CPU time is the store's."""
    raise_open_file_limit()
    # WHY IPv4: the server looks up the name of each client, and that of ::ffff:127.0.0.1 is asked
    # of DNS: 0.1 s for each rank where none answers
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        "127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    told.send(store.port)
    told.recv()


def connect(port: int) -> dist.Store:
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=LIMIT_S))


class Ranks:
    """The simulated ranks, one thread each."""

    def __init__(self, number: int, port: int) -> None:
        self.number = number
        self.used_s = 0.0  # CPU of all ranks in the last call of each
        with ThreadPoolExecutor(number) as pool:
            # WHY at the same time: torch sleeps 0.2 s in each connection
            self.stores: list[dist.Store] = list(pool.map(lambda _: connect(port), range(number)))
        self.patient: list[RunStore] = []

    def each(self, work: Callable[[int, float], Any]) -> list[Any]:
        """Do work on all ranks at the same time, in forks of this process; return the results.

        work gets the rank, and the moment at which all begin: by then all threads run.
        """
        context = get_context("fork")
        forks: list[tuple[BaseProcess, Connection]] = []
        for first in range(0, self.number, FORK_RANKS):
            here, there = context.Pipe()
            block = range(first, min(first + FORK_RANKS, self.number))
            fork = context.Process(target=_each_of_block, args=(work, block, there), daemon=True)
            fork.start()
            forks.append((fork, here))
        for _, here in forks:
            here.recv()
        begins_at = time.perf_counter() + 0.1
        for _, here in forks:
            here.send(begins_at)
        found: list[Any] = []
        self.used_s = 0.0
        for fork, here in forks:
            results, used_s = here.recv()
            if isinstance(results, str):
                raise RuntimeError(results)
            found += results
            self.used_s += used_s
            fork.join()
        return found


def _each_of_block(work: Callable[[int, float], Any], block: range, told: Connection) -> None:
    are_here, begins_at = threading.Barrier(len(block) + 1), Future[float]()

    def play(rank: int) -> Any:
        are_here.wait()
        time.sleep(max(0.0, begins_at.result() - time.perf_counter()))
        return work(rank, begins_at.result())

    try:
        with ThreadPoolExecutor(len(block)) as pool:
            results = pool.map(play, block)
            are_here.wait()
            told.send("ready")
            used_s = time.process_time()
            begins_at.set_result(told.recv())
            told.send((list(results), time.process_time() - used_s))
    except Exception as error:  # WHY broad: the process that forked this one reports it
        told.send((repr(error), 0.0))


def measure_rendezvous(ranks: Ranks) -> float:
    """Return the seconds until all ranks have met."""

    def meet(rank: int, begins_at: float) -> float:
        launch = Launch(
            launcher="torchrun",
            rank=rank,
            world_size=ranks.number,
            agent_owns_store=True,
        )
        rendezvous(ranks.stores[rank], launch, LIMIT_S)
        return time.perf_counter() - begins_at

    took_s: float = max(ranks.each(meet))
    round_id = json.loads(ranks.stores[0].get("round"))["round_id"]
    ranks.patient = [RunStore(dist.PrefixStore(round_id, store)) for store in ranks.stores]
    return took_s


def measure_steady(ranks: Ranks, server: psutil.Process) -> float:
    """Return the share of a core that the store takes for all heartbeats and looks for an alarm."""
    consensus = [
        HangConsensus(store, rank=rank, world_size=ranks.number)
        for rank, store in enumerate(ranks.patient)
    ]
    report = Report(0, 412, int(Phase.FORWARD), 0.1, 60.0)
    split = (412, {"data": 0.001, "forward": 0.02, "backward": 0.04})
    for rank, one in enumerate(consensus):
        one.beat(replace(report, rank=rank), -1, split)
    used_s, began_at = cpu_s(server), time.perf_counter()
    ticks = 0
    while time.perf_counter() - began_at < STEADY_S:
        ends_at = time.perf_counter() + TICK_S
        for rank, one in enumerate(consensus):  # one by one: the calls are spread over a second
            one.beat(replace(report, rank=rank), ticks, split)
            one.alarm("")
        if ticks % 2 == 0:
            consensus[0].splits()
        ticks += 1
        time.sleep(max(0.0, ends_at - time.perf_counter()))
    # per tick: a machine too slow to play all ranks in a second makes the ticks longer
    return (cpu_s(server) - used_s) / ticks / TICK_S


def measure_hang(ranks: Ranks) -> float:
    """Return the seconds from the deadline of a rank that hangs until it is named.

    Each rank's watch ticks once a second, at a moment of its own. Print when all know the verdict.
    """
    hung = ranks.number // 2 + 1

    def watch(rank: int, deadline_at: float) -> float:
        phase = Phase.FORWARD if rank == hung else Phase.ALL_REDUCE
        limit_s = LIMIT_OF_PHASE_S if rank == hung else PATIENCE_S
        report = Report(rank, 412, int(phase), LIMIT_OF_PHASE_S + 1, limit_s)
        consensus = HangConsensus(ranks.patient[rank], rank=rank, world_size=ranks.number)
        time.sleep(max(0.0, deadline_at + rank * 0.618 % 1.0 * TICK_S - time.perf_counter()))
        alarm = ""
        while not alarm:
            alarm = consensus.alarm("hang" if rank == hung else "")
            if not alarm:
                time.sleep(TICK_S)
        verdict = consensus.agree(report, dict, is_witness=rank == hung, wait_limit_s=PATIENCE_S)
        if verdict is None or verdict.ranks != (hung,):
            raise RuntimeError(f"rank {hung} hangs, and the verdict is: {verdict}"[:400])
        return time.perf_counter() - deadline_at

    took_s = ranks.each(watch)
    print(f"a hang: the last rank knows the verdict {max(took_s):.1f} s after the deadline")
    return min(took_s)


def measure_failure(ranks: Ranks, server: psutil.Process) -> float:
    """Return the seconds from the first failure until all ranks know it.

    As on a cluster, all lose their connection to the rank that fails, and ask at the same moment.
    Print how much CPU the store needs, and the ranks, which would spend it side by side.
    """
    store_s = cpu_s(server)

    def listen(rank: int, fails_at: float) -> tuple[float, int]:
        num_asked = 1
        if rank == ranks.number - 1:
            publish_failure(ranks.patient[rank], rank, "RuntimeError: a sample can't be read")
            return time.perf_counter() - fails_at, 0
        while not read_failures(ranks.patient[rank], reader=rank):
            time.sleep(poll_s(ranks.number))
            num_asked += 1
        return time.perf_counter() - fails_at, num_asked

    found = ranks.each(listen)
    used_s = cpu_s(server) - store_s
    told_s, asked = found[-1][0], [number for _, number in found]
    took_s: float = max(known_s for known_s, _ in found)
    print(
        f"a failure: published after {told_s:.2f} s; a rank asks {sum(asked) / len(asked):.1f} "
        f"times on average, {max(asked)} at most; the store used {used_s:.2f} s of CPU, each rank "
        f"{1000 * ranks.used_s / ranks.number:.1f} ms"
    )
    return took_s - told_s


def measure_stop(number: int) -> float:
    """Return the seconds from a signal on one rank until all ranks agree to stop.

    Fewer ranks play it than there are: gloo connects each with each. They do so at the pace of all.
    """
    played = min(number, GLOO_RANKS)
    store = dist.HashStore()
    requests: list[StopRequest] = []
    for rank in range(played):
        launch = Launch(launcher="torchrun", rank=rank, world_size=played)
        group = Group(launch, torch.device("cpu"), timeout_s=LIMIT_S)
        group.world_size = number  # of which the pace of the agreements depends
        requests.append(StopRequest(group))

    def connect(rank: int) -> None:
        limit = timedelta(seconds=LIMIT_S)
        requests[rank].group.control = dist.ProcessGroupGloo(store, rank, played, limit)

    asked_at: list[float] = []
    asks_after_s = 1.0 + CHECK_PER_RANK_S * number  # by then they have agreed on a pace

    def run(rank: int) -> float:
        request, begins_at = requests[rank], time.perf_counter()
        while not request.poll():
            time.sleep(STEP_S)
            is_late = time.perf_counter() > begins_at + asks_after_s
            if rank == played // 2 and is_late and not asked_at:
                asked_at.append(time.perf_counter())
                request.code = signal.SIGTERM
        return time.perf_counter()

    with ThreadPoolExecutor(played) as pool:
        list(pool.map(connect, range(played)))
        used_s, began_at = time.process_time(), time.perf_counter()
        ends = list(pool.map(run, range(played)))
    share = (time.process_time() - used_s) / (max(ends) - began_at) / played
    print(f"a stop: {100 * share:.2f} % of a core on each of {played} ranks, with their polls")
    return max(ends) - asked_at[0]


def measure_sampler(world_size: int, num_samples: int) -> float:
    """Return the seconds of CPU that one rank takes for the indices of a step, epoch by epoch."""
    sampler = WindowSampler(
        torch.utils.data.StackDataset(range(num_samples)),
        num_replicas=world_size,
        rank=world_size // 2,
        seed=0,
        global_batch=32 * world_size,
        batch_size=32,
    )
    windows = chain.from_iterable(map(sampler.windows_of, count()))
    began_s = time.process_time()
    for window in islice(windows, STEPS):
        sampler.micro_batches(window)
    return (time.process_time() - began_s) / STEPS


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=1000)
    number = parser.parse_args().ranks
    raise_open_file_limit()
    threading.stack_size(256 * 1024)
    # WHY: a rank asks the store on a thread made for the question (0.1 ms), which takes 2 ms in a
    # process that has hundreds of them
    run_store.call_within = lambda question, limit_s, **_: question()
    here, there = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=serve, args=(there,), daemon=True)
    process.start()
    ranks, server = Ranks(number, here.recv()), psutil.Process(process.pid)
    steady = "the store's host, steady"
    rows = [
        ("rendezvous", measure_rendezvous(ranks), 20.0, "s"),
        (steady, 100 * measure_steady(ranks, server), 5.0, "% of a core"),
        ("a rank that hangs is named", measure_hang(ranks), 5.0, "s"),
        ("all agree on a stop", measure_stop(number), 3.0, "s"),
        ("the first failure is known to all", measure_failure(ranks, server), 3.0, "s"),
        ("sampler, ImageNet, step and rank", 1000 * measure_sampler(number, IMAGENET), 0.1, "ms"),
        ("sampler, 270,000 samples", 1000 * measure_sampler(number, 270_000), 0.1, "ms"),
        ("sampler, 10^9 samples", 1000 * measure_sampler(number, MANY_SAMPLES), 0.1, "ms"),
        ("sampler, 262,144 samples", 1000 * measure_sampler(number, MAX_KEPT_ORDER), 0.1, "ms"),
    ]
    print(f"{number} simulated ranks, torch {torch.__version__}")
    for what, found, bar, unit in rows:
        print(f"{what:36} {found:8.3f} {unit:12} bar {bar:g}: {'ok' if found <= bar else 'MISSED'}")
    here.send("end")
    process.join()


if __name__ == "__main__":
    main()

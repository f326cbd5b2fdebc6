#!/usr/bin/env python3
"""What the control plane costs with thousands of ranks, played on one machine.

    python benchmarks/control_plane.py --ranks 1000
    python benchmarks/control_plane.py --ranks 4000

Each simulated rank is a thread with a connection of its own to a real TCPStore in another process,
and runs the real code: rendezvous, heartbeats and alarms, failure reports, and the sampler. What it
can't show: the network between hosts, gloo's and NCCL's own connections, the agreement on a stop
(an all-reduce, which is no call of the store), the hang watch's threads, and 1,000 Python
interpreters that start. All threads share this process's GIL, so times are upper limits.
"""

import argparse
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hardened_ddp.data.sampler import WindowSampler
from hardened_ddp.guard.hang_consensus import HangConsensus
from hardened_ddp.guard.verdict import Report
from hardened_ddp.ranks.failures import publish_failure, read_failures
from hardened_ddp.ranks.launch import Launch
from hardened_ddp.ranks.lost import poll_s
from hardened_ddp.ranks.open_files import raise_open_file_limit
from hardened_ddp.ranks.patient_store import PatientStore
from hardened_ddp.ranks.phase import Phase
from hardened_ddp.ranks.rendezvous import rendezvous

LIMIT_S = 300.0
STEADY_S = 10.0
TICK_S = 1.0
SAMPLES = 1_000_000_000
STEPS = 200


def serve(told: Connection) -> None:
    """Serve the store in a process of its own, whose CPU time is the store's."""
    raise_open_file_limit()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    told.send(store.port)
    told.recv()


def connect(port: int) -> dist.Store:
    return dist.TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=LIMIT_S))


class Ranks:
    """The simulated ranks, one thread each."""

    def __init__(self, number: int, port: int) -> None:
        self.number = number
        self._pool = ThreadPoolExecutor(number)
        # WHY at the same time: torch sleeps 0.2 s in each connection
        self.stores: list[dist.Store] = self.each(lambda rank: connect(port))
        self.patient: list[PatientStore] = []

    def each(self, work: Callable[[int], Any]) -> list[Any]:
        """Do work on all ranks at the same time."""
        return list(self._pool.map(work, range(self.number)))


def measure_rendezvous(ranks: Ranks) -> float:
    """Return the seconds until all ranks have met."""

    def meet(rank: int) -> dist.Store:
        launch = Launch(
            launcher="torchrun",
            rank=rank,
            world_size=ranks.number,
            agent_owns_store=True,
        )
        return rendezvous(ranks.stores[rank], launch, LIMIT_S)

    began_at = time.perf_counter()
    met = ranks.each(meet)
    took_s = time.perf_counter() - began_at
    ranks.patient = [PatientStore(store) for store in met]
    return took_s


def measure_steady(ranks: Ranks, server: psutil.Process) -> float:
    """Return the share of a core that the store takes for all heartbeats and looks for an alarm."""
    consensus = [
        HangConsensus(store, rank=rank, world_size=ranks.number)
        for rank, store in enumerate(ranks.patient)
    ]
    report = Report(0, 412, int(Phase.FORWARD), 0.1, 60.0)
    split = (412, {"data": 0.001, "forward": 0.02, "backward": 0.04})
    used_s, began_at = cpu_s(server), time.perf_counter()
    ticks = 0
    while time.perf_counter() - began_at < STEADY_S:
        ends_at = time.perf_counter() + TICK_S
        for one in consensus:  # one after the other: the calls of a second are spread over it
            one.beat(report, ticks, split)
            one.alarm("")
        if ticks % 2 == 0:
            consensus[0].splits()
        ticks += 1
        time.sleep(max(0.0, ends_at - time.perf_counter()))
    # per tick: a machine too slow to play all ranks in a second makes the ticks longer
    return (cpu_s(server) - used_s) / ticks / TICK_S


def measure_failure(ranks: Ranks) -> float:
    """Return the seconds from the first failure until all ranks know it.

    Print what of it is this process's own CPU, which real ranks would spend side by side.
    """
    failed = threading.Event()

    def listen(rank: int) -> float:
        failed.wait()
        if rank == ranks.number - 1:
            publish_failure(ranks.patient[rank], rank, "RuntimeError: a sample can't be read")
            return time.perf_counter()
        while not read_failures(ranks.patient[rank], reader=rank):
            time.sleep(poll_s(ranks.number))
        return time.perf_counter()

    began_at, began_s = time.perf_counter(), time.process_time()
    failed.set()
    took_s = max(ranks.each(listen)) - began_at
    used_s = time.process_time() - began_s
    print(
        f"a failure: the simulated ranks used {used_s:.1f} s of CPU, with one GIL for all of them"
    )
    return took_s


def measure_sampler(world_size: int) -> float:
    """Return the seconds of CPU that one rank takes for the indices of a step."""
    sampler = WindowSampler(
        torch.utils.data.StackDataset(range(SAMPLES)),
        num_replicas=world_size,
        rank=world_size // 2,
        seed=0,
        global_batch=32 * world_size,
        batch_size=32,
    )
    windows = sampler.windows()
    began_s = time.process_time()
    for _ in range(STEPS):
        sampler.micro_batches(next(windows))
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
    here, there = get_context("spawn").Pipe()
    process = get_context("spawn").Process(target=serve, args=(there,))
    process.start()
    ranks, server = Ranks(number, here.recv()), psutil.Process(process.pid)
    steady = "the store's host, steady"
    rows = [
        ("rendezvous", measure_rendezvous(ranks), 20.0, "s"),
        (steady, 100 * measure_steady(ranks, server), 5.0, "% of a core"),
        ("the first failure is known to all", measure_failure(ranks), 3.0, "s"),
        ("sampler, of a step and rank", 1000 * measure_sampler(number), 0.1, "ms"),
    ]
    print(f"{number} simulated ranks, torch {torch.__version__}")
    for what, found, bar, unit in rows:
        print(f"{what:36} {found:8.3f} {unit:12} bar {bar:g}: {'ok' if found <= bar else 'MISSED'}")
    here.send("end")
    process.join()


if __name__ == "__main__":
    main()

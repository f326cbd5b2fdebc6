"""DataParallel against DistributedDataParallel on this machine: samples per second, and the ratio.

    python benchmarks/dp_vs_ddp.py            a few minutes at most
    python benchmarks/dp_vs_ddp.py --quick    some seconds, for a first look

With two GPUs or more: nn.DataParallel (one process, a thread for each GPU) against DDP (a process
for each GPU, NCCL). DataParallel needs GPUs. So without them something else is compared, and the
output says so: one process that uses all cores through threads, against DDP ranks that share the
cores (gloo).
Both train the same model on the same global batch. They take turns, so that what else the machine
does hits both; the time of the start is not counted.
"""

import argparse
import os
import socket
import statistics
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

WARM_UP_STEPS = 3


def build_model(width: int) -> nn.Module:
    """Build a small convolutional network for 3x32x32 images of 10 classes."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(2 * width * 64, 256), nn.ReLU(), nn.Linear(256, 10)),
    )


def time_steps(model: nn.Module, batch_size: int, num_steps: int, device: torch.device) -> float:
    """Train on random images; give the seconds of num_steps after the warm-up."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images = torch.randn(batch_size, 3, 32, 32, device=device)
    labels = torch.randint(10, (batch_size,), device=device)
    start = 0.0
    for step in range(WARM_UP_STEPS + num_steps):
        if step == WARM_UP_STEPS:
            wait_for(device)
            start = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    wait_for(device)
    return time.perf_counter() - start


def wait_for(device: torch.device) -> None:
    """Wait until the device has done its work, and all ranks are here. Collective."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    if dist.is_initialized():
        dist.barrier()  # collective


def run_one_process(rank: int, arguments: argparse.Namespace, result: Path) -> None:
    """Measure DataParallel, or without GPUs the plain model on all cores."""
    has_gpus = arguments.has_gpus
    device = torch.device("cuda" if has_gpus else "cpu")
    if not has_gpus:
        torch.set_num_threads(arguments.num_cores)
    model = build_model(arguments.width).to(device)
    if has_gpus:
        model = nn.DataParallel(model, device_ids=list(range(arguments.ranks)))
    result.write_text(str(time_steps(model, arguments.batch_size, arguments.steps, device)))


def run_ddp_rank(rank: int, arguments: argparse.Namespace, result: Path) -> None:
    """Measure one rank of DDP; rank 0 writes the seconds down."""
    device = torch.device("cuda", rank) if arguments.has_gpus else torch.device("cpu")
    if arguments.has_gpus:
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(max(1, arguments.num_cores // arguments.ranks))
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "nccl" if arguments.has_gpus else "gloo",
        init_method=f"tcp://127.0.0.1:{arguments.port}",
        rank=rank,
        world_size=arguments.ranks,
    )
    model = build_model(arguments.width).to(device)
    replica = DistributedDataParallel(model, device_ids=[rank] if arguments.has_gpus else None)
    share = arguments.batch_size // arguments.ranks
    seconds = time_steps(replica, share, arguments.steps, device)
    if rank == 0:
        result.write_text(str(seconds))
    del replica
    dist.destroy_process_group()


def measure(arguments: argparse.Namespace, *, is_ddp: bool) -> float:
    """Give samples per second of one way, measured in new processes."""
    with socket.socket() as holder, tempfile.TemporaryDirectory() as folder:
        holder.bind(("127.0.0.1", 0))
        # WHY after bind: rank 0 can listen on the port, and until then nobody else gets it
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        arguments.port = holder.getsockname()[1]
        result = Path(folder) / "seconds"
        torch.multiprocessing.start_processes(
            run_ddp_rank if is_ddp else run_one_process,
            args=(arguments, result),
            nprocs=arguments.ranks if is_ddp else 1,
            start_method="spawn" if arguments.has_gpus else "fork",  # CUDA can't be forked
        )
        return arguments.batch_size * arguments.steps / float(result.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=0, help="of DDP; 0: all GPUs, or 2 on the CPU")
    parser.add_argument("--batch_size", type=int, default=128, help="over all ranks")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=32, help="channels of the first layer")
    parser.add_argument("--quick", action="store_true", help="1 round of 5 small steps")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.steps, arguments.rounds, arguments.width = 5, 1, 8
    arguments.has_gpus = torch.cuda.device_count() >= 2
    arguments.ranks = arguments.ranks or (torch.cuda.device_count() if arguments.has_gpus else 2)
    arguments.num_cores = len(os.sched_getaffinity(0))
    one = "DataParallel" if arguments.has_gpus else "one process"
    if not arguments.has_gpus:
        print(
            f"fewer than 2 GPUs: DataParallel needs them, so this compares one process with "
            f"{arguments.num_cores} threads against {arguments.ranks} DDP ranks on the CPU (gloo)"
        )
    speeds: dict[str, list[float]] = {one: [], "DDP": []}
    for number in range(arguments.rounds):
        for name, found in speeds.items():
            found.append(measure(arguments, is_ddp=name == "DDP"))
            print(f"round {number + 1}: {name:<12} {found[-1]:8.0f} samples/s", flush=True)
    first, second = (statistics.median(found) for found in speeds.values())
    print(f"DDP / {one} = {second / first:.2f}  (medians of {arguments.rounds} rounds)")


if __name__ == "__main__":
    main()

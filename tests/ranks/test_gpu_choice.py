"""Each rank gets its own GPU, however the launcher shows them; and enough open files."""

import os
import resource
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from hardened_ddp.errors import LaunchError
from hardened_ddp.ranks import device
from hardened_ddp.ranks.device import pick_device
from hardened_ddp.ranks.group import open_group
from hardened_ddp.ranks.launch import Launch, read_launch
from hardened_ddp.ranks.rendezvous import open_store, rendezvous
from tests.harness.ranks import run_ranks
from tests.launcher_environments import SRUN, TORCHRUN


# The GPUs that it sees, its local rank and environment, and the index of its GPU.
@pytest.mark.parametrize(
    "case",
    [
        (4, 2, SRUN, 2),
        (4, 2, {**SRUN, "SLURM_GPUS_PER_TASK": "1", "SLURM_GPU_BIND": "none"}, 2),
        (1, 2, {**SRUN, "SLURM_GPUS_PER_TASK": "1"}, 0),
        (1, 2, {**TORCHRUN, "CUDA_VISIBLE_DEVICES": "2"}, 0),
        (2, 3, {**TORCHRUN, "CUDA_VISIBLE_DEVICES": "6,7"}, 0),
        (1, 2, TORCHRUN, None),
    ],
)
def test_a_rank_takes_a_gpu_that_it_sees(case: tuple[int, int, dict[str, str], int | None]) -> None:
    visible, local_rank, env, index = case
    has_own_gpus = read_launch(env).has_own_gpus
    launch = Launch(launcher="torchrun", local_rank=local_rank, has_own_gpus=has_own_gpus)
    cuda = {
        "is_available": lambda: True,
        "device_count": lambda: visible,
        "set_device": mock.Mock(),
    }
    with mock.patch.multiple(torch.cuda, **cuda):
        if index is None:
            with pytest.raises(LaunchError, match="has no GPU"):
                pick_device(launch, cpu_only=False, backend="auto")
        else:
            picked = pick_device(launch, cpu_only=False, backend="auto")
            assert picked == torch.device("cuda", index)
    assert pick_device(launch, cpu_only=True, backend="auto") == torch.device("cpu")


def meet_with(backends: list[str], gpus: list[str]) -> str:
    launch = read_launch(os.environ)
    store = open_store(launch, timedelta(seconds=20))
    rank = launch.rank
    try:
        met = rendezvous(store, launch, 20.0, backend=backends[rank], gpu=gpus[rank])
    except LaunchError as error:
        return f"{error.message}; {error.fix}"
    met.set(f"done/{rank}", "")
    if launch.is_main:  # which serves the store
        met.wait([f"done/{rank}" for rank in range(launch.world_size)])
    return ""


BLIND = ["rank 1 (process ", "has WORLD_SIZE=3 and backend gloo, and rank 0 (", "nvidia-smi"]
SAME = ["rank 0 (process ", "rank 2 (process ", " both have the GPU GPU-a; ", "as it has GPUs"]


@pytest.mark.parametrize(
    ("backends", "gpus", "told"),
    [
        (["nccl", "gloo", "nccl"], ["GPU-a", "", "GPU-c"], BLIND),
        (["nccl"] * 3, ["GPU-a", "GPU-b", "GPU-a"], SAME),
        (["nccl"] * 2, ["GPU-a", "GPU-b"], []),
        (["gloo"] * 2, ["", ""], []),
    ],
    ids=["one without", "one GPU twice", "one each", "none"],
)
def test_ranks_without_a_gpu_of_their_own_are_told_on_all_before_nccl_hangs(
    backends: list[str], gpus: list[str], told: list[str]
) -> None:
    for text in run_ranks(meet_with, len(gpus), backends, gpus):
        assert bool(text) == bool(told)
        assert all(words in text for words in told)


class Driver:
    """CUDA's driver, as ctypes gives it."""

    def __init__(self, status: int) -> None:
        self.cuEventQuery = lambda handle: status


@pytest.mark.parametrize(
    ("status", "is_there"), [(0, True), (600, False), (719, "by torch"), (None, "by torch")]
)
def test_an_event_is_asked_for_without_the_gil_and_an_error_by_torch(
    status: int | None, is_there: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    event = SimpleNamespace(cuda_event=0x7F00, query=lambda: "by torch")
    driver = None if status is None else Driver(status)
    monkeypatch.setattr(device, "_driver", lambda: driver)
    assert device.is_reached(event) == is_there


def open_with_few_files() -> int:
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    group = open_group(
        read_launch(os.environ), device=torch.device("cpu"), backend="auto", timeout_s=20
    )
    group.close()
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_the_limit_of_open_files_is_raised_before_the_ranks_connect() -> None:
    assert min(run_ranks(open_with_few_files, 2)) > 128

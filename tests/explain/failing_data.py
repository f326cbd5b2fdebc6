"""Programs whose data or DataLoader fails."""

import errno
import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from tests.explain.reproducers import reproduce, reproduces, throw


class Calling(Dataset[Any]):
    """A dataset whose samples come from a function."""

    def __init__(self, call: Callable[[int], Any]) -> None:
        self.call = call

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:  # Any: what the function gives
        return self.call(index)


def read(call: Callable[[int], Any], **given: Any) -> None:
    for _ in DataLoader(Calling(call), batch_size=2, **given):
        pass


def _die(number: int) -> Callable[[int], Any]:
    return lambda index: os.kill(os.getpid(), number)


@reproduces("data-open-files")
def data_open_files(rank: int, folder: Path) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
    files = []
    while True:
        files.append(open(os.devnull))  # noqa: SIM115


@reproduces("data-bad-image")
def data_bad_image(rank: int, folder: Path) -> None:
    from PIL import Image

    (folder / "cat.jpg").write_bytes(b"no image")
    Image.open(folder / "cat.jpg")


@reproduces("data-sampler")
def data_sampler(rank: int, folder: Path) -> None:
    sampler = torch.utils.data.DistributedSampler(range(4), 2, 0)  # type: ignore[arg-type]
    DataLoader(Calling(int), sampler=sampler, shuffle=True)


@reproduces("data-uneven", num_ranks=2, guilty=0)
def data_uneven_join(rank: int, folder: Path) -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    with model.join(throw_on_early_termination=True):
        for _ in range(2 + rank):
            model(torch.ones(1, 2)).sum().backward()


@reproduces("data-hub")
def data_hub(rank: int, folder: Path) -> None:
    import urllib.request

    urllib.request.urlopen("http://127.0.0.1:9/weights.pt")


@reproduces("gpu-fork")
def gpu_fork(rank: int, folder: Path) -> None:
    torch.cuda._in_bad_fork = True
    torch.cuda._is_in_bad_fork = lambda: True  # type: ignore[attr-defined]
    torch.cuda._lazy_init()


reproduce("data-worker-exited", lambda folder: read(lambda index: os._exit(3), num_workers=1))
reproduce("memory-worker-killed", lambda folder: read(_die(signal.SIGKILL), num_workers=1))
reproduce("memory-shm", lambda folder: read(_die(signal.SIGBUS), num_workers=1))
reproduce("killed-segfault", lambda folder: read(_die(signal.SIGSEGV), num_workers=1))
reproduce(
    "data-worker-timeout",
    lambda folder: read(lambda index: time.sleep(30), num_workers=1, timeout=0.2),
)
reproduce("data-collate", lambda folder: read(lambda index: torch.zeros(index + 1)))
reproduce("data-collate", lambda folder: read(lambda index: torch.zeros(index + 1), num_workers=1))
reproduce("data-collate", lambda folder: read(lambda index: object()))
reproduce("python-keyerror", lambda folder: read(lambda index: {}[f"image_{index}"], num_workers=1))
reproduce(
    "data-target-range", lambda folder: F.cross_entropy(torch.zeros(2, 3), torch.tensor([1, 7]))
)
reproduce("data-target-range", lambda folder: torch.nn.Embedding(10, 2)(torch.tensor([3, 10])))
reproduce(
    "data-label-type",
    lambda folder: F.cross_entropy(torch.zeros(2, 3), torch.tensor([1, 2], dtype=torch.int32)),
)
reproduce(
    "data-target-shape",
    lambda folder: F.cross_entropy(torch.zeros(2, 3), torch.zeros(3, dtype=torch.long)),
)
reproduce(
    "data-target-shape",
    lambda folder: F.binary_cross_entropy_with_logits(torch.zeros(2, 1), torch.zeros(2)),
)
reproduce("data-empty", lambda folder: torch.utils.data.RandomSampler([]))
reproduce("gpu-none", lambda folder: torch.ones(2).cuda())
reproduce(
    "data-missing-file",
    lambda folder: read(lambda index: Path(f"/data/train/{index}.jpg").read_text()),
)
reproduce(
    "data-storage",
    lambda folder: throw(
        OSError(errno.ESTALE, os.strerror(errno.ESTALE), "/mnt/nfs/train/00017.tar")
    ),
)

"""Programs whose data or DataLoader fails."""

import errno
import os
import resource
import signal
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from tests.explain.reproducers import reproduces, throw


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
def data_open_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))
    files = []
    while True:
        files.append(open(os.devnull))  # noqa: SIM115


@reproduces("data-bad-image")
def data_bad_image() -> None:
    from PIL import Image

    Path("cat.jpg").write_bytes(b"no image")
    Image.open("cat.jpg")


@reproduces("data-sampler")
def data_sampler() -> None:
    sampler = torch.utils.data.DistributedSampler(range(4), 2, 0)  # type: ignore[arg-type]
    DataLoader(Calling(int), sampler=sampler, shuffle=True)


@reproduces("data-uneven", num_ranks=2, guilty=0)
def data_uneven_join() -> None:
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    with model.join(throw_on_early_termination=True):
        for _ in range(2 + torch.distributed.get_rank()):
            model(torch.ones(1, 2)).sum().backward()


@reproduces("gpu-fork")
def gpu_fork() -> None:
    torch.cuda._in_bad_fork = True
    torch.cuda._is_in_bad_fork = lambda: True  # type: ignore[attr-defined]
    torch.cuda._lazy_init()


reproduces("data-worker-exited")(lambda: read(lambda index: os._exit(3), num_workers=1))
reproduces("memory-worker-killed")(lambda: read(_die(signal.SIGKILL), num_workers=1))
reproduces("memory-shm")(lambda: read(_die(signal.SIGBUS), num_workers=1))
reproduces("killed-segfault")(lambda: read(_die(signal.SIGSEGV), num_workers=1))
reproduces("data-worker-timeout")(
    lambda: read(lambda index: time.sleep(5), num_workers=1, timeout=0.2)
)
reproduces("data-collate")(lambda: read(lambda index: torch.zeros(index + 1)))
reproduces("data-collate")(lambda: read(lambda index: object()))
reproduces("python-keyerror")(lambda: read(lambda index: {}[f"image_{index}"], num_workers=1))
reproduces("data-target-range")(lambda: F.cross_entropy(torch.zeros(2, 3), torch.tensor([1, 7])))
reproduces("data-target-range")(lambda: torch.nn.Embedding(10, 2)(torch.tensor([3, 10])))
reproduces("data-label-type")(
    lambda: F.cross_entropy(torch.zeros(2, 3), torch.tensor([1, 2], dtype=torch.int32))
)
reproduces("data-target-shape")(
    lambda: F.cross_entropy(torch.zeros(2, 3), torch.zeros(3, dtype=torch.long))
)
reproduces("data-target-shape")(
    lambda: F.binary_cross_entropy_with_logits(torch.zeros(2, 1), torch.zeros(2))
)
reproduces("data-empty")(lambda: torch.utils.data.RandomSampler([]))
reproduces("gpu-none")(lambda: torch.ones(2).cuda())
reproduces("data-missing-file")(
    lambda: read(lambda index: Path(f"/data/train/{index}.jpg").read_text())
)
reproduces("data-storage")(
    lambda: throw(OSError(errno.ESTALE, os.strerror(errno.ESTALE), "/mnt/nfs/train/00017.tar"))
)
reproduces("data-hub")(lambda: urllib.request.urlopen("http://127.0.0.1:9/weights.pt"))

"""Helper threads: each works on the GPU of its rank, which CUDA does not do by itself."""

import threading
import time
from collections.abc import Iterator
from unittest import mock

import pytest
import torch.distributed as dist

from hardened_ddp.ranks import threads
from hardened_ddp.ranks.store import RunStore
from hardened_ddp.ranks.threads import HelperThread, call_within, keep_ready


class Cuda:
    """The device that each thread has, 0 at first, as with CUDA."""

    def __init__(self) -> None:
        self._own = threading.local()
        self.is_lost = False

    def get(self) -> int:
        return getattr(self._own, "index", 0)

    def set(self, index: int) -> None:
        if self.is_lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        self._own.index = index


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cuda]:
    cuda = Cuda()
    monkeypatch.setattr(threads, "_ready", [])  # those of other tests have other devices
    with mock.patch.multiple(
        "torch.cuda", is_initialized=lambda: True, current_device=cuda.get, set_device=cuda.set
    ):
        cuda.set(5)
        yield cuda


def test_a_thread_works_on_the_gpu_of_the_rank_that_starts_it(cuda: Cuda) -> None:
    seen: list[int] = []

    def work() -> None:
        seen.append(cuda.get())
        seen.append(call_within(cuda.get, 60))  # as the hang watch does, to copy the state

    thread = HelperThread(work, name="work")
    assert (thread.name, thread.daemon) == ("work", True)
    thread.start()
    thread.join(60)
    assert seen == [5, 5]


def test_a_gpu_that_is_lost_does_not_keep_a_thread_from_working(cuda: Cuda) -> None:
    cuda.is_lost = True
    assert call_within(lambda: "told", 60) == "told"
    with mock.patch("torch.cuda.current_device", side_effect=RuntimeError("CUDA error")):
        assert call_within(lambda: "told", 60) == "told"


def test_a_question_to_the_store_touches_no_gpu(cuda: Cuda) -> None:
    # Its driver may be stuck, and torch would keep the GIL while it waits.
    store = RunStore(dist.HashStore())
    with mock.patch("torch.cuda.set_device", side_effect=AssertionError("it would wait")):
        assert store.claim("key", "mine") == "mine"


def test_a_question_to_a_device_that_is_stuck_starts_no_thread(cuda: Cuda) -> None:
    # Such a thread would set its GPU, which may wait there, and torch would keep the GIL.
    end = keep_ready(1)
    assert call_within(cuda.get, 60) == 5
    while not threads._ready:  # the thread has answered, and takes the next question soon
        time.sleep(0.001)
    with mock.patch("torch.cuda.set_device", side_effect=AssertionError("it would wait")):
        assert call_within(cuda.get, 60) == 5
    while not threads._ready:
        time.sleep(0.001)
    end()


def test_without_cuda_a_thread_starts_none() -> None:
    with mock.patch("torch.cuda.current_device", side_effect=AssertionError("it would start CUDA")):
        assert call_within(lambda: "told", 60) == "told"

"""Worker processes that read micro-batches for one rank, through torch's DataLoader.

A worker may run out of memory, crash in a decoder, hang on a disk. torch notices a dead one only
when a wait for data has timed out, so we wait with short timeouts. WHY never next() again after any
other error: torch would silently skip the lost batch.
Signals are for a rank and not for its workers: a scheduler and torchrun send SIGTERM, and Ctrl-C
reaches every process of a terminal, but until it stops, a rank needs batches.
A dataset's tensors go to workers through shared memory, as torch sends them: all have one copy.
They are copied into each worker where /dev/shm is small, as in containers, or where there are too
many: each shared one is an open file. All else that a dataset holds is copied.
Does not own: what is done about lost workers (loader.py), how many there are (workers.py).
"""

import contextlib
import io
import logging
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing import resource_tracker, util
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from hardened_ddp.data.batches.batch import Batch, BatchSource, Request
from hardened_ddp.data.batches.nesting import map_tensors
from hardened_ddp.data.batches.workers import WorkerPlan, free_shared_memory
from hardened_ddp.ranks.stacks import ask_for_stacks, offer_stacks
from hardened_ddp.ranks.threads import AwakeTime, HelperThread

log = logging.getLogger(__name__)

POLL_S = 0.5  # how long a dead worker may go unnoticed while a batch is waited for
_LONGEST_GAP_S = 4 * POLL_S  # a longer one was no wait: the process was stopped
START_S = 60.0  # how long workers may at least take to start: a busy machine imports torch slowly
_ANSWER_S = 10.0  # how long idle workers may take to answer that they go on
_NUM_NOTES = 3  # of each worker: the sample being read, its pid, the descriptor of its stacks
END_S = 5.0  # how long workers may take to end before they are killed
SENDING_S = 1.0  # how long one that is to be killed may take to send what it has begun to send

_SHM_MARGIN = 2.0  # of a dataset in shared memory: batches need room there, too
# multiprocessing sends a new process at most 256 open files, its own among them.
_MOST_SHARED_TENSORS = 200

# Of a socket's path, the kernel takes 107 bytes.
_LONGEST_PARENT_OF_SOCKETS = 107 - len("/pymp-XXXXXXXX/listener-XXXXXXXX")
_SHORT_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")

_NOT_RECEIVED = "a batch could not be received"
# Messages of the kernel, torch and us when shared memory is full or too many files are open.
_SIGNS_OF_SHARING = (
    *("SIGBUS", "shared memory", "(shm)", "unable to mmap", "unable to resize file"),
    *("No space left on device", "Too many open files", "too many fds", _NOT_RECEIVED),
)


_NO_NUMBERS = torch.empty(0, dtype=torch.int64)


class WorkersLost(Exception):
    """The workers can't continue: close them and request nothing more.

    is_dangerous: what killed or hung them may do the same to the next process that reads it.
    is_hang: the wait reached its limit.
    is_about_sharing: the way batches come back (shared memory, open files) may be the cause.
    """

    def __init__(self, reason: str, *, is_dangerous: bool = False, is_hang: bool = False) -> None:
        super().__init__(reason)
        self.is_dangerous, self.is_hang = is_dangerous, is_hang
        self.is_about_sharing = any(sign in reason for sign in _SIGNS_OF_SHARING)


class WorkerPool:
    """The workers of one rank. start() them on requests, receive() each batch in order."""

    def __init__(
        self,
        fetcher: BatchSource,
        plan: WorkerPlan,
        *,
        pin_memory: bool,
        timeout_s: float,
        is_lasting: bool = False,
    ) -> None:
        """timeout_s: limit for one batch, 0: none. is_lasting: start() may be called again."""
        self.timeout_s = timeout_s
        self._requests = _Requests()
        self._workers: list[BaseProcess] = []
        # WHY: at the end of a process that left them, multiprocessing sends SIGTERM, and waits for
        # them. These are killed then, or when this object is gone.
        util.Finalize(self, _kill, (self._workers,), exitpriority=0)
        self._iterator: Iterator[Any] | None = None  # Any: what _Reader sends
        _make_folder_of_sockets()
        context = multiprocessing.get_context(plan.start_method)
        self._notes = context.RawArray("q", _NUM_NOTES * plan.num_workers)
        if plan.start_method == "forkserver":
            context.set_forkserver_preload(["torch", "hardened_ddp.data.batches.worker_pool"])
        self._loader: DataLoader[Any] | None = DataLoader(
            _Reader(fetcher, self._notes, plan),
            batch_size=None,
            sampler=self._requests,
            num_workers=plan.num_workers,
            prefetch_factor=plan.prefetch_factor,
            collate_fn=_unchanged,
            persistent_workers=is_lasting,
            pin_memory=pin_memory,
            timeout=POLL_S,
            worker_init_fn=_prepare_worker,
            multiprocessing_context=context,
            # WHY: without its own generator, torch would draw a seed from the run's generator.
            generator=torch.Generator(),
        )

    def start(self, requests: Iterator[Request]) -> None:
        """Start the workers on requests. Raises WorkersLost if they can't be started."""
        assert self._loader is not None, "a closed worker pool was started"
        self._requests.source = requests
        before = set(multiprocessing.active_children())
        if not all(worker.is_alive() for worker in self._workers):
            raise self._explain(RuntimeError("an idle worker has ended"), is_late=False)
        idle: Any = self._iterator  # Any: torch's iterator, whose parts are private
        try:
            with signals_of_rank_blocked():
                if hasattr(idle, "_timeout"):  # torch waits so long for each of them to answer
                    idle._timeout = _ANSWER_S
                self._iterator = iter(self._loader)
        except Exception as error:  # WHY broad: processes, pipes, and pickling the user's dataset
            error.__traceback__ = None  # see receive
            raise WorkersLost(f"workers can't be started: {_summary(error)}") from None
        finally:
            if hasattr(idle, "_timeout"):
                idle._timeout = POLL_S
            self._workers += set(multiprocessing.active_children()) - before

    def receive(self) -> Batch | None:
        """Wait for the next batch; None if all requests are answered. Raises WorkersLost."""
        assert self._iterator is not None, "a worker pool that was not started has no batches"
        limit_s = self.timeout_s or float("inf")
        has_begun, waited = self._has_begun(), AwakeTime(_LONGEST_GAP_S)
        while True:
            try:
                found = next(self._iterator)
                return found.open() if isinstance(found, Payload) else found
            except StopIteration:
                return None
            except Exception as error:  # WHY broad: RuntimeError, OSError, EOFError, pickle's own
                is_late = str(error).startswith("DataLoader timed out")
                if not has_begun and self._has_begun():
                    # WHY from here on: no sample is to blame for the time that a start takes
                    has_begun, waited = True, AwakeTime(_LONGEST_GAP_S)
                most_s = limit_s if has_begun else max(limit_s, START_S)
                # WHY: with a timeout, torch does not look whether its thread that pins still lives
                pins = getattr(self._iterator, "_pin_memory_thread", None)
                is_dead = pins is not None and not pins.is_alive()
                if is_late and not is_dead and waited.passed_s() < most_s:
                    continue
                lost = WorkersLost("the thread that pins memory has ended")
                if not is_dead:
                    lost = self._explain(error, is_late=is_late)
                error.__traceback__ = None
            # WHY without it: a traceback (torch puts it in a cycle) keeps its iterator and threads.
            raise lost

    def _has_begun(self) -> bool:
        """Return whether each worker has started, and reads."""
        return all(self._notes[1::_NUM_NOTES])

    def being_read(self) -> list[int]:
        """Return the sample that each worker reads, or read last; -1 where that is not known."""
        return list(self._notes[::_NUM_NOTES])

    def stacks(self) -> dict[int, str]:
        """Return the Python stacks of each worker by its pid; empty if it does not answer."""
        places = zip(self._notes[1::_NUM_NOTES], self._notes[2::_NUM_NOTES], strict=True)
        return {pid: ask_for_stacks(pid, fd) for pid, fd in places if pid}

    def close(self, *, is_broken: bool = False) -> None:
        """End the workers; at once if they are broken."""
        if is_broken:
            self._kill()
        # WHY suppress: without guard/stop.py, torch's SIGCHLD handler raises at any line.
        with contextlib.suppress(RuntimeError):
            self._loader = self._iterator = None  # torch ends its workers when this is gone
        end = time.monotonic() + END_S
        for worker in self._workers:
            worker.join(max(0.0, end - time.monotonic()))
            if worker.is_alive():
                worker.kill()
                worker.join(END_S)
        self._workers.clear()

    def _kill(self) -> None:
        """Kill the workers, none of them while it sends a batch, as far as that is possible.

        WHY: its lock and half of a batch would stay. torch ends its thread that pins batches with a
        message, for which it needs that lock, and joins it, though it may wait for the other half.
        """
        iterator: Any = self._iterator  # Any: torch's iterator, whose parts are private
        pins = getattr(iterator, "_pin_memory_thread", None) is not None
        queue = getattr(iterator, "_worker_result_queue", None) if pins else None
        lock: Any = getattr(queue, "_wlock", None)
        holds = lock is not None and lock.acquire(timeout=SENDING_S)
        for worker in self._workers:
            worker.kill()
        if hasattr(iterator, "_workers_done_event"):
            # WHY: torch sets it, for which it needs a lock that a worker may have died with
            iterator._workers_done_event = threading.Event()
        if lock is not None and not holds:  # a worker died with it, or no one reads what it sends
            getattr(iterator, "_pin_memory_thread_done_event", threading.Event()).set()
            del iterator._pin_memory_thread  # torch neither writes to it nor waits for it
        if holds:
            for worker in self._workers:
                worker.join(END_S)  # WHY: until then it could still take the lock
            lock.release()

    def _explain(self, error: Exception, *, is_late: bool) -> WorkersLost:
        if is_late:
            reason = f"not all workers have started in {max(self.timeout_s, START_S):g} s"
            if self._has_begun():
                reason = f"no batch in {self.timeout_s:g} s"
            return WorkersLost(reason, is_dangerous=True, is_hang=True)
        if "in DataLoader worker process" in str(error):  # it is alive; its dataset raised
            return WorkersLost(_summary(error))
        # WHY wait: a process closes its connections first, and its exit status is known only later.
        # To mistake its death for something harmless could kill the rank. A death ends the wait.
        multiprocessing.connection.wait([worker.sentinel for worker in self._workers], END_S)
        for worker in self._workers:
            if multiprocessing.connection.wait([worker.sentinel], 0):
                worker.join(END_S)
            # WHY status 0 too: as long as batches are asked for, no worker has a reason to end.
            if not worker.is_alive() and (code := worker.exitcode) is not None:
                how = signal.Signals(-code).name if code < 0 else f"exit status {code}"
                hint = " (out of memory?)" if code == -signal.SIGKILL else ""
                reason = f"worker process {worker.pid} ended with {how}{hint}"
                return WorkersLost(reason, is_dangerous=True)
        return WorkersLost(f"{_NOT_RECEIVED} ({_summary(error)})")


class _Requests(Sampler[Any]):
    """The sampler for torch: the current requests."""

    source: Iterator[Request] = iter(())

    def __iter__(self) -> Iterator[Any]:
        # WHY numpy: each tensor would be sent as an open file in shared memory.
        return ((epoch, indices.numpy()) for epoch, indices in self.source)


class _Reader(Dataset[Any]):
    """The dataset that a worker sees: takes a request, returns its batch as a Payload."""

    def __init__(self, fetcher: BatchSource, notes: Any, plan: WorkerPlan) -> None:
        """notes: what each worker shows to the rank. Any: ctypes' array."""
        self.fetcher, self.notes = fetcher, notes
        self.shares_memory, self.copies_data = plan.shares_memory, plan.copies_data

    def __getstate__(self) -> dict[str, Any]:
        # WHY bytes: multiprocessing's own pickle would put the tensors into shared memory
        sent = pickle.dumps(self.fetcher) if self.copies_data else self.fetcher
        return {**self.__dict__, "fetcher": sent}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        if self.copies_data:
            self.fetcher = pickle.loads(state["fetcher"])

    def begin(self, worker_id: int) -> None:
        """Show this worker's state to the rank from now on."""
        notes = memoryview(self.notes).cast("B").cast("q")[_NUM_NOTES * worker_id :]
        self.fetcher.reading = notes[:1]
        notes[0], notes[1], notes[2] = -1, os.getpid(), offer_stacks()

    def __getitem__(self, request: Any) -> Any:  # Any: arrays, which torch sends without types
        epoch, numbers = request
        batch = self.fetcher[(epoch, torch.from_numpy(numbers))]
        # Pipes are slower, but need no room in /dev/shm, and no open file per tensor.
        change = share if self.shares_memory else torch.Tensor.detach
        inputs, targets = map_tensors((batch.inputs, batch.targets), change)
        sent = replace(batch, inputs=inputs, targets=targets, indices=_NO_NUMBERS)
        dump = ForkingPickler.dumps if self.shares_memory else pickle.dumps
        return Payload(bytes(dump((sent, batch.indices.numpy()))))


def _unchanged(data: Any) -> Any:
    return data  # WHY: torch's default would turn the sample numbers into tensors


def _make_folder_of_sockets() -> None:
    """Have multiprocessing make its folder for sockets, which workers use and this process removes.

    WHY before there are workers: the first one would make its own, and be killed before it removes
    it. Elsewhere than in TMPDIR if that is too long for sockets, as on clusters where it names the
    user, the job and more: else no worker is reached.
    """
    chosen = tempfile.tempdir
    if len(os.fsencode(tempfile.gettempdir())) > _LONGEST_PARENT_OF_SOCKETS:
        usable = (f for f in _SHORT_FOLDERS if os.access(f, os.W_OK | os.X_OK))
        tempfile.tempdir = next(usable, chosen)
    try:
        util.get_temp_dir()  # from now on, it returns this one
    finally:
        tempfile.tempdir = chosen


def _prepare_worker(worker_id: int) -> None:
    """Make a worker end with its rank, and leave alone the signals that are meant for the rank."""
    parent, info = multiprocessing.parent_process(), get_worker_info()
    assert parent is not None, "this is no worker"
    assert info is not None, "this is no worker"
    # WHY not PR_SET_PDEATHSIG: the parent process is the fork server.
    HelperThread(partial(_end_with, parent.sentinel), name="end-with-rank").start()
    info.dataset.begin(worker_id)  # type: ignore[attr-defined]  # it is a _Reader
    # WHY a handler for SIGTERM: programs that the dataset starts would inherit a mask, and could
    # not be ended by it.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS_OF_THE_RANK - {signal.SIGTERM})
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    torch.set_num_threads(1)


def _end_with(sentinel: int) -> None:
    """Wait until the process behind sentinel is gone, then end this one."""
    multiprocessing.connection.wait([sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def _summary(error: BaseException) -> str:
    """Return the most useful line: the error line after a worker's traceback, else the first."""
    lines = [line for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    # After a traceback, the error is the first line that is not indented.
    after = [line for line in lines[1:] if not line.startswith((" ", "Original", "Traceback"))]
    return (after or lines)[0].rstrip(".")


class Payload:
    """A pickled batch: bytes that name shared memory, or contain the data.

    WHY not the batch itself: torch would pickle and unpickle them in its own threads. A failure
    there (not picklable, too many open files) ends the thread, and the rank waits forever.
    """

    def __init__(self, content: bytes) -> None:
        self.content = content

    def open(self) -> Batch:
        batch, numbers = pickle.loads(self.content)
        batch.indices = torch.from_numpy(numbers)
        return cast(Batch, batch)

    def pin_memory(self) -> Batch:
        """Unpickle and pin the tensors. torch calls this in its pinning thread."""
        batch = self.open()
        batch.pin()
        return batch


def share(tensor: torch.Tensor) -> torch.Tensor:
    """Move to shared memory. WHY here: running out of it then raises in the worker's own thread."""
    tensor = tensor.detach()
    if tensor.untyped_storage().nbytes() > tensor.nbytes:
        tensor = tensor.clone()  # WHY: of a view, torch would send the whole tensor behind it
    tensor.share_memory_()  # type: ignore[no-untyped-call]  # torch left it untyped
    return tensor


SIGNALS_OF_THE_RANK = {signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM}


@contextlib.contextmanager
def signals_of_rank_blocked() -> Iterator[None]:
    """Block them in the processes that this one starts inside; it gets its own after that.

    WHY: the fork server and spawned workers import torch for seconds before they could do so.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS_OF_THE_RANK)
    try:
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS_OF_THE_RANK)  # its start unblocks SIGINT
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _kill(workers: Sequence[BaseProcess]) -> None:
    for worker in workers:
        worker.kill()


def plan_sending(fetcher: BatchSource, plan: WorkerPlan) -> WorkerPlan:
    """Decide how workers get the dataset of fetcher: tensors shared or copied.

    No workers, with a warning, if the dataset can't be sent.
    """
    if plan.start_method == "fork":
        return plan
    trial = SendingTrial()
    try:
        trial.dump(fetcher)
    except Exception as error:  # WHY broad: pickling runs the user's own code
        why = f"the dataset or its collate can't be sent to a worker ({error})"
        log.warning("num_workers %d requested, using 0: %s", plan.num_workers, why)
        return replace(plan, num_workers=0)
    tensor_bytes = sum(trial.tensors.values())
    needed_bytes = tensor_bytes * plan.local_world_size * _SHM_MARGIN
    is_many = len(trial.tensors) > _MOST_SHARED_TENSORS
    copies_data = is_many or needed_bytes > (free_shared_memory() or 0)
    return replace(plan, copies_data=copies_data)


class SendingTrial(pickle.Pickler):
    """Pickles what one worker gets, but for the tensors."""

    def __init__(self) -> None:
        self.tensors: dict[int, int] = {}  # bytes of each storage, by its address
        super().__init__(io.BytesIO(), protocol=pickle.HIGHEST_PROTOCOL)

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is not torch.Tensor or not obj.is_cpu or obj.layout != torch.strided:
            return None
        storage = obj.untyped_storage()
        self.tensors[storage.data_ptr()] = storage.nbytes()
        return "tensor"

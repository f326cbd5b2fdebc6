"""The meeting point: the key-value store through which the ranks of one attempt find each other.

Owns the TCPStore: who serves it, on which address, and who has come to which meeting.
Does not own: the process group that is formed over it (group.py).

WHY meetings: torchrun keeps one store over all restarts, and a restarted rank that reads the
addresses which a dead attempt left there hangs or fails. A count of restarts would tell attempts
apart on one node; with elastic nodes the counts differ. So rank 0 names each meeting by a random
word, each rank answers with a random word of its own, and rank 0 opens the meeting by repeating
the answers: what a dead attempt left never holds the answer that a living rank just gave.
"""

import json
import queue
import socket
import threading
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from hardened_ddp.errors import GroupError
from hardened_ddp.ranks.launch import Launch

POLL_S = 0.01
PATIENCE_S = 2.0

T = TypeVar("T")


class PatientStore:
    """A store of which each question is answered within PATIENCE_S, or raises RuntimeError.

    WHY: where the rank that serves it is stopped or hangs, torch's own calls wait for ever.
    """

    def __init__(self, store: dist.Store) -> None:
        self._store = store
        self._is_silent = False

    def has(self, key: str) -> bool:
        return self._ask(lambda: self._store.check([key]))

    def get(self, key: str) -> str:
        return self._ask(lambda: self._store.get(key)).decode()

    def set(self, key: str, text: str) -> None:
        self._ask(lambda: self._store.set(key, text))

    def claim(self, key: str, name: str) -> str:
        """Write name where nothing is yet; give the name that stands there."""
        return self._ask(lambda: self._store.compare_set(key, "", name)).decode()

    def wait(self, keys: list[str], limit_s: float) -> None:
        """Wait for all keys. For the rank that serves the store."""
        self._store.wait(keys, timedelta(seconds=limit_s))

    def _ask(self, question: Callable[[], T]) -> T:
        if self._is_silent:  # WHY at once: its connection still waits for the last answer
            raise RuntimeError("the store does not answer")
        answers: queue.SimpleQueue[T | RuntimeError] = queue.SimpleQueue()

        def ask() -> None:
            try:
                answers.put(question())
            except RuntimeError as error:
                answers.put(error)

        threading.Thread(target=ask, name="ask-store", daemon=True).start()
        try:
            answer = answers.get(timeout=PATIENCE_S)
        except queue.Empty:
            self._is_silent = True
            raise RuntimeError(f"the store gave no answer for {PATIENCE_S:g} s") from None
        if isinstance(answer, RuntimeError):
            raise answer
        return answer


def open_store(launch: Launch, timeout: timedelta) -> dist.Store:
    """Connect to the key-value store that the launcher, or else rank 0, serves. Rank-local.

    Raises GroupError if the port is taken, RuntimeError if nobody answers there.
    """
    is_server = launch.is_main and not launch.agent_owns_store
    listen_fd = None
    if is_server and launch.num_nodes == 1 and launch.master_addr in ("127.0.0.1", "localhost"):
        # WHY: TCPStore itself listens on all interfaces, and its protocol has no password.
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("127.0.0.1", launch.master_port))
        except OSError as error:
            raise GroupError(
                f"port {launch.master_port} of this machine is taken ({error.strerror}), so rank 0 "
                "can't serve the store that the ranks meet at",
                fix="torchrun --standalone --nproc_per_node=N ddp_training.py (it takes a free "
                "port), or another --master_port",
            ) from error
        listener.listen(512)
        listen_fd = listener.detach()
    return dist.TCPStore(
        launch.master_addr,
        launch.master_port,
        launch.world_size,
        is_server,
        timeout,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=listen_fd,
    )


def meet(store: dist.Store, launch: Launch, timeout_s: float) -> dist.Store:
    """Wait until every rank has come; give the part of the store that is this meeting's alone.

    Collective: all ranks. Raises GroupError naming the ranks that did not come.
    """
    end = time.monotonic() + timeout_s
    meeting = _invite(store, launch, end) if launch.is_main else _answer(store, launch, end)
    if meeting is None:
        missing = _missing(store, launch)
        raise GroupError(
            f"rank {launch.rank} waited {timeout_s:g} s at {launch.master_addr}:"
            f"{launch.master_port} and these of {launch.world_size} ranks never came: {missing}",
            fix="look at the log of those ranks: they did not start, or can't reach that address",
        )
    return dist.PrefixStore(meeting, store)


def _invite(store: dist.Store, launch: Launch, end: float) -> str | None:
    """Name a meeting, wait for all answers, and open it. On rank 0."""
    meeting = uuid.uuid4().hex
    store.set("meeting", meeting)
    keys = [f"{meeting}/hello/{rank}" for rank in range(1, launch.world_size)]
    try:
        store.wait(keys, timedelta(seconds=max(POLL_S, end - time.monotonic())))
    except RuntimeError:
        return None
    answers = [store.get(key).decode() for key in keys]
    store.set(f"{meeting}/open", json.dumps(answers))
    return meeting


def _answer(store: dist.Store, launch: Launch, end: float) -> str | None:
    """Answer the newest invitation until one of the meetings is opened with this answer."""
    answer, meeting = uuid.uuid4().hex, ""
    while time.monotonic() < end:
        if store.check(["meeting"]):
            newest = store.get("meeting").decode()
            if newest != meeting:
                meeting = newest
                store.set(f"{meeting}/hello/{launch.rank}", answer)
            is_open = store.check([f"{meeting}/open"])
            if is_open and answer in json.loads(store.get(f"{meeting}/open")):
                return meeting
        time.sleep(POLL_S)
    return None


def _missing(store: dist.Store, launch: Launch) -> list[int]:
    """List the ranks that did not answer the newest invitation, or rank 0 that sent none."""
    if not store.check(["meeting"]):
        return [0]
    meeting = store.get("meeting").decode()
    others = range(1, launch.world_size)
    missing = [rank for rank in others if not store.check([f"{meeting}/hello/{rank}"])]
    # All have answered, and rank 0 never opened it: the invitation is that of a dead attempt.
    return missing or [0]

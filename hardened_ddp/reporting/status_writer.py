"""Writes what this rank does into the run folder: for the commands watch and report.

A thread reads the tracker and writes RUN/status/rank-N.json (rank_status.py) every few seconds. All
ranks together write at most MOST_WRITES_PER_S, and one rank spends at most 1 % of the time on it.
Rank 0 also tells the status server of Kubeflow Trainer, from a thread of its own; a failure of that
is ignored.
"""

import json
import logging
import os
import platform
import ssl
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch

from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.launch import environment
from hardened_ddp.ranks.phase import PHASE, SINCE, STEP, Phase
from hardened_ddp.ranks.process import this_process
from hardened_ddp.ranks.threads import HelperThread
from hardened_ddp.reporting.rank_status import SILENT_AFTER_S, RankStatus
from hardened_ddp.reporting.resources import read_rss_mib
from hardened_ddp.reporting.sinks import open_no_link
from hardened_ddp.settings.earlier_run import STATUS_FOLDER
from hardened_ddp.settings.typed_command import working_folder

log = logging.getLogger(__name__)

EVERY_S = 2.0  # between two writes, at least
MOST_WRITES_PER_S = 64
_SHARE_OF_TIME = 0.01
_RATE_OVER = 8  # writes
_END_LIMIT_S = 2.0
_SILENT_PERIODS = 5
KUBEFLOW_URL = "KUBEFLOW_TRAINER_SERVER_URL"  # set by its operator, where it is to be told
_KUBEFLOW_CA = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
_KUBEFLOW_TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"  # both are paths of files
_KUBEFLOW_EVERY_S, _KUBEFLOW_LIMIT_S = 10.0, 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What is trained, once it is known. Each function is called from the writing thread."""

    global_batch: int = 0  # samples of one step, over all ranks
    epochs: int = 0
    # On a GPU: the seconds of each part of a step. The CPU's clock would see only the queueing.
    split: Callable[[], tuple[int, Mapping[str, float]]] = lambda: (0, {})
    epoch: Callable[[], int] = lambda: 0

    # What torch has of the GPU, and had at most. It must not ask torch, which keeps the GIL while
    # it waits for what a stuck main thread may hold.
    gpu_mib: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)
    steps: Callable[[], int | None] = lambda: None  # of the whole run; None: not known yet


class StatusWriter:
    """Writes the status of this rank. Use it in a with statement."""

    def __init__(self, folder: Path, group: Group) -> None:
        self._path = folder / STATUS_FOLDER / f"rank-{group.launch.rank}.json"
        self._group = group
        self._every_s = max(EVERY_S, group.world_size / MOST_WRITES_PER_S)
        self._work = Work()
        self._state = "running"
        self._rates: deque[tuple[float, int]] = deque(maxlen=_RATE_OVER)
        self._end = threading.Event()
        call = partial(self._repeat, self._write, self._every_s)
        self._threads = [HelperThread(call, name="rank-status")]
        if group.launch.is_main and KUBEFLOW_URL in environment():
            call = partial(self._repeat, self._tell_kubeflow, _KUBEFLOW_EVERY_S, share=1.0)
            self._threads.append(HelperThread(call, name="kubeflow"))
        self._facts = self._read_facts()

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, error: object, *rest: object) -> None:
        """Write the last status. Takes some seconds at most, even if the disk hangs."""
        if self._state == "running":
            self._state = "finished" if error is None else "failed"
        self._end.set()
        for thread in self._threads:
            thread.join(_END_LIMIT_S)

    def attach(self, work: Work) -> None:
        self._work = work

    def close_as(self, state: str) -> None:
        self._state = state

    def read(self) -> RankStatus:
        tracker, work = self._group.tracker, self._work
        words = tracker.words
        step, phase = words[STEP], Phase(words[PHASE]).label
        phase_s = (time.monotonic_ns() - words[SINCE]) / 1e9
        if tracker.phase == Phase.START_UP:
            phase, phase_s = tracker.part_of_start()
        gpu_mib, gpu_peak_mib = work.gpu_mib()
        return replace(
            self._facts,
            now=round(time.time(), 3),
            state=self._state,
            step=step,
            total_steps=work.steps() or 0,
            epoch=work.epoch(),
            epochs=work.epochs,
            phase=phase,
            phase_s=phase_s,
            steps_here=tracker.num_steps,
            spent_s={label: round(seconds, 3) for label, seconds in tracker.spent_s().items()},
            split_s=dict(work.split()[1]) if self._group.device.type == "cuda" else {},
            samples_per_s=round(self._rate(step, tracker.wall_s()) * work.global_batch, 1),
            rss_mib=round(read_rss_mib(), 1),
            gpu_mib=gpu_mib,
            gpu_peak_mib=gpu_peak_mib,
        )

    def _repeat(
        self, tell: Callable[[], None], every_s: float, *, share: float = _SHARE_OF_TIME
    ) -> None:
        failed, wait_s, is_over = "", 0.0, False
        while not is_over:
            is_over = self._end.wait(wait_s)
            began = time.monotonic()
            try:
                tell()
                failed = ""
            except Exception as error:  # WHY broad: the run goes on, and so must its status
                if str(error) != failed:
                    log.debug("the status was not told: %s", error)
                failed = str(error)
            wait_s = max(every_s, (time.monotonic() - began) / share)

    def _tell_kubeflow(self) -> None:
        post_progress(self.read(), environment())

    def _write(self) -> None:
        """Write in place. WHY not aside and rename: on a shared disk that is three times as much.

        The file ends with a line break, which a reader looks for.
        """
        data = (json.dumps(asdict(self.read())) + "\n").encode()
        self._path.parent.mkdir(exist_ok=True)
        descriptor = open_no_link(self._path, os.O_WRONLY | os.O_CREAT)
        try:
            os.pwrite(descriptor, data, 0)
            os.ftruncate(descriptor, len(data))
        finally:
            os.close(descriptor)

    def _rate(self, step: int, wall_s: list[float]) -> float:
        """Return the steps per second since some writes, without evaluation and checkpoints."""
        aside = wall_s[Phase.EVALUATION] + wall_s[Phase.CHECKPOINT] + wall_s[Phase.START_UP]
        now = sum(wall_s) - aside
        if self._rates and step < self._rates[-1][1]:  # rolled back
            self._rates.clear()
        self._rates.append((now, step))
        began, first = self._rates[0]
        passed = now - began
        return (step - first) / passed if passed > 0 else 0.0

    def _read_facts(self) -> RankStatus:
        group, launch = self._group, self._group.launch
        is_gpu = group.device.type == "cuda"
        return RankStatus(
            rank=launch.rank,
            state=self._state,
            began_at=round(launch.started_at, 3),
            silent_after_s=max(SILENT_AFTER_S, _SILENT_PERIODS * self._every_s),
            world_size=launch.world_size,
            num_nodes=launch.num_nodes,
            launcher=launch.launcher,
            working_folder=working_folder(),
            command=launch.command() if launch.start.is_whole else "",
            process=asdict(this_process()),
            device=str(group.device),
            device_name=torch.cuda.get_device_name(group.device) if is_gpu else "CPU",
            backend=group.backend,
            versions={
                "torch": torch.__version__,
                "python": platform.python_version(),
                "system": platform.platform(),
                "cuda": torch.version.cuda or "none",
            },
        )


def post_progress(status: RankStatus, env: Mapping[str, str]) -> None:
    """Tell Kubeflow's server how far the run is: the last word counts. Raises what urllib does."""
    numbers = {"step": status.step, "epoch": status.epoch, "samples_per_s": status.samples_per_s}
    metrics = [{"name": name, "value": f"{value:.10g}"} for name, value in numbers.items()]
    now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
    told: dict[str, Any] = {"metrics": metrics, "lastUpdatedTime": now}  # Any: JSON
    if status.total_steps:
        told["progressPercentage"] = min(100, 100 * status.step // status.total_steps)
    headers = {"Content-Type": "application/json"}
    if path := env.get(_KUBEFLOW_TOKEN):  # WHY each time: a token lives for an hour
        headers["Authorization"] = f"Bearer {Path(path).read_text().strip()}"
    data = json.dumps({"trainerStatus": told}).encode()  # with data it is a POST
    request = urllib.request.Request(env[KUBEFLOW_URL], data, headers)
    context = ssl.create_default_context(cafile=env.get(_KUBEFLOW_CA))
    # WHY no proxy: the server is inside of the cluster
    handlers = (urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    urllib.request.build_opener(*handlers).open(request, timeout=_KUBEFLOW_LIMIT_S).close()

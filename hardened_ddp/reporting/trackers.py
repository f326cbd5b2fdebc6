"""Trackers: where the curves of a run go besides metrics.jsonl, such as Weights & Biases.

Each has a thread: a tracker that is slow, hangs or raises is named once and left behind, and
training goes on. WandbTracker, MlflowTracker and PrometheusFile are built in. Another one is any
class such as

    class MyTracker:
        def __init__(self, *, folder: Path, settings: Mapping[str, Any]) -> None: ...
        def log(self, step: int, values: Mapping[str, float]) -> None: ...
        def close(self) -> None: ...

Only rank 0 has trackers. All three are called in the tracker's own thread, one after the other.
"""

import json
import logging
import re
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any, Protocol

from hardened_ddp.reporting.sinks import ReportWriter, write_text, write_whole

log = logging.getLogger(__name__)


class Tracker(Protocol):
    """Takes the values of a run."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...
    def close(self) -> None: ...


class TrackerThread:
    """One tracker, behind a thread. None of its methods raises or waits, but for close."""

    def __init__(self, name: str, make: Callable[[], Tracker]) -> None:
        """make: builds the tracker; called in the thread, at the first values."""
        self.name = name
        self._make = make
        self._tracker: Tracker | None = None
        self._has_failed = False
        self._writer = ReportWriter(flush=lambda: True, name=f"tracker-{name}")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # WHY a copy: a tracker may change what it gets, and others get the same values
        self._writer.do(partial(self._do, methodcaller("log", step, dict(values))))

    def close(self) -> None:
        """Let the tracker finish, for half a minute at most."""
        if self._writer.num_refused:
            text = "tracker %s was too slow: %d values were dropped; metrics.jsonl has all of them"
            log.warning(text, self.name, self._writer.num_refused)
        last = partial(self._do, methodcaller("close"))
        if not self._writer.close(f"tracker {self.name} to take its last values", last=last):
            log.warning("tracker %s did not close in time: values may be missing", self.name)

    def _do(self, call: Callable[[Tracker], object]) -> None:
        if self._has_failed:
            return
        try:
            if self._tracker is None:
                self._tracker = self._make()
            call(self._tracker)
        # WHY broad: a foreign program may raise anything; sys.exit would end this thread unseen
        except BaseException as error:
            self._has_failed = True
            text = "tracker %s failed, training continues without it: %s: %s"
            log.warning(text, self.name, type(error).__name__, error)
            log.debug("the traceback of tracker %s", self.name, exc_info=True)


class WandbTracker:
    """Weights & Biases: --tracker wandb.

    Its id of a run is kept in the run folder, so a resumed run goes on in the same curves. Project,
    key and mode are set as W&B says, by WANDB_PROJECT, WANDB_API_KEY and WANDB_MODE (offline writes
    to the run folder only; later: wandb sync).
    """

    def __init__(self, *, folder: Path, settings: Mapping[str, Any]) -> None:  # Any: of settings
        import wandb

        path = folder / "wandb" / "run-id.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.is_file():
            write_text(path, uuid.uuid4().hex[:16] + "\n")
        self._run = wandb.init(
            dir=folder,
            id=path.read_text(encoding="utf-8").strip(),
            name=folder.name,
            resume="allow",
            config=dict(settings),
            # WHY no console: it would put itself between this process and its log
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        # W&B ignores a step that is before the last one, as after a rollback
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowTracker:
    """MLflow: --tracker mlflow. The server is that of MLFLOW_TRACKING_URI, else a file of the run.

    Its id of a run is kept in the run folder, so a resumed run goes on in the same curves.
    """

    def __init__(self, *, folder: Path, settings: Mapping[str, Any]) -> None:  # Any: of settings
        import mlflow

        self._mlflow, path = mlflow, folder / "mlflow" / "run-id.txt"
        path.parent.mkdir(exist_ok=True)
        if not mlflow.is_tracking_uri_set():
            mlflow.set_tracking_uri(f"sqlite:///{path.parent.resolve() / 'mlflow.db'}")
        if path.is_file():
            mlflow.start_run(run_id=path.read_text(encoding="utf-8").strip())
            return
        run = mlflow.start_run(run_name=folder.name)
        write_text(path, run.info.run_id + "\n")
        mlflow.log_params({name: str(value)[:500] for name, value in settings.items()})

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._mlflow.log_metrics(dict(values), step=step)

    def close(self) -> None:
        self._mlflow.end_run()


class PrometheusFile:
    """The newest values as a text file for Prometheus: --metrics_file.

    WHY no timestamps: node_exporter refuses a file that has any.
    """

    def __init__(self, path: Path, run: str) -> None:
        self._path, self._is_failing = path, False
        self._run = json.dumps(run, ensure_ascii=False)
        self._values: dict[str, float] = {}

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Replace the file. A disk that is full is named once, and tried again."""
        self._values |= {"step": step, **values}
        lines = []
        for name, value in sorted(self._values.items()):
            metric = "ddp_training_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)
            text = f"{value:.9g}".replace("nan", "NaN").replace("inf", "Inf")
            lines += [f"# TYPE {metric} gauge", f"{metric}{{run={self._run}}} {text}"]
        try:
            write_whole(self._path, "\n".join(lines) + "\n")
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                log.warning("%s can't be written, training continues: %s", self._path, error)
            self._is_failing = True

    def close(self) -> None:
        """The last values stay, for whoever reads them next."""

"""The reports of a run: its start in a few lines, log, metrics, TensorBoard, trackers, the summary.

Rank 0 writes; the other ranks keep their own log file, which also has the facts of their start.
"""

import importlib.util
import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from time import monotonic

import torch

from hardened_ddp.data.batches.sampler import WindowSampler
from hardened_ddp.data.foreign_code import import_callable
from hardened_ddp.errors import ConfigError, MissingPackageError
from hardened_ddp.guard.slow import BACKWARD_AND_WAIT, Split
from hardened_ddp.ranks.launch import environment
from hardened_ddp.ranks.phase import Phase
from hardened_ddp.reporting.ending import stop_status
from hardened_ddp.reporting.goodput import Goodput
from hardened_ddp.reporting.log import ON_EVERY_RANK
from hardened_ddp.reporting.metrics import MetricsLog
from hardened_ddp.reporting.resources import ResourceMonitor, read_gpu_mib
from hardened_ddp.reporting.step_clock import REPORTED, start_clock
from hardened_ddp.reporting.summary import closing_lines, withdraw_summary, write_summary
from hardened_ddp.reporting.trackers import (
    MlflowTracker,
    PrometheusFile,
    Tracker,
    TrackerThread,
    WandbTracker,
)
from hardened_ddp.settings.config import (
    MLFLOW,
    TENSORBOARD,
    WANDB,
    Config,
    RunConfig,
    tracker_names,
)
from hardened_ddp.settings.layers import Resolved
from hardened_ddp.settings.record import yaml_word
from hardened_ddp.settings.schema import DEFAULT, RUN, SETTINGS, flatten
from hardened_ddp.settings.typed_command import pip_command
from hardened_ddp.settings.wording import counted, listed
from hardened_ddp.step.left_out import LeftOut
from hardened_ddp.step.parts import Parts
from hardened_ddp.step.progress import Progress
from hardened_ddp.task.task import LOSS, described, with_loss
from hardened_ddp.training.evaluation import EMA, PARTIAL, Evaluation
from hardened_ddp.training.run_folder import RunFolder

log = logging.getLogger(__name__)

SIGN_EVERY_S = 30.0  # so long after the last report rank 0 says at which step it is


class RunReport:
    """The reports of one run on this rank."""

    def __init__(
        self, parts: Parts, folder: RunFolder, goodput: Goodput, left_out: LeftOut, *, step: int
    ) -> None:
        """left_out: what the steps leave out; it grows during the run."""
        self.parts = parts
        self.folder = folder.folder
        self.is_main = parts.group.launch.is_main
        if self.is_main:
            withdraw_summary(self.folder)
        self.metrics = MetricsLog(
            self.folder,
            tensorboard=has_tensorboard(parts.config.run),
            is_main=self.is_main,
            trackers=_make_trackers(parts.config, self.folder) if self.is_main else (),
        )
        tracker = parts.group.tracker
        self.read_times = start_clock(tracker, parts.device)
        self.resources = ResourceMonitor(parts.device)
        self.goodput = goodput
        self.goodput.begin(step)
        self.split: tuple[int, Split] = (0, {})  # the number of reports, and that of the last
        self.last_train: Mapping[str, float] = {}
        # What torch had of this rank's GPU at the last report, and at most.
        self.gpu_mib = (0.0, 0.0)
        self._last_tested: Mapping[str, float] = {}  # the figures of the last evaluation
        self._tracker = tracker
        self._trained_s = self._training_s()
        self._left_out = left_out
        self._told_left_out: set[str] = set()
        self._num_rollbacks = self.num_diverged = 0
        self._time_spent = ""
        self._told_at = monotonic()

    def tick(self, step: int) -> None:
        """Say where the run is, if nothing was said for long; note the time. Rank-local."""
        if self.is_main and monotonic() - self._told_at > SIGN_EVERY_S:
            self._told_at = monotonic()
            log.info("step %d%s", step, self._of_all())
        self.goodput.note(step)

    def log_training(
        self,
        progress: Progress,
        sums: Mapping[str, float],
        rate: float,
        grad_norm: torch.Tensor | None,
    ) -> None:
        """Report loss, metrics, rate, times and memory since the last report. Rank-local."""
        with self._tracker.within(Phase.REPORT):
            times = self.read_times()
            # WHY another name: on a GPU the waiting is part of backward
            backward = "backward" if self.parts.device.type == "cpu" else BACKWARD_AND_WAIT
            split = {backward if name == "backward" else name: s for name, s in times.items()}
            self.split = (self.split[0] + 1, split)
            before, self._trained_s = self._trained_s, self._training_s()
            speed = sums["samples"] / max(1e-9, self._trained_s - before)
            self.last_train, self.gpu_mib = sums, read_gpu_mib(self.parts.device)
            if not self.is_main:
                return
            self._note_left_out()
            self._told_at = monotonic()
            told = with_loss(sums["loss"], described(self.parts.task.metrics, sums))
            epoch = f"{progress.epoch + 1}/{self.parts.config.loop.epochs}"
            text = "epoch %s step %d%s  %s  lr %.2e  %.0f samples/s"
            log.info(text, epoch, progress.step, self._of_all(), told, rate, speed)
            metrics = [metric.name for metric in self.parts.task.metrics]
            values = {
                **{f"{name}/train": sums[name] for name in (LOSS, *metrics) if name in sums},
                "optimizer/learning_rate": rate,
                "speed/samples_per_s": speed,
                **{f"step_time/{name}_s": times[name] for name in REPORTED if name in times},
                **self.resources.sample(),
            }
            if grad_norm is not None:
                values["optimizer/gradient_norm"] = float(grad_norm)
            self.metrics.scalars(progress.step, values)

    def log_evaluation(self, progress: Progress, evaluation: Evaluation) -> None:
        self._last_tested = figures = evaluation.figures
        if not self.is_main:
            return
        log.info(
            "%s done: %s (%d samples%s)",
            # WHY: --max_steps may end a run within an epoch
            f"step {progress.step}" if progress.cursor else f"epoch {progress.epoch}",
            self._tested(figures),
            evaluation.num_samples,
            f", {len(evaluation.left_out)} left out" if evaluation.left_out else "",
        )
        if new := [text for text in evaluation.left_out if text not in self._told_left_out]:
            self._told_left_out.update(new)
            log.warning("left out of the evaluation: test sample %s", listed(new))
        tested = {f"{name}/test": value for name, value in figures.items()}
        self.metrics.scalars(progress.step, tested | _times(self.goodput.account()))

    def _tested(self, figures: Mapping[str, float]) -> str:
        """Format what was measured on the test set: of the weights, and of their averages."""
        metrics = self.parts.task.test_metrics
        of = "partial test" if any(name.startswith(PARTIAL) for name in figures) else "test"
        figures = {name.removeprefix(PARTIAL): value for name, value in figures.items()}
        text = f"{of} {with_loss(figures[LOSS], described(metrics, figures, of=of))}"
        averaged = {n.removeprefix(EMA): v for n, v in figures.items() if n.startswith(EMA)}
        if not averaged:
            return text
        told = described(metrics, averaged, of=of)
        return f"{text}; averaged weights: {with_loss(averaged[LOSS], told)}"

    def go_back(self, left_at: int, step: int) -> None:
        """Account for a return to an earlier step: the time after it is lost. Rank-local."""
        self._num_rollbacks += 1
        self.parts.events.tell("rollback", step=step, from_step=left_at)
        self.goodput.go_back(left_at, step)
        self._trained_s = self._training_s()

    def close(self, progress: Progress, *, status: str) -> None:
        """Write the summary and close all files. Rank-local."""
        ended = status if status in ("finished", "stopped") else ""
        self.goodput.note(progress.step, is_last=True, ended=ended)
        # WHY here: a tracker that sends its last values over a network is no part of the training
        self._time_spent = self.goodput.describe()
        if self.is_main:
            self._note_left_out()
            self.metrics.scalars(progress.step, _times(self.goodput.account()))
            tested = self._last_tested
            write_summary(
                self.folder,
                {
                    "status": status,
                    "step": progress.step,
                    "epoch": progress.epoch,
                    **{f"test_{m.name}": tested.get(m.name) for m in self.parts.task.test_metrics},
                    "test_loss": tested.get(LOSS),
                    **{f"test_{n}": v for n, v in tested.items() if n.startswith((EMA, PARTIAL))},
                    "train_loss": self.last_train.get("loss"),
                    "world_size": self.parts.group.world_size,
                    "num_left_out": progress.num_errors,
                    "num_rollbacks": self._num_rollbacks,
                    "num_diverged": self.num_diverged,
                    "time": {k: round(v, 3) for k, v in self.goodput.account().items()},
                    "run_folder": str(self.folder),
                },
            )
        if ended:
            facts = {"step": progress.step, "epoch": progress.epoch, **self._last_tested}
            self.parts.events.tell(ended, status=self._exit_status(ended), **facts)
        self.metrics.close()

    def say_what_next(self, status: str) -> int:
        """Log on rank 0 how the run ended and what to type next; return the exit status."""
        if self.is_main:
            log.info("time: %s", self._time_spent)
            tested = self._last_tested
            result = described(self.parts.task.test_metrics, tested, of="test")
            if tested and (not result or f"{EMA}{LOSS}" in tested):
                result = self._tested(tested)
            board = has_tensorboard(self.parts.config.run)
            resume = self.parts.group.launch.command("--resume", self.folder)
            told = closing_lines(
                self.folder, status=status, result=result, resume=resume, has_tensorboard=board
            )
            for line in told:
                log.info("%s", line)
        return self._exit_status(status)

    def _exit_status(self, status: str) -> int:
        setting = self.parts.config.loop.stop_status
        return stop_status(setting, environment()) if status == "stopped" else 0

    def _of_all(self) -> str:
        return f"/{self.parts.length.total}" if self.parts.length.is_known else ""

    def _training_s(self) -> float:
        seconds = self._tracker.wall_s()
        return sum(seconds) - seconds[Phase.EVALUATION]

    def _note_left_out(self) -> None:
        try:
            self._left_out.write()
        except OSError as error:
            log.warning("what was left out can't be written: %s", error)


def _times(account: Mapping[str, float]) -> dict[str, float]:
    """Name the account of the wall time as TensorBoard shows it."""
    seconds = {f"time/{name}_s": value for name, value in account.items() if name != "goodput"}
    return {"time/goodput": account["goodput"], **seconds}


def check_trackers(run: RunConfig) -> None:
    for name in tracker_names(run.tracker):
        if name in (WANDB, MLFLOW) and importlib.util.find_spec(name) is None:
            raise MissingPackageError(
                f"tracker {name}: its package is not installed",
                fix=pip_command("requirements-extras.txt", name),
            )
        if ":" in name:
            import_callable(name, setting="tracker", error=ConfigError)
    if run.tensorboard and TENSORBOARD in tracker_names(run.tracker) and not has_tensorboard(run):
        text = "the package tensorboard is not installed: its curves are not written"
        log.warning("%s", text, extra=ON_EVERY_RANK)


def has_tensorboard(run: RunConfig) -> bool:
    is_there = importlib.util.find_spec("tensorboard") is not None
    return is_there and run.tensorboard and TENSORBOARD in tracker_names(run.tracker)


def _make_trackers(config: Config, folder: Path) -> list[TrackerThread]:
    def make(name: str) -> Tracker:
        kinds: Mapping[str, Callable[..., Tracker]] = {WANDB: WandbTracker, MLFLOW: MlflowTracker}
        kind = kinds.get(name) or import_callable(name, setting="tracker", error=ConfigError)
        return kind(folder=folder, settings=flatten(config))

    names = [name for name in tracker_names(config.run.tracker) if name != TENSORBOARD]
    trackers = [TrackerThread(name, partial(make, name)) for name in names]
    if path := config.run.metrics_file:
        file = partial(PrometheusFile, Path(path), folder.name)
        trackers.append(TrackerThread("metrics_file", file))
    return trackers


_MAX_NAMED = 12


def tell_start(settings: Resolved, parts: Parts, progress: Progress) -> None:
    """Log how the run starts: on rank 0 in a few lines, and the facts of each rank."""
    lines = [_ranks_line(parts), _work_line(parts, progress), _auto_line(parts)]
    if changed := changed_settings(settings):
        lines.append("settings: " + "; ".join(changed))
    if num := parts.config.run.keep_milestones:
        length, size = parts.length, sum(p.nbytes for p in parts.replica.module.parameters())
        steps = f"{2 * length.total // num + 1:,}" if length.is_known else f"2 / {num} of all"
        text = f"{num} milestones, {3e-6 * num * size:,.0f} MB with AdamW; each step is at most"
        lines.append(f"{text} {steps} steps, plus the time between two saves, behind one")
    if parts.group.is_main:
        is_again = progress.step or parts.group.launch.attempt
        parts.events.tell("restart" if is_again else "started", step=progress.step, told=lines)
        for line in lines:
            log.info("%s", line)
        if settings.not_used:
            log.warning("%s", not_used_line(settings))
    text = "local rank %d of %d, device %s, %d threads, dataset fingerprint %s"
    launch, fingerprint = parts.group.launch, parts.data.fingerprint[:16]
    place, num_threads = (launch.local_rank, launch.local_world_size), torch.get_num_threads()
    log.debug(text, *place, parts.group.device, num_threads, fingerprint)


def changed_settings(settings: Resolved) -> list[str]:
    """Say which settings are not at their default, grouped by where they come from."""
    values = flatten(settings.config)
    groups: dict[str, list[str]] = {}
    for name, source in settings.sources.items():
        if source != DEFAULT and values[name] != SETTINGS[name].default:
            place = "the continued run" if source == RUN else source.rsplit(":", 1)[0]
            groups.setdefault(place, []).append(f"{name} {yaml_word(values[name])}")
    return [f"{place}: {listed(named, _MAX_NAMED)}" for place, named in groups.items()]


def not_used_line(settings: Resolved) -> str:
    """Say what was changed in config.yaml without effect on the run that is continued."""
    named = [f"{name} ({place})" for name, place in settings.not_used.items()]
    flag = f"--{next(iter(settings.not_used))} VALUE"
    return (
        f"not used: {listed(named, _MAX_NAMED)}: the continued run keeps its own values; "
        f"to change one, give it as a flag: {flag}"
    )


def _ranks_line(parts: Parts) -> str:
    group, launch = parts.group, parts.group.launch
    hosts = f" on {launch.num_nodes} nodes" if launch.num_nodes > 1 else ""
    attempt = f" (restart {launch.attempt})" if launch.attempt else ""
    on_gpu = group.device.type == "cuda"
    device = torch.cuda.get_device_name(group.device) if on_gpu else "CPU"
    precision = "fp32" if parts.precision.name == "off" else parts.precision.name
    sums = "no process group"
    if group.world_size > 1:
        threads = counted(torch.get_num_threads(), "thread")
        sums = f"backend {group.backend}, gradients {parts.gradients.how}, {threads}"
    by = "hand" if launch.launcher == "none" else launch.launcher
    how = f"{counted(group.world_size, 'rank')}{hosts}, started by {by}{attempt}"
    return f"{how}: {device}, {sums}, precision {precision}"


def _work_line(parts: Parts, progress: Progress) -> str:
    config, world_size = parts.config, parts.group.world_size
    numbers = [p.numel() for p in parts.replica.module.parameters()]
    trained = sum(p.numel() for p in parts.gradients.local.by_name.values())
    frozen = f", {trained:,} of them trained" if trained != sum(numbers) else ""
    test = 0 if parts.data.test is None else len(parts.data.test)  # type: ignore[arg-type]  # map-style
    size = "a stream"
    if isinstance(parts.sampler, WindowSampler):
        size = f"{parts.sampler.size:,} samples"
        if (drawn := parts.sampler.sampling) is not None:
            size += f", {drawn.length:,} drawn per epoch ({drawn.name})"
    each = -(-parts.global_batch // world_size)
    micro = -(-each // max(1, parts.sampler.batch_size))
    cut = f"{world_size} x {each}" + (f" in {micro} micro-batches" if micro > 1 else "")
    steps = "steps not known"
    if parts.length.is_known:
        done = f", {progress.step} done" if progress.step else ""
        total = parts.length.total
        steps = f"{total:,} step{'' if total == 1 else 's'}{done}"
    if parts.average is not None:
        frozen += f", {parts.average}"
    return (
        f"model {config.model.model}: {sum(numbers):,} parameters{frozen}; dataset "
        f"{config.data.dataset}: {size}{f', {test:,} to test' if test else ''}; "
        f"{parts.global_batch} per step = {cut}; {steps}"
    )


def _auto_line(parts: Parts) -> str:
    config = parts.config
    values = flatten(config)
    reader = parts.train_loader.reader
    found = {
        "task": parts.task.name,
        "amp": parts.precision.name,
        "backend": parts.group.backend,
        "num_workers": str(reader.num_workers) + (" (in memory)" if parts.data.in_memory else ""),
        "channels_last": "on" if parts.replica.inputs.channels_last else "off",
        "lr_schedule": str(parts.schedule.config.lr_schedule),
        "checkpoint_every_steps": "measured",
    }
    if parts.group.world_size > 1:
        found["find_unused_parameters"] = "on" if parts.gradients.allows_unused else "off"
    chosen = [f"{name} {word}" for name, word in found.items() if values[name] in (None, "auto")]
    return "auto: " + (", ".join(chosen) or "nothing")

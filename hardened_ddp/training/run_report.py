"""What a run tells about itself while it goes: log lines, metrics.jsonl, TensorBoard, summary.

Owns which numbers are reported, and when. Rank 0 writes; the other ranks keep their own log file.
Does not own: how they are written (reporting/), which never stops training.
"""

import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from hardened_ddp.guard.slow import BACKWARD_AND_WAIT, Splits
from hardened_ddp.ranks.heartbeat import DATA, REPORT
from hardened_ddp.reporting.goodput import Goodput
from hardened_ddp.reporting.metrics import MetricsLog
from hardened_ddp.reporting.progress import ProgressBar
from hardened_ddp.reporting.resources import ResourceMonitor
from hardened_ddp.reporting.step_clock import StepClock
from hardened_ddp.reporting.summary import closing_lines, withdraw_summary, write_summary
from hardened_ddp.step.parts import Parts, Progress
from hardened_ddp.step.step import Stepper
from hardened_ddp.task.task import described, shortly_described
from hardened_ddp.training.evaluation import Evaluation
from hardened_ddp.training.profiling import start_profile

log = logging.getLogger(__name__)

_MOST_TOLD = 8  # test samples that are named one by one in the log


class RunReport:
    """The reports of one run on this rank."""

    def __init__(self, parts: Parts, folder: Path, *, settings_text: str, step: int) -> None:
        self.parts = parts
        self.folder = folder
        self.is_main = parts.group.launch.is_main
        if self.is_main:
            withdraw_summary(folder)
        run = parts.config.run
        self.metrics = MetricsLog(folder, tensorboard=run.tensorboard, is_main=self.is_main)
        self.bar = ProgressBar(
            total_steps=parts.total_steps,
            initial_step=step,
            enabled=run.progress if self.is_main else False,
        )
        self.clock = StepClock(parts.device)
        self.resources = ResourceMonitor(parts.device)
        self.goodput = Goodput(
            folder, began_at=parts.group.launch.started_at, step=step, is_main=self.is_main
        )
        self.splits = Splits()
        self.last_train: Mapping[str, float] = {}
        self.last_evaluation: Evaluation | None = None
        self._settings_text = settings_text
        self._last_time = self._paused_at = time.monotonic()
        self._num_left_out = 0
        self._told_left_out: set[str] = set()
        self.num_rollbacks = self.num_diverged = 0
        self.left_out: list[dict[str, Any]] = []
        """The stepper's own list of what was left out; it grows while the run goes on."""

    def log_training(self, progress: Progress, stepper: Stepper, sums: Mapping[str, float]) -> None:
        """Report loss, accuracy, rate, times and memory since the last report. Rank-local."""
        heartbeat = self.parts.group.heartbeat
        heartbeat.enter(REPORT)
        times = self.clock.read_and_reset()
        self.splits.add(_own_split(times, heartbeat.read_split(), self.parts.device))
        self._log_training(progress, stepper, sums, times)
        heartbeat.enter(DATA)

    def _log_training(
        self,
        progress: Progress,
        stepper: Stepper,
        sums: Mapping[str, float],
        times: Mapping[str, float],
    ) -> None:
        now = time.monotonic()
        speed = sums["samples"] / max(1e-9, now - self._last_time)
        self._last_time = now
        self.last_train = sums
        if not self.is_main:
            return
        self._note_left_out()
        self.bar.describe(
            epoch=progress.epoch + 1,
            num_epochs=self.parts.config.loop.epochs,
            loss=sums["loss"],
            metrics=shortly_described(self.parts.task.metrics, sums),
            samples_per_s=speed,
        )
        log.info(
            "epoch %d/%d step %d/%d  loss %.4f  %s  lr %.2e  %.0f samples/s",
            progress.epoch + 1,
            self.parts.config.loop.epochs,
            progress.step,
            self.parts.total_steps,
            sums["loss"],
            described(self.parts.task.metrics, sums),
            stepper.rate,
            speed,
        )
        values = {
            "loss/train": sums["loss"],
            **{f"{m.name}/train": sums[m.name] for m in self.parts.task.metrics},
            "optimizer/learning_rate": stepper.rate,
            "speed/samples_per_s": speed,
            **{f"step_time/{phase}_s": seconds for phase, seconds in times.items()},
            **self.resources.sample(),
        }
        if stepper.grad_norm is not None:
            values["optimizer/gradient_norm"] = float(stepper.grad_norm)
        self.metrics.scalars(progress.step, values)
        if self._settings_text:
            self.metrics.text("settings", self._settings_text)
            self._settings_text = ""

    def log_evaluation(self, progress: Progress, evaluation: Evaluation) -> None:
        """Report the test set's loss and metrics, and pictures of mistakes. Rank-local."""
        self.last_evaluation = evaluation
        if not self.is_main:
            return
        log.info(
            "epoch %d done: test loss %.4f  %s (%d samples%s)",
            progress.epoch,
            evaluation.loss,
            described(self.parts.task.metrics, evaluation.metrics, of="test"),
            evaluation.num_samples,
            f", {len(evaluation.left_out)} left out" if evaluation.left_out else "",
        )
        if new := [text for text in evaluation.left_out if text not in self._told_left_out]:
            self._told_left_out.update(new)
            for text in new[:_MOST_TOLD]:
                log.warning("left out of the evaluation: test sample %s", text)
            if len(new) > _MOST_TOLD:
                log.warning("and %d more test samples", len(new) - _MOST_TOLD)
        self.metrics.scalars(
            progress.step,
            {
                "loss/test": evaluation.loss,
                **{f"{name}/test": value for name, value in evaluation.metrics.items()},
                **_times(self.goodput.account()),
            },
        )
        mistakes = evaluation.mistakes
        if mistakes and mistakes[0].image.dim() == 3:
            self.metrics.images(
                progress.step,
                "mistakes/test",
                torch.stack([mistake.image for mistake in mistakes]),
                [mistake.caption for mistake in mistakes],
            )

    def skip_time(self) -> None:
        """Leave the time since the last step out of the speeds: it was not spent on training."""
        self._last_time += time.monotonic() - self._paused_at
        self.parts.group.heartbeat.enter(DATA)
        self.clock.skip()

    def pause_time(self) -> None:
        """Remember that something else than training begins here."""
        self._paused_at = time.monotonic()

    def go_back(self, step: int) -> None:
        """Account for a return to an earlier step: what came after it is lost time. Rank-local."""
        self.num_rollbacks += 1
        self.goodput.go_back(step)
        self.clock.skip()
        self._last_time = time.monotonic()

    def start_profile(self) -> Callable[[], None]:
        """Profile a few steps; call the result after each step. Rank-local."""
        rank = self.parts.group.launch.rank
        return start_profile(self.folder, rank=rank, device=self.parts.device)

    def close(self, progress: Progress, *, status: str) -> None:
        """Write the summary and close all files. Rank-local."""
        self.bar.close()
        self.goodput.note(progress.step, is_last=True)
        if self.is_main:
            self._note_left_out()
            self.metrics.scalars(progress.step, _times(self.goodput.account()))
            evaluation = self.last_evaluation
            tested = evaluation.metrics if evaluation else {}
            write_summary(
                self.folder,
                {
                    "status": status,
                    "step": progress.step,
                    "epoch": progress.epoch,
                    **{f"test_{m.name}": tested.get(m.name) for m in self.parts.task.metrics},
                    "test_loss": evaluation.loss if evaluation else None,
                    "train_loss": self.last_train.get("loss"),
                    "world_size": self.parts.group.world_size,
                    "num_left_out": progress.num_errors,
                    "num_rollbacks": self.num_rollbacks,
                    "num_diverged": self.num_diverged,
                    "time": {k: round(v, 3) for k, v in self.goodput.account().items()},
                    "run_folder": str(self.folder),
                },
            )
        self.metrics.close()

    def say_what_next(self, status: str) -> None:
        """Tell on rank 0 how the run ended and what to type next."""
        if self.is_main:
            log.info("time: %s", self.goodput.describe())
            tested = self.last_evaluation.metrics if self.last_evaluation else {}
            for line in closing_lines(
                self.folder,
                status=status,
                result=described(self.parts.task.metrics, tested, of="test") if tested else "",
                has_tensorboard=self.parts.config.run.tensorboard,
            ):
                log.info("%s", line)

    def _note_left_out(self) -> None:
        """Add what was left out since the last report to skipped_samples.jsonl."""
        new = self.left_out[self._num_left_out :]
        if new:
            self._num_left_out = len(self.left_out)
            try:
                with (self.folder / "skipped_samples.jsonl").open("a", encoding="utf-8") as file:
                    file.writelines(json.dumps(entry) + "\n" for entry in new)
            except OSError as error:
                log.warning("skipped_samples.jsonl can't be written: %s", error)


def _own_split(
    times: Mapping[str, float], shown: Mapping[str, float], device: torch.device
) -> Mapping[str, float]:
    """Give the seconds of each phase of this rank's steps, with its waiting apart if possible.

    WHY not on a GPU: there the waiting is part of its backward.
    """
    if device.type == "cpu":
        return shown
    return {BACKWARD_AND_WAIT if name == "backward" else name: s for name, s in times.items()}


def _times(account: Mapping[str, float]) -> dict[str, float]:
    """Name the account of the wall time as TensorBoard shows it."""
    seconds = {f"time/{name}_s": value for name, value in account.items() if name != "goodput"}
    return {"time/goodput": account["goodput"], **seconds}

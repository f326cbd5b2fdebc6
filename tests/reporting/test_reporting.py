"""What a run says of itself: logs, metrics, TensorBoard, times, memory, summary.

Faults are real ones: full devices, closed pipes, terminals that go away, files that hit a limit.
And what a file, a name or an exception says is printed, and changes nothing in the terminal.
"""

import contextlib
import json
import logging
import math
import os
import re
import resource
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TextIO, cast

import psutil
import pytest
import torch

from hardened_ddp.ranks import phase as phase_module
from hardened_ddp.ranks.phase import Phase, Tracker
from hardened_ddp.reporting import log as log_module
from hardened_ddp.reporting import metrics as metrics_module
from hardened_ddp.reporting import sinks, step_clock
from hardened_ddp.reporting.log import ConsoleHandler, add_log_file, start_logging, stop_logging
from hardened_ddp.reporting.metrics import MetricsLog
from hardened_ddp.reporting.resources import ResourceMonitor, read_rss_mib
from hardened_ddp.reporting.sinks import FileSink
from hardened_ddp.reporting.step_clock import GpuTimeline, start_clock
from hardened_ddp.reporting.summary import finished_at, withdraw_summary, write_summary
from hardened_ddp.settings.wording import printable
from hardened_ddp.training.run_report import SIGN_EVERY_S, RunReport
from tests.forks import run_forked
from tests.harness.processes import clean_environment, wait_until
from tests.harness.ranks import run_command, run_program, train
from tests.marks import slow_after
from tests.run_folder import only_run

log = logging.getLogger("hardened_ddp.tests")
CPU = torch.device("cpu")
Said = Callable[[], str]  # gives what was written to stderr since the last call


@pytest.fixture(autouse=True)
def logging_ends() -> Iterator[None]:
    yield
    stop_logging()


@pytest.fixture
def stderr(capfd: pytest.CaptureFixture[str]) -> Said:
    return lambda: capfd.readouterr().err


class TestConsole:
    def test_other_ranks_say_only_their_own_warnings(self, tmp_path: Path, stderr: Said) -> None:
        for rank in range(2):
            start_logging(rank=rank, world_size=2, debug=False)
            add_log_file(tmp_path, rank=rank)
            log.debug("hidden")
            log.info("loss 0.5")
            log.warning("disk slow")
            log.warning("retrying step 3", extra=log_module.ON_EVERY_RANK)
            logging.getLogger("py.warnings").warning("FutureWarning: old name")
            stop_logging()
            said = (tmp_path / f"rank-{rank}.log").read_text()
            assert "retrying step 3" in said
            assert "old name" in said
        lines = stderr().splitlines()
        assert time.strptime(lines[0][:8], "%H:%M:%S")
        assert [line[8:] for line in lines] == [
            " [rank 0] loss 0.5",
            " [rank 0] WARNING disk slow",
            " [rank 0] WARNING retrying step 3",
            " [rank 0] WARNING FutureWarning: old name",
            " [rank 1] WARNING disk slow",
        ]

    def test_debug_shows_all_of_all_ranks_and_nothing_of_libraries(self, stderr: Said) -> None:
        start_logging(rank=1, world_size=2, debug=True)
        log.debug("detail")
        logging.getLogger("other").debug("noise")
        assert stderr()[8:] == " [rank 1] detail\n"
        start_logging(rank=0, world_size=1, debug=False)  # one process needs no tag
        log.info("sample \u00fcber \U0001f600 \udcff.png")
        assert stderr()[8:] == " sample \\xfcber \\U0001f600 \\udcff.png\n"

    def test_a_line_that_cannot_be_formatted_does_not_raise(self, stderr: Said) -> None:
        class Unprintable:
            def __str__(self) -> str:
                raise RuntimeError("no")

        console = ConsoleHandler(sys.stderr, tag="")
        for text, value in (("%d steps", "many"), ("%s", Unprintable())):
            console.handle(log.makeRecord("x", logging.INFO, "a.py", 6, text, (value,), None))
        first, second = stderr().splitlines()
        assert first == "INFO a.py:6: unreadable line (TypeError)"
        assert second == "INFO a.py:6: unreadable line (RuntimeError)"

    def test_a_terminal_that_takes_nothing_for_a_while_costs_its_lines(self, stderr: Said) -> None:
        start_logging(rank=0, world_size=1, debug=False)
        fd = sys.stderr.fileno()
        good, full = os.dup(fd), os.open("/dev/full", os.O_WRONLY)
        os.dup2(full, fd)
        for _ in range(3):
            log.info("into the void")
        os.dup2(good, fd)
        log.info("back")
        os.close(good)
        os.close(full)
        assert stderr()[8:] == " back\n"

    @pytest.mark.parametrize("stream", [None, "closed"])
    def test_a_closed_stderr_does_not_raise(
        self, stream: str | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        file = (tmp_path / "x").open("w")
        monkeypatch.setattr(sys, "stderr", None if stream is None else file)
        start_logging(rank=0, world_size=1, debug=False)
        file.close()
        log.error("nobody hears this")
        add_log_file(tmp_path / "logs", rank=0)
        assert "nobody hears this" in (tmp_path / "logs/rank-0.log").read_text()


class TestLogFile:
    def test_what_was_said_before_is_in_the_file(self, stderr: Said, tmp_path: Path) -> None:
        start_logging(rank=3, world_size=4, debug=False)
        for number in range(5000):
            log.debug("early detail %d", number)
        add_log_file(tmp_path / "logs", rank=3)
        log.info("later")
        stop_logging()
        text = (tmp_path / "logs/rank-3.log").read_text()
        assert 200_000 < len(text) < 260 * 1024, "what waits is bounded"
        *_, last, later = text.splitlines()
        assert last.endswith(" DEBUG hardened_ddp.tests: early detail 4999")
        assert later.endswith(" INFO hardened_ddp.tests: later")

    def test_a_folder_that_cannot_be_made_is_a_warning(self, stderr: Said, tmp_path: Path) -> None:
        (tmp_path / "logs").write_text("a file")
        start_logging(rank=0, world_size=1, debug=False)
        add_log_file(tmp_path / "logs", rank=0)
        assert "WARNING this rank's log file can't be written, training continues" in stderr()

    def test_logging_starts_again_and_leaves_no_trace(self, stderr: Said, tmp_path: Path) -> None:
        root, ours = logging.getLogger(), logging.getLogger("hardened_ddp")
        before = (list(root.handlers), root.level, ours.level, warnings.showwarning)
        for attempt in range(3):
            start_logging(rank=0, world_size=1, debug=False)
            add_log_file(tmp_path, rank=0)
            log.info("attempt %d", attempt)
        stop_logging()
        stop_logging()
        assert (list(root.handlers), root.level, ours.level, warnings.showwarning) == before
        assert len((tmp_path / "rank-0.log").read_text().splitlines()) == 3


@pytest.mark.parametrize(
    ("keep_bytes", "kept"), [(100_000, range(50)), (350, (0, 1, 2, 47, 48, 49))]
)
def test_a_file_at_its_limit_is_continued_with_the_rest_of_a_record(
    keep_bytes: int, kept: Sequence[int], tmp_path: Path
) -> None:
    records = [b"%02d-%s-%02d\n" % (number, b"x" * 93, number) for number in range(50)]

    def write() -> None:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (250, hard))  # in the middle of a record
        sink = FileSink(tmp_path / "file", keep_bytes=keep_bytes)
        for record in records[:3]:
            sink.add(record)
        assert not sink.flush()
        for record in records[3:]:
            sink.add(record)
        assert not sink.flush()
        assert "File too large" in str(sink.error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert sink.close()
        assert sink.num_lost == 50 - len(kept)

    assert run_forked(write) == 0
    assert (tmp_path / "file").read_bytes() == b"".join(records[number] for number in kept)


def test_steps_that_take_long_give_a_sign_of_life(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    goodput = SimpleNamespace(note=lambda step: None)
    report: Any = SimpleNamespace(
        is_main=True, _told_at=-SIGN_EVERY_S, _of_all=lambda: "/9", goodput=goodput
    )
    for step in (6, 7):
        RunReport.tick(report, step)
    assert caplog.messages == ["step 6/9"]


def read_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def read_board(folder: Path) -> Any:  # Any: tensorboard has no types
    """Read a run's TensorBoard files as TensorBoard does."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(folder / "tensorboard"), size_guidance={"images": 0, "scalars": 0})
    return board.Reload()


class TestMetrics:
    def test_numbers_are_in_both_files_and_non_finite_ones_are_null(self, tmp_path: Path) -> None:
        metrics = MetricsLog(tmp_path, tensorboard=True, is_main=True)
        metrics.scalars(20, {"train/loss": 0.5, "train/bad": math.nan})
        metrics.scalars(300, {"train/loss": 1e300, "train/bad": -math.inf})
        metrics.close()
        first, second = read_lines(tmp_path)
        now = pytest.approx(time.time(), abs=60)
        assert first == {"step": 20, "time": now, "train/loss": 0.5, "train/bad": None}
        assert second["train/bad"] is None
        board = read_board(tmp_path)
        points = board.Scalars("train/loss")
        assert [(point.step, point.value) for point in points] == [(20, 0.5), (300, math.inf)]
        assert points[0].wall_time == pytest.approx(time.time(), abs=60)
        bad = [point.value for point in board.Scalars("train/bad")]
        assert math.isnan(bad[0])
        assert bad[1] == -math.inf

    def test_a_restart_replaces_the_steps_behind_it(self, tmp_path: Path) -> None:
        for first_step, loss in ((10, 1.0), (30, 2.0)):
            with (tmp_path / "metrics.jsonl").open("a") as lines:
                lines.write('{"step": 1, "lo')  # half a line of a start that was killed
            metrics = MetricsLog(tmp_path, tensorboard=True, is_main=True)
            for step in range(first_step, 60, 10):
                metrics.scalars(step, {"loss": loss})
            metrics.close()
            # Files of one second and one process would have one name.
            for path in (tmp_path / "tensorboard").iterdir():
                path.rename(path.with_name(f"{path.name}.{int(loss)}"))
        board = read_board(tmp_path)
        points = [(point.step, point.value) for point in board.Scalars("loss")]
        assert points == [(10, 1.0), (20, 1.0), (30, 2.0), (40, 2.0), (50, 2.0)]
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert sum('"loss"' in line for line in lines if line.startswith('{"step": ')) == 8

    def test_other_ranks_and_no_tensorboard_write_nothing(self, tmp_path: Path) -> None:
        for folder, is_main in ((tmp_path / "main", True), (tmp_path / "other", False)):
            metrics = MetricsLog(folder, tensorboard=not is_main, is_main=is_main)
            metrics.scalars(1, {"loss": 1.0})
            metrics.close()
        assert [path.name for path in tmp_path.iterdir()] == ["main"]
        assert [path.name for path in (tmp_path / "main").iterdir()] == ["metrics.jsonl"]

    def test_a_disk_with_room_again_gets_all_numbers_without_a_new_report(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        full, opened = {tmp_path / "metrics.jsonl"}, sinks.open_no_link
        fake = lambda path, flags: opened("/dev/full" if path in full else path, flags)  # noqa: E731
        monkeypatch.setattr(sinks, "open_no_link", fake)
        monkeypatch.setattr(sinks, "_RETRY_AFTER_S", 0.01)
        metrics = MetricsLog(tmp_path, tensorboard=True, is_main=True)
        for step in range(1, 100):
            metrics.scalars(step, {"loss": 1.0, "accuracy": 0.5})
        wait_until(lambda: caplog.messages, 60, "a report")
        full.clear()
        wait_until((tmp_path / "metrics.jsonl").is_file, 60, "the file without a new report")
        metrics.close()
        assert len(caplog.messages) == 1
        assert [line["step"] for line in read_lines(tmp_path)] == list(range(1, 100))
        steps = [point.step for point in read_board(tmp_path).Scalars("accuracy")]
        assert steps == list(range(1, 100))

    def test_a_disk_that_hangs_holds_up_neither_the_steps_nor_the_end(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(metrics_module, "_CLOSE_LIMIT_S", 0.1)
        pipe = tmp_path / "metrics.jsonl"
        os.mkfifo(pipe)  # it takes 64 KiB, and then blocks
        metrics = MetricsLog(tmp_path, tensorboard=False, is_main=True)
        for step in range(11_000):  # WHY no limit: they would wait for ever
            metrics.scalars(step, {"loss": 1.0})
        metrics.close()
        assert "the disk does not answer" in caplog.messages[-1]
        reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

        def is_over() -> bool:
            with contextlib.suppress(BlockingIOError):
                os.read(reader, 2**20)
            return all(thread.name != "metrics" for thread in threading.enumerate())

        wait_until(is_over, 10, "the end of the thread")
        os.close(reader)

    def test_a_program_that_forgets_to_close_ends_all_the_same(self) -> None:
        program = (
            "import threading\n"
            "from hardened_ddp.reporting.sinks import ReportWriter\n"
            "is_stuck = threading.Event()\n"
            "def hang(): is_stuck.set(); threading.Event().wait()\n"
            "ReportWriter(flush=lambda: True, name='metrics').do(hang)\n"
            "is_stuck.wait()\n"
        )
        run_command([sys.executable, "-c", program], timeout_s=30).ok()

    def test_a_report_that_breaks_is_left_out_and_the_next_is_written(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        metrics = MetricsLog(tmp_path, tensorboard=True, is_main=True)
        metrics.scalars(1, {"half a character \udc80": 1.0})
        metrics.scalars(1, {"loss": 1.0})
        metrics.close()
        assert "a report failed and is skipped, training continues" in caplog.text
        assert read_board(tmp_path).Scalars("loss")


class TestStepClock:
    def test_phases_of_micro_steps_add_up_per_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        now = [0]
        monkeypatch.setattr(phase_module, "monotonic_ns", lambda: now[0] * 10**9)
        tracker = Tracker()
        read_times = start_clock(tracker, CPU)
        micro_step = [(Phase.FORWARD, 2), (Phase.BACKWARD, 4)]
        for step in range(2):
            for phase, seconds in ((Phase.DATA, 1), *micro_step, *micro_step, (Phase.OPTIMIZER, 8)):
                tracker.enter(phase)
                now[0] += seconds
            with tracker.within(Phase.ALL_REDUCE):
                now[0] += 16
            tracker.end_step(step)
        times = {"data": 1.0, "forward": 4.0, "backward": 8.0, "optimizer": 8.0, "all-reduce": 16.0}
        assert read_times() == times
        assert read_times() == {}

    def test_a_gpu_is_timed_by_its_own_queue_and_only_in_sampled_steps(self) -> None:
        gpu = FakeGpu()
        timeline = GpuTimeline(gpu.record, sample_every=4)
        timeline.enter(Phase.DATA)
        for _ in range(8):
            phases = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER, Phase.DATA)
            for milliseconds, phase in zip((1, 2, 4, 8), phases, strict=True):
                gpu.now += milliseconds  # of the phase before
                timeline.enter(phase)
        assert gpu.num_events == 2 * 5  # of steps 1 and 5, each with its start
        assert timeline.read_and_reset() == {}  # the GPU has done nothing of it yet
        gpu.done = gpu.now
        expected = {"data": 0.001, "forward": 0.002, "backward": 0.004, "optimizer": 0.008}
        assert timeline.read_and_reset() == pytest.approx(expected)
        assert timeline.read_and_reset() == {}

    def test_time_that_was_not_spent_on_training_is_left_out_on_a_gpu_too(self) -> None:
        gpu = FakeGpu()
        timeline = GpuTimeline(gpu.record, sample_every=1)
        for _ in range(2):
            timeline.enter(Phase.EVALUATION)
            gpu.now += 1000
            for phase in (Phase.DATA, *step_clock.PHASES[1:], Phase.DATA):
                timeline.enter(phase)
                gpu.now += 1
        gpu.done = gpu.now
        assert timeline.read_and_reset() == pytest.approx(
            dict.fromkeys(("data", "forward", "backward", "optimizer"), 0.001)
        )


class FakeGpu:
    """A GPU's queue: now is where it is filled to, done where the GPU has come to."""

    now, done, num_events = 0.0, -1.0, 0

    def record(self) -> Any:
        self.num_events += 1
        at = self.now
        elapsed = lambda end: end.at - at  # noqa: E731
        return SimpleNamespace(at=at, query=lambda: at <= self.done, elapsed_time=elapsed)


class TestResources:
    def test_memory_is_what_the_kernel_says(self) -> None:
        monitor = ResourceMonitor(CPU)
        first = monitor.sample()
        block = b"\1" * (64 * 2**20)
        second = monitor.sample()
        assert 60 < second["memory/rss_mib"] - first["memory/rss_mib"] < 80
        assert first["memory/rss_mib"] > 50
        assert 0 < first["memory/system_used_percent"] < 100
        assert first["memory/shm_used_mib"] >= 0
        assert "memory/gpu_allocated_mib" not in first
        assert len(block)

    def test_a_full_machine_is_said_once_and_a_container_by_its_own_limit(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        memory = psutil.virtual_memory()._replace(percent=96.0)
        monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
        monitor = ResourceMonitor(CPU)
        assert monitor.sample()["memory/system_used_percent"] == pytest.approx(96)
        monitor.sample()
        [message] = [text for text in caplog.messages if "system memory" in text]
        assert "more than 95 % full" in message
        (tmp_path / "memory.max").write_text("1000000\n")
        (tmp_path / "memory.current").write_text("990000\n")
        (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 20000\n")
        found = ResourceMonitor(CPU, cgroup=tmp_path).sample()
        assert found["memory/container_used_percent"] == pytest.approx(97)
        assert "this container's memory is more than 95 % full" in caplog.text

    @pytest.mark.parametrize("error", [psutil.AccessDenied, psutil.NoSuchProcess, OSError])
    def test_what_cannot_be_read_is_left_out(
        self, error: Callable[[int], Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "memory.max").write_text("many\n")

        def refuse(self: object) -> None:
            raise error(1)

        monkeypatch.setattr(psutil.Process, "memory_info", refuse)
        assert set(ResourceMonitor(CPU, cgroup=tmp_path).sample()) == {"memory/shm_used_mib"}
        assert read_rss_mib() == 0.0


class TestSummary:
    def test_it_is_whole_or_absent(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        summary = {"step": 3, "loss": math.nan, "folder": tmp_path, "times": {"data": (0.5,)}}
        write_summary(tmp_path, summary)
        written = json.loads((tmp_path / "summary.json").read_text())
        expected = {"step": 3, "loss": None, "folder": str(tmp_path), "times": {"data": [0.5]}}
        assert written == expected
        assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
        write_summary(tmp_path / "summary.json", {})  # not a folder
        assert "summary.json can't be written" in caplog.text
        assert json.loads((tmp_path / "summary.json").read_text()) == expected

    @pytest.mark.parametrize(
        "text",
        ["", "{", "{}", "[]", "null", '"finished"', "[" * 100_000, '{"status": "finished"}']
        + [f'{{"status": "finished", "step": {s}}}' for s in ("null", '"x"', "[1]", "Infinity")]
        + ['{"status": "stopped", "step": 3}'],
    )
    def test_one_that_is_none_means_not_finished(self, text: str, tmp_path: Path) -> None:
        write_summary(tmp_path, {"status": "finished", "step": 3})
        assert finished_at(tmp_path) == 3
        (tmp_path / "summary.json").write_text(text)
        assert finished_at(tmp_path) is None
        withdraw_summary(tmp_path)
        withdraw_summary(tmp_path)  # there is none any more
        assert not list(tmp_path.iterdir())


def test_a_terminal_that_takes_nothing_now_is_waited_for_and_a_stream_will_do(
    tmp_path: Path,
) -> None:
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    received = []

    def read() -> None:
        while part := os.read(read_end, 65536):
            received.append(part)

    reader = threading.Thread(target=read)
    with os.fdopen(write_end, "w") as stream:
        console = ConsoleHandler(stream, tag="")
        reader.start()
        console.write("x" * 1_000_000)
    reader.join()
    os.close(read_end)
    assert sum(map(len, received)) == 1_000_000
    written: list[str] = []
    console = ConsoleHandler(
        cast(TextIO, SimpleNamespace(write=written.append, flush=lambda: None)), tag=""
    )
    console.handle(log.makeRecord(log.name, logging.INFO, __file__, 1, "hello", (), None))
    assert [line[9:] for line in written] == ["hello\n"]


CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\x7f\u202egnp.exe\u2066\r"
GOOD = "größer 漢字 🙂"


def test_controls_are_escaped_and_ordinary_text_is_not() -> None:
    assert printable(f"{GOOD}\n\tat line 3") == f"{GOOD}\n\tat line 3"
    assert printable("a\x1b[1mb\x85\u202ec\x7f") == "a\\u001b[1mb\\u0085\\u202ec\\u007f"
    assert printable("a\r\nb\rc") == "a\nb\\u000dc"
    assert json.loads(printable(json.dumps({"a": EVIL}, ensure_ascii=False))) == {"a": EVIL}
    for code in range(0x11000):
        found = printable(f"{chr(code)}")
        assert not CONTROLS.search(found)
        assert found == chr(code) or not chr(code).isprintable()


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("printed")
    argv = ["--cpu_only", "--max_steps", "4", "--checkpoint_every_steps", "2", "--ledger"]
    train([*argv, "--output_dir", output]).ok()
    run = only_run(output)
    status = run / "status" / "rank-0.json"
    told = json.loads(status.read_text())
    process = {**told["process"], "host": EVIL + GOOD}
    told |= {"state": "failed", "phase": EVIL, "device": EVIL, "device_name": EVIL + GOOD}
    status.write_text(json.dumps({**told, "process": process}) + "\n")
    best = {"schema": 1, "step": 4, "metric": EVIL + GOOD, "value": 0.5}
    (run / "checkpoints" / "best.json").write_text(json.dumps(best))
    (run / "summary.json").unlink()
    with (run / "logs" / "rank-0.log").open("a", encoding="utf-8") as log:
        log.write(f"2026-01-01 00:00:00.000 WARNING hardened_ddp.step: {GOOD}{EVIL}\n")
        log.write(f"2026-01-01 00:00:00.000 ERROR hardened_ddp: [DDP-D01] {GOOD}{EVIL}\n")
        log.write(f"Traceback (most recent call last):\nValueError: {GOOD}{EVIL}\n")
    return run


@pytest.mark.parametrize(
    "words",
    slow_after(4, ["watch RUN --once", "explain RUN", "report RUN --output OUT", "--MISSING 1",
     "explain RUN --json", "verify-ledger RUN", "--config MISSING", "audit --source MISSING"]),
)  # fmt: skip
def test_a_command_prints_no_control_character(words: str, hostile: Path, tmp_path: Path) -> None:
    places = {"RUN": hostile, "OUT": tmp_path / (EVIL + GOOD), "MISSING": f"no{EVIL}{GOOD}"}
    argv = ["python", "ddp_training.py"]
    for word in words.split():
        place = next((name for name in places if name in word), "")
        argv.append(word.replace(place, str(places[place])) if place else word)
    env = clean_environment({"PYTHONIOENCODING": "utf-8"})
    finished = run_program(argv, timeout_s=60, env=env)
    for text in (finished.stdout, finished.stderr):
        assert not CONTROLS.search(text), ascii(CONTROLS.sub("<BAD>", text))
    if words == "explain RUN":
        assert GOOD in finished.stdout
    if "--json" in words:
        json.loads(finished.stdout)


def test_a_run_tells_what_a_dataset_raised_without_its_controls(tmp_path: Path) -> None:
    argv = ["--dataset", "tests.plugins:points_that_write", "--cpu_only", "--num_workers", "0"]
    finished = train([*argv, "--output_dir", tmp_path])
    assert all(finished.statuses)
    assert "it can't be read" in finished.output
    log = (only_run(tmp_path) / "logs" / "rank-0.log").read_text(encoding="utf-8")
    for text in (finished.output, log):
        assert not CONTROLS.search(text), ascii(text)
        assert "\\u001b]0;owned\\u0007" in text
        assert text.count("\n") >= 2  # the lines stay

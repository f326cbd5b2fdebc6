"""The commands watch and report, on runs of one and two ranks that run, died and finished."""

import fcntl
import io
import json
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from rich.console import Console

from ddp_runs.report import page_of
from ddp_runs.report_plots import rank_plot
from ddp_runs.run_events import events_of, merged
from ddp_runs.run_files import read_run
from ddp_runs.tools import run_tool
from ddp_runs.watch import COLUMNS, drawn, run_watch, sparkline
from hardened_ddp.errors import CheckpointError, ConfigError, RunFolderError
from hardened_ddp.guard.slow import BACKWARD_AND_WAIT
from hardened_ddp.settings.cli import parse
from hardened_ddp.settings.earlier_run import find_folder
from tests.forks import give_up_privileges, run_forked
from tests.harness.processes import ROOT, clean_environment, deadline, wait_until
from tests.harness.ranks import run_command, start_training, train
from tests.marks import slow_after

ENDLESS: list[str | Path] = ["--cpu_only", "--epochs", "100000", "--eval_every", "0"]
ENDLESS += ["--batch_size", "4", "--log_interval", "5", "--run_name", "r"]


def watched(folder: Path, *words: str) -> tuple[int, str]:
    """Run the command watch without a terminal; return its status and what it prints."""
    output = io.StringIO()
    request = parse(["watch", str(folder), "--once", *words])
    return run_watch(request.options, output=output), output.getvalue()


def reported(folder: Path) -> str:
    """Return the page of the command report, without the library that draws the plots."""
    return page_of({"r": read_run(folder)}, "")


def write_status(folder: Path, **more: object) -> None:
    """Write the status of a rank that runs."""
    status = {"rank": 0, "world_size": 1, "state": "running", "step": 7}
    status |= {"now": time.time(), "phase": "forward", "phase_s": 0.1, **more}
    (folder / "status").mkdir(parents=True, exist_ok=True)
    (folder / "status" / f"rank-{status['rank']}.json").write_text(json.dumps(status) + "\n")


def rows_of(text: str) -> list[list[str]]:
    """Return the cells of each row of the printed table."""
    lines = [line for line in text.splitlines() if line.startswith("|") and "+-" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_a_run_is_shown_while_it_runs_when_it_died_and_when_it_finished(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    argv = [*ENDLESS, "--output_dir", tmp_path]

    def is_at_work() -> bool:
        run = read_run(folder)
        steps = [rank.step for rank in run.ranks]
        return len(steps) == 2 and min(steps) > 5 and bool(run.curve("loss/train")[0])

    with start_training(argv, 2) as running:
        wait_until(is_at_work, 60, "a status of each rank")
        status, text = watched(folder)
        assert status == 0
        assert text.splitlines()[0].startswith(f"{folder}: running, step ")
        assert " left" in text.splitlines()[0]
        head, *rows = rows_of(text)
        assert [row[head.index("rank")] for row in rows] == ["0", "1"]
        for row in rows:
            cells = dict(zip(head, row, strict=True))
            assert cells["device"] == "cpu"
            assert cells["doing"]
            assert int(cells["step"]) > 5
            shares = [int(cells[name].rstrip("%")) for name in ("forward", "backward")]
            assert all(0 < share < 100 for share in shares)
            assert cells["memory"].endswith(" GiB")
            assert float(cells["samples/s"]) > 0
        assert "loss  " in text
        page = reported(folder)
        assert "<td>running</td>" in page
        assert '"title": "loss"' in page
        assert '"rank 1"' in page
        for rank in (0, 1):
            running.kill(rank)
        running.wait(60)
    status, text = watched(folder)
    assert status == 1
    found = re.search(rf"{re.escape(str(folder))}: dead, step (\d+)", text)
    saved = [int(path.name[5:]) for path in folder.glob("checkpoints/step-*")]
    curve = [point.step for point in read_run(folder).points]
    assert int(found[1]) >= max([*saved, *curve])
    assert "no heartbeat since" in text
    assert f"explain {shlex.quote(str(folder))}" in text
    assert "<td>dead</td>" in reported(folder)
    train([*argv, "--max_steps", "6", "--eval_every", "1"], 2).ok()
    status, text = watched(folder)
    assert status == 0
    assert text.startswith(f"{folder}: finished, step ")
    assert "accuracy" in text
    page = reported(folder)
    assert "<td>finished</td>" in page
    assert "<td>2 x CPU</td>" in page
    assert "max_steps" in page
    assert ", the newest of step " in text


NEVER_EMPTY = {"best.json", "manifest.json", "config.yaml", "metrics.jsonl", "summary.json"}
NEVER_EMPTY |= {"attempts.jsonl", "rank-0.json", "rank-1.json", "rank-0.log", "rank-1.log"}
GARBAGE = (b"", b"\0\xff\xfe", b"[]\n", b"{}\n", b'null\n[1]\n{"step": "x", "began_at": {}}\n')
STRANGE_RANK = {"rank": 0, "state": "running", "world_size": 2, "spent_s": [], "process": "x"}
STRANGE_NUMBERS = ("1" + "0" * 400, "NaN", "-1")


def test_broken_files_are_named_and_never_raise(tmp_path: Path) -> None:
    argv: list[str | Path] = ["--cpu_only", "--max_steps", "4", "--log_interval", "2"]
    train([*argv, "--output_dir", tmp_path, "--run_name", "r"], 2).ok()
    folder = tmp_path / "r"
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    assert {path.name for path in files} >= NEVER_EMPTY
    for path in files:
        if path.suffix == ".safetensors":
            continue
        whole = path.read_bytes()
        for content in (*GARBAGE, whole[: len(whole) // 2], json.dumps(STRANGE_RANK).encode()):
            path.write_bytes(content)
            text = watched(folder)[1]
            reported(folder)
            if content in GARBAGE[:2] and path.name in NEVER_EMPTY:
                assert path.name in text.partition("problem ")[2]
        for number in STRANGE_NUMBERS if path.suffix in (".json", ".jsonl") else ():
            text = re.sub(r"(: )-?\d[\d.e+-]*", rf"\g<1>{number}", whole.decode())
            path.write_text(text)
            watched(folder)
            reported(folder)
        path.unlink()
        path.mkdir()
        assert path.name not in NEVER_EMPTY or path.name in watched(folder)[1]
        reported(folder)
        path.rmdir()
        path.write_bytes(whole)
    status = folder / "status" / "rank-1.json"
    status.write_text(json.dumps({**json.loads(status.read_text()), "now": time.time() + 4000}))
    for text in (watched(folder)[1], reported(folder)):
        assert re.search(r"rank-1.json: is \d{4} s in the future", text)
    (folder / "metrics.jsonl").write_bytes(GARBAGE[1])
    assert "metrics.jsonl: 1 line can't be read" in watched(folder)[1]
    assert "metrics.jsonl: 1 line can&#x27;t be read" in reported(folder)


def test_a_rank_that_is_silent_beside_others_is_named(tmp_path: Path) -> None:
    for rank in range(3):
        write_status(tmp_path, rank=rank, world_size=4, now=time.time() - 60 * (rank == 1))
    write_status(tmp_path, rank=9, now=1)  # of a larger start
    status, text = watched(tmp_path)
    assert status == 0
    rows = rows_of(text)[1:]
    assert [row[4] for row in rows] == ["forward", "silent, was in forward", "forward"]
    assert rows[1][5].startswith("1m0")
    assert "missing     no status yet of rank 3\n" in text


@pytest.mark.parametrize("width", [40, 60, 80, 200])
def test_a_narrow_terminal_gets_fewer_columns_and_none_is_cut(width: int, tmp_path: Path) -> None:
    gpu = {"device": "cuda:0", "device_name": "NVIDIA H100 80GB HBM3", "gpu_mib": 70000}
    write_status(tmp_path, step=123456, phase="all-reduce", rss_mib=9000, **gpu)

    def table() -> tuple[str, dict[str, str]]:
        output = io.StringIO()
        drawing = drawn(read_run(tmp_path), width=width)
        Console(file=output, width=width).print(drawing)
        assert max(map(len, output.getvalue().splitlines())) <= width
        head, row = rows_of(output.getvalue())
        return output.getvalue(), dict(zip(head, row, strict=True))

    text, cells = table()
    assert {"rank", "step", "doing", "for"} <= set(cells)
    assert len(cells) == len(COLUMNS) or width < 200
    assert ("waits" in cells) == (width >= 60)
    assert cells["doing"] == "all-reduce"
    assert text.isascii()  # no column ends with three dots
    write_status(tmp_path, step=123456, now=time.time() - 60, phase="opening the run folder")
    _, cells = table()
    assert (cells["rank"], cells["step"]) == ("0", "123456")
    assert cells["doing"].startswith("silent, was")


def make_busy_run(folder: Path, *, num_ranks: int) -> None:
    """Write a run of many ranks with a loss of four decades, checkpoints, faults and warnings."""
    for name in ("logs", "checkpoints/step-000005000"):
        (folder / name).mkdir(parents=True)
    place = {"device": "cpu", "process": {"host": "gpu-node-17"}, "world_size": num_ranks}
    place |= {"rss_mib": 9000, "samples_per_s": 1e4, "silent_after_s": 3000.0, "total_steps": 9000}
    for rank in range(num_ranks):
        write_status(folder, rank=rank, step=5400, phase="all-reduce", **place)
    points = [{"step": n, "time": 1.0, "loss/train": 2.4 * 10 ** (-n / 1200)} for n in
              range(0, 5401, 100)]  # fmt: skip
    lines = [*points, {"step": 5000, "time": 1.0, "loss/test": 0.02, "accuracy/test": 0.99}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(p) + "\n" for p in lines))
    (folder / "checkpoints/step-000005000/manifest.json").write_text('{"step": 5000}')
    for rank in range(1, num_ranks):  # a log without a line, and each is a problem
        (folder / "logs" / f"rank-{rank}.log").touch()
    (folder / "logs" / "rank-0.log").write_text(
        "".join(
            f"2026-11-22 12:00:{n:02}.000 WARNING hardened_ddp.step.retry: retrying step {n}: "
            f"rank 1 raised OSError: {'x' * 150}\n"
            for n in range(9)
        )
    )


@pytest.mark.parametrize("size", slow_after(1, [(80, 24, 300), (40, 24, 2)]))
def test_a_screen_of_any_size_has_the_current_loss_and_all_its_lines_until_the_run_ends(
    size: tuple[int, int, int], tmp_path: Path
) -> None:
    width, height, num_ranks = size
    folder = tmp_path / f"7 {'9' * (width - 4)}"  # which is broken at its space, and then within
    make_busy_run(folder / "r", num_ranks=num_ranks)
    shown = on_a_terminal(folder, width=width, height=height)
    assert len(shown) < height
    assert max(map(len, shown)) <= width
    [loss] = [line for line in shown if line.startswith("loss ")]
    assert loss.startswith("loss        7.589e-05 at step 5400")
    [faults] = [n for n, line in enumerate(shown) if line.startswith("faults      9 x retry")]
    assert len(shown) - faults == (2 if num_ranks == 2 else 4)
    rows = [line for line in shown if re.match(r" *\d+ .*all-reduce", line)]
    assert len(rows) >= 2
    assert any("more ranks" in line for line in shown) == (num_ranks == 300)
    if width >= 80:
        curve = re.search(r"  ([▁▂▃▄▅▆▇█]{8,}) from 2.4$", loss)
        assert len(set(curve[1])) == 8  # on a linear scale most of it is the lowest bar


def on_a_terminal(folder: Path, *, width: int, height: int) -> list[str]:
    """Watch the newest run on a terminal of this size until it ends; return its first screen."""
    terminal, inner = pty.openpty()
    fcntl.ioctl(inner, termios.TIOCSWINSZ, struct.pack("HHHH", height, width, 0, 0))
    words = [sys.executable, "-X", "importtime", ROOT / "ddp_training.py", "watch"]
    command = [*words, "--output_dir", folder, "--every", "0.2"]
    env = {"TERM": "xterm-256color", "LANG": "C.UTF-8", "PYTHONUTF8": "1"}
    env = clean_environment(env)
    for name in ("COLUMNS", "LINES", "NO_COLOR"):
        env.pop(name, None)
    with (
        (folder / "imports").open("w") as imports,
        subprocess.Popen(command, stdin=inner, stdout=inner, stderr=imports, env=env) as process,
    ):
        os.close(inner)
        seen = b""
        end = deadline(60)
        while time.monotonic() < end:
            # the next screen begins with moves of the cursor, up to the first line
            if b"faults" in seen.rpartition(b"\x1b[1A")[0]:
                for path in (folder / "r" / "status").iterdir():
                    path.write_text(path.read_text().replace('"running"', '"finished"'))
            try:
                seen += os.read(terminal, 65536)
            except OSError:  # it has closed the terminal
                break
    os.close(terminal)
    assert process.returncode == 0
    assert b"finished" in seen
    imported = [line.split("|")[-1].strip() for line in (folder / "imports").open()]
    assert "rich.live" in imported
    assert "torch" not in imported
    parts = seen.decode("utf-8", "replace").split("\x1b[1A")
    screen = next(part for part in parts if "faults" in part)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen).replace("\r", "")
    return [line.rstrip() for line in text.strip("\n").split("\n")]


def test_a_name_that_cannot_be_encoded_is_escaped_and_the_line_is_whole(tmp_path: Path) -> None:
    folder = tmp_path / ("gr\u00f6\u00dfe " * 25)
    write_status(folder)
    argv = [sys.executable, ROOT / "ddp_training.py", "watch", folder, "--once"]
    done = run_command(argv, timeout_s=60, env={"PYTHONIOENCODING": "ascii"})
    assert done.status == 0
    shown = f"{folder}: running, step 7".encode("ascii", "backslashreplace").decode()
    assert done.stdout.splitlines()[0].startswith(shown)


def test_of_a_gpu_the_parts_are_those_that_the_gpu_measured(tmp_path: Path) -> None:
    # The names are those that a rank on a GPU publishes.
    split = {"data": 0.1, "forward": 0.3, BACKWARD_AND_WAIT: 0.5, "optimizer": 0.1}
    times = {"split_s": split, "spent_s": {"forward": 9.0}, "steps_here": 7}
    write_status(tmp_path, device="cuda:0", gpu_mib=2048, rss_mib=1024, **times)
    head, row = rows_of(watched(tmp_path)[1])
    cells = dict(zip(head, row, strict=True))
    parts = [cells[name] for name in ("data", "forward", "backward", "optimizer")]
    assert parts == ["10%", "30%", "50%", "10%"]
    assert cells["memory"] == "1.0 GiB, GPU 2.0"
    drawn_parts = {trace["name"]: trace["y"] for trace in rank_plot(read_run(tmp_path))["data"]}
    assert drawn_parts == {"data": [100], "forward": [300], "backward": [500], "optimizer": [100]}


def test_what_ranks_log_becomes_events_with_their_kind_and_step() -> None:
    line = "2026-11-22 12:00:0{}.000 {} {}: {}"
    retry = "retrying step 18: rank 1 raised OSError"
    said = [
        line.format(1, "WARNING", "hardened_ddp.step.retry", retry),
        "a traceback",
        line.format(2, "INFO", "hardened_ddp.training.run_report", "epoch 1/5 step 50"),
        line.format(3, "WARNING", "hardened_ddp", "SIGTERM: stopping at step 20, saving first"),
        line.format(4, "ERROR", "hardened_ddp", "[DDP-R01] lost"),
        line.format(4, "ERROR", "hardened_ddp", "why: python ddp_training.py explain runs/first"),
        line.format(5, "WARNING", "hardened_ddp.guard.hang", "rank 2 is slow: 41.3 ms of work"),
        line.format(6, "WARNING", "hardened_ddp.streams.views", "shard 3 ends early: OSError"),
        line.format(7, "WARNING", "hardened_ddp.data.batches.fetch", "sample 5 was skipped"),
    ]
    found = merged(event for rank in (0, 1) for event in events_of("\n".join(said), rank=rank))
    kinds = [(event.kind, event.step) for event in found]
    assert kinds[:4] == [("retry", 18), ("stop", 20), ("error", None), ("slow", None)]
    assert kinds[4:] == [("data", None)] * 2
    assert {event.ranks for event in found} == {(0, 1)}
    assert found[0].text == retry


def test_a_curve_in_one_line_shows_its_ends_and_its_middle() -> None:
    assert sparkline([4, 3, 2, 1], "1234") == "4321"
    assert sparkline([5] * 100, "12", width=10) == "1" * 10
    assert sparkline([4, float("nan"), 2, float("inf"), 1], "1234") == "4?2?1"
    assert sparkline([float("nan")], "1234") == "?"
    assert len(sparkline(list(range(1000)), "12345678", width=60)) == 60
    assert sparkline([1000, 100, 10, 1], "1234") == "4321"  # more than a decade
    assert sparkline([1000, 100, 10, 0], "1234") == "4111"  # no logarithm


def test_a_wrong_run_or_interval_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="there is no run in"):
        run_watch(parse(["watch", "--output_dir", str(tmp_path)]).options, output=io.StringIO())
    (tmp_path / "a file").touch()
    for place in (tmp_path, tmp_path / "a file"):
        with pytest.raises(RunFolderError, match="is a folder with checkpoints, status or logs"):
            watched(place)
    (tmp_path / "logs").mkdir()
    with pytest.raises(ConfigError, match="needs seconds, from"):
        watched(tmp_path, "--every", "0")
    with pytest.raises(RunFolderError, match="there is no run xxx"):
        watched(Path("x" * 300))  # no file system has such a name
    (tmp_path / "output" / "first" / "logs").mkdir(parents=True)
    with pytest.raises(RunFolderError, match="there is no run frist") as caught:
        find_folder("frist", tmp_path / "output")
    assert caught.value.fix == f"choose a run of {tmp_path / 'output'}: first"

    def look_without_rights() -> None:
        give_up_privileges()
        for words in ([str(tmp_path)], ["--output_dir", str(tmp_path)]):
            with pytest.raises(RunFolderError, match="can't be read: Permission denied"):
                run_watch(parse(["watch", *words]).options, output=io.StringIO())

    tmp_path.chmod(0)
    status = run_forked(look_without_rights)
    tmp_path.chmod(0o700)
    assert status == 0
    assert "unknown" in watched(tmp_path)[1]


def test_a_run_is_found_by_its_name_beside_a_folder_that_is_none_and_its_ledger_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("first", "runs/first/checkpoints"):
        (tmp_path / folder).mkdir(parents=True)
    with pytest.raises(CheckpointError, match="runs/first has no valid checkpoint"):
        run_tool(parse(["verify-ledger", "first"]))
    with pytest.raises(RunFolderError, match="there is no run x: neither"):
        run_tool(parse(["verify-ledger", "x"]))

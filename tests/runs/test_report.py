"""The page of the command report, in a browser, and what stands in it."""

import io
import json
import math
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddp_runs.report import page_of, run_report, sentences_of
from ddp_runs.report_plots import MOST_POINTS, thinned
from ddp_runs.run_files import read_run
from ddp_runs.tools import run_tool
from hardened_ddp.errors import MissingPackageError, RunFolderError
from hardened_ddp.settings.cli import parse
from tests.harness.processes import ROOT
from tests.settings.given import settings_of

PARTS = {"start_up": 2.0, "data_wait": 1.0, "training": 10.0, "evaluation": 1.0, "checkpoint": 1.0}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
BEGAN = 1_795_000_000.0


def make_run(folder: Path, *, batch_size: int = 8) -> Path:
    """Write a run folder with two attempts, on 2 ranks and then 1, and everything that happens."""
    from hardened_ddp.settings.record import dump

    for name in ("logs", "status", "checkpoints/step-000000080"):
        (folder / name).mkdir(parents=True)
    (folder / "checkpoints" / "step-000000080" / "manifest.json").write_text('{"step": 80}')
    settings = settings_of(f"--batch_size {batch_size} --run_name r")
    (folder / "config.yaml").write_text(dump(settings.config, settings.sources))
    lines = []
    for step in range(10, 201, 10):
        values = {"loss/train": 1 / step, "speed/samples_per_s": 900, "memory/rss_mib": 300 + step}
        values |= {f"step_time/{name}_s": 0.01 for name in ("data", "forward", "all-reduce")}
        lines.append({"step": step, "time": BEGAN + step, **values})
    lines.append({"step": 200, "time": BEGAN + 200, "loss/test": 0.01, "accuracy/test": 0.9})
    lines.append({"step": 190, "time": BEGAN + 190, "loss/train": None, "optimizer/norm": math.nan})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    first = {"began_at": BEGAN, "now": BEGAN + 15, "first_step": 0, "step": 100, **PARTS}
    second = {"began_at": BEGAN + 30, "now": BEGAN + 60, "first_step": 80, "step": 200, **PARTS}
    attempts = [{**first, "world_size": 2}, {**second, "world_size": 1, "ended": "finished"}]
    (folder / "attempts.jsonl").write_text("".join(json.dumps(a) + "\n" for a in attempts))
    for rank in range(2):
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(BEGAN + 9))
        said = f"{clock}.000 WARNING hardened_ddp.step.retry: retrying step 18: </script> & OSError"
        said += f"\n{clock}.500 WARNING hardened_ddp.guard.slow: rank 1 is slow"
        (folder / "logs" / f"rank-{rank}.log").write_text(said + "\n")
        status = {"rank": rank, "state": "finished", "world_size": 2, "now": BEGAN + 60}
        status |= {"step": 200, "spent_s": {"forward": 1.2, "all-reduce": 0.6}}
        status |= {"steps_here": 120, "rss_mib": 300}
        status |= {"versions": {"torch": "2.13.0"}, "process": {"host": "node7"}}
        (folder / "status" / f"rank-{rank}.json").write_text(json.dumps(status))
    (folder / "skipped_samples.jsonl").write_text('{"step": 3, "sample": 77, "error": "<b>"}\n')
    return folder


def figures_of(page: str) -> dict[str, dict[str, Any]]:  # Any: JSON
    figures = json.loads(page.partition('id="figures">')[2].partition("</script>")[0])
    return {figure["title"]: figure for figure in figures}


def drawn_in_a_browser(page: Path) -> tuple[str, str]:
    """Load a page in headless Chromium; return the document and what the console says."""
    browser = next((name for name in BROWSERS if shutil.which(name)), "")
    if not browser:
        pytest.skip("there is no Chromium on this machine")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    flags += ["--enable-logging=stderr", "--virtual-time-budget=30000", "--window-size=1250,2400"]
    flags += ["--host-resolver-rules=MAP * ~NOTFOUND"]
    # WHY not tmp_path: it makes a socket in its folders, whose path must be short
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        ended = subprocess.run(
            [browser, *flags, f"--user-data-dir={folder}", "--dump-dom", page.as_uri()],
            capture_output=True, text=True, timeout=300, check=True,
            env={**os.environ, "TMPDIR": folder},
        )  # fmt: skip
    said = [line for line in ended.stderr.splitlines() if "CONSOLE" in line]
    return ended.stdout, "\n".join(said)


@pytest.mark.slow
def test_every_plot_is_drawn_without_a_network_and_without_an_error(tmp_path: Path) -> None:
    names = [str(make_run(tmp_path / "first")), str(make_run(tmp_path / "second", batch_size=16))]
    output = io.StringIO()
    page = tmp_path / "report.html"
    options = parse(["report", *names, "--output", str(page)]).options
    assert run_report(options, output=output) == 0
    assert "report.html: 2.0 MB; open it in a browser" in output.getvalue()
    assert page.stat().st_size < 5_000_000
    document, said = drawn_in_a_browser(page)
    assert not said
    places = re.findall(r'class="plot[^"]*" id="(plot-\d+)"', page.read_text())
    assert len(places) >= 10
    assert f'data-drawn="{len(places)}"' in document
    figures = re.split(r'id="plot-\d+"', document)[1:]
    assert len(figures) == len(places)
    assert all("main-svg" in figure and "gtitle" in figure for figure in figures)
    assert "can't be drawn" not in document.partition("<script")[0]


def test_the_page_has_faults_goodput_settings_and_machines(tmp_path: Path) -> None:
    runs = {name: read_run(make_run(tmp_path / name, batch_size=size))
            for name, size in (("first", 8), ("second", 16))}  # fmt: skip
    page = page_of(runs, "library")
    assert "<td>2, 1 x </td>" in page  # the resize
    assert "1 x retry, 1 x slow" in page
    assert "retrying step 18: &lt;/script&gt; &amp; OSError" in page
    assert "<td>0, 1</td>" in page  # both ranks said so: one event
    assert "<td>node7</td>" in page
    assert "<td>2.13.0</td>" in page
    assert "<td>77</td><td>&lt;b&gt;</td>" in page
    assert '<tr class="other"><td>batch_size</td><td>8   (command line)</td>' in page
    assert "<tr><td>run_name</td><td>r   (command line)</td>" in page
    assert page.count("</script>") == 3
    by_title = figures_of(page)
    assert "where the time went, in seconds; goodput: first 40.0%, second 40.0%" in by_title
    attempts = by_title["attempts, and what happened (times in UTC)"]
    assert attempts["data"][0]["text"][1] == "2: steps 80 to 200, 1 rank, finished"
    marks = {trace["name"]: trace for trace in attempts["data"][1:]}
    assert marks.keys() == {"checkpoint", "retry", "slow"}
    [retried] = marks["retry"]["x"]
    assert retried.startswith(time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(BEGAN + 9)))
    ranks = {trace["name"]: trace for trace in by_title["step time by rank, newest start"]["data"]}
    assert ranks["forward"]["y"] == [10.0, 10.0]


def test_the_first_words_say_how_the_run_went(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "first"))
    head, went, survived, unusual = sentences_of(run)
    assert head == "Finished at step 200 after 45s"
    assert went == "The loss fell from 0.1 to 0.005"
    # 20 of the 100 steps of the first attempt were done again, 15 s passed between the two,
    # and the second one needed 2 s to start
    assert survived == "It came through 1 restart, 1 retried step, 1 sample left out; " \
        "time lost by them: 19s (42.2%)"  # fmt: skip
    assert unusual.startswith("Unusual: goodput is 40%: being down between attempts took 33%")
    assert "1 warning of a slow rank" in unusual
    page = page_of({"first": run}, "")
    assert page.index('<p class="verdict finished"><b>Finished at step 200') < page.index("<table")
    ranks = tuple(replace(rank, state="running", now=1.0) for rank in run.ranks)
    dead = replace(run, ranks=ranks, best={"step": 80, "metric": "accuracy/test", "value": 0.9})
    assert sentences_of(dead)[0].startswith("Ended without a word at step 200")
    assert "best accuracy 0.9 at step 80" in sentences_of(dead)[1]
    assert sentences_of(replace(run, ranks=(), attempts=(), points=(), events=(), left_out=(),
                                problems=(), summary={}, checkpoints=())) == [
        "Not known how it ended, at step 0"]  # fmt: skip


def test_a_loss_that_falls_by_decades_is_on_a_log_scale(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "first")
    loss = figures_of(page_of({"first": read_run(folder)}, ""))["loss"]["layout"]
    assert loss["yaxis"]["type"] == "log"

    def layout_of(values: list[float], name: str, title: str) -> dict[str, Any]:  # Any: JSON
        lines = [{"step": n, "time": 1.0, name: value} for n, value in enumerate(values)]
        (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
        figure = figures_of(page_of({"first": read_run(folder)}, ""))[title]
        return dict(figure["layout"])

    assert layout_of([2.0, 1.9, 1.8], "loss/train", "loss")["yaxis"]["type"] == "linear"
    # a loss below zero, as of a variational bound, has no logarithm
    assert "type" not in layout_of([9.0, 0.1, -3.0], "loss/train", "loss")["yaxis"]
    # a rate that ends near zero would have the scale of one point
    cosine = [0.001 * (1 + math.cos(math.pi * n / 101)) for n in range(101)]
    layout = layout_of(cosine, "optimizer/learning_rate", "learning rate")
    assert layout["yaxis"].get("type", "linear") == "linear"


def test_faults_are_marked_in_the_curves_with_their_text(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "first")
    said = "2026-11-22 12:00:00.000 WARNING hardened_ddp.training.rollback: rolled back to step 150"
    with (folder / "logs" / "rank-0.log").open("a") as file:
        file.write(said + "\n")
    (folder / "failures.jsonl").write_text('{"step": 80, "error": "lost rank 1 <b>"}\n')
    loss = figures_of(page_of({"first": read_run(folder)}, ""))["loss"]
    marks = {t["name"]: (t["x"], t["y"], t["text"]) for t in loss["data"] if t["mode"] == "markers"}
    assert marks["failure"][:2] == ([80], [1 / 80])
    # the restart is at the step of the failure: one mark, with both texts
    assert marks["failure"][2] == [
        "failure, step 80: lost rank 1 &lt;b><br>restart, step 80: attempt 2 begins here, on 1 rank"
    ]
    assert "restart" not in marks
    assert marks["rollback"][0] == [150]
    assert marks["retry"][0] == [18]
    assert marks["retry"][1] == [1 / 10]  # the newest value before it
    assert marks["left out"][2] == ["left out, step 3: sample 77, error &lt;b>"]
    both = page_of({"a": read_run(folder), "b": read_run(folder)}, "")
    assert {"a failure", "b failure"} <= {t["name"] for t in figures_of(both)["loss"]["data"]}


def test_a_long_curve_keeps_its_extremes(tmp_path: Path) -> None:
    values = [float(n % 7) for n in range(100_000)]
    values[54_321], values[77_777] = 99.0, -99.0
    steps, kept = thinned(range(100_000), values)
    assert len(steps) <= MOST_POINTS
    assert (steps[0], steps[-1]) == (0, 99_999)
    assert kept[steps.index(54_321)] == 99
    assert kept[steps.index(77_777)] == -99
    assert thinned([1, 2], [3, 4]) == ([1, 2], [3, 4])


def test_where_the_disk_is_full_the_report_of_before_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # WHY: the limit would cut the .pyc of what is imported first, for all later tests
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    folder = make_run(tmp_path / "first")
    (folder / "report.html").write_text("before")
    options = parse(["report", "first", "--output_dir", str(tmp_path)]).options
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    names = sorted(folder.iterdir())
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
        with pytest.raises(RunFolderError, match="the report can't be written to"):
            run_report(options, output=io.StringIO())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (folder / "report.html").read_text() == "before"
    assert sorted(folder.iterdir()) == names


def test_a_report_may_go_through_a_pipe(tmp_path: Path) -> None:
    make_run(tmp_path / "first")
    words = ["report", "first", "--output_dir", str(tmp_path), "--output", "/dev/stdout"]
    command = [sys.executable, ROOT / "ddp_training.py", *words]
    done = subprocess.run(command, capture_output=True, timeout=120, text=True, check=True)
    assert done.stdout.startswith("<!DOCTYPE html>")
    assert "</html>" in done.stdout


def test_a_report_needs_plotly_only_and_without_it_tells_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extras = (ROOT / "requirements-extras.txt").read_text(encoding="utf-8")
    for name in re.findall(r"^(\w+)==", extras, re.MULTILINE):
        for module in [name, *(m for m in sys.modules if m.startswith(f"{name}."))]:
            monkeypatch.setitem(sys.modules, module, None)
    make_run(tmp_path / "first")
    request = parse(["report", "first", "--output_dir", str(tmp_path)])
    assert run_tool(request) == 0
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(MissingPackageError, match="needs plotly") as caught:
        run_tool(request)
    assert re.search(r" -m pip install plotly==[\d.]+$", caught.value.fix)


def test_the_page_of_a_run_that_failed_often_is_readable(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "often")
    saved = (folder / "config.yaml").read_text()
    (folder / "config.yaml").write_text(re.sub("# default$", "# run", saved, flags=re.MULTILINE))
    base = {"step": 5, "first_step": 0, **PARTS}
    times = [{"began_at": BEGAN + 2000 * n, "now": BEGAN + 2000 * n + 9} for n in range(9)]
    attempts = [{**base, **e, "world_size": n % 2 + 3, "restart": n} for n, e in enumerate(times)]
    (folder / "attempts.jsonl").write_text("".join(json.dumps(a) + "\n" for a in attempts))
    (folder / "failures.jsonl").write_text('{"step": 5, "is_peer": true, "error": "lost rank 1"}\n')
    page = page_of({"often": read_run(folder)}, "library")
    assert "<td>3, 4, 3, 4, 3, 4 and 3 more x </td>" in page
    assert "<tr><td>5</td><td>lost rank 1</td></tr>" in page
    assert re.search(r"<td>wall time</td><td>4h\d\dm</td>", page)
    settings = page.partition("<h2>Settings")[2].partition("<details>")[0]
    assert "<td>batch_size</td><td>8   (command line)</td>" in settings
    assert "(run)" not in settings  # those at their default are folded, also after a resume
    [said] = [f["data"][0]["text"] for n, f in figures_of(page).items() if n.startswith("attempts")]
    assert said[0] == "1: steps 0 to 5, 3 ranks, failed or killed"
    assert said[-1] == "9: steps 0 to 5, 3 ranks, finished"

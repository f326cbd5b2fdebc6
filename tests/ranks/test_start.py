"""The start of a run: what it says before the first step."""

import logging
import re
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from hardened_ddp.ranks.phase import Phase, Tracker
from hardened_ddp.reporting.log import start_logging, stop_logging, watch_start
from hardened_ddp.training.run_report import changed_settings, not_used_line
from tests.harness.processes import ROOT, limit_of, wait_until
from tests.harness.ranks import run_command, train
from tests.settings.given import settings_of


def test_a_start_says_what_runs_and_debug_what_each_rank_does(tmp_path: Path) -> None:
    argv = ["--cpu_only", "--max_steps", "3", "--epochs", "1", "--log_interval", "2", "--debug"]
    finished = train([*argv, "--output_dir", tmp_path, "--run_name", "r"], 2).ok()
    [main, other] = finished.outputs
    lines = [line.partition("] ")[2] for line in main.splitlines()]
    at = next(n for n, line in enumerate(lines) if line.startswith("2 ranks, started by torchrun:"))
    assert "CPU, backend gloo" in lines[at]
    assert "model simple_cnn: 53,002 parameters; dataset digits: 1,437 samples" in lines[at + 1]
    assert lines[at + 1].endswith("64 per step = 2 x 32; 3 steps")
    assert "task classification" in lines[at + 2]
    assert lines[at + 3].startswith("settings: command line: cpu_only true, epochs 1, max_steps 3")
    assert at + 3 < next(n for n, line in enumerate(lines) if line.startswith("epoch 1/1 step 2/3"))
    assert any(line.startswith("step 3 done: test loss") for line in lines)
    assert "2 ranks, started by" not in other
    for rank, output in enumerate(finished.outputs):
        written = (tmp_path / "r" / "logs" / f"rank-{rank}.log").read_text(encoding="utf-8")
        for text in (output, written):
            assert "start: building the model: " in text
            assert f"local rank {rank} of 2, device cpu" in text


@pytest.mark.parametrize(
    "words", [["ddp_training.py", "--cpu_only"], ["launchers/run_with_python.py", "--nproc", "2"]]
)
def test_without_the_environment_the_next_command_is_told(words: list[str], tmp_path: Path) -> None:
    text = "raise ModuleNotFoundError('No module named torch', name='torch')\n"
    (tmp_path / "torch.py").write_text(text)
    script = ROOT / words[0]
    env = {"PYTHONPATH": str(tmp_path)}
    done = run_command([sys.executable, script, *words[1:]], timeout_s=60, cwd=tmp_path, env=env)
    assert done.status == 2
    assert f"{sys.executable} has no package torch" in done.stderr
    assert re.search(rf"source '?{re.escape(str(ROOT))}/\.venv/bin/activate", done.stderr)
    assert "Traceback" not in done.output


def test_garbage_is_looked_for_in_what_a_run_makes_and_not_in_what_was_imported() -> None:
    """In a process of its own: the objects of this one must stay as they are."""
    code = """if True:
        import gc, weakref
        from hardened_ddp.ranks.resources import collect_as_usual, collect_rarely, keep_imported
        usual = gc.get_threshold()
        class Node: pass
        collect_rarely()
        before = gc.get_stats()[0]["collections"]
        imported = [[] for _ in range(40_000)]
        assert gc.get_stats()[0]["collections"] == before
        keep_imported()
        assert gc.get_freeze_count() > len(imported)
        node = Node()
        node.itself, seen = node, weakref.ref(node)
        collect_as_usual()
        assert gc.get_threshold() == usual
        del node
        made = [[] for _ in range(1_000)]
        assert seen() is None
    """
    run_command(["python", "-c", code], timeout_s=30).ok()


def test_settings_name_who_changed_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.yaml").write_text("epochs: 3\nseed: 0\n\nbatch_size: 8\n")
    found = settings_of("--config my.yaml --cpu_only --amp auto")
    sources = {**found.sources, "epochs": "run"}
    assert changed_settings(replace(found, sources=sources)) == [
        "command line: cpu_only true",
        "my.yaml: batch_size 8",
        "the continued run: epochs 3",
    ]
    assert changed_settings(settings_of("")) == []
    edited = replace(found, not_used={"seed": "config.yaml:2"})
    assert not_used_line(edited).startswith("not used: seed (config.yaml:2): the continued run")
    assert not_used_line(edited).endswith("give it as a flag: --seed VALUE")
    many = settings_of(
        "--seed 1 --epochs 2 --batch_size 3 --momentum 0.1 --learning_rate 1 --weight_decay 1 "
        "--max_steps 9 --warmup_steps 3 --keep_last 1 --log_interval 2 --eval_every 2 --ledger "
        "--drop_last --augment"
    )
    [line] = changed_settings(many)
    assert line.endswith(" and 2 more")


def test_a_long_part_of_the_start_gives_a_sign_of_life(caplog: pytest.LogCaptureFixture) -> None:
    tracker = Tracker()
    caplog.set_level(logging.INFO, logger="hardened_ddp")
    start_logging(rank=0, world_size=1)
    is_over = watch_start(tracker, first_sign_s=0.02)
    [thread] = [each for each in threading.enumerate() if each.name == "start-up"]
    try:
        for begin, name, part in (
            (tracker.begin, "opening the dataset", "opening the dataset: "),
            (tracker.enter, Phase.FORWARD, "the first step, forward: "),
            (tracker.enter, Phase.ALL_REDUCE, "the first step, forward, waiting for other ranks: "),
        ):
            begin(name)
            wait_until(lambda part=part: part in caplog.text, 10, part)
        tracker.end_step(1)
        thread.join(limit_of(10))
        assert not thread.is_alive(), "it ends with the first step"
    finally:
        is_over.set()
        stop_logging()

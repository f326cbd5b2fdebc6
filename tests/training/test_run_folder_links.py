"""A run writes into its folder alone: a link in it is refused at the start, and never followed."""

import os
from pathlib import Path

import pytest
import torch

from hardened_ddp.errors import RunFolderError
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.launch import Launch
from hardened_ddp.ranks.tracker import Tracker
from hardened_ddp.reporting.goodput import Goodput
from hardened_ddp.reporting.rank_status import RankStatus
from hardened_ddp.reporting.sinks import FileSink, write_text
from hardened_ddp.settings.earlier_run import refuse_links
from tests.harness.marks import slow_after
from tests.harness.ranks import start_training, train
from tests.harness.run_folder import only_run

ARGV: list[str | Path] = ["--cpu_only", "--max_steps", "2", "--eval_every", "0", "--ledger"]
ARGV += ["--num_workers", "0"]
FILES = ["attempts.jsonl", "metrics.jsonl", "logs/rank-0.log", "status/rank-0.json"]
FILES += ["config.yaml", "summary.json", "failures.jsonl", "skipped_samples.jsonl", "run.lock"]
FILES += ["profile-rank-0.json", "ledger/0002-rank-0.bin", "hangs/verdict.txt"]
FOLDERS = ["logs", "status", "ledger", "tensorboard", "hangs", "checkpoints"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("links")
    train([*ARGV, "--output_dir", output]).ok()
    return only_run(output)


def plant(run: Path, name: str, target: Path) -> Path:
    """Put a link to target in the place of a file or folder of the run."""
    link = run / name
    link.parent.mkdir(exist_ok=True)
    if os.path.lexists(link):
        link.rename(run.parent / f".kept-{link.name}")
    link.symlink_to(target)
    return link


def take_away(link: Path, run: Path) -> None:
    link.unlink()
    kept = run.parent / f".kept-{link.name}"
    if kept.exists():
        kept.rename(link)


@pytest.mark.parametrize("name", [*FILES, *FOLDERS])
def test_a_link_in_a_run_folder_is_named(name: str, trained: Path, tmp_path: Path) -> None:
    link = plant(trained, name, tmp_path / "victim")
    with pytest.raises(RunFolderError, match=r"is a symbolic link to .*victim") as caught:
        refuse_links(trained)
    assert str(link) in str(caught.value)
    take_away(link, trained)
    refuse_links(trained)


@pytest.mark.parametrize("name", slow_after(2, ["metrics.jsonl", "status", "logs/rank-0.log"]))
@pytest.mark.parametrize("is_named", slow_after(1, [False, True]))
def test_a_run_with_a_link_in_its_folder_does_not_start(
    name: str, is_named: bool, trained: Path, tmp_path: Path
) -> None:
    victim = tmp_path / "victim"
    if name == "status":
        victim.mkdir()
    else:
        victim.write_text("years of work")
    folder = trained
    if is_named:  # there is no run in it yet
        folder = tmp_path / "prepared"
        folder.mkdir()
    link = plant(folder, name, victim)
    given = ["--output_dir", tmp_path, "--run_name", "prepared"] if is_named else []
    finished = train([*ARGV, *(given or ["--resume", trained]), "--max_steps", "3"], 2)
    take_away(link, folder)
    assert all(finished.statuses)
    assert finished.output.count(f"{link} is a symbolic link to {victim}") == 1
    assert "Traceback" not in finished.output
    assert "DDP-K03" in finished.outputs[0]
    assert not list(victim.iterdir()) if victim.is_dir() else victim.read_text() == "years of work"


def test_a_link_is_named_before_the_ranks_have_met(trained: Path, tmp_path: Path) -> None:
    link = plant(trained, "metrics.jsonl", tmp_path / "victim")
    with start_training([*ARGV, "--resume", trained], 2, missing=1) as running:
        finished = running.wait(40)
    take_away(link, trained)
    assert f"{link} is a symbolic link" in finished.output


def test_a_link_above_the_run_folder_and_those_of_other_programs_are_fine(tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "runs").symlink_to(tmp_path / "scratch")
    argv = [*ARGV, "--output_dir", tmp_path / "home" / "runs", "--run_name", "run"]
    train(argv).ok()
    run = tmp_path / "scratch" / "run"
    (run / "wandb").mkdir()
    (run / "wandb" / "latest-run").symlink_to("run-1")
    train([*argv, "--max_steps", "3"]).ok()


def test_a_link_that_is_put_there_during_the_run_is_not_followed(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("years of work")
    for name in ("a", "attempts.jsonl", "status/rank-0.json"):
        plant(tmp_path, name, victim)
    sink = FileSink(tmp_path / "a", keep_bytes=100)
    sink.add(b"mine")
    assert not sink.flush()
    for mode in ("w", "a"):
        with pytest.raises(OSError, match="symbolic link"):
            write_text(tmp_path / "a", "mine", mode=mode)
    Goodput(tmp_path, Tracker(), Launch(), step=0).leave()
    with RankStatus(tmp_path, Group(Launch(), torch.device("cpu"))):
        pass
    assert victim.read_text() == "years of work"

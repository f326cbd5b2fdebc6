"""The command drill on real programs: what it finds, what it leaves alone, and how it ends."""

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.doctor_drill.programs import LOOP, NO_RANKS, SILENT
from tests.harness.processes import ROOT
from tests.harness.ranks import Finished, run_command


def run_drill(source: str, folder: Path, *options: str, program: Sequence[str] = ()) -> Finished:
    """Drill a program of two ranks, or another command; its facts are JSON."""
    (folder / "train.py").write_text(source)
    command = [*(program or ["python", "train.py"])]
    argv = ["python", ROOT / "ddp_training.py", "drill", "--json", *options, "--", *command]
    return run_command(argv, timeout_s=240, cwd=folder)


@pytest.mark.slow
def test_what_faults_cost_a_program_that_saves_after_every_fifth_step(tmp_path: Path) -> None:
    done = run_drill(LOOP, tmp_path, "--faults=kill-rank,exception,nan,full-disk,cut-checkpoint")
    assert done.status == 1, done.output
    report = json.loads(done.stdout)
    assert (report["steps"], report["ranks"], report["saves_after"]) == (18, 2, [5, 10, 15])
    assert report["same_weights_twice"]
    assert report["same_samples_twice"]
    rows = {row["fault"]: row for row in report["faults"]}
    lost = report["fault_step"] - 1 - 10  # the newest checkpoint is that of step 10
    for name in ("kill-rank", "exception"):
        assert rows[name]["lost"] == [f"{lost} steps of work"], rows[name]
        assert rows[name]["next_start"] == "step 11"
        assert rows[name]["weights"] == "equal"
        assert rows[name]["samples"] == {"twice": 0, "never": 0}
        assert (rows[name]["orphans"], rows[name]["checkpoints"]["broken"]) == (0, 0)
    assert rows["exception"]["log_names"] == ["cause"]
    assert rows["kill-rank"]["log_names"] == [], "no line of the program tells of it"
    assert rows["nan"]["weights"] == "not finite"
    assert rows["full-disk"]["checkpoints"]["broken"] == 1
    assert "the next start: status 1" in rows["cut-checkpoint"]["lost"]
    assert rows["cut-checkpoint"]["weights"] is None
    assert os.listdir(tmp_path) == ["train.py"], "the user's folder is as it was"


@pytest.mark.slow
def test_a_hang_is_ended_at_its_limit_and_a_program_that_saves_nothing_starts_again(
    tmp_path: Path,
) -> None:
    source = LOOP.replace("if step % 5 == 0 and", "if False and")
    done = run_drill(source, tmp_path, "--faults=hang", "--hang_after=5", "--step=7", "--copy")
    assert done.status == 1, done.output
    [row] = json.loads(done.stdout)["faults"]
    assert row["ended_by_drill"] == "hung"
    assert (row["next_start"], row["steps_lost"], row["weights"]) == ("step 1", 6, "equal")
    assert row["orphans"] is None
    assert os.listdir(tmp_path) == ["train.py"]


@pytest.mark.slow
def test_a_write_outside_of_the_folder_is_refused_and_told_and_can_be_allowed(
    tmp_path: Path,
) -> None:
    (own := tmp_path / "own").mkdir()
    (outside := tmp_path / "outside").mkdir()
    source = LOOP.replace('os.path.abspath("last.pt")', f'"{outside}/last.pt"')
    done = run_drill(source, own, "--faults=exception")
    assert done.status == 2, done.output
    told = json.loads(done.stdout)
    assert f"{outside}/last.pt" in told["error"]
    assert told["next"] == f"add --also {outside}"
    done = run_drill(source, own, "--faults=exception", f"--also={outside}")
    assert done.status == 1, done.output
    [row] = json.loads(done.stdout)["faults"]
    assert (row["next_start"], row["weights"]) == ("step 11", "equal")
    assert os.listdir(outside) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "told"),
    [(SILENT, "hung"), (NO_RANKS, "no DDP program"), ("raise ValueError(7)", "ValueError: 7")],
)
def test_what_can_not_be_observed_ends_with_2_and_one_reason(
    source: str, told: str, tmp_path: Path
) -> None:
    done = run_drill(source, tmp_path, "--hang_after=3")
    assert done.status == 2, done.output
    assert told in json.loads(done.stdout)["error"]

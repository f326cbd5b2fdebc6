"""The command drill on real programs: what it finds, what it leaves alone, and how it ends.

Those of programs.txt: two ranks are forked from one process, so each start imports torch once. loop
has 18 steps, saved after every fifth with all that a resumed run needs; stream is a dataset that
can only be gone through, and divides itself among the ranks; with accelerate, 6 steps, saves none.
"""

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.harness.processes import ROOT
from tests.harness.ranks import Finished, run_command
from tests.marks import sections

PROGRAMS = sections(Path(__file__).with_name("programs.txt"))
LOOP = PROGRAMS["loop"]
STREAMED = LOOP.replace("def train(", f"{PROGRAMS['stream']}def train(").replace(
    "DataLoader(data, 8, sampler=sampler)", "DataLoader(Stream(data, rank), 8)"
)
TORCHRUN = "KeyError: 'lr'\napi.py:1] failed (exitcode: 1) rank 0\n" + "more\n" * 20
"""What torchrun says after an error is longer than what is shown."""


def run_drill(source: str, folder: Path, *options: str, program: Sequence[str] = ()) -> Finished:
    """Drill a program of two ranks, or another command; its facts are JSON."""
    (folder / "train.py").write_text(source)
    command = [*(program or ["python", "train.py"])]
    argv = ["python", "-m", "ddp_doctor", "drill", "--json", *options, "--", *command]
    done = run_command(argv, timeout_s=240, cwd=folder, env={"PYTHONPATH": str(ROOT)})
    if logs := json.loads(done.stdout).get("logs"):
        assert (Path(logs) / "undisturbed/log0").exists()
        assert not any(path.is_dir() for path in Path(logs).glob("*/*")), "logs, and no more"
        shutil.rmtree(logs)
    return done


@pytest.mark.slow
def test_what_faults_cost_a_program_that_saves_every_fifth_step(tmp_path: Path) -> None:
    (own := tmp_path / "own").mkdir()
    (outside := tmp_path / "outside").mkdir()
    source = LOOP.replace('os.path.abspath("last.pt")', f'"{outside}/last.pt"')
    faults = "--faults=kill-rank,full-disk,cut-checkpoint"
    done = run_drill(source, own, faults, f"--also={outside}")
    assert done.status == 1, done.output
    report = json.loads(done.stdout)
    assert (report["steps"], report["ranks"], report["saves_after"]) == (18, 2, [5, 10, 15])
    assert report["same_weights_twice"]
    assert report["same_samples_twice"]
    rows = {row["fault"]: row for row in report["faults"]}
    lost = report["fault_step"] - 1 - 10  # the newest checkpoint is that of step 10
    killed = rows["kill-rank"]
    # WHY one less, too: torchrun may end the other rank before that has made its step
    assert killed["lost"] in ([f"{n} steps of work"] for n in (lost, lost - 1)), killed
    assert (killed["next_start"], killed["weights"]) == ("step 11", "equal")
    assert (killed["samples_twice"], killed["samples_never"]) == (0, 0)
    assert (killed["orphans"], killed["files_broken"]) == (0, 0)
    assert killed["log_names"] == "nothing", "no line of the program tells of it"
    assert rows["full-disk"]["files_broken"] == 1
    assert "the next start: status 1" in rows["cut-checkpoint"]["lost"]
    assert rows["cut-checkpoint"]["weights"] is None
    assert os.listdir(own) == ["train.py"], "the user's folder is as it was"
    assert os.listdir(outside) == []


@pytest.mark.slow
def test_a_hang_ends_at_its_limit_and_a_streams_samples_are_counted_in_a_copy(
    tmp_path: Path,
) -> None:
    done = run_drill(STREAMED, tmp_path, "--faults=hang", "--hang_after=20", "--step=13", "--copy")
    assert done.status == 1, done.output
    report = json.loads(done.stdout)
    assert report["same_samples_twice"]
    [row] = report["faults"]
    assert row["ended"] == "hung"
    assert (row["next_start"], row["steps_lost"], row["weights"]) == ("step 11", 2, "equal")
    assert (row["samples_twice"], row["samples_never"]) == (0, 0)
    assert row["orphans"] is None
    assert os.listdir(tmp_path) == ["train.py"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "told", "patience_s"),
    [
        (PROGRAMS["silent"], "hung", 3),
        (PROGRAMS["no ranks"], "no DDP program", 60),
        (f"print({TORCHRUN!r}, flush=True); input()", "KeyError: 'lr'", 60),
    ],
)
def test_what_can_not_be_observed_ends_with_2_and_one_reason(
    source: str, told: str, patience_s: int, tmp_path: Path
) -> None:
    done = run_drill(source, tmp_path, f"--hang_after={patience_s}")
    assert done.status == 2, done.output
    report = json.loads(done.stdout)
    assert told in report["error"]
    assert "Error" not in told or report["next"].endswith("python train.py < /dev/null")


@pytest.mark.slow
def test_a_program_under_accelerate_launch_is_drilled(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    command = (
        "accelerate launch --multi_gpu --num_processes=2 --num_machines=1 --main_process_port=0"
    )
    command += " --mixed_precision=no --dynamo_backend=no train.py"
    done = run_drill(
        PROGRAMS["with accelerate"], tmp_path, "--faults=exception", program=command.split()
    )
    assert done.status == 1, done.output
    [row] = json.loads(done.stdout)["faults"]
    assert (row["next_start"], row["weights"]) == ("step 1", "equal")
    assert row["log_names"] == "rank and cause"


@pytest.mark.slow
def test_the_script_hands_over_what_it_read(tmp_path: Path) -> None:
    (other := tmp_path / "other").mkdir()
    source = f"open({str(other / 'file')!r}, 'w').close()"
    (folder := tmp_path / "own").mkdir()
    (folder / "train.py").write_text(source)
    argv = ["python", ROOT / "ddp_training.py", "drill", "--json", "--", "python", "train.py"]
    done = run_command(argv, timeout_s=60, cwd=folder)
    assert done.status == 2
    told = json.loads(done.stdout)
    assert str(other / "file") in told["error"]
    assert told["next"] == f"add --also {other}"
    assert f"add --also {other}" in done.stderr
    done = run_command([*argv[:4], f"--also={other}", *argv[4:]], timeout_s=60, cwd=folder)
    assert "no DDP program" in json.loads(done.stdout)["error"]
    assert os.listdir(other) == []
    done = run_command([*argv[:4], "--table=x", *argv[4:]], timeout_s=60, cwd=folder)
    assert "takes no NAME, no --ranks and no --table" in done.stderr
    done = run_command([*argv[:3], "--copy"], timeout_s=60, cwd=folder)
    assert "--copy: needs -- COMMAND" in done.stderr

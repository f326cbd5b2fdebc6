"""The presets and the checks of CI as they are typed: their commands, quoting and stages."""

import json
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from tests.harness.processes import ROOT
from tests.harness.ranks import run_command, start_command
from tests.marks import slow_after

TORCHRUN = "python -m torch.distributed.run --standalone --nproc_per_node="
PRESETS = {
    "1": "python ddp_training.py --single_gpu --batch_size 32 --epochs 5",
    "2": TORCHRUN + "2 ddp_training.py --batch_size 16 --epochs 5",
    "3": TORCHRUN + "4 ddp_training.py --batch_size 16 --epochs 10 --cpu_only",
    "4": TORCHRUN + "2 ddp_training.py --debug --log_interval 10 --batch_size 16",
    "5": TORCHRUN + "2 ddp_training.py --find_unused_parameters --num_workers 0 --batch_size 8"
    " --continue_on_error",
    "6": "python ddp_training.py --cpu_only --batch_size 8 --epochs 2",
    "7": TORCHRUN + "2 ddp_training.py --amp bf16 --batch_size 8 --accumulation_steps 4",
    "8": "python ddp_training.py --resume newest",
    "9": "python -m tensorboard.main --logdir runs",
    "10": "python ddp_training.py doctor",
    "test": "python test_ddp_training.py",
}
SHOW = "import json, os, sys; print(json.dumps([os.getpid(), os.getcwd(), sys.argv[1:]]))\n"


class TestPresets:
    def test_without_an_argument_each_preset_is_listed_on_one_line(self) -> None:
        lines = run_command(["./launch_examples.sh"], timeout_s=20).ok().stdout.splitlines()
        listed = [line.split()[0] for line in lines if line.startswith("  ")]
        assert listed == list(PRESETS)

    @pytest.mark.parametrize("preset", PRESETS)
    def test_a_dry_run_prints_the_command(self, preset: str, machine: "Machine") -> None:
        assert machine.dry_run(preset) == PRESETS[preset]

    def test_an_unknown_preset_is_refused_with_the_list(self) -> None:
        for preset in ("11", "0", "tset", "1 2"):
            done = run_command(["./launch_examples.sh", preset], timeout_s=20)
            assert done.status == 2
            assert f"no preset '{preset}'" in done.stderr
            assert "TensorBoard" in done.stderr

    @pytest.mark.parametrize(
        ("visible", "seen"),
        [
            *((None, 4), ("0,1,2", 3), ("0, 3", 2), ("2", 1), ("0,1,2,3,4,5", 4)),
            *(("", 0), ("-1", 0), ("NoDevFiles", 0), ("0,-1,2", 1), ("GPU-8a,GPU-17", 2)),
        ],
    )
    def test_as_many_ranks_run_as_gpus_are_visible(
        self, visible: str | None, seen: int, machine: "Machine"
    ) -> None:
        machine.add_gpus(4, visible=visible)
        assert machine.dry_run("2").startswith(TORCHRUN + f"{seen or 2} ")

    def test_with_gpus_they_are_used(self, machine: "Machine") -> None:
        machine.add_gpus(4, visible=None)
        assert machine.dry_run("3") == PRESETS["3"].removesuffix(" --cpu_only")
        assert machine.dry_run("7").startswith(TORCHRUN + "4 ddp_training.py --amp auto")
        machine.add_gpus(0, visible="0,1,2,3")  # a variable makes none
        assert machine.dry_run("3") == PRESETS["3"]

    def test_threads_are_limited_where_torchrun_would_warn(self, machine: "Machine") -> None:
        machine.env["OMP_NUM_THREADS"] = ""
        assert machine.dry_run("2") == f"env OMP_NUM_THREADS=1 {PRESETS['2']}"
        assert machine.dry_run("6") == PRESETS["6"]

    def test_the_run_is_the_process_and_gets_each_word(self, copied: Path, tmp_path: Path) -> None:
        words = ["--run_name", "a b", "it's", "*", "$HOME", 'say "hi"', "", "new\nline", "\\"]
        argv = [copied / "launch_examples.sh", "6", *words]
        with start_command(argv, cwd=tmp_path) as command:
            done = command.wait(timeout_s=30).ok()
            pid, folder, given = json.loads(done.stdout)
            assert pid == command.pid  # so a signal to the script reaches the run
        assert Path(folder) == copied
        assert given == ["--cpu_only", "--batch_size", "8", "--epochs", "2", *words]
        assert done.stderr == ""  # the set-up is silent where it has nothing to do
        shown = run_command([*argv, "--dry-run"], timeout_s=20, cwd=tmp_path).ok().stdout
        typed = run_command(["bash", "-c", shown], timeout_s=20, cwd=tmp_path).ok()
        assert json.loads(typed.stdout)[1:] == [folder, given]

    def test_a_link_to_the_script_works_from_anywhere(self, copied: Path, tmp_path: Path) -> None:
        (tmp_path / "train").symlink_to(copied / "launch_examples.sh")
        done = run_command(["./train", "1"], timeout_s=20, cwd=tmp_path).ok()
        assert Path(json.loads(done.stdout)[1]) == copied

    def test_a_dry_run_changes_nothing(self, copied: Path) -> None:
        (copied / "requirements.txt").write_text("no-such-package==1.0\n")
        before = sorted(copied.rglob("*"))
        done = run_command([copied / "launch_examples.sh", "--dry-run", "1"], timeout_s=20).ok()
        assert " && .venv/bin/python /" in done.stdout  # from the folder of who reads it
        assert "would install" in done.stderr
        assert sorted(copied.rglob("*")) == before


class TestCheck:
    def test_all_stages_run_in_order_and_make_check_is_the_same(self, checked: Path) -> None:
        done = run_command(["make", "--silent", "check"], timeout_s=30, cwd=checked).ok()
        stages = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("==")]
        names = ["environment", "format", "lint", "types", "shell", "tests", "hostile"]
        assert [words[0] for words in stages] == [f"{name}:" for name in names]
        assert all(words[1] == "ok," and words[-1] == "s" for words in stages)
        assert (checked / "calls").read_text().splitlines() == [
            "setup.sh --dev --print_python",
            "python -m pip install --quiet -r requirements-extras.txt",
            "python -m venv .venv-tools",
            "python -m ruff format --check --quiet .",
            "python -m ruff check --quiet .",
            "python -m mypy",
            "shellcheck .ci/run ./launch_examples.sh ./setup.sh",
            "launch_examples.sh test --all",
            "launch_examples.sh test --hostile --seed 31",
        ]

    def test_a_fault_is_named_and_the_tests_are_not_run(self, checked: Path) -> None:
        done = run_command([".ci/run"], timeout_s=30, cwd=checked, env={"FAULT": "python -m ruff"})
        assert done.status == 1
        assert "== failed: format, lint" in done.stderr
        assert "== shell: ok" in done.stdout
        assert "launch_examples.sh" not in (checked / "calls").read_text().split()


class Machine:
    """The checkout on a machine with as many GPUs as a test wants."""

    def __init__(self, tools: Path) -> None:
        self.tools = tools
        self.env = {"PATH": f"{tools}:{Path(sys.executable).parent}:/usr/bin:/bin"}
        self.add_gpus(0, visible=None)

    def add_gpus(self, number: int, *, visible: str | None) -> None:
        names = "\n".join(f"GPU {i}: NVIDIA H200 (UUID: GPU-{i})" for i in range(number))
        executable(self.tools / "nvidia-smi", f'[ "$1" = -L ] && printf "%s\\n" "{names}"')
        self.env.pop("CUDA_VISIBLE_DEVICES", None)
        if visible is not None:
            self.env["CUDA_VISIBLE_DEVICES"] = visible

    def dry_run(self, *words: str) -> str:
        argv = ["./launch_examples.sh", *words, "--dry-run"]
        shown = run_command(argv, timeout_s=20, env=self.env).ok().stdout
        # The environment's Python is written as it is found: on PATH, or in .venv.
        return shown.strip().replace(".venv/bin/python", "python")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return Machine(tmp_path)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The scripts in a folder with a space, content with the environment of this test."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    for name in ("launch_examples.sh", "setup.sh"):
        shutil.copy(ROOT / name, folder)
    (folder / "requirements.txt").write_text(f"pytest=={pytest.__version__}\n")
    (folder / "ddp_training.py").write_text(SHOW)
    return folder


@pytest.fixture
def checked(tmp_path: Path) -> Path:
    """A copy of .ci/run and Makefile among programs that only note how they are called."""
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", tmp_path / ".ci")
    shutil.copy(ROOT / "Makefile", tmp_path)
    note = f'call="${{0##*/}} $*"; echo "${{call% }}" >>"{tmp_path}/calls"\n'
    note += 'case $call in "${FAULT:-nothing}"*) exit 1 ;; esac\n'
    (tmp_path / "runs" / "environment").mkdir(parents=True)
    python = tmp_path / "runs" / "environment" / "python"
    for path in (python, python.with_name("shellcheck"), tmp_path / "launch_examples.sh"):
        executable(path, note)
    executable(tmp_path / "setup.sh", f'{note}echo "{python}"')
    return tmp_path


def executable(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


class TestSlurmScript:
    """train.slurm with stand-ins for Slurm's programs; with a real Slurm: test_slurm.py."""

    CASES = (
        (1, "stopped", 1, "not queued again"),  # it got no further in five starts
        (0, "stopped", 0, "stopped and saved; queued again"),
        (3, "stopped", 0, "queued 2 times already, which is the limit (MAX_REQUEUES)"),
        (3, "stopped", 0, "stopped and saved; queued again"),  # --stop_status 3
        (75, "failed", 0, "a rank was lost, and the others saved (status 75); queued"),
        (0, "finished", 0, "the run is finished"),
        (2, "failed", 2, "not queued again"),
    )

    @pytest.mark.parametrize("case", slow_after(3, CASES))
    def test_a_job_is_queued_again_by_the_status_of_its_ranks(
        self, case: tuple[int, str, int, str], tmp_path: Path
    ) -> None:
        noted, summary, status, said = case
        note = json.dumps({"attempt": 0, "status": noted, "run": ""})
        programs = {
            "setup.sh": f"echo {sys.executable}",
            "srun": f"echo '{note}' > $HARDENED_DDP_ENDINGS\n"
            f'mkdir -p runs/r; echo \'{{"status": "{summary}"}}\' > runs/r/summary.json\n'
            f"exit {noted}",
            "scontrol": f"echo $* >> {shlex.quote(str(tmp_path / 'asked'))}",
        }
        for name, script in programs.items():
            executable(tmp_path / name, script)
        (tmp_path / "ddp_training.py").touch()
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "PYTHONPATH": str(ROOT), "RUN_NAME": "r"}
        env |= {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2"}
        env |= {"SLURM_JOB_NODELIST": "a", "SLURM_JOB_NUM_NODES": "1"}
        if "MAX_REQUEUES" in said:
            env |= {"SLURM_RESTART_COUNT": "2", "MAX_REQUEUES": "2"}
        done = run_command(["bash", ROOT / "train.slurm"], env=env, timeout_s=30)
        assert done.status == status, done.output
        assert said in done.stderr
        is_queued = said.endswith((" queued", "; queued again"))
        assert ("requeue 7" in (tmp_path / "asked").read_text()) == is_queued
        assert ("next: env RUN_NAME=r " in done.stderr) == ("MAX_REQUEUES" in said)

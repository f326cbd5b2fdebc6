"""The shell scripts: presets, quoting, and the set-up that is skipped where nothing is to do."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = ("launch_examples.sh", "setup.sh", ".ci/run")


@pytest.fixture(scope="module")
def path_with_gpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A PATH on which this machine seems to have 4 GPUs."""
    folder = tmp_path_factory.mktemp("gpus")
    tool = folder / "nvidia-smi"
    tool.write_text('#!/bin/sh\nfor i in 0 1 2 3; do echo "GPU $i: seeming"; done\n')
    tool.chmod(0o755)
    return f"{folder}:{os.environ['PATH']}"


def run(
    *argv: str, cwd: Path = ROOT, gpus: str = "", path: str | None = None
) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus, "OMP_NUM_THREADS": "1"}
    if path is not None:
        env["PATH"] = path
    return subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=60)


def dry_run(*words: str, gpus: str = "", path: str | None = None) -> str:
    done = run("./launch_examples.sh", "--dry-run", *words, gpus=gpus, path=path)
    assert done.returncode == 0, done.stderr
    # The environment's Python is written as it is found: on PATH, or in .venv.
    python, _, rest = done.stdout.strip().partition(" ")
    assert python.endswith("python")
    return f"python {rest}"


def test_no_argument_lists_all_presets() -> None:
    done = run("./launch_examples.sh")
    assert done.returncode == 0
    listed = [line.split()[0] for line in done.stdout.splitlines() if line[:4].strip()]
    assert [*map(str, range(1, 11)), "test"] == [word for word in listed if word != "usage:"][:11]


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


@pytest.mark.parametrize("preset", PRESETS)
def test_dry_run_prints_the_command(preset: str) -> None:
    assert dry_run(preset) == PRESETS[preset]


def test_presets_use_the_gpus_that_are_visible(path_with_gpus: str) -> None:
    assert dry_run("2", gpus="0,1,2", path=path_with_gpus).startswith(TORCHRUN + "3")
    assert "--cpu_only" not in dry_run("3", gpus="0,1,2,3", path=path_with_gpus)
    assert "--amp auto" in dry_run("7", gpus="0", path=path_with_gpus)
    assert dry_run("2", gpus="", path=path_with_gpus).startswith(TORCHRUN + "2")


def test_more_arguments_are_passed_through_as_they_are() -> None:
    words = ["--run_name", "a b", "it's", "*", "$HOME", 'say "hi"']
    shown = dry_run("1", *words)
    echoed = subprocess.run(
        ["bash", "-c", f"printf '%s\\n' {shown}"], capture_output=True, text=True, timeout=10
    )
    assert echoed.stdout.splitlines()[-len(words) :] == words


def test_an_unknown_preset_is_refused_with_the_list() -> None:
    done = run("./launch_examples.sh", "11")
    assert done.returncode == 2
    assert "no preset '11'" in done.stderr
    assert "doctor" in done.stderr


def test_shell_scripts_are_clean() -> None:
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = run(str(shellcheck), *SCRIPTS)
    assert done.returncode == 0, done.stdout


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the scripts in a folder with a space in its name."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    for name in ("launch_examples.sh", "setup.sh", "requirements.txt", "requirements-dev.txt"):
        shutil.copy(ROOT / name, folder)
    return folder


def test_setup_takes_an_environment_that_satisfies_the_pins(copied: Path) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = run("./setup.sh", "--dev", "--print_python", cwd=copied, path=path)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).parent == Path(sys.executable).parent
    assert not (copied / ".venv").exists()
    assert all((copied / name).is_dir() for name in ("data", "models", "runs"))


def test_setup_makes_an_environment_where_a_pin_is_missing(copied: Path) -> None:
    (copied / "requirements.txt").write_text("no-such-package-at-all==1.0\n")
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    wheels = copied / "wheels"
    wheels.mkdir()
    done = run("./setup.sh", "--offline", str(wheels), cwd=copied, path=path)
    assert done.returncode == 1
    assert "pip could not install requirements.txt" in done.stderr
    assert "--offline WHEELS" in done.stderr
    assert (copied / ".venv" / "bin" / "python").exists()


def test_setup_names_a_missing_wheel_folder_and_an_unknown_option(copied: Path) -> None:
    assert "no such folder" in run("./setup.sh", "--offline", "nowhere", cwd=copied).stderr
    done = run("./setup.sh", "--fast", cwd=copied)
    assert done.returncode == 2
    assert "unknown option --fast" in done.stderr


def test_setup_without_a_new_python_says_so(copied: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname", "mkdir"):
        (tools / name).symlink_to(shutil.which(name) or name)
    done = run("./setup.sh", cwd=copied, path=str(tools))
    assert done.returncode == 1
    assert "no Python 3.11 or newer" in done.stderr

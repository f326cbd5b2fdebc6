"""config.yaml beside the script: every start uses what was changed in it."""

import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hardened_ddp.errors import ConfigError
from hardened_ddp.settings.cli import parse
from hardened_ddp.settings.config import Config
from hardened_ddp.settings.layers import Resolved, resolve
from tests.harness.settings_given import PROJECT, make_run


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run each test in an empty folder: output_dir and --config are relative paths."""
    monkeypatch.chdir(tmp_path)


def settings_beside(text: str, command: str = "") -> Resolved:
    """Give the settings of a command where config.yaml has this text."""
    Path("config.yaml").write_text(text, encoding="utf-8")
    return resolve(parse(shlex.split(command), edited_file="config.yaml"))


def error_beside(text: str, command: str = "") -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        settings_beside(text, command)
    return caught.value


def test_as_it_is_shipped_it_changes_nothing_and_is_no_source() -> None:
    found = settings_beside((PROJECT / "config.yaml").read_text(encoding="utf-8"))
    assert found.config == Config()
    assert set(found.sources.values()) == {"default"}


def test_without_the_file_the_defaults_are_used() -> None:
    assert resolve(parse([], edited_file="none.yaml")).config == Config()


def test_it_comes_after_the_default_and_before_everything_else() -> None:
    make_run("old", command="--batch_size 8 --seed 1")
    Path("my.yaml").write_text("momentum: 0.2\nlearning_rate: 0.2\n")
    text = "epochs: 3\nbatch_size: 3\nmomentum: 0.3\nlearning_rate: 0.3\ntimeout_s: 3\n"
    found = settings_beside(text, "--resume newest --config my.yaml --learning_rate 0.1")
    names = ("timeout_s", "epochs", "batch_size", "momentum", "learning_rate")
    assert {name: found.sources[name] for name in names} == {
        "timeout_s": "config.yaml:5",  # a machine's own, which no run passes on
        "epochs": "run",
        "batch_size": "run",
        "momentum": "my.yaml:1",
        "learning_rate": "command line",
    }
    assert found.not_used == {"epochs": "config.yaml:1", "batch_size": "config.yaml:2"}
    same = settings_beside("batch_size: 8\nseed: 2\n", "--resume newest --seed 3")
    assert not same.not_used
    config = found.config
    assert (config.device.timeout_s, config.loop.epochs, config.data.batch_size) == (3, 5, 8)
    assert (config.optimizer.momentum, config.optimizer.learning_rate) == (0.2, 0.1)


def test_a_run_that_it_names_is_continued() -> None:
    make_run("old", command="--seed 7")
    assert settings_beside("resume: newest\n").config.device.seed == 7


def test_no_config_ignores_it() -> None:
    assert settings_beside("epochs: 3\n", "--no_config").config.loop.epochs == 5
    assert settings_beside("[not: yaml", "--no-config").config.loop.epochs == 5


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("epochs: 3\nbatch_sise: 8\n", "config.yaml:2: batch_sise: no such setting; did you mean"),
        ("epochs: many\n", "config.yaml:1: epochs: "),
        ("epochs: [3\n", "config.yaml:2: is not YAML"),
        ("single_gpu: true\ncpu_only: true\n", "config.yaml:1: single_gpu"),
    ],
)
def test_what_is_wrong_in_it_is_named_with_its_line_and_how_to_ignore_it(
    text: str, place: str
) -> None:
    error = error_beside(text)
    assert place in error.message
    assert "--no_config ignores config.yaml" in error.fix


def test_a_mistake_elsewhere_does_not_speak_of_it() -> None:
    assert "config.yaml" not in str(error_beside("epochs: 5\n", "--epochs 0"))


def test_the_script_reads_the_one_beside_it_from_any_folder() -> None:
    shutil.copy(PROJECT / "ddp_training.py", "ddp_training.py")
    Path("hardened_ddp").symlink_to(PROJECT / "hardened_ddp")
    Path("config.yaml").write_text("epochs: 3\n\nepoch: 4\n")
    Path("elsewhere").mkdir()
    words = [sys.executable, "../ddp_training.py", "--seed", "x"]
    ended = subprocess.run(words, cwd="elsewhere", capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert f"{Path.cwd()}/config.yaml:3: epoch: no such setting; did you mean" in ended.stderr
    assert "--seed: found 'x'" in ended.stderr

"""Settings: where a value comes from, and how a word becomes a value."""

import ast
import math
import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hardened_ddp.errors import ConfigError
from hardened_ddp.settings.cli import parse
from hardened_ddp.settings.config import Config, DeviceConfig
from hardened_ddp.settings.document import plain_value
from hardened_ddp.settings.layers import Resolved, resolve
from hardened_ddp.settings.schema import SETTINGS
from tests.marks import sections
from tests.settings.given import PROJECT, make_run, problem_of, settings_of, values_of

FLAGS = sections(Path(__file__).with_name("typed_flags.txt"))
"""Flags: the name of a setting and its value, as Python writes it."""

LINES = sections(Path(__file__).with_name("typed_lines.txt"))
LINES["model_args:\n  size: 28\n  names: [y, n]"] = "{'size': 28, 'names': ['y', 'n']}"


def test_no_arguments_and_an_empty_file_give_the_defaults() -> None:
    resolved = settings_of("")
    assert resolved.config == Config()
    assert set(resolved.sources.values()) == {"default"}
    assert list(resolved.sources) == list(SETTINGS)
    assert resolved.run_folder is None
    for text in ("", "# only a comment\n", "---\n"):
        Path("my.yaml").write_text(text)
        assert settings_of("--config my.yaml").config == Config()
    Path("my.yaml").write_text("epochs: 2\n", encoding="utf-8-sig")  # a byte order mark is no text
    assert values_of("--config my.yaml")["epochs"] == 2


def settings_beside(text: str, command: str = "") -> Resolved:
    """Give the settings of a command where config.yaml has this text."""
    Path("config.yaml").write_text(text, encoding="utf-8")
    return resolve(parse(shlex.split(command), edited_file="config.yaml"))


def error_beside(text: str, command: str = "") -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        settings_beside(text, command)
    return caught.value


class TestEditedConfig:
    """config.yaml beside the script: every start uses what was changed in it."""

    def test_as_it_is_shipped_it_changes_nothing_and_is_no_source(self) -> None:
        found = settings_beside((PROJECT / "config.yaml").read_text(encoding="utf-8"))
        assert found.config == Config()
        assert set(found.sources.values()) == {"default"}
        assert resolve(parse([], edited_file="none.yaml")).config == Config()

    def test_it_comes_after_the_default_and_before_everything_else(self) -> None:
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

    def test_a_run_that_it_names_is_continued_and_no_config_ignores_it(self) -> None:
        make_run("old", command="--seed 7")
        assert settings_beside("resume: newest\n").config.device.seed == 7
        assert settings_beside("epochs: 3\n", "--no_config").config.loop.epochs == 5
        assert settings_beside("[not: yaml", "--no-config").config.loop.epochs == 5

    def test_what_is_wrong_in_it_is_named_with_its_line_and_how_to_ignore_it(self) -> None:
        error = error_beside("epochs: 3\nbatch_sise: 8\nsingle_gpu: true\ncpu_only: true\n")
        assert "config.yaml:2: batch_sise: no such setting; did you mean" in error.message
        assert "config.yaml:3: single_gpu" in error.message
        assert "--no_config ignores config.yaml" in error.fix
        assert "config.yaml" not in str(error_beside("epochs: 5\n", "--epochs 0"))

    def test_the_script_reads_the_one_beside_it_from_any_folder(self) -> None:
        shutil.copy(PROJECT / "ddp_training.py", "ddp_training.py")
        Path("hardened_ddp").symlink_to(PROJECT / "hardened_ddp")
        Path("config.yaml").write_text("epochs: 3\n\nepoch: 4\n")
        Path("elsewhere").mkdir()
        words = [sys.executable, "../ddp_training.py", "--seed", "x"]
        ended = subprocess.run(words, cwd="elsewhere", capture_output=True, text=True, timeout=120)
        assert ended.returncode == 2
        assert f"{Path.cwd()}/config.yaml:3: epoch: no such setting; did you mean" in ended.stderr
        assert "--seed: found 'x'" in ended.stderr


class TestContinuedRun:
    @pytest.mark.parametrize(
        "flags",
        [
            "--resume newest",
            "--resume runs/first",
            "--resume runs/first/checkpoints/step-000000010",
            "--run_name first",
        ],
    )
    def test_a_run_that_is_continued_gives_its_settings(self, flags: str) -> None:
        make_run("first", command="--seed 7")
        resolved = settings_of(flags)
        assert resolved.config.device.seed == 7
        assert resolved.sources["seed"] == "run"
        assert resolved.run_folder is not None
        assert resolved.run_folder.resolve() == Path("runs/first").resolve()

    def test_the_machine_and_the_place_of_the_run_are_not_inherited(self) -> None:
        command = "--cpu_only --backend gloo --timeout_s 9 --resume never --run_name old"
        make_run("first", command=command)
        resolved = settings_of("--resume runs/first")
        assert replace(resolved.config.device, seed=0) == DeviceConfig()
        assert resolved.config.run.run_name == ""
        assert resolved.config.run.resume == "runs/first"
        assert resolved.sources["cpu_only"] == "default"

    def test_a_default_of_a_setting_that_is_gone_since_is_no_problem(self) -> None:
        saved = make_run("first") / "config.yaml"
        text = saved.read_text()
        saved.write_text(f"{text}split_by_length: false  # default\n")
        assert settings_of("--resume runs/first").run_folder is not None
        saved.write_text(f"{text}split_by_length: true  # command line\n")
        told = f"{saved}:{len(text.splitlines()) + 1}: split_by_length: no such setting"
        assert problem_of("--resume runs/first").startswith(told)

    def test_newest_is_the_run_whose_checkpoints_changed_last(self) -> None:
        without = make_run("without_checkpoint", step=None)
        assert "no run with a checkpoint in runs" in problem_of("--resume newest")
        for time_s, name in enumerate(("b", "a", "c")):
            folder = make_run(name, command=f"--epochs {time_s + 1}")
            os.utime(folder / "checkpoints", (time_s, time_s))
        os.utime(without / "checkpoints", (9, 9))
        Path("runs/linked").symlink_to("c")  # no run of this folder
        assert settings_of("--resume newest").run_folder == Path("runs/c")
        assert settings_of("--resume newest").config.loop.epochs == 3
        assert "no run with a checkpoint in none" in problem_of("--resume newest --output_dir none")
        assert settings_of("--run_name c --resume never").config.loop.epochs == 5
        assert settings_of("--run_name second").run_folder is None

    def test_two_runs_to_continue_are_an_error(self) -> None:
        make_run("first")
        Path("my.yaml").write_text("run_name: other\n")
        for resume in ("runs/first", "runs/first/checkpoints/step-000000010", "newest"):
            line = problem_of(f"--resume {resume} --run_name other")
            assert line.startswith("--run_name: --resume continues ")
            assert "runs/first, which is another run" in line
            assert settings_of(f"--resume {resume} --run_name first").run_folder is not None
            # the command line overrides a file
            assert settings_of(f"--config my.yaml --resume {resume}").run_folder is not None
        Path("my.yaml").write_text("run_name: other\nresume: newest\n")
        assert "my.yaml:2: resume continues runs/first, which" in problem_of("--config my.yaml")

    @pytest.mark.parametrize(
        ("given", "told"),
        [
            ("runs/frist", "there are: runs/first"),
            ("a_file", "'a_file' is neither a run folder"),
            ("runs", "neither a run folder"),
            (".", "neither a run folder"),
        ],
    )
    def test_a_path_that_is_no_run_is_an_error_with_a_hint(self, given: str, told: str) -> None:
        make_run("first")
        Path("a_file").touch()
        Path("config.yaml").touch()  # as in the project's own folder
        line = problem_of(f"--resume {given}")
        assert line.startswith("--resume: ")
        assert told in line

    def test_a_rule_can_be_broken_by_an_inherited_value(self) -> None:
        make_run("first", command="--amp fp16")
        line = problem_of("--resume runs/first --cpu_only")
        assert line.startswith("run: amp fp16 with --cpu_only true: ")
        assert settings_of("--resume runs/first --cpu_only --amp off").config.optimizer.amp == "off"


class TestWords:
    @pytest.mark.parametrize("flags", FLAGS)
    def test_a_flag_gives_a_typed_value(self, flags: str) -> None:
        name, _, literal = FLAGS[flags].partition(": ")
        found, value = values_of(flags)[name], ast.literal_eval(literal.strip())
        assert found == value
        assert type(found) is type(value)

    @pytest.mark.parametrize("line", LINES)
    def test_a_line_gives_a_typed_value(self, line: str) -> None:
        Path("my.yaml").write_text(line + "\n")
        found = values_of("--config my.yaml")[line.partition(":")[0]]
        value = ast.literal_eval(LINES[line])
        assert found == value
        assert type(found) is type(value)

    @pytest.mark.parametrize(
        ("word", "value"),
        [
            ("1e-3", 1e-3), ("+5", 5), ("-0", 0), ("1.", 1.0), ("0o17", 15), ("1e", "1e"),
            ("1e+2", 100.0), ("TRUE", True), ("tRUE", "tRUE"), ("", None), ("Infinity", math.inf),
            ("5\n", "5\n"), ("\u0665", "\u0665"), ("inf", "inf"), (".", "."), ("-", "-"),
        ],
    )  # fmt: skip
    def test_plain_words_are_read_by_yaml_1_2(self, word: str, value: object) -> None:
        assert plain_value(word) == value
        assert type(plain_value(word)) is type(value)

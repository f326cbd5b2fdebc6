"""Settings: where a value comes from, how a word becomes a value, and which are refused.

And how they are written down: beside a run, in config.yaml, in --help.
"""

import ast
import itertools
import math
import os
import random
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from hardened_ddp.errors import ConfigError
from hardened_ddp.settings.cli import parse
from hardened_ddp.settings.commands import COMMANDS
from hardened_ddp.settings.config import Config, DeviceConfig
from hardened_ddp.settings.document import plain_value, read_text
from hardened_ddp.settings.layers import Resolved, resolve
from hardened_ddp.settings.manual import help_text, setting_texts
from hardened_ddp.settings.record import agreed_settings, dump, read_back
from hardened_ddp.settings.schema import SETTINGS, TITLES, assemble, flatten
from hardened_ddp.settings.wording import OTHER_NAMES
from tests.documents import template
from tests.harness.processes import ROOT
from tests.marks import sections
from tests.settings import given
from tests.settings.given import make_run, problem_of, problems_in, problems_of, settings_of

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
    assert given.values_of("--config my.yaml")["epochs"] == 2


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
        found = settings_beside((ROOT / "config.yaml").read_text(encoding="utf-8"))
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
        shutil.copy(ROOT / "ddp_training.py", "ddp_training.py")
        Path("hardened_ddp").symlink_to(ROOT / "hardened_ddp")
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
        found, value = given.values_of(flags)[name], ast.literal_eval(literal.strip())
        assert found == value
        assert type(found) is type(value)

    @pytest.mark.parametrize("line", LINES)
    def test_a_line_gives_a_typed_value(self, line: str) -> None:
        Path("my.yaml").write_text(line + "\n")
        found = given.values_of("--config my.yaml")[line.partition(":")[0]]
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


BAD_FLAGS = sections(Path(__file__).with_name("bad_flags.txt"))
BAD_FLAGS["128 at most"] = f"--run_name {'x' * 129}"
BAD_LINES = sections(Path(__file__).with_name("bad_lines.txt"))
BAD_LINES |= {
    "found inf, needs a number, 0 or more": f"learning_rate: 1{'0' * 400}\n",
    "my.yaml:1: ": f"seed: {'9' * 5000}\n",
    "my.yaml:1: is not YAML: character U+0001": "seed: \x01\n",
    "more than 50 levels deep": f"model_args: {'[' * 60}{']' * 60}\n",
    "is nested": f"model_args: {'[' * 2000}{']' * 2000}\n",
}


class TestProblems:
    def test_all_problems_of_all_places_come_in_one_message(self) -> None:
        Path("my.yaml").write_text(
            "batch_size: 0\nlearning_rat: 1\nepochs: true\nstop_when: loss\n"
        )
        lines = problems_of(
            "--config my.yaml --seed x --eval_every 0 --nope --single_gpu", world_size=2
        )
        places = ["my.yaml:1", "my.yaml:2", "my.yaml:3", "--seed", "--nope"]
        places += ["--single_gpu true with 2 ranks", "my.yaml:4"]
        assert [line.split(": ")[0] for line in lines] == places

    @pytest.mark.parametrize(
        ("given", "meant"),
        [
            ("batch_sze", "batch_size"),
            ("epoch", "epochs"),  # a flag is never shortened
            ("lr", "learning_rate"),
            ("Epochs", "epochs"),
            ("no_tensorbord", "tensorboard"),
        ],
    )
    def test_an_unknown_name_gets_the_nearest_right_one(self, given: str, meant: str) -> None:
        assert problem_of(f"--{given} 3").endswith(f"did you mean --{meant}?")
        assert problems_in(f"{given}: 3\n")[0].endswith(f"did you mean {meant}?")

    def test_names_of_other_programs_lead_to_settings_that_exist(self) -> None:
        assert {*OTHER_NAMES.values()} <= SETTINGS.keys()
        assert not OTHER_NAMES.keys() & SETTINGS.keys()

    @pytest.mark.parametrize("told", BAD_FLAGS)
    def test_a_bad_flag_is_told(self, told: str) -> None:
        lines = problems_of(BAD_FLAGS[told], world_size=2)
        assert any(told in line for line in lines), lines

    @pytest.mark.parametrize("told", BAD_LINES)
    def test_a_bad_line_is_told_with_its_number(self, told: str) -> None:
        [line] = problems_in(BAD_LINES[told])
        assert told in line

    def test_a_file_that_cant_be_read_is_told(self) -> None:
        Path("folder").mkdir()
        Path("binary").write_bytes(b"\x80\x02abc")
        Path("large").write_bytes(b"# \n" * 400_000)
        assert problem_of("--config none.yaml") == (
            "none.yaml: can't be read: No such file or directory"
        )
        assert "Is a directory" in problem_of("--config folder")
        assert "can't decode byte 0x80" in problem_of("--config binary")
        assert "too large" in problem_of("--config large")
        with pytest.raises(ConfigError, match="null byte"):
            resolve(parse(["--config", "a\0b"]))

    def test_arguments_that_are_not_utf8_are_told_and_of_a_path_what_to_set(self) -> None:
        bad = os.fsdecode(b"\xff")
        for words in (["--model_args", bad], [f"--{bad}"], ["--data_dir", bad]):
            with pytest.raises(ConfigError) as caught:
                resolve(parse(words))
            assert str(caught.value).isascii()
        assert "export LC_ALL=C.UTF-8" in str(caught.value)

    def test_many_aliases_of_one_file_and_a_long_value_are_one_line(self) -> None:
        lines = [f"  k{number}: *x\n" for number in range(30)]
        Path("my.yaml").write_text("model_args: &x {a: 1}\ndataset_args:\n" + "".join(lines))
        assert problem_of("--config my.yaml").startswith("my.yaml:1: uses an alias")
        for words in (f"--epochs {'x' * 5000}", f"--{'x' * 5000}"):
            assert len(problem_of(words)) < 200


class TestRules:
    def test_one_setting_that_can_not_be_is_told_once(self) -> None:
        assert "--task clasification: there is no such task" in problem_of("--task clasification")
        assert "--single_gpu true with 2 ranks" in problem_of("--single_gpu", world_size=2)
        settings_of("--cpu_only --amp bf16 --backend gloo --warmup_steps 10", world_size=2)
        settings_of("--num_workers 0 --warmup_steps 9 --max_steps 10 --single_gpu")
        assert len(problems_of("--cpu_only --backend nccl --amp fp16")) == 2
        assert len(problems_of("--cpu_only --single_gpu maybe")) == 1
        assert len(problems_in("cpu_only: [\n", "--single_gpu")) == 1
        assert len(problems_in("cpu_only: !x true\n", "--single_gpu")) == 1


PLACES = [f"--{name}" for name, setting in SETTINGS.items() if setting.is_place]
WORDS = [
    f"{name} {'' if option.is_word else f'{word} {option.needs} --{option.name}'}"
    for name, command in COMMANDS.items()
    for word in ["RUN" if any(other.is_word for other in command.options) else ""]
    for option in command.options
    if option.is_place
]


class TestPlaces:
    def test_what_names_a_folder_or_a_file_is_declared(self) -> None:
        assert {"--output_dir", "--resume", "--data_dir", "--init_from", "--dataset"} < {*PLACES}
        named = {"explain ", "watch ", "report ", "verify-ledger ", "evaluate ", "export "}
        assert named < {*WORDS}
        texts = [text for name, text in setting_texts().items() if name != "mirror"]
        for text in (*texts, *map(str, COMMANDS.values())):
            assert "://" not in text, "a setting that takes a URL is no place"

    @pytest.mark.parametrize(
        ("words", "url"),
        [
            *((words, "s3://bucket/runs") for words in ("--config", *PLACES, *WORDS)),
            *(
                ("--data_dir", url)
                for url in ("gs://b", "HTTPS://a.b/c?d=e", "a+b.c://", "file:///a")
            ),
        ],
    )
    def test_a_url_is_refused_where_a_folder_or_a_file_is_meant(self, words: str, url: str) -> None:
        problem = problem_of(f"{words} {url}")
        assert problem.startswith(f"{words.split()[-1]}: " if "--" in words else ("RUN", "LOG"))
        assert f"found '{url}', needs a folder or file of this machine" in problem
        assert f"{url.partition('://')[0]}:// can't be read or written here; copy" in problem

    def test_a_url_in_a_file_behind_a_word_or_among_many_is_refused(self) -> None:
        assert "my.yaml:1: data_dir" in problems_in("data_dir: s3://b\n")[0]
        for kind in ("text", "parquet", "tar", "hf"):
            assert "s3://" in problem_of(f"--dataset {kind}:s3://b/*")
        assert "gs://" in problem_of("report runs/a gs://b runs/c")

    def test_what_is_no_url_is_taken_and_a_run_of_an_earlier_version_continued(self) -> None:
        for place in ("./s3:/bucket/runs", "a:b", "a:/b", "/a://b", "runs", "a b"):
            assert given.values_of("--output_dir '" + place + "'")["output_dir"] == place
        found = given.values_of("--dataset m:f --dataset_args '{url: s3://b, test: s3://c}'")
        assert found["dataset_args"]["url"] == "s3://b"
        run = make_run("a")
        saved = run / "config.yaml"
        text = saved.read_text(encoding="utf-8")
        saved.write_text(text.replace("output_dir: runs", "output_dir: s3://bucket/runs"))
        assert "s3://" in saved.read_text(encoding="utf-8")
        assert settings_of("--resume runs/a").run_folder == run


BAD_COMMANDS = sections(Path(__file__).with_name("bad_commands.txt"))
BAD_COMMANDS["xyzzy"] = f"known: {', '.join(('train', *COMMANDS))}"


class TestRecord:
    def test_what_is_dumped_says_its_sources_and_reads_back_to_the_same_settings(self) -> None:
        Path("my.yaml").write_text("epochs: 7\n")
        command = "--config my.yaml --learning_rate 1e-5 --run_name 007 --amp off"
        command += " --find_unused_parameters --num_workers 3 "
        given = r'{a: [1, .inf, null, "x\ty\u2028\x7f"], b: {"on": yes, "": 1.0}, c: "1e3"}'
        words = ["--data_dir", "a #b: 'c' \N{SNOWMAN}\N{GRINNING FACE}", "--model_args", given]
        resolved = settings_of(command + shlex.join(words))
        text = dump(resolved.config, resolved.sources)
        assert [name for name, _, _ in read_back(text)] == list(SETTINGS)
        sources = {name: source for name, _, source in read_back(text)}
        assert (sources["epochs"], sources["run_name"]) == ("my.yaml:1", "command line")
        assert sources["batch_size"] == "default"
        Path("again.yaml").write_text(text, encoding="utf-8")
        again = settings_of("--config again.yaml")
        assert again.config == resolved.config
        assert all(source.startswith("again.yaml:") for source in again.sources.values())

    def test_other_yaml_readers_find_the_same_and_a_source_stays_in_its_comment(self) -> None:
        config = settings_of("--learning_rate 1e-7 --amp off --no_find_unused_parameters").config
        values = {n: "auto" if v is None else v for n, v in flatten(config).items()}
        assert yaml.safe_load(dump(config, {})) == values
        text = dump(Config(), {"epochs": "a\nseed: 3"})
        found = {entry.key: entry.value for entry in read_text(text)}
        assert assemble({name: found[name] for name in ("epochs", "seed")}) == Config()

    def test_all_other_settings_are_compared_between_ranks(self) -> None:
        words = ["7", "3", "0.5", "true", "false", "90s", "{a: 1}", "file:///x", "other"]
        for name, setting in SETTINGS.items():
            configs = (taken(name, w) for w in [*setting.choices, *words, "package.module:name"])
            changed = next(config for config in configs if config and config != Config())
            differs = agreed_settings(changed) != agreed_settings(Config())
            assert differs is not setting.may_differ, name

    def test_config_yaml_has_every_setting_with_its_default(self) -> None:
        path = ROOT / "config.yaml"
        text = path.read_text(encoding="utf-8")
        assert text == template(), "python -m tests.documents writes it as it is shipped"
        assert [entry.key for entry in read_text(text)] == list(SETTINGS)
        assert settings_of(f"--config {shlex.quote(str(path))}").config == Config()
        assert text.isascii()
        assert max(map(len, text.splitlines())) <= 100


def taken(name: str, word: str) -> Config | None:
    try:
        return assemble(parse([f"--{name}={word}"]).settings.values)
    except ConfigError:
        return None


class TestCommands:
    @pytest.mark.parametrize("words", BAD_COMMANDS)
    def test_a_wrong_command_is_told(self, words: str) -> None:
        with pytest.raises(ConfigError, match=BAD_COMMANDS[words].strip()):
            parse(words.split())

    @pytest.mark.parametrize(
        ("words", "topic"),
        [
            (["--epochs", "x", "--help"], "train"),
            (["help"], "train"),
            (["export", "-h"], "export"),
            (["help", "doctor"], "doctor"),
        ],
    )
    def test_help_wins_over_everything_else(self, words: list[str], topic: str) -> None:
        request = parse(words)
        assert (request.command, request.options["topic"]) == ("help", topic)


class TestHelp:
    def test_it_has_every_setting_once_with_its_default(self) -> None:
        entries = help_text().split("\n  --")
        for name, setting in SETTINGS.items():
            found = [entry for entry in entries if entry.split()[0] == name]
            assert len(found) == 1, name
            text = " ".join(found[0].split())
            assert "default: " in text
            assert setting_texts()[name].split()[0] in text
            assert all(choice in text for choice in setting.choices)
            assert setting_texts()[name].endswith((".", "?")), name
            assert setting.bounds or setting.type not in (int, float), name

    def test_it_has_sections_commands_and_three_examples_that_parse(self) -> None:
        text = help_text()
        assert all(f"\n{title}\n" in text for title in TITLES.values())
        assert all(f"\n  {command} " in text for command in ("train", *COMMANDS))
        examples = text.partition("Examples\n")[2].partition("\n\n")[0].splitlines()
        assert len(examples) == 3
        for example in examples:
            words = shlex.split(example)
            script = next(n for n, word in enumerate(words) if word.endswith("ddp_training.py"))
            request = parse(words[script + 1 :])
            assert not request.settings.problems
            assert request.settings.values

    def test_it_is_ascii_and_fits_100_columns(self) -> None:
        for topic in ("train", *COMMANDS):
            text = help_text(topic)
            assert text.isascii()
            assert text.replace("\n", "").isprintable()
            # a command is typed in full, where it is pasted, and not folded
            lines = [line for line in text.splitlines() if "ddp_training.py" not in line]
            assert max(map(len, lines)) <= 100
        assert "ddp_training.py export RUN\n       [--format " in help_text("export")


class TestAnything:
    """Whatever is given: a Config that can run, or a ConfigError; never another exception."""

    WORDS = (
        *["", " ", "auto", "true", "False", "null", "~", "on", "0", "-1", "3", "3.0", "1e-4"],
        *["1e999", "nan", ".nan", "-.inf", "0x", "0o9", "1_000", "9" * 400, "x" * 300, "a/b", ".."],
        *["~/x", "[", "{", "}", "{a: 1}", "[1, 2]", "'", '"', "*a", "&a", "!!int x", "!x", "- 1"],
        *["a: b", ": ", "#", "%", "@", "`", "|", ">", "\t", "\n", "\x00", "\x7f"],
        *["\u2028", "\udcff", "? a", "--", "-", "--help=", "-1e5", "=", "<<", "\U0001f600", "None"],
    )  # fmt: skip

    @pytest.mark.slow
    def test_a_value_of_any_setting_fits_or_is_told(self) -> None:
        # a file's words become values by the type of a setting: one of each type is enough
        kinds = {(s.type, s.has_auto, bool(s.choices), s.shape): n for n, s in SETTINGS.items()}
        for name, word in itertools.product(SETTINGS, self.WORDS):
            self.check_argv([f"--{name}={word}"])
            if name in kinds.values():
                self.check_file(f"{name}: {word}\n")

    @pytest.mark.slow
    def test_any_words_in_any_order_fit_or_are_told(self) -> None:
        rng = random.Random(0)
        names = [f"--{no}{name}" for name in SETTINGS for no in ("", "no_")]
        names += ["--config", "my.yaml", "export", "doctor"]
        for _ in range(1500):
            argv = rng.choices([*self.WORDS, *names], k=rng.randint(0, 6))
            self.check_argv(argv)
            lines = rng.choices(
                [*self.WORDS, *SETTINGS, ":", "\n", "  ", ","], k=rng.randint(1, 12)
            )
            self.check_file("".join(lines))

    def check_argv(self, argv: list[str]) -> None:
        try:
            config = resolve(parse(argv)).config
        except ConfigError:
            return
        self.check_round_trip(config)

    def check_file(self, text: str) -> None:
        Path("my.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
        self.check_argv(["--config", "my.yaml"])

    def check_round_trip(self, config: Config) -> None:
        entries = read_text(dump(config, {}))
        assert not any(entry.problem for entry in entries)
        again = {entry.key: None if entry.value == "auto" and SETTINGS[entry.key].has_auto
                 else entry.value for entry in entries}  # fmt: skip
        # WHY repr: a NaN inside of model_args does not equal itself
        assert repr(again) == repr(flatten(config))


def test_titles_do_not_depend_on_docstrings() -> None:
    code = "from hardened_ddp.settings.schema import TITLES; print(*TITLES.values(), sep='|')"
    command = [sys.executable, "-OO", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "|".join(TITLES.values())

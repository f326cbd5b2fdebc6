"""Settings written down: beside a run, in config.yaml, in --help; the other commands; anything."""

import itertools
import random
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from hardened_ddp.errors import ConfigError
from hardened_ddp.settings.cli import parse
from hardened_ddp.settings.commands import COMMANDS
from hardened_ddp.settings.config import Config
from hardened_ddp.settings.document import read_text
from hardened_ddp.settings.layers import resolve
from hardened_ddp.settings.manual import help_text, setting_texts
from hardened_ddp.settings.record import agreed_settings, dump, read_back
from hardened_ddp.settings.schema import SETTINGS, TITLES, assemble, flatten
from tests.documents import template
from tests.settings.given import PROJECT, settings_of


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
        path = PROJECT / "config.yaml"
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
    @pytest.mark.parametrize(
        ("words", "told"),
        [
            ("doctor --epochs 3", "--epochs: no such option of doctor; known: --cluster"),
            ("doctor now", "'now': unexpected behind doctor"),
            ("doctor --wait 5", "--wait: needs --cluster"),
            ("drill nan-once --faults nan", "--faults: needs -- COMMAND"),
            ("drill nan-once twice", "'twice': unexpected behind drill"),
            # all problems of a command come in one message
            ("export --format onnxx --ouput x", "(?s)--ouput: no .*RUN: is.*'onnxx', needs one"),
            ("trian", "'trian': no such command; did you mean train"),
            ("xyzzy", f"known: {', '.join(('train', *COMMANDS))}"),
        ],
    )
    def test_a_wrong_command_is_told(self, words: str, told: str) -> None:
        with pytest.raises(ConfigError, match=told):
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
        for name, word in itertools.product(SETTINGS, self.WORDS):
            self.check_argv([f"--{name}={word}"])
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
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True)
    assert done.stdout.strip() == "|".join(TITLES.values())

"""Settings that are refused: which, and in which words."""

import os
from pathlib import Path

import pytest

from hardened_ddp.errors import ConfigError
from hardened_ddp.settings.cli import parse
from hardened_ddp.settings.commands import COMMANDS
from hardened_ddp.settings.layers import resolve
from hardened_ddp.settings.manual import setting_texts
from hardened_ddp.settings.schema import SETTINGS
from hardened_ddp.settings.wording import OTHER_NAMES
from tests.marks import sections
from tests.settings.given import (
    make_run,
    problem_of,
    problems_in,
    problems_of,
    settings_of,
    values_of,
)

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
            assert values_of("--output_dir '" + place + "'")["output_dir"] == place
        given = values_of("--dataset m:f --dataset_args '{url: s3://b, test: s3://c}'")
        assert given["dataset_args"]["url"] == "s3://b"
        run = make_run("a")
        saved = run / "config.yaml"
        text = saved.read_text(encoding="utf-8")
        saved.write_text(text.replace("output_dir: runs", "output_dir: s3://bucket/runs"))
        assert "s3://" in saved.read_text(encoding="utf-8")
        assert settings_of("--resume runs/a").run_folder == run

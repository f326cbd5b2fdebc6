"""The installed command hardened-ddp: its words, and what a new user does with it."""

import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from hardened_ddp.errors import ConfigError
from hardened_ddp.ranks.launchers_env import command_words
from hardened_ddp.settings import typed_command
from hardened_ddp.settings.schema import SETTINGS
from hardened_ddp.settings.typed_command import own_command, pip_command
from hardened_ddp.settings.wording import TORCHRUN_OPTIONS, TORCHRUN_SWITCHES
from hardened_ddp_command import check_numbers, is_for_ranks, split_words, start_ranks
from tests.harness.processes import ROOT
from tests.harness.ranks import run_command
from tests.launcher_environments import environment_of


def test_torchruns_options_are_split_from_our_own() -> None:
    words = ["--nproc-per-node", "2", "--cpu_only", "--max_restarts=3", "--run_name", "a"]
    words += ["--standalone"]
    launcher = ["--nproc_per_node=2", "--max_restarts=3", "--standalone"]
    assert split_words(words) == (launcher, ["--cpu_only", "--run_name", "a"])
    audit = ["audit", "--", "torchrun", "--nproc_per_node", "2", "train.py"]
    assert split_words(audit) == ([], audit)
    with pytest.raises(ConfigError, match="nnodes: has no value"):
        split_words(["--nnodes"])


@pytest.mark.parametrize(
    ("words", "has_ranks"),
    [
        *((words, True) for words in ("", "--cpu_only", "evaluate runs/a", "doctor --cluster")),
        ("ddp_training.py --cpu_only", True),  # as launch.py writes it
        *((words, False) for words in ("doctor", "explain LOG", "--help")),
    ],
)
def test_ranks_are_started_for_what_ranks_can_do(words: str, has_ranks: bool) -> None:
    assert is_for_ranks(words.split()) is has_ranks


def test_torchrun_has_these_options_and_no_other_and_no_setting_has_the_name_of_one() -> None:
    from torch.distributed.run import get_args_parser

    # what a rank runs is ours; torch 2.15 completes the words of a shell
    left_out = {"help", "module", "no_python", "run_path", "print_completion"}
    names = {
        option.lstrip("-").replace("-", "_"): action.nargs == 0
        for action in get_args_parser()._actions
        for option in action.option_strings
        if option.startswith("--")
    }
    known = dict.fromkeys(TORCHRUN_OPTIONS, False) | dict.fromkeys(TORCHRUN_SWITCHES, True)
    assert known.items() >= {n: s for n, s in names.items() if n not in left_out}.items()
    assert not known.keys() & SETTINGS.keys()


@pytest.mark.parametrize(
    ("name", "value"),
    [("nproc_per_node", "two"), ("nproc_per_node", "0"), ("nnodes", "1:x"), ("master_port", "-1")],
)
def test_a_number_that_is_none_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"--{name}: found '{value}'"):
        check_numbers({name: value})


def test_a_value_of_torchruns_may_have_an_equals_sign() -> None:
    launcher, own = split_words(["--rdzv_conf", "timeout=900", "--nnodes=x"])
    with pytest.raises(ConfigError, match="--nnodes: found 'x'"):
        start_ranks(launcher, own, {})


def test_commands_are_written_as_the_program_was_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = tmp_path / "bin" / "hardened-ddp"
    command.parent.mkdir()
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(command), "--cpu_only"])
    assert own_command("explain", "a b") == f"{shlex.quote(str(command))} explain 'a b'"
    monkeypatch.setenv("PATH", str(command.parent))
    assert own_command("doctor") == "hardened-ddp doctor"
    words = command_words("torchrun", 4, env=environment_of("TORCHRUN"))
    assert words == (str(command), "--nproc_per_node=4")
    assert command_words("slurm", 2, env={})[-1] == str(command)
    monkeypatch.setattr(typed_command, "ROOT", tmp_path)  # without requirements files
    assert pip_command("requirements-extras.txt", "wandb").endswith("-m pip install wandb")


def test_the_doctors_own_distribution_has_all_of_its_packages_and_needs_nothing() -> None:
    folder = ROOT / "ddp_doctor"
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    found = {init.parent for init in folder.rglob("__init__.py")}
    names = {".".join(path.relative_to(ROOT).parts) for path in found if "build" not in path.parts}
    assert set(project["tool"]["setuptools"]["packages"]) == names
    assert "dependencies" not in project["project"]
    ours = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert ours["scripts"]["ddp-doctor"] == project["project"]["scripts"]["ddp-doctor"]
    assert not [name for name in ours["dependencies"] if "==" in name]
    assert "torch>=2.11" in ours["dependencies"]


@pytest.mark.slow
def test_what_a_new_user_does_works(tmp_path: Path) -> None:
    script = [ROOT / "tests" / "new_user.sh", tmp_path, sys.executable]
    run_command(script, timeout_s=120).ok()

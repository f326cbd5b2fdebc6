"""The stages: what each one runs, how a soak repeats a round, and what the first one must cover."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable

import pytest

from tests import stages
from tests.documents import promised
from tests.harness.processes import ROOT
from tests.harness.ranks import run_program
from tests.stages import run_stage, soak

# Slurm looks at time limits every 30 s only, and ten faults in a hundred steps take a minute.
NOT_AT_FIRST = ("A Slurm job that reaches its time limit", "Ten faults in a run of a hundred steps")


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ([], ["-m", "not slow"]),
        (["-k", "resume"], ["-m", "not slow", "-k", "resume"]),
        (["--all"], []),
        (["--all", "-x"], ["-x"]),
    ],
)
def test_a_stage_chooses_its_tests_and_passes_other_words_to_pytest(
    words: list[str], given: list[str], pytests_words: list[str]
) -> None:
    run_stage(words)
    where = pytests_words.index("--numprocesses")
    rest = [word for word in pytests_words if word not in pytests_words[where : where + 3]]
    assert rest == [*stages.CONFIGURED, *given, *stages.EVERYWHERE]
    assert "PYTHONDONTWRITEBYTECODE" not in os.environ
    pytests_words.clear()
    run_stage([*words, "tests/tools/test_stages.py"])  # a file that is named: its slow tests, too
    assert pytests_words == [*stages.CONFIGURED, *words, "tests/tools/test_stages.py"]


def test_a_soak_ends_by_time_or_with_the_seed_of_the_first_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stages, "_do_round", lambda seed: int(seed == 12))
    assert soak(["--seed", "10"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("failed after 2 good rounds")
    again = lines[-1].rpartition(": ")[2]
    assert again == "python test_ddp_training.py --soak --for 1s --seed 12"
    assert soak(shlex.split(again)[3:]) == 1
    assert "failed after 0 good rounds" in capsys.readouterr().out
    monkeypatch.setattr(stages, "_do_round", lambda seed: 0)
    assert soak(["--for", "0.01s"]) == 0

    def interrupt(seed: int) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(stages, "_do_round", interrupt)
    assert soak([]) == 0
    assert "0 rounds in 0 s, all good" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        soak(["--for", "long"])


@pytest.mark.slow
def test_the_first_stage_has_a_test_of_each_promise_and_a_soak_finds_its_own() -> None:
    argv = ["python", "-m", "pytest", *stages.CONFIGURED, "--collect-only", "-q"]
    done = run_program([*argv, "-m", "not slow", *stages.EVERYWHERE], timeout_s=60).ok()
    first = {re.sub(r"\[.*", "", line) for line in done.stdout.splitlines() if "::" in line}
    for promise, tests in promised().items():
        if not promise.startswith(NOT_AT_FIRST):
            assert first & set(tests), promise
    found = run_program([*argv, "--rounds=1", "--plans=1", *stages.SOAKED], timeout_s=60).ok()
    assert sum("::" in line for line in found.stdout.splitlines()) == len(stages.SOAKED)


@pytest.fixture
def pytests_words(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments that pytest was called with."""
    words: list[str] = []
    main: Callable[[list[str]], None] = words.extend
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # restored at the end; a stage removes it
    monkeypatch.setattr(pytest, "main", lambda argv: main(argv) or 0)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return words


@pytest.mark.slow
def test_the_tests_need_no_active_environment() -> None:
    """README's command starts them by the path of their Python, on a PATH that lacks it."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    words += ["tests/ranks/test_launcher_environments.py", "-k", "bad_environment"]
    env = {**os.environ, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout

"""The tools of the tests: stages, a soak, the hostile stage, and what takes things away."""

import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from unittest import mock

import psutil
import pytest

from tests import hostile, stages
from tests.documents import promised
from tests.harness.processes import ROOT, ask, is_alive, wait_until
from tests.harness.ranks import run_program, start_command
from tests.hostile import LONG, SHORT, run_hostile, shuffled
from tests.marks import sections
from tests.mutate import Mutation, noticed_by, read_mutations
from tests.stages import run_stage, soak

PROGRAMS = sections(Path(__file__).with_name("programs.txt"))
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
    monkeypatch.setattr(stages, "_do_round", mock.Mock(side_effect=KeyboardInterrupt))
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
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")  # restored at the end; a stage removes it
    monkeypatch.setattr(pytest, "main", lambda argv: words.extend(argv) or 0)
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


def test_the_order_is_random_and_keeps_together_what_must_be() -> None:
    tests = [f"{file}::{number}" for file in "abcdef" for number in range(10)]

    def group_of(test: str) -> str:
        return test.partition("::")[0]

    orders = [shuffled(tests, group_of, seed=seed) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    for order in orders:
        assert sorted(order) == sorted(tests)
        files = [group_of(test) for test in order]
        assert sum(a != b for a, b in itertools.pairwise(files)) == 5
        assert files != sorted(files)
        assert [test for test in order if group_of(test) == "a"] != tests[:10]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout whose tests show what they are given."""
    for words in (["init", "--quiet"], ["add", "--all"]):
        (tmp_path / "test_ddp_training.py").write_text(PROGRAMS["shows what it is given"])
        subprocess.run(["git", *words], cwd=tmp_path, check=True, timeout=60)
    monkeypatch.setattr(hostile, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("seed", [31, 0])
def test_the_tests_get_the_conditions_and_nothing_of_them_is_left(
    seed: int, checkout: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostile, "NUM_BUSY", 1)
    monkeypatch.setenv("COLUMNS", "99")
    monkeypatch.setenv("CI", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of the processes beside it
    before = psutil.pids()
    assert run_hostile(["--seed", str(seed), "-k", "two words"]) == 5
    lines = capfd.readouterr().out.splitlines()
    again = f"./launch_examples.sh test --hostile --seed {seed} -k 'two words'"
    assert lines[0] == f"hostile: {again}"
    assert f"is_long={bool(seed)}, is_narrow={bool(seed)}" in lines[1]
    assert lines[-1].startswith("hostile: failed in ")
    assert lines[-1].endswith(again)
    shown = dict(line.split("=", 1) for line in lines[2:-1] if "=" in line)
    assert len(shown["TMPDIR"]) == (LONG if seed else SHORT)
    assert (" " in shown["TMPDIR"]) == bool(seed)
    assert shown["COLUMNS"] == ("40" if seed else "None")
    assert shown["CI"] == ("true" if seed else "None")
    assert (shown["LANG"], shown["LC_ALL"], shown["USER"]) == ("C", "C", "None")
    assert shown["files"] == "[]"
    is_other = "who is not root and has no name" in lines[1]
    assert is_other == (shown["uid"] != str(os.geteuid()))
    assert not is_other or f":{shown['uid']}:" not in Path("/etc/passwd").read_text()
    assert f"words --shuffle={seed} -k two words" in lines
    assert not Path(shown["TMPDIR"]).exists()
    assert not Path(shown["HOME"]).parent.exists()
    assert not [pid for pid in set(psutil.pids()).difference(before) if is_beside(pid)]


def is_beside(pid: int) -> bool:
    return "tests.hostile" in " ".join(ask(pid, "cmdline") or ())


@pytest.mark.slow
def test_whatever_ends_it_ends_the_processes_beside_it() -> None:
    script = (
        "import contextlib, signal, sys\n"
        "from tests import hostile\n"
        "with contextlib.ExitStack() as stack:\n"
        "    pids = [stack.enter_context(hostile._helper(name)) for name in ('busy', 'ports')]\n"
        "    print(*pids, 'up', flush=True)\n"
        "    signal.pause()\n"
    )
    with start_command([sys.executable, "-c", script]) as command:
        command.wait_for(lambda: "up" in command.stdout, timeout_s=30, what="the processes")
        pids = [int(word) for word in command.stdout.split()[:2]]
        command.wait_for(lambda: all(map(is_beside, pids)), timeout_s=30, what="their start")
        command.kill()
        command.wait(timeout_s=30)
    wait_until(lambda: not any(map(is_alive, pids)), 30, "the end of both")


def test_each_mutation_stands_in_the_code_once() -> None:
    texts = ((m, m.path_in(ROOT).read_text(encoding="utf-8")) for m in read_mutations())
    assert not [mutation for mutation, text in texts if text.count(mutation.old) != 1]


@pytest.mark.slow
def test_what_nobody_notices_is_told_and_each_mutation_is_taken_back(tmp_path: Path) -> None:
    code = tmp_path / "hardened_ddp" / "parity.py"
    code.parent.mkdir()
    code.write_text("def is_odd(number):\n    return number % 2 == 1\n")
    test = (
        "from hardened_ddp.parity import is_odd\n\ndef test_three_is_odd():\n    assert is_odd(3)\n"
    )
    (tmp_path / "test_parity.py").write_text(test)

    def noticed(old: str, new: str) -> str | None:
        return noticed_by(tmp_path, Mutation("parity.py", "test_parity.py", old, new), quick=True)

    assert noticed("== 1", "== 0") == "test_parity.py::test_three_is_odd"
    assert noticed("number % 2 == 1", "number % 2") is None
    assert "return number % 2 == 1" in code.read_text()
    with pytest.raises(SystemExit, match="0 x"):
        noticed("is_even", "")

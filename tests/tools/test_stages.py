"""The tools of the tests: the harness, stages, a soak, hostile ones, and what takes things away."""

import itertools
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from unittest import mock

import psutil
import pytest

from tests import hostile, stages
from tests.documents import promised
from tests.harness import processes, ranks
from tests.harness.processes import ROOT, ask, is_alive, wait_until
from tests.harness.ranks import RankFailure, run_command, run_program, start_command
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


WAITS = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(1000)"]


def say_and_hang() -> None:
    print("ready")
    threading.Event().wait()


def fail_die_or_hang() -> str:
    print(f"this is rank {os.environ['RANK']}")
    match os.environ["RANK"]:
        case "1":
            raise ValueError("the odd one")
        case "2":
            os.kill(os.getpid(), signal.SIGKILL)
        case "3":
            sys.exit(7)
    return "survived"


def test_what_fails_is_named_with_its_end_traceback_and_output() -> None:
    with pytest.raises(RankFailure, match="rank 1, 2, 3 failed") as failure:
        ranks.run_ranks(fail_die_or_hang, 4, timeout_s=30)
    finished, text = failure.value.finished, str(failure.value)
    assert finished.statuses == (0, 1, -signal.SIGKILL, 7)
    assert finished.values == ("survived", None, None, None)
    for words in ("rank 1 ended with status 1", "ValueError: the odd one", "in fail_die_or_hang"):
        assert words in text
    assert "rank 2 ended with SIGKILL" in text
    assert "this is rank 1" in text
    assert "this is rank 0" not in text


def test_ranks_are_signalled_and_show_stacks_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    with ranks.start_ranks(say_and_hang, 2) as running:
        running.wait_for(lambda: "ready" in running.output(1), timeout_s=20, what="rank 1")
        running.kill(1, signal.SIGTERM)
        running.wait_for(lambda: running.living() == [0], timeout_s=20, what="the end of rank 1")
        monkeypatch.setattr(processes, "LEAST_S", 0.0)
        with pytest.raises(RankFailure, match=r"0\.6 s went by without a miracle") as failure:
            running.wait_for(lambda: False, timeout_s=0.2, what="a miracle")
        assert "in say_and_hang" in str(failure.value)
        assert running.wait(5).statuses == (-signal.SIGABRT, -signal.SIGTERM)


def leave_a_child() -> None:
    subprocess.Popen(WAITS, stdout=subprocess.DEVNULL, start_new_session=True)


@pytest.mark.slow
def test_a_test_that_leaves_something_fails_and_the_next_one_starts_clean(tmp_path: Path) -> None:
    (tmp_path / "test_leaving.py").write_text(PROGRAMS["leaves something"])
    argv = ["python", "-m", "pytest", "-p", "tests.leftovers", f"--rootdir={tmp_path}"]
    completed = run_command([*argv, "-W", "ignore", tmp_path], timeout_s=60)
    assert completed.status == 1, completed.output
    assert "3 passed, 1 error" in completed.stdout, completed.output
    told = ["environment variable LEFT_VARIABLE: was None, is '1'", "SIGUSR1: was"]
    told += [f"working folder: was {str(ROOT)!r}, is '/'", "thread 'left-thread' of pytest"]
    for words in (*told, "file /dev/shm/torch_", "rank still running: process "):
        assert words in completed.stdout
    # WHY a set: with CI=true pytest shows a failure twice.
    left = set(re.findall(r"process (\d+) \(parent .*import time; print\('up'", completed.stdout))
    assert len(left) == 2, "of the test, and of its rank"


def test_a_forked_program_has_its_own_modules_folder_and_output(tmp_path: Path) -> None:
    (tmp_path / "hardened_ddp.py").write_text("")
    (tmp_path / "script.py").write_text(
        "import os, sys, hardened_ddp\n"
        "sys.stdout.reconfigure(errors='strict')\n"  # raises if it is taken for a file
        "print(hardened_ddp.__file__, sys.argv[1], os.getcwd(), 'torch' in sys.modules)\n"
        "sys.exit('its last words')\n"
    )
    argv = ["python", "-u", tmp_path / "script.py", "word"]
    done = run_program(argv, timeout_s=30, cwd=tmp_path)
    assert done.stdout == f"{tmp_path / 'hardened_ddp.py'} word {tmp_path} True\n", done.output
    assert (done.stderr, done.status) == ("its last words\n", 1)


def test_a_held_port_is_for_those_who_are_told_it() -> None:
    port = ranks.held_port()
    with socket.socket() as other, pytest.raises(OSError, match="already in use"):
        other.bind(("127.0.0.1", port))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=10)
    for address in ("127.0.0.1", ""):  # again and again, as ranks that restart
        with socket.create_server((address, port)):
            socket.create_connection(("127.0.0.1", port), timeout=10).close()
    ranks.release_ports()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=10)


@pytest.mark.slow  # it starts a second fork server
def test_the_end_of_pytest_ends_the_server_and_its_ranks() -> None:
    script = (
        "import os, signal; from tests.harness import ranks; from tests.tools import test_stages;"
        "running = ranks.start_ranks(test_stages.say_and_hang, 1);"
        "keepers = [child.keeper for child in ranks.CHILDREN];"
        "print(*ranks.SERVER_PIDS, *keepers, *running.pids, flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    completed = run_command([sys.executable, "-c", script], timeout_s=60)
    pids = [int(word) for word in completed.stdout.split()]
    assert len(pids) == 3, completed.output
    wait_until(lambda: not any(map(is_alive, pids)), 10, "the end of all three")

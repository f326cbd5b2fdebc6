"""The stage --hostile: its conditions, its order, its place, and the end of all that it starts."""

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import hostile
from tests.harness.processes import ROOT, deadline, is_alive, list_pids, read_command_line
from tests.harness.ranks import start_command
from tests.hostile import LONG, SHORT, draw, run_hostile, shuffled

SHOWS = """
import os, sys
names = ("HOME", "TMPDIR", "LANG", "LC_ALL", "COLUMNS", "CI", "USER")
print(*(f"{name}={os.environ.get(name)}" for name in names), sep="\\n")
print(f"uid={os.geteuid()}", f"files={os.listdir(os.environ['HOME'])}", sep="\\n")
print("words", *sys.argv[1:], flush=True)
open(os.path.join(os.environ["TMPDIR"], "left"), "w").close()
sys.exit(5)
"""


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
        (tmp_path / "test_ddp_training.py").write_text(SHOWS)
        subprocess.run(["git", *words], cwd=tmp_path, check=True, timeout=60)
    monkeypatch.setattr(hostile, "ROOT", tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("seed", [27, 0])
def test_the_tests_get_the_conditions_and_nothing_of_them_is_left(
    seed: int, checkout: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostile, "NUM_BUSY", 1)
    monkeypatch.setenv("COLUMNS", "99")
    monkeypatch.setenv("CI", "1")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of the processes beside it
    before = list_pids()
    assert run_hostile(["--seed", str(seed), "-k", "two words"]) == 5
    lines = capfd.readouterr().out.splitlines()
    again = f"./launch_examples.sh test --hostile --seed {seed} -k 'two words'"
    assert lines[0] == f"hostile: {again}"
    assert f"TMPDIR of {LONG if seed else SHORT} characters" in lines[1]
    assert lines[-1].startswith("hostile: failed in ")
    assert lines[-1].endswith(again)
    shown = dict(line.split("=", 1) for line in lines[2:-1] if "=" in line)
    assert len(shown["TMPDIR"]) == (LONG if seed else SHORT)
    assert (" " in shown["TMPDIR"]) == bool(seed)
    assert shown["COLUMNS"] == ("40" if seed else "None")
    assert shown["CI"] == ("true" if seed else "None")
    assert (shown["LANG"], shown["LC_ALL"], shown["USER"]) == ("C", "C", "None")
    assert (shown["uid"], shown["files"]) == (str(os.geteuid()), "[]")
    assert f"words --shuffle={seed} -k two words" in lines
    assert not Path(shown["TMPDIR"]).exists()
    assert not Path(shown["HOME"]).parent.exists()
    assert not [pid for pid in list_pids() - before if "tests.hostile" in read_command_line(pid)]


@pytest.mark.slow
def test_another_user_is_not_root_and_has_no_name(checkout: Path) -> None:
    conditions = draw(4)
    with hostile._make_place(conditions) as place:
        words, note = hostile._find_user(place)
        if not words:
            pytest.skip(f"the tests stay {note}")
        argv = [*words, sys.executable, "-c", "import os, torch; print(os.geteuid(), os.umask(0))"]
        done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=300)
        uid = int(done.stdout.split()[0])
        assert f":{uid}:" not in Path("/etc/passwd").read_text()
        for folder in (place.home, place.temporary, place.checkout / "test_ddp_training.py"):
            assert folder.stat().st_uid == uid


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_whatever_ends_it_ends_the_processes_beside_it(number: int) -> None:
    script = (
        "import contextlib, signal, sys\n"
        "from tests import hostile\n"
        "signal.signal(signal.SIGTERM, hostile._leave)\n"
        "with contextlib.ExitStack() as stack:\n"
        "    pids = [stack.enter_context(hostile._helper(name)) for name in ('busy', 'ports')]\n"
        "    print(*pids, 'up', flush=True)\n"
        "    signal.pause()\n"
    )
    with start_command([sys.executable, "-c", script]) as command:
        command.wait_for(lambda: "up" in command.stdout, timeout_s=30, what="the processes")
        pids = [int(word) for word in command.stdout.split()[:2]]
        command.wait_for(
            lambda: all("tests.hostile" in read_command_line(pid) for pid in pids),
            timeout_s=30,
            what="their start",
        )
        command.kill(0, number)
        command.wait(timeout_s=30)
    end = deadline(30)
    while any(map(is_alive, pids)):
        assert time.monotonic() < end

"""The benchmark that counts the code of a step: what it takes for ours, and that it counts."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.step_trace import Watch
from tests.harness.ranks import run_program

CODE = """
import contextlib

class Part:
    default = (lambda: 1)()

    def do(self):
        with part():
            return sorted([self.one(x) for x in (2, 1)], key=lambda x: -x)

    def one(self, x):
        return x

@contextlib.contextmanager
def part():
    yield

def outer():
    def inner():
        return Part().do()
    return inner()

def not_called():
    pass
"""


def code_in(folder: Path) -> dict[str, Any]:
    """Load CODE as a file of this folder."""
    names: dict[str, Any] = {"__name__": "code"}
    exec(compile(CODE, str(folder / "package" / "code.py"), "exec"), names)
    return names


def seen(profile: Callable[..., None], watch: Watch, function: Callable[[], object]) -> set[str]:
    """Call the function under this profile, and name the functions that the watch has seen."""
    earlier = sys.getprofile()
    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(earlier)
    assert {file for file, _ in watch.seen} <= {"package/code.py"}
    return {name for _, name in watch.seen}


def test_lambdas_and_comprehensions_are_part_of_their_function(tmp_path: Path) -> None:
    watch = Watch(str(tmp_path))
    found = seen(watch, watch, code_in(tmp_path)["outer"])
    assert found == {"outer", "outer.<locals>.inner", "Part.do", "Part.one", "part"}
    watch = Watch(str(tmp_path))
    found = seen(watch.within(("Part.do",)), watch, code_in(tmp_path)["outer"])
    assert found == {"Part.do", "Part.one", "part"}


def test_code_of_others_and_of_a_module_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = tmp_path / "ours"
    monkeypatch.setattr(sys, "prefix", str(ours / ".venv"))
    watch = Watch(str(ours))
    for others in (tmp_path / "others", ours / ".venv"):
        assert seen(watch, watch, code_in(others)["outer"]) == set()
    assert seen(watch, watch, lambda: code_in(ours)) == {"Part"}  # the lambda of its body


@pytest.mark.slow
def test_it_counts_a_step_a_save_and_a_resume() -> None:
    done = run_program(["python", "benchmarks/step_path.py", "--verbose"], timeout_s=400).ok()
    figures = re.findall(r"^  (\w+) +(\d+) .* PASS$", done.stdout, re.MULTILINE)
    step = ["frames", "files", "functions"]
    assert [name for name, _ in figures] == [*step, *step, "save", "resume"], done.stdout
    assert all(int(count) > 0 for _, count in figures)
    for expected in ("ddp_training.py: fit", "checkpoint/disk.py", "training/run_folder.py"):
        assert expected in done.stdout

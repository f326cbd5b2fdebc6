"""ddp_doctor without the rest of the repository: what it needs, and what it knows of our runs."""

import shutil
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest

from ddp_doctor.explain.catalogue import CAUSES
from ddp_doctor.explain.catalogue.own import STEPS, TITLES
from ddp_doctor.explain.command import run_cause
from ddp_doctor.explain.run_folder import WAITS
from ddp_doctor.terminal import printable
from hardened_ddp import errors
from hardened_ddp.ranks.phase import FIRST_WAIT, Phase
from hardened_ddp.settings import wording
from tests.harness.processes import ROOT

LOG = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/me/train.py", line 31, in <module>
[rank1]:     loss.backward()
[rank1]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB.
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has ddp_doctor, and nothing else of the repository."""
    folder = tmp_path_factory.mktemp("alone")
    shutil.copytree(ROOT / "ddp_doctor", folder / "ddp_doctor")
    return folder


def run(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run it with the standard library only: -S leaves site-packages out."""
    argv = [sys.executable, "-S", "-m", "ddp_doctor", *words]
    how = {"capture_output": True, "text": True, "timeout": 60}
    return subprocess.run(argv, cwd=folder, env={"PATH": "/usr/bin:/bin"}, **how)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("explain job.log --json", '"memory-gpu"'),
        ("explain --cause graph-unused", "find_unused_parameters=True"),
        ("audit --source train.py", "no mistakes found"),
    ],
)
def test_it_works_alone_with_the_standard_library(words: str, told: str, alone: Path) -> None:
    (alone / "job.log").write_text(LOG)
    (alone / "train.py").write_text("import torch\n")
    done = run(alone, *words.split())
    assert done.returncode == 0, done.stderr
    assert told in done.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("explain", ""),
        ("explain --cause graph-unusd", "graph-unusd"),
        ("audit", "next: python -m ddp_doctor audit"),
        ("audit --source missing.py", "can't be read"),
        ("audit -- no-such-program train.py", "no-such-program can't be started"),
    ],
)
def test_a_mistake_is_one_message_and_status_2(words: str, told: str, alone: Path) -> None:
    done = run(alone, *words.split())
    assert done.returncode == 2
    assert done.stderr.startswith("ddp_doctor: error: ")
    assert told in done.stderr
    assert "next: " in done.stderr
    assert "Traceback" not in done.stderr


def test_it_knows_every_code_of_the_trainer_and_the_phases_in_which_a_rank_waits() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    ours = [cls for cls in classes if issubclass(cls, errors.HardenedError)]
    first = {cls.code: (cls.__doc__ or "").splitlines()[0].rstrip(".") for cls in ours}
    assert {code: text[0].lower() + text[1:] for code, text in first.items()} == TITLES
    assert {phase.label for phase in Phase if phase >= FIRST_WAIT} == WAITS


def test_text_that_steers_a_terminal_is_escaped_as_the_trainer_does() -> None:
    text = "".join(map(chr, range(0x2100))) + "a\r\nb"
    assert printable(text) == wording.printable(text)
    assert "\x1b" not in printable(text)


def test_every_cause_is_printed_in_full_by_its_code() -> None:
    for cause in CAUSES:
        output = StringIO()
        assert run_cause(cause.code, output=output) == 0
        words = " ".join(output.getvalue().split())
        steps = [text.removesuffix(":") for text, _ in STEPS.get(cause.code, ())]
        fixes = steps or (cause.fix, cause.lightning)
        parts = (cause.title, *fixes, cause.confirm, cause.or_else)
        assert [part for part in parts if " ".join(part.split()) not in words] == [], cause.code
        assert all(phrase in output.getvalue() for phrase in cause.phrases), cause.code

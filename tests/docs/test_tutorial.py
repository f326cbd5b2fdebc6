"""The tutorial: each break breaks as its chapter says, and each mend mends."""

import re
import shlex
from pathlib import Path

import pytest

from ddp_runs import replay as replaying
from ddp_runs.tools import run_tool
from hardened_ddp.settings.cli import parse
from tests.docs.test_docs import ELSEWHERE, typed_elsewhere
from tests.documents import commands_of, text_of
from tests.drills.forked import run_trainer_forked
from tests.harness.processes import ROOT
from tests.harness.ranks import import_in_server, run_program
from tests.marks import sections

SCRIPTS = sorted((ROOT / "examples" / "tutorial").glob("*.py"))
LAUNCH = "torchrun --standalone --nproc_per_node=2 examples/tutorial/"
OFF, OFF_7 = "largest difference from the weights of one process: ", "that of one big batch by "
MENDED_4 = "finished; the weights are "
TYPED = sections(Path(__file__).with_name("tutorial.txt"))
"""The commands of the chapters, script and flags, and what each prints, as its chapter says. One
that fails ends with !"""

TOLD_9 = TYPED.pop("the story of chapter 9").splitlines()
RUNS: dict[int, dict[str, list[str]]] = {}  # for each chapter the commands, and what each prints
for typed, lines in TYPED.items():
    RUNS.setdefault(int(typed[0]), {})[typed] = lines.splitlines()


def chapter_of(number: int) -> str:
    [path] = (ROOT / "docs" / "tutorial").glob(f"{number}_*.md")
    return str(path.relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize("number", RUNS)
def test_a_chapter_breaks_and_mends_as_it_says(number: int, tmp_path: Path) -> None:
    import_in_server("sklearn.datasets")
    chapter = text_of(chapter_of(number))
    weights, differences = [], []
    for typed, phrases in RUNS[number].items():
        script, *flags = typed.removesuffix(" !").split()
        launch = ["torchrun", "--standalone", "--nproc_per_node=2"] if number > 1 else ["python"]
        argv = [*launch, ROOT / "examples/tutorial" / script, *flags]
        done = run_program(argv, timeout_s=200, cwd=tmp_path)
        assert (done.status != 0) == typed.endswith("!"), done.output
        for phrase in phrases:
            assert phrase in done.output, done.output
            assert phrase in chapter or phrase.startswith(("8_hang.py", "rank 1 fails")), phrase
        weights += re.findall(rf"{MENDED_4}(\w+)", done.output)
        differences += [float(x) for x in re.findall(rf"(?:{OFF}|{OFF_7})(\S+)", done.output)]
    if number == 4:
        whole, broken, again, mended = weights
        assert whole == again == mended
        assert broken != whole
    if number in (3, 7):
        assert min(differences[:-1]) > 1e-3 or number == 7
        assert max(differences) > 0.1
        assert differences[-1] < 1e-5


@pytest.mark.slow
def test_the_story_of_chapter_9_happens_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import_in_server("sklearn.datasets")
    monkeypatch.setattr(replaying, "run_trainer", run_trainer_forked)
    said = ""
    for command in commands_of(chapter_of(9)):
        if command.startswith("torchrun"):
            argv = [*shlex.split(command), "--output_dir", tmp_path / "runs"]
            said += run_program(argv, timeout_s=150).ok().output
        else:
            _, _, *words = shlex.split(command.replace("runs/", f"{tmp_path}/runs/"))
            run_tool(parse(words))
            said += capsys.readouterr().out
    said = said.replace(f"{tmp_path}/", "").replace("python3 ", "python ")  # as pytest was started
    for phrase in TOLD_9:
        assert phrase in said, said
        assert phrase in text_of(chapter_of(9)), phrase


@pytest.mark.parametrize("number", [*RUNS, 9])
def test_a_chapter_shows_the_code_and_the_commands_that_there_are(number: int) -> None:
    path = chapter_of(number)
    [script] = [one for one in SCRIPTS if one.name.startswith(f"{number}_" if number < 9 else "s")]
    code = {line.strip() for line in script.read_text(encoding="utf-8").splitlines()}
    for block in re.findall(r"^```python\n(.*?)^```$", text_of(path), re.DOTALL | re.MULTILINE):
        for line in block.splitlines():
            assert line.strip() in code, line
    launch = "python examples/tutorial/" if number == 1 else LAUNCH
    run_here = {launch + typed.removesuffix(" !") for typed in RUNS.get(number, ())}
    told = set(commands_of(path))
    if number == 9:  # they are all run by the test above
        return
    assert run_here <= told
    for command in told - run_here:
        is_drill = command.startswith("python ddp_training.py drill ")
        assert is_drill or command in {*ELSEWHERE, *typed_elsewhere(), *README_COMMANDS}, command


README_COMMANDS = set(commands_of("README.md"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_short_and_uses_nothing_of_the_package(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= (40 if script.name.startswith("2_") else 80)
    assert "hardened_ddp" not in text

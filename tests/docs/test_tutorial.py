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

SCRIPTS = sorted((ROOT / "examples" / "tutorial").glob("*.py"))
LAUNCH = "torchrun --standalone --nproc_per_node=2 examples/tutorial/"


OFF, OFF_7 = "largest difference from the weights of one process: ", "that of one big batch by "
MENDED_4 = "finished; the weights are "
# The commands of the chapters, script and flags, and below each what it prints, as its chapter
# says. A command that fails ends with !
TYPED = f"""
1_single_process.py
    epoch 3: accuracy 9
2_plain_ddp.py
    epoch 3: accuracy 9
3_samples.py --break same
    1797 samples were used 2 times | {OFF}
3_samples.py --break padded
    1 samples were used 2 times | {OFF}
3_samples.py --break short
    1797 samples were used 1 times | {OFF}
3_samples.py
    1797 samples were used 1 times | {OFF}
4_kill_and_resume.py --break
    {MENDED_4}
4_kill_and_resume.py --break --kill !
    Signal 9 (SIGKILL) received
4_kill_and_resume.py --break --resume
    rank 0 continues at step 29 | {MENDED_4}
4_kill_and_resume.py
    {MENDED_4}
4_kill_and_resume.py --kill !
    Signal 9 (SIGKILL) received
4_kill_and_resume.py --resume
    rank 0 continues at step 40 | {MENDED_4}
5_one_rank_raises.py --break !
    rank 0 leaves out a batch: sample 777: the file is truncated | rank 1 fails after
    Timed out waiting 8000ms
5_one_rank_raises.py
    rank 0 leaves out a batch: sample 777 | finished
6_unused_parameters.py --break !
    fails in step 1: Expected to have finished reduction in the prior iteration
6_unused_parameters.py
    no gradient for old_head.weight | finished
7_out_of_memory.py --break memory !
    DefaultCPUAllocator: can't allocate memory
7_out_of_memory.py --break mean
    {OFF_7} | finished
7_out_of_memory.py
    {OFF_7} | rank 1 has no memory for 600 samples | finished
8_hang.py --break !
    rank 0 fails in step 20
8_hang.py !
    rank 0 fails in step 20 | 8_hang.py", line 53 in <module> | line 39 in read
"""
RUNS: dict[int, dict[str, list[str]]] = {}  # for each chapter the commands, and what each prints
for typed in re.split(r"\n(?! )", TYPED.strip()):
    command, *lines = map(str.strip, typed.splitlines())
    RUNS.setdefault(int(command[0]), {})[command] = " | ".join(lines).split(" | ")

TOLD_9 = (
    "by step 35: python ddp_training.py replay runs/spike --step 31",
    "loss > 5 holds first at step 19: recorded when it was done",
    "proved: step 19 without sample 777 does not lead to it",
    "20 steps equal bit for bit: samples, loss, all of the gradient",
    "float32 (64,), from 0 to 1000, mean 739.3",
    "step 19 left out sample 777",
    "they part at step 19: the same samples, of other bytes",
    "sample 777 differs",
)


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
    said = said.replace(f"{tmp_path}/", "")
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

"""The documents: what they name exists, and every command in them runs.

A command stands in a bash block, one a line. It is run here, or by the test that ELSEWHERE names.
What goes wrong here: a document is older than the code; python -m tests.documents writes it anew.
"""

import ast
import io
import re
import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ddp_drills.command import read_work, report
from ddp_drills.faults import find
from ddp_drills.runner import Drills
from docs.pictures.draw import PICTURES, ring
from hardened_ddp.errors import HardenedError
from hardened_ddp.settings.cli import parse
from hardened_ddp.settings.commands import COMMANDS
from hardened_ddp.settings.schema import SETTINGS
from hardened_ddp.settings.wording import TORCHRUN_OPTIONS, TORCHRUN_SWITCHES
from tests import documents
from tests.documents import DOCUMENTS, READING, README, TROUBLES, commands_of, table_rows, text_of
from tests.drills.forked import start_forked
from tests.harness.processes import ROOT
from tests.harness.ranks import run_command, run_program
from tests.launchers.test_launchers import PRESETS
from tests.launchers.test_run_with import INSPECT
from tests.launchers.test_run_with import LAUNCHERS as RUN_WITH
from tests.launchers.test_slurm import SBATCH, SRUN
from tests.marks import sections
from tests.run_folder import losses_of
from tests.tools.test_architecture import PRODUCT, nodes_of, parts_of

TYPED_TEST = "test_ddp_training.py::test_a_command_as_typed_trains_and_leaves_a_whole_run_folder"
# Commands that are not run here, and the test that does run them; test_ddp_training.py, too.
ELSEWHERE = {
    command: test.strip()
    for command, test in sections(Path(__file__).with_name("elsewhere.txt")).items()
}
LAUNCHED = {
    **dict.fromkeys(RUN_WITH, "run_with.py::test_every_launcher_ends_in_the_same_weights"),
    INSPECT: "run_with.py::test_to_inspect_shows_the_ranks_and_runs_no_script",
    SRUN: "slurm.py::test_srun_of_one_task_per_rank_ends_in_the_weights_of_torchrun",
    SBATCH: "slurm.py::test_a_job_at_its_time_limit_saves_and_is_queued_again_and_loses_nothing",
}
ELSEWHERE |= {command: f"tests/launchers/test_{test}" for command, test in LAUNCHED.items()}
# Run here, but not as they stand: what would take too long, or never ends, is shortened.
INSTEAD = {
    "./launch_examples.sh 1": "./launch_examples.sh 1 --dry-run",
    "tensorboard --logdir runs": "tensorboard --logdir runs --inspect",
    **{line: line.replace("0.1", "0") for line in commands_of(READING) if "pause_s: 0.1" in line},
}
# Commands of the script run on forked ranks, but for these: no other test starts them for real.
FOR_REAL = {"python ddp_training.py evaluate runs/first"}
FOR_REAL |= {line for line in commands_of(README) if " audit " in line}
# Commands that end with another status than 0, because the text says so.
STATUSES = {
    'grep -h "DDP-" runs/first/logs/*.log | grep -v "DDP-G04"': 1,  # a good run has none
    "torchrun --nproc_per_node=2 ddp_training.py --cpu_only --no_shared_memory --max_steps 5"
    " --model forgetful:Forgetful --find_unused_parameters off": 1,
}
TEST_OF_OTHER_RANKS = "test_any_number_of_ranks_goes_on_with_the_same_samples_in_each_step"
HOSTS = {"docs.pytorch.org", "docs.nvidia.com", "arxiv.org"}
"""Where links of the documents may lead to, besides files of this repository."""
OTHER_PROGRAMS = {"shm-size", "ipc", "cap-add", "pid", "logdir", "local_addr", "shutdown-timeout"}
OTHER_PROGRAMS |= {"local_rank", "shutdown_timeout"}  # of old launchers, and of a new torchrun
OTHER_PROGRAMS |= {"ntasks", "ntasks-per-node", "gpus-per-node", "partition", "nodes", "signal"}
OURS = {option.name for command in COMMANDS.values() for option in command.options}
OURS |= {"config", "no_config", "help", "version", "dry-run", "width"}  # width: of a benchmark
OURS |= {"all", "hostile", "soak", "for", "dev", "torch", "lint"}  # of the tests, and of setup.sh
OURS |= {"nesterov", "inspect", "nproc", "hosts", "break", "kill"}  # a recipe, launchers, tutorial


class TestErrorCodes:
    def test_every_code_has_its_section_with_symptom_cause_and_fix(self) -> None:
        found = re.split(r"^##+ ", text_of(TROUBLES), flags=re.MULTILINE)
        sections = [part for part in found if re.match(r"DDP-[A-Z]\d\d |[1-5]\. ", part)]
        codes = sorted(part[:7] for part in sections if part.startswith("DDP-"))
        assert codes == sorted(error.code for error in error_classes())
        assert len(sections) == len(codes) + 5
        for section in sections:
            parts = re.findall(r"^\*\*(Symptom|Cause|Fix)\b", section, re.MULTILINE)
            assert parts == ["Symptom", "Cause", "Fix"], section.splitlines()[0]

    def test_a_symptom_has_words_that_the_program_really_says(self) -> None:
        said = said_by_the_program()
        sections = re.split(r"^### ", text_of(TROUBLES), flags=re.MULTILINE)
        for section in sections:
            # WHY but two: of these the words are those of torch, or of the user's code.
            if section[:4] == "DDP-" and section[:7] not in ("DDP-S01", "DDP-S02"):
                symptom = section.partition("**Symptom.**")[2].partition("**Cause.**")[0]
                quotes = " ".join(re.findall(r"`([^`]+)`", symptom)).replace("\n", " ")
                parts = re.split(r"\.\.\.|\d+|'[^']*'|[\[\]:;(),]", quotes)
                words = [part.split() for part in parts]
                threes = [" ".join(w[i : i + 3]) for w in words for i in range(len(w) - 2)]
                assert any(three in said for three in threes), section.splitlines()[0]

    def test_status_and_retry_are_those_of_the_classes(self) -> None:
        rows = [row for row in table_rows(TROUBLES, cells=3) if row[-1].startswith("DDP-")]
        told = {code: row[:2] for row in rows for code in row[-1].split(", ")}
        assert told == {
            error.code: [str(error.exit_status), "yes" if error.is_retryable else "no"]
            for error in error_classes()
        }


class TestReadme:
    @pytest.mark.parametrize(
        ("document", "kind"),
        [(d, kind) for d, kinds in documents.GENERATED.items() for kind in kinds],
    )
    def test_a_generated_part_is_up_to_date(self, document: str, kind: str) -> None:
        old, new = text_of(document), documents.rendered(text_of(document), only=kind)
        assert f"<!-- {kind}" in old
        assert old == new, "write it anew with: python -m tests.documents"

    def test_a_promise_is_kept_and_a_command_is_run_by_a_test_that_exists(self) -> None:
        promises = documents.promised()
        assert len(promises) >= 10
        for promise, tests in promises.items():
            assert tests
            for test in tests:
                assert documents.has_function(test), f"{test} does not exist: {promise}"
        # they are run below
        assert set() < set(commands_of(documents.AUDIT)) <= set(commands_of(README))
        for test in (TYPED_TEST, *ELSEWHERE.values()):
            assert documents.has_function(test), test

    def test_a_drill_shows_what_the_table_of_faults_says_of_this_project(self) -> None:
        rows = table_rows(README, cells=7)[2:]
        assert len(rows) == len(documents.FAULTS)
        for row in rows:
            ours, name = row[-2], row[-1].strip("`")
            fault = find(name)
            if fault is None:
                assert documents.has_function(f"{name}::{TEST_OF_OTHER_RANKS}"), row
                continue
            assert (fault.ends == "continues") == ours.startswith("continues, nothing lost"), row
            assert fault.ends == "continues" or fault.keeps == "same weights", row
            assert not fault.leaves_out, row

    def test_a_preset_has_the_flags_that_the_table_says(self) -> None:
        rows = [row for row in table_rows(README) if re.fullmatch(r"`(\d+|test)`", row[0])]
        assert [row[0] for row in rows] == [f"`{n}`" for n in (*range(1, 11), "test")]
        for preset, _, flags in rows:
            command = PRESETS[preset.strip("`")]
            assert all(flag in command for flag in re.findall(r"--\w+", flags)), command


class TestPictures:
    @pytest.mark.parametrize("name", PICTURES)
    def test_a_picture_is_what_its_script_draws_today(self, name: str) -> None:
        drawn = PICTURES[name]()
        ElementTree.fromstring(drawn)
        old = (ROOT / "docs" / "pictures" / name).read_text(encoding="utf-8")
        assert old == drawn, "draw it anew with: python -m tests.documents"

    def test_the_ring_ends_with_the_sum_of_all_ranks_on_each(self) -> None:
        *_, before, last = ring()
        assert {part for row in last for part in row} == {"0123"}
        assert {part for row in before for part in row} != {"0123"}


def test_what_a_newcomer_reads_first_is_short_and_all_together_has_at_most_250_kb() -> None:
    assert len(text_of(README)) <= 16_000
    assert len(text_of(README).splitlines()) <= 280
    assert text_of(README).splitlines().index("## Your own model and data") < 80
    assert len(text_of(documents.CONTRIBUTING)) <= 10_000
    patterns = ("*.md", "docs/**/*.md", "benchmarks/**/*.md", "examples/**/*.md")
    pages = {page for pattern in patterns for page in ROOT.glob(pattern)}
    sizes = {str(page.relative_to(ROOT)): page.stat().st_size for page in pages}
    assert sum(sizes.values()) <= 250 * 1024, sorted(sizes.items(), key=lambda item: item[1])


class TestAllDocuments:
    @pytest.mark.parametrize("document", DOCUMENTS)
    def test_a_link_leads_somewhere(self, document: str) -> None:
        for target in re.findall(r"\]\(([^)]+)\)", documents.prose_of(document)):
            name, _, anchor = target.partition("#")
            path = (ROOT / document).parent / name if name else ROOT / document
            if name.startswith("https:"):
                continue
            assert path.exists(), target
            if anchor:
                assert anchor in documents.anchors_of(path.read_text(encoding="utf-8")), target

    @pytest.mark.parametrize("document", DOCUMENTS)
    def test_a_file_that_is_named_exists(self, document: str) -> None:
        made_by_a_run = {"manifest.json", "summary.json", "best.json", "my.yaml"}
        made_by_a_run |= {"verdict.txt", "rank_1.txt", "rank_1_worker_4711.txt"}
        for name in re.findall(
            r"`((?:[\w.]+/)*[\w.]+\.(?:py|sh|yaml|txt|md))`", documents.prose_of(document)
        ):
            is_made = name in made_by_a_run or f"Save this as `{name}`" in text_of(document)
            places = (ROOT / name, ROOT / "hardened_ddp" / name)
            assert is_made or any(place.exists() for place in places), name

    @pytest.mark.parametrize("document", DOCUMENTS)
    def test_a_flag_that_is_named_exists(self, document: str) -> None:
        torchrun = {*TORCHRUN_OPTIONS, *TORCHRUN_SWITCHES}
        known = {*SETTINGS, *(f"no_{name}" for name in SETTINGS), *OURS, *OTHER_PROGRAMS, *torchrun}
        words = documents.prose_of(document) + "\n".join(commands_of(document))
        for flag in re.findall(r"(?<![\w-])--([a-z][\w-]*)", words):
            assert flag in known, flag

    @pytest.mark.parametrize("document", DOCUMENTS)
    def test_a_document_is_plain_and_belongs_to_no_machine(self, document: str) -> None:
        text = text_of(document)
        assert text.isascii()
        hosts = set(re.findall(r"https?://([^/)\s]+)", text))
        assert hosts <= HOSTS, "a link to a page that nobody here reads"
        assert not re.search(r"/(?:work|home|root|tmp)/|pypi|index-url", text)
        assert not re.search(r"#\d{3,}", text), "an issue's number says nothing to a reader"
        lines = [
            line for line in documents.prose_of(document).splitlines() if not line.startswith("|")
        ]
        assert not [line for line in lines if len(line) > 100 and "](http" not in line]


class TestCommands:
    @pytest.mark.slow
    @pytest.mark.timeout(1200)  # some thirty commands, each with a limit of its own
    @pytest.mark.parametrize(
        "document", [README, documents.MANUAL, TROUBLES, documents.OWN_TRAINING]
    )
    def test_the_commands_of_a_document_run_in_their_order(
        self, document: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_examples(document, tmp_path, monkeypatch)
        if document in (TROUBLES, documents.MANUAL):  # they speak of a run that there is already
            run_documented("python ddp_training.py --run_name first", tmp_path, max_steps=1)
        elsewhere = {*typed_elsewhere(), *ELSEWHERE}
        elsewhere |= set() if document == README else set(commands_of(README))
        for index, command in enumerate(commands_of(document)):
            if command not in elsewhere:
                # WHY more each time: a command that continues a run must find something to do
                learns = document == README and "--model_args" in command
                said = run_documented(command, tmp_path, max_steps=0 if learns else 2 + index)
                accuracies = re.findall(r"test accuracy ([\d.]+)%", said) if learns else ["100"]
                assert float(accuracies[-1]) > 97

    @pytest.mark.slow
    def test_the_exercises_come_out_as_their_answers_say(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        write_examples(READING, tmp_path, monkeypatch)
        outputs = [run_documented(line, tmp_path, max_steps=0) for line in commands_of(READING)]
        ours, torchs, _, _, _, _, _, sums, auto, off, _, resumed = outputs
        shares = ast.literal_eval(ours)
        assert [len(share) for share in shares] == [5, 3, 2]
        assert sorted(sample for share in shares for sample in share) == list(range(10))
        assert sum(len(share) for share in ast.literal_eval(torchs)) == 12
        runs = [tmp_path / "runs" / name for name in ("one", "two", "four")]
        losses = [[*losses_of(run).values()] for run in runs]
        assert len(losses[0]) == 60
        for other in losses[1:]:
            assert other == pytest.approx(losses[0], rel=1e-5)
        assert len({line.split()[0] for line in sums.splitlines()}) == 1
        for real_ddp in (outputs[3], auto):
            assert "gradients summed by DDP during backward" in real_ddp
        assert "spare.weight" in auto
        assert "find_unused_parameters: on" in auto
        assert "DDP-M02" in off
        assert "passed over" in resumed
        assert "sha256" in resumed


def error_classes() -> list[type[HardenedError]]:
    """List HardenedError and all classes below it."""
    found = [HardenedError]
    for error in found:  # WHY while it grows: classes below classes
        found += error.__subclasses__()
    return found


def said_by_the_program() -> str:
    """Give all texts in the program, with a line break where a value is filled in."""
    others = ("ddp_doctor", "ddp_runs", "ddp_drills")
    trees = [tree for name, tree, _ in map(parts_of, PRODUCT) if not name.startswith(others)]
    nodes = [node for tree in trees for node in nodes_of(tree)]
    texts = [node.value for node in nodes if isinstance(node, ast.Constant)]
    return "\n".join(text for text in texts if isinstance(text, str))


def typed_elsewhere() -> set[str]:
    """Give the commands that test_ddp_training.py runs as they are typed."""
    from test_ddp_training import TYPED, TYPED_WITH_OTHER_FLAGS

    return {TYPED, *TYPED_WITH_OTHER_FLAGS}


def write_examples(document: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Save the document's Python files as it tells its reader to."""
    pattern = r"Save this as `(\w+\.py)`.*?```python\n(.*?)^```$"
    for name, code in re.findall(pattern, text_of(document), re.DOTALL | re.MULTILINE):
        (folder / name).write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))


def run_documented(command: str, folder: Path, *, max_steps: int) -> str:
    """Run a command as a reader would, in folder; a training for max_steps unless that is 0.

    Returns what it printed: of the script stderr too.
    """
    status, is_forked = STATUSES.get(command, 0), command not in FOR_REAL
    command = INSTEAD.get(command, command)
    words = command.split()
    if words[1:3] == ["ddp_training.py", "drill"] and words[3:]:
        return run_drill(words[3:], folder / "drills")
    is_script = "ddp_training.py" in words and is_forked
    if is_script and max_steps and not {*COMMANDS, "--help"} & {*words}:
        command += f" --max_steps {max_steps}"
        if words[0] == "torchrun" and "--num_workers" not in words:
            command += " --num_workers 0"  # WHY: the workers of each rank import torch anew
    command = command.replace("launchers/", f"{ROOT}/launchers/")
    for name in ("ddp_training.py", "launch_examples.sh", "setup.sh"):
        command = re.sub(rf"(\./)?\b{re.escape(name)}", str(ROOT / name), command)
    env = {"PYTHONPATH": str(ROOT)}
    if words[0] in ("python", "torchrun") and is_forked and not re.search(r"[|;&<>$*]", command):
        done = run_program(shlex.split(command), timeout_s=150, cwd=folder, env=env)
    else:
        done = run_command(["bash", "-c", command], timeout_s=150, cwd=folder, env=env)
    assert done.status == status, f"{command}\n{done.output}"
    # WHY: torchrun shows its own for a rank that fails
    assert status or "Traceback" not in done.output, f"{command}\n{done.output}"
    return done.output if is_script else done.stdout


def run_drill(words: list[str], folder: Path) -> str:
    """Run a drill on forked ranks; test_drills.py starts real ones by such a command."""
    fault, output = find(words[0]), io.StringIO()
    assert fault is not None, words
    drills = Drills(read_work(parse(["drill", *words]), 2), folder, start_forked)
    [verdict] = report(drills, [fault], output)
    assert verdict.passed, f"{output.getvalue()}{drills.output_of(fault)}"
    return output.getvalue()

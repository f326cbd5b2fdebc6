"""audit --source: planted mistakes are found on their line, and good programs are left in peace.

The sources are in sources.txt, after what all begin with: `=== mistake: code`, `=== healthy: name`.
What is planted stands before the comment `# here`.
"""

import importlib.util
import json
import os
from pathlib import Path

import pytest

import ddp_training
from ddp_doctor.audit.origins import drops_padding
from ddp_doctor.audit.source_rules import RULES, Script, read_script
from ddp_doctor.audit.verdict import Verdict, as_json
from tests.harness.ranks import run_command
from tests.marks import sections

SOURCES = Path(__file__).with_name("sources.txt")
HEAD = SOURCES.read_text(encoding="utf-8").partition("=== ")[0]
TITLED = [(*title.split(": ", 1), text) for title, text in sections(SOURCES).items()]
MISTAKES = {name: text for kind, name, text in TITLED if kind == "mistake"}
HEALTHY = {name: text for kind, name, text in TITLED if kind == "healthy"}


def read(folder: Path, source: str) -> tuple[list[Verdict], int]:
    """Read a source behind HEAD; give the verdicts and the planted line, 0 without one."""
    text = HEAD + source
    path = folder / "train.py"
    path.write_text(text)
    lines = [i for i, line in enumerate(text.splitlines(), start=1) if "# here" in line]
    return read_script(Script(path)), lines[0] if lines else 0


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_found_on_its_line(name: str, tmp_path: Path) -> None:
    verdicts, line = read(tmp_path, MISTAKES[name])
    assert [(v.code, v.line) for v in verdicts] == [(name.split()[0], line)]
    assert all(verdict.is_mistake and verdict.evidence for verdict in verdicts)


def test_each_rule_has_a_planted_mistake_and_none_accuses_our_own_programs() -> None:
    assert {name.split()[0] for name in MISTAKES} == {code for code, _ in RULES}
    root = Path(ddp_training.__file__).parent
    own = [root / "ddp_training.py", *(root / "examples").rglob("*.py")]
    assert [v.place for path in own for v in read_script(Script(path))] == []


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_source_is_not_accused(name: str, tmp_path: Path) -> None:
    verdicts, _ = read(tmp_path, HEALTHY[name])
    assert verdicts == []


@pytest.mark.parametrize("line", ["p[:101]", "p[:len(d)]", "all_p[i] = p", "np.unique(i)"])
def test_gathered_results_cut_or_put_by_index_count_none_twice(line: str, tmp_path: Path) -> None:
    text = "all_p[i] = p[:50]\ndist.all_gather(p, q)\nall_p['x'] = p[:-1]\nh[epoch] = p\n"
    for number, whole in enumerate([text, text + line]):
        (path := tmp_path / f"train_{number}.py").write_text(whole)
        assert drops_padding(f"{path}:2", 101) is bool(number)
    (path := tmp_path / "epoch.py").write_text("def f(p, q, n):\n    p[:n]\n    gather(p, q)\n")
    assert not drops_padding(f"{path}:3", 101)


@pytest.mark.slow
@pytest.mark.parametrize("package", ["torch", "accelerate", "lightning", "transformers"])
def test_programs_of_the_frameworks_are_not_accused(package: str) -> None:
    """Their own scripts and tests for several ranks, as they are installed here."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"{package} is not installed")
    found, num_read = [], 0
    for path in sorted(Path(spec.origin).parent.rglob("*.py")):
        text = path.read_text(encoding="utf-8", errors="replace")
        if "DistributedDataParallel" in text or "init_process_group" in text:
            num_read += 1
            found += read_script(Script(path))
    # torch's test of monitored_barrier plants this one itself
    found = [v for v in found if "monitored_barrier" not in v.evidence[0]]
    assert num_read > 0
    assert [f"{v.place} {v.code}" for v in found] == []


def test_the_command_exits_with_1_and_prints_json(tmp_path: Path) -> None:
    _, line = read(tmp_path, MISTAKES["same-file"])
    script = tmp_path / "train.py"
    done = run_command(
        ["python", "ddp_training.py", "audit", "--source", script, "--json"], timeout_s=20
    )
    assert done.status == 1, done.output
    report = json.loads(done.stdout)
    assert set(report) == {"verdicts", "healthy"}
    assert report["healthy"] is False
    [verdict] = report["verdicts"]
    assert set(verdict) == {"code", "severity", "sentence", "file", "line", "seen_at", "evidence"}
    assert (verdict["file"], verdict["line"]) == (str(script), line)


@pytest.mark.parametrize("content", [b"def f(:\n", os.urandom(4096)])
def test_what_is_no_python_gives_one_error(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "train.py"
    path.write_bytes(content)
    assert ddp_training.main(["audit", "--source", str(path)]) == 2
    error = capsys.readouterr().err
    assert "no Python" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("place", ["", "model.py", "<string>:?"])
def test_a_place_without_a_line_number_is_written_as_line_0(place: str) -> None:
    verdict = Verdict("gradients-not-averaged", "s", place=place)
    [row] = json.loads(as_json([verdict]))["verdicts"]
    assert row["line"] == 0

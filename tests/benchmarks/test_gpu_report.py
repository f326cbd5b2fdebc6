"""The report of a machine with a GPU: its harness works, tried small on the CPU."""

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_report
from benchmarks.gpu import checks, meter, row, runs, speed, works
from tests.harness.ranks import run_program

CPU = torch.device("cpu")


@pytest.mark.parametrize("check", checks.CHECKS, ids=lambda check: check.__name__)
def test_each_check_runs_on_the_cpu(check: object) -> None:
    assert callable(check)
    check(CPU)


def test_a_part_replaces_its_own_section_and_keeps_the_others(tmp_path: Path) -> None:
    file = tmp_path / "GPU.md"
    about = {"gpu": "H100", "versions": "torch 2.13", "commit": "1", "date": "d", "took": "1 s"}
    good, bad = row.Row("a|b", "1.2 x", row.PASS), row.Row("c", "", row.MISS, "Traceback")
    for name, rows in (("life", [good]), ("tests", [bad]), ("life", [bad, good])):
        text = gpu_report.section(name, f"Title of {name}", rows, about, dry=False)
        gpu_report.write_section(file, name, text)
    written = file.read_text(encoding="utf-8")
    assert written.count("## Title of life") == written.count("## Title of tests") == 1
    assert written.index("tests") < written.index("life")
    assert "| a\\|b | 1.2 x | PASS |" in written
    assert "`python benchmarks/gpu_report.py --part life`, H100, torch 2.13" in written
    assert "```text\nTraceback\n```" in written


def test_ratios_are_taken_within_a_round() -> None:
    def round_of(ours: float, bare: float) -> dict[str, speed.Figures]:
        others = {"peak_mib": 1.0, "waits": 1.0, "kernels": 5.0, "first_step_s": 1.0}
        return {
            speed.OURS: {"samples_per_s": ours, **others, "kernels": 7.0},
            speed.BARE: {"samples_per_s": bare, **others},
        }

    rounds = [round_of(10, 10), round_of(4, 5), round_of(30, 20)]
    rows = speed.rows_of("mlp", rounds, bar=1.01)
    assert rows[0].found.startswith("1.000 x")
    assert [r.verdict for r in rows] == [row.MISS, row.PASS, row.PASS, "", ""]
    assert rows[3].found.startswith("+2")
    assert speed.rows_of("mlp", [], bar=1.0)[0].verdict == row.OPEN


def test_the_driver_knows_the_sizes_of_the_works() -> None:
    for small, steps, batches in (
        (False, speed.STEPS, speed.BATCHES),
        (True, dict.fromkeys(works.SMALL, speed.SMALL_STEPS), speed.SMALL_BATCHES),
    ):
        sizes = works.sizes(small)
        assert {name: size.steps for name, size in sizes.items()} == steps
        assert {name: size.batch_size for name, size in sizes.items()} == batches
    assert (meter.WARM_UP, meter.PROFILED) == (speed.WARM_UP, speed.PROFILED)
    with torch.device("meta"):
        gpt = works.model("gpt", small=False)
    num_parameters = sum(parameter.numel() for parameter in gpt.parameters())
    assert num_parameters == pytest.approx(124e6, rel=0.01)


def test_each_test_that_pytest_names_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def say(command: Sequence[str], **_: object) -> row.Done:
        name = command[-1]
        said = f"{name}::test_a PASSED [ 50%]\n{name}::test_b[x y] FAILED [100%]\n"
        return row.Done(1, said) if "pytest" in command else row.Done(0, "PASS\ta check\t1\n")

    monkeypatch.setattr(runs, "run", say)
    _, *found, whole = runs.first_tests(dry=False, ends_at=0.0)
    assert [(one.what, one.verdict) for one in found] == [
        ("test_a", row.PASS),
        ("test_b[x y]", row.MISS),
    ]
    assert (whole.what, whole.verdict) == ("tests/step/test_gpu.py", row.MISS)


def test_a_command_that_hangs_is_killed_with_its_children() -> None:
    done = row.run(["bash", "-c", "echo begun; sleep 1000 & wait"], limit_s=1.0)
    assert done.status == row.TIMED_OUT
    assert "begun" in done.output
    assert row.run(["no-such-program"], limit_s=1.0).status == 127


def test_a_part_that_raises_is_missed_and_what_it_had_found_stays() -> None:
    def rows() -> Iterator[row.Row]:
        yield row.Row("a", "1", row.PASS)
        raise ZeroDivisionError("of the report")

    found = list(row.guarded("a part", rows))
    assert [(one.what, one.verdict) for one in found] == [("a", row.PASS), ("a part", row.MISS)]
    assert "ZeroDivisionError: of the report" in found[1].details


@pytest.mark.slow
def test_without_a_gpu_it_says_so_and_a_dry_run_needs_a_file() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = run_program(["python", "benchmarks/gpu_report.py", "--part", "life"], timeout_s=60)
    assert done.status == 2
    assert "no GPU" in done.stdout
    done = run_program(["python", "benchmarks/gpu_report.py", "--dry-run"], timeout_s=60)
    assert done.status == 2
    assert "--output" in done.stderr


@pytest.mark.slow
def test_a_dry_run_of_all_parts_finds_all_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its commands are forked here, which saves each of them the import of torch."""

    def run_in_fork(
        command: Sequence[str | Path],
        *,
        limit_s: float,
        env: Mapping[str, str] | None = None,
        cwd: Path = row.ROOT,
    ) -> row.Done:
        if command[0] != "python":
            return row.run(command, limit_s=limit_s, env=env, cwd=cwd)
        done = run_program(command, timeout_s=limit_s, env=env, cwd=cwd)
        return row.Done(done.status, done.output)

    for module in (gpu_report, runs, speed):
        monkeypatch.setattr(module, "run", run_in_fork)
    file = tmp_path / "GPU.md"
    monkeypatch.setattr(sys, "argv", ["gpu_report.py", "--dry-run", "--output", str(file)])
    status = gpu_report.main()
    written = file.read_text(encoding="utf-8")
    sections = dict(re.findall(r"<!-- part (\S+) -->\n(.*?)<!-- end -->", written, re.DOTALL))
    assert list(sections) == list(gpu_report.PARTS)
    for name, section in sections.items():
        assert "dry run" in section
        if name.startswith("speed"):  # whether a bar is met on this CPU says nothing
            assert "not measured" not in section
            assert "failed" not in section
        else:
            assert row.MISS not in section, section
    assert status == int(row.MISS in written)
    assert f"life: {gpu_report.PARTS['life'][0]}" in capsys.readouterr().out

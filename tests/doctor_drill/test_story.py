"""What the records of drilled processes mean, and what is read from the command line and files."""

import io
import itertools
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_doctor.drill import command, isolation
from ddp_doctor.drill.command import COLUMNS, row_of, run_drill, sentences, with_ranks
from ddp_doctor.drill.outcome import checkpoints_of, is_whole
from ddp_doctor.drill.runs import Case, Plan
from ddp_doctor.drill.story import parts_of, samples_of, uses_of
from ddp_doctor.terminal import UsageError

Records = list[dict[str, Any]]
NAMES = ("faults", "step", "rank", "again", "also", "repeat", "hang_after", "copy", "html")
OPTIONS = dict.fromkeys(NAMES, "") | {"usage": "drill --help", "json": "true"}


def case_of(folder: Path, *starts: dict[int, Records], status: int = 1) -> Case:
    """Write the records of starts, by rank, as the processes do."""
    work = folder / "work"
    case = Case(Plan([str(folder)], work, {}, hang_after_s=1, rank=1, step=1), "case")
    for number, ranks in enumerate(starts):
        for rank, records in ranks.items():
            write_records(case, rank, records, world=len(ranks))
        case.starts.append({"status": status if number == 0 else 0})
    return case


def write_records(
    case: Case, rank: int, records: Records, *, world: int = 2, at_s: float = 0
) -> None:
    """Write what a rank of the next start tells; world 0: it has no process group."""
    number, group = len(case.starts), {"k": "group", "rank": rank, "world": world}
    lines = [
        r | {"t": number + at_s + i / 1e3} for i, r in enumerate([group] * (world > 0) + records)
    ]
    path = case.home / f"records{number}/p{rank + 1}.jsonl"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def life(*weights: str, uses: dict[int, list[int]] | None = None) -> Records:
    """Give the records of a process that went through these weights."""
    records: Records = []
    for number, weight in enumerate(weights[1:], start=1):
        records += [{"k": "use", "n": number, "names": (uses or {}).get(number, [number])}]
        before = {"the weights": weights[number - 1]}
        records += [{"k": "update", "n": number, "o": 0, "w": weight, "before": before}]
    return records


CLAMPED = life("a", "b", "c", "d")
CLAMPED[-1]["before"] = {"the weights": "c within limits"}


@pytest.mark.parametrize(
    ("first", "second", "total", "base", "how"),
    [
        (life("a", "b", "c", "d"), life("c", "x", "y"), 4, 2, "weights"),  # whatever its steps
        (life("a", "a", "a", "b"), life("a", "a", "b", "c"), 4, 1, "weights"),  # learning rate 0
        (CLAMPED, life("c within limits", "x"), 9, 2, "weights"),  # changed between two steps
        (life("a", "b", "c"), life("z", "y", "x"), 3, 1, "number of steps"),
        (life("a", "b"), [], 3, None, "no step"),
    ],
)
def test_a_start_continued_where_its_first_weights_were(
    first: Records, second: Records, total: int, base: int | None, how: str, tmp_path: Path
) -> None:
    parts = parts_of(case_of(tmp_path, {0: first}, {0: second}), total)
    assert [(part.base, part.how) for part in parts] == [(0, "weights"), (base, how)]


def test_a_start_on_one_rank_without_a_process_group_goes_on_where_it_began(tmp_path: Path) -> None:
    case = case_of(tmp_path, {0: life("a", "b", "c"), 1: life("a", "b", "c")})
    write_records(case, 0, life("c", "d"), world=0)
    case.starts.append({"status": 0})
    parts = parts_of(case, 3)
    assert [(part.base, part.end) for part in parts] == [(0, 2), (2, 3)]
    assert samples_of(uses_of(case, parts)) == {1: 3, 2: 2}


def test_a_check_before_and_an_evaluation_after_training_are_no_lives(tmp_path: Path) -> None:
    rest = {0: life("b", "c", uses={1: [2]}), 1: life("b", "c", uses={1: [2]})}
    case = case_of(tmp_path, {0: life("a", "b", "c"), 1: life("a", "b", "c")}, rest)
    for start, rank, place in itertools.product((0, 1), (0, 1), (-0.5, 0.5)):
        told = {"k": "group", "rank": rank, "world": 2, "t": start + place}
        path = case.home / f"records{start}/p{rank + 3 + int(2 * place)}7.jsonl"
        path.write_text(json.dumps(told) + "\n")
    parts = parts_of(case, 2)
    assert [(part.base, part.how) for part in parts] == [(0, "weights"), (1, "weights")]
    assert samples_of(uses_of(case, parts)) == {1: 2, 2: 2}
    shutil.copy(case.home / "records1/p1.jsonl", case.home / "records0/p5.jsonl")
    case.starts[0] |= {"status": 0, "why": ""}
    ranks = [process for process in case.processes() if process.rank is not None][:2]
    with pytest.raises(UsageError, match="several processes"):
        command.check_observed(case, ranks, ["./run.sh"])


def test_samples_count_if_a_rank_ended_their_step_and_once_if_done_again(tmp_path: Path) -> None:
    first, second = life("a", "b", "c", "d"), life("a", "b", "c", "d")
    dead = [*life("a", "b", "c"), {"k": "use", "n": 3, "names": [33]}]
    case = case_of(tmp_path, {0: first, 1: dead}, {0: life("d", "e"), 1: life("d", "e")})
    parts = parts_of(case, 4)
    uses = uses_of(case, parts)
    assert (1, 3) in uses, "rank 1 died in step 3, which rank 0 ended"
    assert [record["names"] for record in uses[1, 3][1]] == [[33]]
    case = case_of(tmp_path / "2", {0: first, 1: second}, {0: life("c", "d"), 1: life("c", "d")})
    assert sorted(uses_of(case, parts_of(case, 3))) == [(r, s) for r in (0, 1) for s in (1, 2, 3)]


def test_samples_are_counted_over_all_ranks_if_all_are_known(tmp_path: Path) -> None:
    shared = {0: life("a", "b", "c"), 1: life("a", "b", "c", uses={1: [8], 2: [1]})}
    case = case_of(tmp_path, shared)
    assert samples_of(uses_of(case, parts_of(case, 2))) == {1: 2, 2: 1, 8: 1}
    case = case_of(tmp_path / "2", {0: [r for r in life("a", "b", "c") if r["k"] != "use"]})
    assert samples_of(uses_of(case, parts_of(case, 2))) is None, "they are unknown"
    assert samples_of({}) is None


def test_a_file_that_was_cut_is_seen_by_its_own_format(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w") as archive:
        archive.writestr("data/0", os.urandom(5000))
    header = json.dumps({"w": {"dtype": "U8", "shape": [100], "data_offsets": [0, 100]}}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(100)
    (tmp_path / "a.safetensors").write_bytes(content)
    (tmp_path / "a.bin").write_bytes(b"of nobody's format")
    for name, was, now in (("pt", True, False), ("safetensors", True, False), ("bin", None, None)):
        path = tmp_path / f"a.{name}"
        assert is_whole(path) is was
        os.truncate(path, path.stat().st_size // 2)
        assert is_whole(path) is now
    for content in (b"\xff" * 100, b"\0" * 6 + b"\xff\x0f{}", b"\2" + b"\0" * 7 + b"[]"):
        (tmp_path / "a.safetensors").write_bytes(content)
        assert is_whole(tmp_path / "a.safetensors") is False


def test_a_file_of_several_parts_that_was_cut_behind_one_of_them_is_broken(tmp_path: Path) -> None:
    for _ in range(2):  # as torch.distributed.checkpoint writes them
        torch.save(torch.zeros(300), part := io.BytesIO())
        with (path := tmp_path / "0_0.distcp").open("ab") as file:
            file.write(part.getvalue())
    assert is_whole(path) is True
    os.truncate(path, path.stat().st_size * 2 // 3)
    assert is_whole(path) is False


@pytest.mark.parametrize("form", ["--nproc_per_node=2", "--nproc-per-node 2", "--num-processes 2"])
def test_a_command_is_given_for_another_number_of_ranks(form: str) -> None:
    words = ["torchrun", *form.split(), "train.py", "--num_processes_of_mine=7"]
    assert " ".join(with_ranks(words, 2, 1)) == " ".join(words).replace("2", "3")
    assert with_ranks(["python", "train.py"], 2, 1) == []
    accelerate = ["accelerate", "launch", "--multi_gpu", "--num_processes=2", "train.py"]
    assert " ".join(with_ranks(accelerate, 2, -1)) == "accelerate launch --num_processes=1 train.py"
    assert "--multi_gpu" in with_ranks(accelerate, 2, 1)
    assert with_ranks(["torchrun", "--nproc_per_node=auto", "train.py"], 2, 1) == []


@pytest.mark.parametrize(
    ("options", "program", "told"),
    [
        ({"faults": "kill-rank,hnag"}, ["true"], "'hnag'"),
        ({}, ["no-such-command"], "no-such-command"),
        ({}, [], "no command"),
        ({"repeat": "0"}, ["true"], "--repeat: found '0'"),
        ({"rank": "x"}, ["true"], "--rank: found 'x'"),
        ({"again": "a 'b"}, ["true"], "--again"),
        ({"again": "no-such-command b"}, ["true"], "no-such-command"),
        ({"also": "/no/such/folder"}, ["true"], "/no/such/folder"),
        ({"html": "/no/such/folder/a.html"}, ["true"], "/no/such/folder"),
        ({"html": "."}, ["true"], "--html"),
    ],
)
def test_a_mistake_is_told_in_json(options: dict[str, str], program: list[str], told: str) -> None:
    output = io.StringIO()
    with pytest.raises(UsageError, match=told):
        run_drill(OPTIONS | options, program, output=output, env=os.environ)
    assert told in json.loads(output.getvalue())["error"]


ROW = {"fault": "kill-rank", "verdict": "lost", "ended": "status 1", "gone_s": 0.5, "orphans": 0}
ROW |= {"lost": ["3 steps of work"], "not_measured": ["samples"], "notes": ["<script>"]}
ROW |= {"next_start": "step 11", "samples_twice": None, "log_names": "rank and cause"}


def test_what_was_not_measured_is_shown_as_such_and_nothing_is_markup() -> None:
    verdict = ("not", "applicable")
    other = {"fault": "nan", "verdict": " ".join(verdict), "lost": [], "not_measured": []}
    report = {"faults": [ROW, other | {"notes": []}]}
    report |= {"logs": "", "command": "torchrun <b>", "steps": 18, "ranks": 2, "seconds": 1.0}
    report |= {"saves_after": [], "same_weights_twice": True, "same_samples_twice": None}
    report |= {"fault_step": 3, "fault_rank": 1}
    shown = dict(zip(COLUMNS, row_of(ROW), strict=True))
    assert (shown["samples_twice"], shown["orphans"], shown["gone_s"]) == ("-", "0", "0.5")
    assert command.line_of(ROW).endswith("rank and cause")
    assert command.line_of(other).split() == ["nan", *verdict, *["-"] * (len(COLUMNS) - 2)]
    assert "kill-rank: lost 3 steps of work; not measured: samples" in sentences(report)[0]
    page = command.as_html(report)
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "torchrun &lt;b&gt;" in page


def test_what_an_overlay_leaves_can_be_removed_by_its_user(tmp_path: Path) -> None:
    for name in ("home/upper0", "own"):
        (tmp_path / name).mkdir(parents=True)
    home, own = tmp_path / "home", tmp_path / "own"
    words = [sys.executable, "-I", isolation.__file__, str(home), str(own), "--", "true"]
    if subprocess.run(words, capture_output=True, timeout=60, check=False).returncode:
        pytest.skip("no overlay mounts here")
    for path in home.rglob("*/"):
        assert path.stat().st_mode & 0o700 == 0o700, path


def test_only_files_that_the_program_wrote_are_looked_at(tmp_path: Path) -> None:
    moved = {"k": "moved", "old": f"{tmp_path}/part", "new": f"{tmp_path}/last"}
    saves = [{"k": "save", "path": f"{tmp_path}/part/state"}, moved]
    case = case_of(tmp_path, {0: [*life("a", "b"), *saves]})
    (upper := case.home / "upper0").joinpath("last").mkdir()
    for name in ("old.pt", "new.pt", "new.txt", "last/state"):
        (upper / name).write_bytes(b"x")
    os.utime(upper / "old.pt", (1, 1))  # as a copy of the user's has it
    for name in ("new.pt", "last/state"):
        os.utime(upper / name, (case.made_at + 1, case.made_at + 1))
    (case.home / "tmp" / "later").mkdir()
    found = {seen for _, seen in checkpoints_of(case)}
    assert found == {f"{tmp_path}/new.pt", f"{tmp_path}/last/state"}


def test_a_mount_without_end_is_no_overlay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (stuck := tmp_path / "stuck.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.setattr(command, "MOUNT_S", 0.3)
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.setattr(command.tempfile, "tempdir", f"{tmp_path}/link")
    monkeypatch.setattr(command.isolation, "__file__", str(stuck))
    plan = command.make_plan(OPTIONS, {})
    assert not plan.has_overlay
    assert plan.work.parent == tmp_path, "a program's file is compared with it by its real path"
    shutil.rmtree(plan.work)
    with pytest.raises(UsageError, match=r"overlay mounts: .*timed out after 0\.3 seconds"):
        command.make_plan(OPTIONS | {"also": str(tmp_path)}, {})

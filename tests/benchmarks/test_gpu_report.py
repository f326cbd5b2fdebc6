"""The report of a machine with a GPU: its harness works, tried small on the CPU."""

import contextlib
import io
import json
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_report
from benchmarks.gpu import checks, drills, meter, row, runs, speed, works
from ddp_drills.runner import Drills
from hardened_ddp.step.async_device import Flag
from tests.drills.forked import start_forked
from tests.harness.ranks import import_in_server, run_program
from tests.pretended_gpu import PretendedGpu

CPU = torch.device("cpu")


def test_the_flag_is_sent_as_a_step_sends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = []
    send = Flag.send
    monkeypatch.setattr(Flag, "send", lambda flag: sent.append(flag) or send(flag))
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    with PretendedGpu().on():
        checks.a_flag_is_queued_without_a_wait(torch.device("cuda", 0))
    assert len(sent) == 2


def test_the_meter_counts_neither_a_report_nor_its_own_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(meter, "WAITS", ("aten::item",))
    file, number = tmp_path / "figures.json", torch.ones(())
    one = meter.Meter(file=str(file), warm_up=40, steps=40, batch_size=1, started_at=0.0)
    monkeypatch.setattr(one, "_wait", lambda: float(number.item()) + time.perf_counter())
    for step in range(1, 40 + 40 + 1 + meter.PROFILED + 1):
        number.item()  # the flag of each step
        one.after_step()
        if step % 50 == 0:  # a report reads several figures
            _ = [number.item() for _ in range(4)]
    assert json.loads(file.read_text(encoding="utf-8"))["waits"] == 1.0


DEVICE = {"gpu": "H100", "versions": "torch 2.13", "commit": "1", "date": "d"}


def test_a_report_that_was_cut_off_goes_on_with_the_part_that_is_not_done(tmp_path: Path) -> None:
    file = tmp_path / "GPU.md"
    records = gpu_report.Records(file, DEVICE, dry=False)
    records.begin("first")
    records.add("first", row.Row("drill kill-backward", "", row.PASS))
    records.end("first")
    records.begin("tests")
    records.add("tests", row.Row("a flag is queued without a wait", "", row.PASS))
    with (tmp_path / "GPU.md.jsonl").open("a", encoding="utf-8") as lines:
        lines.write('{"part": "tests", "ev')  # killed while it wrote
    again = gpu_report.Records(file, DEVICE, dry=False)
    assert again.is_done("first")
    assert not again.is_done("tests")
    again.begin("tests")
    again.end("tests")
    assert gpu_report.Records(file, DEVICE, dry=False).is_done("tests")
    assert not gpu_report.Records(file, DEVICE | {"commit": "2"}, dry=False).is_done("first")


def round_of(ours: float, bare: float) -> dict[str, speed.Figures]:
    others = {"peak_mib": 1.0, "waits": 1.0, "kernels": 5.0, "first_step_s": 1.0}
    return {
        speed.OURS: {"samples_per_s": ours, **others, "kernels": 7.0},
        speed.BARE: {"samples_per_s": bare, **others},
    }


def test_a_speed_within_the_noise_of_the_bare_loop_is_no_miss() -> None:
    rounds = [round_of(0.98 * bare, bare) for bare in (100.0, 104.0)]
    assert speed.rows_of("mlp", rounds, bar=1.0)[0].verdict == row.WITHIN_NOISE
    assert speed.rows_of("mlp", rounds[:1], bar=1.0)[0].verdict == row.OPEN  # no noise is known
    slow = [round_of(0.9 * bare, bare) for bare in (100.0, 104.0)]
    assert speed.rows_of("mlp", slow, bar=1.0)[0].verdict == row.MISS


def test_ratios_are_taken_within_a_round() -> None:
    rounds = [round_of(10, 10), round_of(4, 5), round_of(30, 20)]
    rows = speed.rows_of("mlp", rounds, bar=1.01)
    assert rows[0].found.startswith("1.000 x")
    assert [r.verdict for r in rows] == [row.WITHIN_NOISE, row.PASS, row.PASS, "", ""]
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
    assert meter.PROFILED == speed.PROFILED
    with torch.device("meta"):
        gpt = works.model("gpt", small=False)
    num_parameters = sum(parameter.numel() for parameter in gpt.parameters())
    assert num_parameters == pytest.approx(124e6, rel=0.01)


@pytest.mark.slow
def test_a_dry_run_of_all_parts_finds_all_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its commands and their ranks are forked here, which saves each the import of torch."""
    for name in ("sklearn.datasets", "torchvision"):  # of the digits, and ResNet-50
        import_in_server(name)
    monkeypatch.setenv(row.MARK, "")  # the report sets it for what it starts
    monkeypatch.setattr(
        drills, "prepare", lambda work, folder, env: Drills(work, folder, start_forked)
    )

    def run_in_fork(command: Sequence[str | Path], *, limit_s: float, **how: Any) -> row.Done:
        if command[0] != "python":
            return row.run(command, limit_s=limit_s, **how)
        if "benchmarks.gpu.drills" in command:
            with monkeypatch.context() as patch:
                patch.setattr(sys, "argv", [str(word) for word in command[2:]])
                with contextlib.redirect_stdout(io.StringIO()) as output:
                    return row.Done(drills.main(), output.getvalue())
        done = run_program(command, timeout_s=limit_s, **how)
        return row.Done(done.status, done.output)

    for module in (gpu_report, runs, speed):
        monkeypatch.setattr(module, "run", run_in_fork)
    file = tmp_path / "GPU.md"
    monkeypatch.setattr(sys, "argv", ["gpu_report.py", "--dry-run", "--output", str(file)])
    status = gpu_report.main()
    written = file.read_text(encoding="utf-8")
    titles, whole = [title for title, _, _ in gpu_report.PARTS.values()], written
    places = [*(whole.index(f"## {title}") for title in titles), len(whole)]
    sections = {n: whole[a:b] for n, (a, b) in zip(gpu_report.PARTS, pairwise(places), strict=True)}
    for name, section in sections.items():
        assert "dry run" in section
        assert row.MISS not in section, section
        if name.startswith("speed"):  # whether a bar is met on this CPU says nothing
            assert "not measured" not in section
            assert row.PASS not in section
    assert status == 0
    assert f"life: {gpu_report.PARTS['life'][0]}" in capsys.readouterr().out

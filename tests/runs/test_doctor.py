"""The doctor's report: on this machine, in bad environments, and each check by itself."""

import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from ddp_runs import machine, selftest, software
from ddp_runs.doctor import list_checks, run_doctor
from ddp_runs.machine import GIB, Check
from tests.harness.processes import ROOT, clean_environment, limit_of
from tests.harness.ranks import run_command, run_program


def statuses_in(lines: Sequence[str]) -> dict[str, str]:
    """Read the lines of a report: the status of each check by its name."""
    statuses = {}
    for line in lines:
        if line[2:6].strip() in ("ok", "warn", "FAIL") and line.startswith("  "):
            statuses[line[8:21].strip()] = line[2:6].strip()
    return statuses


class TestReport:
    def test_on_this_machine_training_can_run_and_under_torchrun_too(self, tmp_path: Path) -> None:
        env = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        env |= {"MASTER_ADDR": "node7.invalid", "MASTER_PORT": "29500"}
        env |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
        # Its two ranks are forked here; tests below start real ones.
        doctor = ["python", ROOT / "ddp_training.py", "doctor"]
        done = run_program(doctor, timeout_s=60, env=env, cwd=tmp_path)
        report = done.stdout
        assert done.status == 0, done.output
        statuses = statuses_in(report.splitlines())
        assert len(statuses) == len(list_checks(clean_environment(env)))
        assert statuses["all-reduce"] == "ok"
        assert statuses["writing"] == "ok"
        assert report.endswith("So training can run here.\n")
        assert not list(tmp_path.iterdir())

    def test_a_broken_torch_is_a_line_of_the_report_beside_others(self, tmp_path: Path) -> None:
        (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: no such file')\n")
        done = run_command(
            [sys.executable, ROOT / "ddp_training.py", "doctor"],
            timeout_s=60,
            env={"PYTHONPATH": str(tmp_path), "RANK": "1"},
        )
        assert done.status == 1
        statuses = statuses_in(done.stdout.splitlines())
        assert statuses["torch"] == "FAIL"
        assert statuses["python"] == "ok"
        assert "can't be imported: libcudart.so.13: no such file" in done.stdout
        assert re.search(r"rank [01] of 2: ImportError: libcudart.so.13: no such", done.stdout)
        assert "-m pip install -r " in done.stdout
        assert "Traceback" not in done.output
        lines = done.stdout.splitlines()
        for number, line in enumerate(lines):
            assert not line.startswith("  FAIL") or " do: " in lines[number + 1]
        assert lines[-1].endswith("So training can't run here as it is.")

    def test_a_check_that_breaks_does_not_hide_the_others(self) -> None:
        check_stars = mock.Mock(side_effect=ZeroDivisionError("no stars"), __name__="check_stars")
        output = StringIO()
        checks = [check_stars, lambda: Check("sun", "ok", "\u2600")]
        assert run_doctor(output=output, env={}, checks=checks) == 0
        told = output.getvalue()
        assert "  warn  stars          could not be checked: ZeroDivisionError: no stars" in told
        assert "  ok    sun            \u2600" in told
        assert "2 checks: 0 FAIL, 1 warn." in told

    def test_a_reader_that_stops_reading_is_no_error(self) -> None:
        read_end, write_end = os.pipe()
        os.close(read_end)
        output = os.fdopen(write_end, "w")
        assert run_doctor(output=output, env={}, checks=[lambda: Check("x", "ok", "y")]) == 0
        with pytest.raises(BrokenPipeError):
            output.close()


def threaded(number: str) -> Check:
    return machine.check_threads({"OMP_NUM_THREADS": number})


@pytest.mark.parametrize(
    ("check", "status"),
    [
        (lambda: software.check_python((3, 10)), "FAIL"),
        (lambda: software.check_python((3, 11)), "ok"),
        (lambda: software.check_python((3, 13)), "ok"),
        (lambda: software.check_python((4, 0)), "warn"),
        (lambda: software.judge_torch("2.10.1"), "FAIL"),
        (lambda: software.judge_torch("2.11.0+cu128"), "ok"),
        (lambda: software.judge_torch("2.15.0+cpu"), "ok"),
        (lambda: software.judge_torch("2.16.0a0+git1"), "warn"),
        (lambda: software.judge_torch("unknown"), "FAIL"),
        (lambda: threaded("1"), "ok"),
        (lambda: threaded("1,2"), "ok"),
        (lambda: threaded("0"), "FAIL"),
        (lambda: threaded("x"), "FAIL"),
        (lambda: threaded("99999"), "warn"),
    ],
)
def test_each_fact_has_its_status_and_advice(check: Callable[[], Check], status: str) -> None:
    found = check()
    assert found.status == status
    assert bool(found.advice) == (status != "ok")


def test_missing_packages_are_named_with_what_they_are_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "_FEATURES", {"no-such-package": "flying"})
    check = software.check_packages()
    assert check.status == "warn"
    assert "no-such-package: flying" in check.advice
    monkeypatch.setattr(software, "_NEEDED", ("no-such-package",))
    assert software.check_packages().status == "FAIL"


@pytest.mark.parametrize("kind", ["Kernel Module  ", "Open Kernel Module for x86_64  "])
def test_the_driver_version_is_read_from_both_kinds_of_driver(kind: str, tmp_path: Path) -> None:
    line = f"NVRM version: NVIDIA UNIX x86_64 {kind}535.104.05  Sat Aug 19 01:15:15"
    (tmp_path / "version").write_text(f"{line}\nGCC version:  gcc version 12.2.0\n")
    assert software.read_driver(tmp_path / "version") == "535.104.05"


def test_a_gpu_that_this_torch_was_not_built_for_is_a_warning(tmp_path: Path) -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch is built for GPUs")
    assert software.check_gpus(tmp_path / "none", tmp_path).status == "ok"
    (tmp_path / "nvidia0").touch()
    check = software.check_gpus(tmp_path / "none", tmp_path)
    assert check.status == "warn"
    assert "built for CPUs" in check.detail


class TestMachine:
    @pytest.mark.parametrize(
        ("folder", "names"),
        [
            ("", "memory.max memory.current inactive_file"),
            ("memory", "memory.limit_in_bytes memory.usage_in_bytes total_inactive_file"),
        ],
        ids=["v2", "v1"],
    )
    def test_a_nearly_full_container_fails(self, folder: str, names: str, tmp_path: Path) -> None:
        (tmp_path / folder).mkdir(exist_ok=True)
        limit, used, cached = names.split()
        for name in (limit, used):
            (tmp_path / folder / name).write_text(f"{GIB}\n")
        (tmp_path / folder / "memory.stat").write_text(f"{cached} {GIB // 4}\n")
        check = machine.check_memory(tmp_path)
        assert check.status == "FAIL"
        assert "this container: 0.2 of 1.0 GiB free" in check.detail
        (tmp_path / folder / limit).write_text("max\n")
        assert "container" not in machine.check_memory(tmp_path).detail

    @pytest.mark.parametrize("folder", ["/proc", "/no/such/folder"])
    def test_no_shared_memory_fails_and_says_how_to_get_some(self, folder: str) -> None:
        check = machine.check_shared_memory(Path(folder))
        assert check.status == "FAIL"
        assert "--shm-size" in check.advice

    def test_writing_is_tried_in_the_folder_of_runs_and_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        full = mock.Mock(side_effect=OSError(28, "No space left on device"))
        (tmp_path / "runs").mkdir()
        check = machine.check_writing(tmp_path)
        assert check.status == "ok"
        assert f"{tmp_path}/runs" in check.detail
        monkeypatch.setattr(machine.os, "fsync", full)
        for folder in (Path("/proc"), tmp_path):
            check = machine.check_writing(folder)
            assert check.status == "FAIL"
            assert "--output_dir" in check.advice
        assert "No space left" in check.detail
        assert not list((tmp_path / "runs").iterdir())


class TestVariables:
    def test_values_that_cost_much_are_warned_of_and_others_listed(self) -> None:
        env = {"NCCL_P2P_DISABLE": "1", "NCCL_DEBUG": "info"}
        check = machine.check_settings(env)
        assert check.status == "warn"
        assert check.advice.endswith(": unset NCCL_P2P_DISABLE NCCL_DEBUG")
        told = machine.check_settings({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}).detail
        assert "DEBUG=DETAIL: it ends DDP on gloo with a segmentation fault" in told
        env = {"NCCL_DEBUG": "WARN", "GLOO_SOCKET_IFNAME": "lo", "HOME": "/root"}
        check = machine.check_settings(env)
        assert check == Check("variables", "ok", "GLOO_SOCKET_IFNAME=lo, NCCL_DEBUG=WARN")


class TestNetwork:
    @pytest.mark.parametrize(
        ("name", "told"),
        [("192.0.2.1", "192.0.2.1, which is not an address of this machine"), ("x" * 70, "x: ")],
        ids=["of another machine", "longer than a name may be"],
    )
    def test_a_name_that_is_not_this_machine_is_a_warning(self, name: str, told: str) -> None:
        check = machine.check_hostname(name)
        assert check.status == "warn"
        assert told in check.detail
        assert f"add '127.0.0.1 {name}' to /etc/hosts" in check.advice

    def test_a_silent_name_server_is_not_waited_for(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(machine, "_LOOKUP_S", 0.0)
        answered = threading.Event()
        monkeypatch.setattr(machine.socket, "getaddrinfo", lambda *name: answered.wait(20))
        assert machine.check_hostname("x").detail == "x: no answer for 0 s"
        answered.set()


def test_ranks_of_the_all_reduce_that_do_not_end_are_killed_and_told_of() -> None:
    check = selftest.check_all_reduce(clean_environment(), limit_s=0.05)
    assert check.status == "FAIL"
    assert "2 ranks did not finish within 0.05 s" in check.detail


@pytest.mark.slow
def test_all_reduce_names_its_interface_and_keeps_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = selftest._start

    def begin_late(rank: int, port: int, *rest: Any) -> Any:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))  # also before rank 0 listens
        return begin(rank, port, *rest)

    monkeypatch.setattr(selftest, "_start", begin_late)
    env = clean_environment({"GLOO_SOCKET_IFNAME": "nocard7"})
    check = selftest.check_all_reduce(env, limit_s=limit_of(20.0))
    assert check.status == "FAIL"
    assert "nocard7" in check.detail

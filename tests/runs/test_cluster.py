"""doctor --cluster on two hosts with addresses of their own, healthy and not."""

import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch

from ddp_runs import cluster, links, machine
from ddp_runs.machine import MIB, Check
from hardened_ddp.errors import GroupError
from hardened_ddp.ranks.launch import Launch
from tests.harness.processes import ROOT
from tests.harness.ranks import Finished, run_program, start_command, start_program, train
from tests.ranks.test_two_hosts import by_hand
from tests.two_hosts import TwoHosts

PORT = 29710
SUMS = [{"took": {}, "backend": "gloo"}]
DOCTOR = ["python", "ddp_training.py", "doctor", "--cluster", "--output_dir"]


def run_doctor(hosts: TwoHosts, tmp_path: Path, *words: str, second: str = "") -> list[Finished]:
    """Run it on one rank of each host; second: PYTHONPATH of the second one."""
    argv = [*DOCTOR, str(tmp_path), *words]
    env = by_hand(1, PORT)
    if second:  # a program of its own: forked ranks have torch already
        other = start_command(hosts.on(1, *argv), env=env | {"PYTHONPATH": second})
    else:
        other = start_program(argv, host=hosts.host(1), env=env)
    with start_program(argv, host=hosts.host(0), env=by_hand(0, PORT)) as zero, other as one:
        return [zero.wait(timeout_s=60), one.wait(timeout_s=60)]


def line_of(report: str, name: str) -> str:
    lines = [line for line in report.splitlines() if line[8:].startswith(f"{name} ")]
    return " ".join(lines[0].split()) if lines else ""


@pytest.mark.slow
def test_two_healthy_hosts_pass_and_are_measured(hosts: TwoHosts, tmp_path: Path) -> None:
    zero, one = run_doctor(hosts, tmp_path)
    assert (zero.status, one.status) == (0, 0), zero.output + one.output
    assert " 0 FAIL" in zero.stdout
    assert line_of(zero.stdout, "ports") == "ok ports each of 2 hosts reaches each other one"
    for name in ("torch", "code", "data", "clocks"):
        assert line_of(zero.stdout, name).startswith(f"ok {name}")
    assert "32 MiB" in line_of(zero.stdout, "all-reduce")
    assert "10.77.0.2" in zero.stdout
    assert not one.stdout, "rank 0 tells for all"


@pytest.mark.slow
def test_a_slow_link_another_torch_and_clock_are_all_named(hosts: TwoHosts, tmp_path: Path) -> None:
    # WHY the folders: PATH of an ordinary shell lacks them
    tc = shutil.which("tc", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    if tc is None:
        pytest.skip("not installed on this machine: tc (see .ci/run)")
    shape = ["qdisc", "add", "dev", hosts.interfaces[1], "root", "tbf", "rate", "40mbit"]
    shape += ["burst", "64kbit", "latency", "100ms"]
    made = subprocess.run([tc, "-n", hosts.namespaces[1], *shape], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"this kernel can't slow a link down: {made.stderr.strip()}")
    (tmp_path / "sitecustomize.py").write_text(
        "import time\nimport torch\ntorch.__version__ = '2.12.9'\n"
        "real = time.time\ntime.time = lambda: real() + 120\n"
    )
    zero, one = run_doctor(hosts, tmp_path, second=str(tmp_path))
    assert (zero.status, one.status) == (1, 1), zero.output + one.output
    assert "FAIL torch node1: 2.12.9; node0: 2." in line_of(zero.stdout, "torch").replace(
        f"node0: {torch.__version__}; node1: 2.12.9", "node1: 2.12.9; node0: 2."
    )
    assert "warn clocks differs from node0: node1 by +120." in line_of(zero.stdout, "clocks")
    slow = line_of(zero.stdout, "links")
    assert slow.startswith("warn links node1 -> node0: "), zero.stdout
    assert line_of(zero.stdout, "all-reduce").startswith("ok"), "slow is not broken"


@pytest.mark.slow
def test_closed_ports_are_named_and_a_closed_master_too(hosts: TwoHosts, tmp_path: Path) -> None:
    # As a firewall that only the master's port is opened in. WHY the second line: what is for this
    # host itself is looked up first, by a rule that has to go behind the new one.
    rules = ["add pref 5 ipproto tcp sport 32768-60999 dport 32768-60999 blackhole"]
    rules += ["add pref 9 lookup local", "del pref 0"]
    for rule in rules:
        argv = ["ip", "-n", hosts.namespaces[1], "rule", *rule.split()]
        made = subprocess.run(argv, capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"this kernel has no such rules: {made.stderr.strip()}")
    zero, one = run_doctor(hosts, tmp_path)
    assert (zero.status, one.status) == (1, 1), zero.output + one.output
    ports = line_of(zero.stdout, "ports")
    assert ports.startswith("FAIL ports node0 -> node1: port ")
    assert "node1 -> node0: port " in ports
    assert "not tried: see ports" in line_of(zero.stdout, "all-reduce")
    hosts.cut()
    zero, one = run_doctor(hosts, tmp_path, "--wait", "6")
    assert (zero.status, one.status) == (1, 1)
    assert "of 2 ranks these never joined: [1]" in line_of(zero.stdout, "meeting")
    assert f"tried 10.77.0.1:{PORT} for 6 s" in line_of(one.stdout, "meeting")


def test_one_process_and_a_wrong_wait_are_mistakes(tmp_path: Path) -> None:
    argv = ["python", ROOT / "ddp_training.py", "doctor", "--cluster"]
    alone = run_program(argv, cwd=tmp_path, timeout_s=60)
    assert alone.status == 2
    assert "was started as one process" in alone.output
    assert "torchrun --nnodes" in alone.output
    for wait in ("x", "9" * 15):
        assert "needs whole seconds" in run_program([*argv, "--wait", wait], timeout_s=60).output


@pytest.mark.slow
def test_the_ranks_of_one_host_are_one_report(tmp_path: Path) -> None:
    done = train(["doctor", "--cluster", "--output_dir", tmp_path], 2, timeout_s=60).ok()
    assert "doctor --cluster: 2 ranks" in done.output
    assert line_of(done.output, "all-reduce").startswith("ok all-reduce gloo: 4 KiB")


def host(name: str, **facts: object) -> dict[str, object]:
    """Make the facts of a host that has nothing wrong."""
    good = {"host": name, "rank": int(name[1:]), "interface": ["eth0", 1e9], "checks": []}
    return {**good, "equal": {"torch": "2.13.0"}, "disk": 1e9, **facts}


def judged(*hosts: dict[str, object], **of_last: object) -> dict[str, Check]:
    """Judge hosts whose links are right; of_last: what was measured on the last one."""
    measured = [
        {"host": h["host"], "closed": {}, "ahead_s": 0.0, "rate": 9e8, "next": "x"} for h in hosts
    ]
    measured[-1].update(of_last)
    return {c.name: c for c in cluster.judge(hosts, measured, SUMS)}


def test_the_odd_one_of_many_hosts_is_named() -> None:
    hosts = [host(f"n{index}") for index in range(5)]
    assert {check.status for check in judged(*hosts).values()} == {"ok"}
    hosts[3] = host("n3", equal={"torch": "2.12.0"}, disk=1e8)
    found = judged(*hosts, rate=1e7)
    assert found["torch"].status == "FAIL"
    assert found["torch"].detail.startswith("n3: 2.12.0; n0, n1, n2, n4: 2.13.0")
    assert found["disk"].detail == "n3: 100 MB/s, others 1.0 GB/s"
    assert found["links"].detail == "n4 -> x: 10 MB/s, others 900 MB/s"
    assert "start a time service" in judged(*hosts, ahead_s=-9.0)["clocks"].advice


def test_what_hosts_found_of_themselves_is_one_line_of_all_who_found_it() -> None:
    check = ["disk", "FAIL", "64 MiB can't be written to --output_dir", "free space there"]
    found = judged(*(host(name, disk=0.0, checks=[check]) for name in ("n0", "n1")))["disk"]
    assert found.status == "FAIL"
    assert found.detail == "n0, n1: 64 MiB can't be written to --output_dir"


def test_a_link_that_gives_far_less_than_it_should_is_named_even_if_all_do() -> None:
    hosts = [host(f"n{index}", interface=["ib0", 5e10]) for index in range(2)]
    assert "where its link should give 50.0 GB/s" in judged(*hosts)["links"].detail


def test_gpus_are_read_and_errors_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '0, 1980, 0, Not Active'; echo '1, 1980, 3, Active'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    clocks, [errors, slowdown] = cluster.read_gpus()
    assert clocks == "1980 MHz"
    assert (errors.status, errors.detail) == ("FAIL", "3 uncorrected ECC errors")
    assert (slowdown.name, slowdown.detail) == ("GPU 1", "slowed down: Active")
    hosts = [host(f"n{n}", equal={"gpu clocks": f"{1980 - n} MHz"}) for n in range(2)]
    found = judged(*hosts)["gpu clocks"]
    assert (found.status, found.detail) == ("warn", "n0: 1980 MHz; n1: 1979 MHz")


def test_a_digest_sees_changes_and_no_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.py").write_text("x = 1\n")
    before = cluster.digest(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "b.py").write_text("y = 1\n")
    assert cluster.digest(tmp_path) == before
    (tmp_path / "a.py").write_text("x = 2\n")
    assert cluster.digest(tmp_path) != before
    assert cluster.digest(tmp_path / "none") == "none"
    (tmp_path / "big").write_bytes(bytes(MIB))
    assert cluster.digest(tmp_path, by_size=True).startswith("3 files, ")
    (tmp_path / os.fsdecode(b"caf\xe9.py")).touch()
    assert cluster.digest(tmp_path).startswith("2 files, ")
    assert cluster.digest(tmp_path / ("x" * 300)).startswith("can't be read: ")
    monkeypatch.setattr(cluster, "_MOST_FILES", 2)
    (tmp_path / "c.py").write_text("")
    monkeypatch.setattr(cluster.os, "walk", partial(walk_no_further, tmp_path))
    assert cluster.digest(tmp_path).startswith("the first 2 files, ")


WALK = os.walk


def walk_no_further(top: Path, folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """Walk one folder; fail where the walk goes on, through millions of files."""
    assert folder == top
    yield next(WALK(folder))
    raise AssertionError("walked on")


def test_what_breaks_on_one_rank_is_a_line_of_its_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    lost = mock.Mock(side_effect=RuntimeError("CUDA error: ECC\nmore"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lost)
    facts = cluster._equal_facts(Path("none"), [])
    assert facts["gpus"] == "can't be used: CUDA error: ECC"
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert links.interface_of("127.0.0.1") == ("unknown", 0.0)
    broken = mock.Mock(side_effect=RuntimeError("Broken pipe\nmore"))
    monkeypatch.setattr(cluster, "_measure", broken)
    output = io.StringIO()
    options = {"wait": "1", "data": "data", "output_dir": "runs"}
    assert cluster.run_cluster(options, output=output, env=by_hand(1, PORT)) == 1
    assert "FAIL  meeting        the store of rank 0 is gone: Broken pipe\n" in output.getvalue()


def test_a_rank_that_joined_and_tells_nothing_is_named() -> None:
    meeting = cluster.Meeting(torch.distributed.HashStore(), Launch(world_size=2), limit_s=-60.0)
    with pytest.raises(GroupError, match=r"ranks \[1\] joined, but have not told their facts"):
        meeting.share("facts", {})


def test_a_name_that_means_loopback_would_keep_gloo_from_other_hosts() -> None:
    found = machine.check_hostname("localhost", is_told=True)
    assert found.status == "FAIL"
    assert ": gloo tells that address to the other hosts" in found.detail
    assert machine.check_hostname("localhost").status == "ok"


@pytest.mark.parametrize(("num_nodes", "interface"), [(2, ""), (2, "eth0"), (1, "")])
def test_only_where_gloo_tells_the_name_of_the_host_it_must_not_be_loopback(
    num_nodes: int, interface: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[bool] = []
    monkeypatch.setattr(machine, "check_hostname", lambda *, is_told: told.append(is_told))
    monkeypatch.setattr(cluster.doctor, "list_checks", lambda env: [])
    monkeypatch.setattr(cluster.doctor, "guarded", lambda check: check() or Check("x", "ok", ""))
    monkeypatch.setattr(cluster, "_PROBE_BYTES", MIB)
    monkeypatch.setattr(cluster, "digest", lambda folder, by_size=False: "")
    launch = Launch(world_size=2, num_nodes=num_nodes)
    options = {"output_dir": str(tmp_path), "data": "none"}
    cluster._facts_of(launch, 1, options, {"GLOO_SOCKET_IFNAME": interface})
    assert told == [num_nodes > 1 and not interface]

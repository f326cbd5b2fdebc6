"""audit --source: planted mistakes are found on their line, and good programs are left in peace.

What is planted stands before the comment `# here`.
"""

import importlib.util
import json
import os
import textwrap
from pathlib import Path

import pytest

import ddp_training
from ddp_doctor.audit.source_rules import RULES, Script, read_script
from ddp_doctor.audit.verdict import Verdict, as_json
from tests.harness.ranks import run_command

HEAD = """
import argparse, os
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
parser = argparse.ArgumentParser()
dist.init_process_group("gloo")
rank = dist.get_rank()
"""
LOOP = """
model = DDP(net)
for epoch in range(3):
    for x, y in loader:
        loss_fn(model(x), y).backward()
        optimizer.step()
"""
MISTAKES = {
    "gradients-not-averaged": """
        model = DDP(net)
        for epoch in range(3):
            for x, y in loader:
                out = model.module(x)  # here
                loss = loss_fn(out, y)
                loss.backward()
                optimizer.step()
        """,
    "gradients-not-averaged in the method of one batch": """
        class Trainer:
            def __init__(self, net):
                self.model = DDP(net, device_ids=[rank])
            def run_batch(self, x, y):
                self.optimizer.zero_grad()
                loss = loss_fn(self.model.module(x), y)  # here
                loss.backward()
                self.optimizer.step()
        """,
    "same-order in a loop of another name": """
        sampler = DistributedSampler(train)  # here
        loader = DataLoader(train, 32, sampler=sampler)
        """
    + textwrap.indent(LOOP.replace("epoch", "i"), "        "),
    "collectives-differ": """
        for epoch in range(3):
            if rank == 0:
                torch.save(net.state_dict(), "a.pt")
                dist.barrier()  # here
        """,
    "collectives-differ by call": """
        if not dist.get_rank():
            dist.all_reduce(total)  # here
        """,
    "collectives-differ in a forward": """
        model = DDP(net)
        if rank == 0:
            print(model(x).mean())  # here
        """,
    "same-file": """
        def main():
            model = DDP(net)
            torch.save(model.module.state_dict(), "model.pt")  # here
        main()
        """,
    "hard-coded-device": """
        net = net.to("cuda:0")  # here
        model = DDP(net)
        """,
}
HEALTHY = {
    "the tutorial": """
        sampler = DistributedSampler(train)
        loader = DataLoader(train, 32, sampler=sampler)
        model = DDP(net, device_ids=[rank])
        for epoch in range(3):
            sampler.set_epoch(epoch)
            for x, y in loader:
                loss_fn(model(x), y).backward()
            if rank == 0:
                torch.save(model.module.state_dict(), "a.pt")
            dist.barrier()
        """,
    "one pass with micro-batches": """
        loader = DataLoader(train, 32, sampler=DistributedSampler(train))
        model = DDP(net)
        batches = iter(loader)
        for step in range(100):
            for micro in range(4):
                x, y = next(batches)
                loss_fn(model(x), y).backward()
            optimizer.step()
        """,
    "evaluation through module": """
        model = DDP(net)
        for epoch in range(3):
            for x, y in loader:
                loss_fn(model(x), y).backward()
            with torch.no_grad():
                for x, y in val_loader:
                    out = model.module(x)
            for x, y in val_loader:
                print(model.module(x).detach())
        """,
    "a teacher, and a discriminator's features": """
        teacher, model = DDP(a), DDP(b)
        for x, y in loader:
            with torch.no_grad():
                goal = teacher.module(x)
            (model(x) - goal).pow(2).mean().backward()
        """,
    "first one downloads": """
        if rank != 0:
            dist.barrier()
        data = download()
        if rank == 0:
            dist.barrier()
        """,
    "both branches": """
        if rank == 0:
            dist.broadcast_object_list(names, src=0)
        else:
            dist.broadcast_object_list(none, src=0)
        """,
    "early return": """
        def save(path):
            if rank != 0:
                return
            torch.save(net.state_dict(), "a.pt")
        save("a")
        """,
    "a flag": """
        is_master = int(os.environ["RANK"]) == 0
        if is_master:
            torch.save(net.state_dict(), "a.pt")
        """,
    "one file per rank": """
        torch.save(net.state_dict(), f"state-{rank}.pt")
        """,
    "called on rank 0": """
        def checkpoint():
            torch.save(net.state_dict(), "a.pt")
        for epoch in range(3):
            if rank == 0:
                checkpoint()
        """,
    "an evaluation sampler": """
        sampler = DistributedSampler(val, shuffle=False)
        loader = DataLoader(val, 32, sampler=sampler)
        """
    + textwrap.indent(LOOP, "        "),
    "one epoch": """
        sampler = DistributedSampler(train)
        for x, y in DataLoader(train, 32, sampler=sampler):
            loss_fn(DDP(net)(x), y).backward()
        """,
    "either launcher": """
        parser.add_argument("--local-rank", type=int, default=int(os.environ["LOCAL_RANK"]))
        """,
    "one process too": """
        device = "cuda:0" if not dist.is_initialized() else f"cuda:{rank}"
        if world == 1:
            net.to("cuda:0")
        model = DDP(net)
        """,
    "a side group": """
        if rank == 0:
            dist.barrier(group=own)
        """,
}


def read(folder: Path, source: str) -> tuple[list[Verdict], int]:
    """Read a source behind HEAD; give the verdicts and the planted line, 0 without one."""
    text = HEAD + textwrap.dedent(source)
    path = folder / "train.py"
    path.write_text(text)
    lines = [i for i, line in enumerate(text.splitlines(), start=1) if "# here" in line]
    return read_script(Script(path)), lines[0] if lines else 0


@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_found_on_its_line(name: str, tmp_path: Path) -> None:
    verdicts, line = read(tmp_path, MISTAKES[name])
    assert [(v.code, v.line) for v in verdicts] == [(name.split()[0], line)]
    assert all(verdict.is_mistake and verdict.evidence for verdict in verdicts)


def test_each_rule_has_a_planted_mistake() -> None:
    assert {name.split()[0] for name in MISTAKES} == {code for code, _ in RULES}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_source_is_not_accused(name: str, tmp_path: Path) -> None:
    verdicts, _ = read(tmp_path, HEALTHY[name])
    assert verdicts == []


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


def test_our_own_programs_are_not_accused() -> None:
    root = Path(ddp_training.__file__).parent
    own = [root / "ddp_training.py", *(root / "examples").rglob("*.py")]
    assert [v.place for path in own for v in read_script(Script(path))] == []


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


def test_a_healthy_source_ends_with_0_in_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    read(tmp_path, HEALTHY["the tutorial"])
    assert ddp_training.main(["audit", "--source", str(tmp_path / "train.py")]) == 0
    assert "no mistakes found" in capsys.readouterr().out


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
    verdict = Verdict(code="gradients-not-averaged", sentence="s", place=place)
    [row] = json.loads(as_json([verdict]))["verdicts"]
    assert row["line"] == 0

"""Own loops of other kinds, and ranks that others start: killed once, they end in the same bits."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from hardened_ddp.errors import PeerLostError
from tests.harness.processes import ROOT
from tests.harness.ranks import held_port, run_command, run_program
from tests.launchers.test_run_with import MPI_ENV
from tests.own_loop.faults import (
    Fault,
    checkpoints_of,
    is_exact,
    launch,
    line_of,
    run_folder,
    state_of,
    text_of,
)

pytestmark = pytest.mark.slow
DIES_AT = 5
SCALED = (
    "1e-2) -> 1e-2)\nscaler = torch.amp.GradScaler('cpu', init_scale=256.0, growth_interval=3)",
    "loss.backward() -> scaler.scale(loss).backward()",
    "opt.step() -> scaler.step(opt); scaler.update()",
    "opt=opt -> opt=opt, scaler=scaler",
)
HEAD = """
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader
from hardened_ddp import protect

"""
CLOSURE = f"""{HEAD}
dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6)))
opt = torch.optim.LBFGS(model.parameters(), 0.5, max_iter=3, history_size=4)
loader = DataLoader(torch.randn(120, 6), 10)
with protect("runs/lbfgs", model=model, opt=opt) as run:
    for epoch in run.epochs(2):
        for points in run.batches(loader):
            losses = []

            def closure():
                opt.zero_grad()
                loss = (model(points) - points).square().mean()
                if losses:
                    losses.append("a line to die at: the weights are written")
                loss.backward()
                losses.append(loss.detach())
                dist.all_reduce(losses[-1])
                return losses[-1]

            opt.step(closure)
            run.commit()
"""
TEACHER = f"""{HEAD}
class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 6), nn.Linear(6, 6).requires_grad_(False)

    def forward(self, points):
        for old, new in zip(self.teacher.parameters(), self.student.parameters()):
            old.data.lerp_(new.data, 0.1)  # no version tells of it
        return (self.student(points) - self.teacher(points)).square().mean()

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DDP(Pair())
opt = torch.optim.SGD(model.parameters(), 0.1)
loader = DataLoader(torch.randn(120, 6), 10)
with protect("runs/teacher", model=model, opt=opt) as run:
    for epoch in run.epochs(2):
        for points in run.batches(loader):
            loss = model(points)
            opt.zero_grad()
            loss.backward()
            opt.step()
            run.commit()
"""
KINDS = {
    "a GradScaler": "scaler.step",
    "LBFGS and a closure": "a line to die at",
    "a teacher that forward moves": "loss.backward()",
}
LOOP = f"""
import os
import sys
{HEAD}

def loop(rank=0, port=""):
    if port:
        place = f"tcp://127.0.0.1:{{port}}"
        dist.init_process_group("gloo", init_method=place, rank=rank, world_size=2)
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    loader = DataLoader(torch.randn(64, 4), 4)
    with protect("runs/a", model=model, opt=opt) as run:
        for epoch in run.epochs(2):
            for batch in run.batches(loader):
                loss = (model(batch) - batch).square().mean()
                opt.zero_grad()
                loss.backward()
                if run.step == {DIES_AT} and dist.get_rank() == 1 and os.path.exists("die"):
                    os.unlink("die")
                    os.kill(os.getpid(), 9)
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                opt.step()
                run.commit()


if __name__ == "__main__":
    given = sys.argv[1:]
    if given[:1] == ["spawn"]:
        torch.multiprocessing.spawn(loop, args=tuple(given[1:]), nprocs=2)
    else:
        loop()
"""
"""Gradients are summed by hand: DDP would need the group before protect makes it."""
DIES = f"""import os
            if run.step == {DIES_AT} and dist.get_rank() == 1 and os.path.exists("die"):
                os.unlink("die")
                os.kill(os.getpid(), 9)
            """


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_is_killed_in_a_loop_of_this_kind_costs_no_commit(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = text_of("two_sets", *SCALED), CLOSURE, TEACHER
    text = dict(zip(KINDS, texts, strict=True))[kind]
    finished = launch(text, fault=Fault(act="kill", line=line_of(text, KINDS[kind])))
    assert finished.statuses == (PeerLostError.exit_status, -9), finished.describe()
    assert checkpoints_of(Path())[-1] in (DIES_AT, DIES_AT + 1)  # the other may have finished it
    launch(text).ok()
    assert is_exact(Path()) == ""
    found = state_of(Path())
    (tmp_path / "whole").mkdir()
    monkeypatch.chdir(tmp_path / "whole")
    launch(text).ok()
    assert state_of(Path()) == found


def check_launched(
    tmp_path: Path, *argv: str, env: dict[str, str] | None = None, text: str = LOOP
) -> str:
    """Run a loop, whose rank 1 dies, and again; it ends in the state of forked ranks.

    Returns what the first start has told. A torchrun is forked, but for the first one of LOOP.
    """
    (tmp_path / "loop.py").write_text(text, encoding="utf-8")
    (tmp_path / "die").touch()
    env = {**(env or {}), "PYTHONPATH": str(ROOT)}
    how: dict[str, Any] = {"timeout_s": 90, "cwd": tmp_path, "env": env}
    again = run_program if argv[0] == "torchrun" else run_command
    first = (run_command if text == LOOP else again)(argv, **how)
    assert first.status
    assert checkpoints_of(tmp_path) == [DIES_AT], first.describe()
    resumed = again(argv, **how).ok()
    assert f"resuming {run_folder(tmp_path)} from step {DIES_AT}" in resumed.output
    found = state_of(tmp_path)
    shutil.rmtree(tmp_path / "runs")
    loop, main, _ = text.partition("if __name__")
    launch(loop + ("loop()" if main else "")).ok()
    assert state_of(Path()) == found
    return first.stderr


@pytest.mark.parametrize("group", ["of protect", "of the program"])
def test_under_torchrun_the_same_command_continues_after_a_kill(group: str, tmp_path: Path) -> None:
    argv = ["torchrun", "--standalone", "--nproc_per_node=2", "loop.py"]
    text = LOOP if group == "of protect" else text_of("gan", f"loss_G =  -> {DIES}loss_G = ")
    told = check_launched(tmp_path, *argv, text=text)
    assert text != LOOP or f"to resume: {' '.join(argv)}" in told


def test_under_mpirun_a_rank_that_is_killed_costs_no_commit(tmp_path: Path) -> None:
    """Where protect makes the process group."""
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed on this machine (see .ci/run)")
    check_launched(tmp_path, "mpirun", "-np", "2", sys.executable, "loop.py", env=MPI_ENV)


def test_under_spawn_a_rank_that_is_killed_costs_no_commit(tmp_path: Path) -> None:
    """Where the process group is the program's, and no environment says who is who."""
    check_launched(tmp_path, sys.executable, "loop.py", "spawn", str(held_port()))

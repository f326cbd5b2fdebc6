"""A GPU behind an all-reduce that never ends: the last update that it has finished is saved.

The GPU is a thread of a CPU rank that does queued work: see stuck_device.py.
"""

import json
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.launch import Launch
from hardened_ddp.ranks.phase import Phase
from hardened_ddp.step.async_device import AsyncDevice, Event, beside
from hardened_ddp.step.progress import Progress
from tests.harness.ranks import Finished, start_training, train
from tests.marks import Undisturbed, slow_after
from tests.run_folder import find_checkpoints, last_tensors, only_run, saved_step, step_of

NUM_WARM_UPS = 2
"""All-reduces of DDP's warm-up, before the first step."""

FLAGS = ["--cpu_only", "--dataset", "tests.plugins:points", "--batch_size", "4", "--epochs", "3"]
FLAGS += ["--num_workers", "0", "--log_interval", "1000", "--no_shared_memory"]
FLAGS += ["--model", "tests.stuck_device:Net", "--model_args", "{}", "--gradient_as_bucket_view"]
FLAGS += ["--checkpoint_every_steps", "0", "--checkpoint_every_epochs", "0"]
FLAGS += ["--stop_grace_s", "1.5", "--hang_after_s", "1.5"]


def plan(folder: Path, **fault: object) -> dict[str, str]:
    """Return the environment of ranks: who leaves, in which phase, at which call of it, how."""
    folder.mkdir()
    nobody = {"rank": -1, "phase": "", "call": 0, "signal": ""}
    return {"STUCK_DEVICE": json.dumps({"folder": str(folder), **nobody, **fault})}


def run(output: Path, world_size: int) -> Finished:
    env = plan(output.with_name(f"{output.name}-notes"))
    return train([*FLAGS, "--output_dir", output], world_size, env=env)


def test_a_state_is_copied_on_a_stream_made_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    # Not one of those that the futures of collectives get; and a stuck device may make none.
    made: list[Any] = []
    monkeypatch.setattr(torch.cuda, "Stream", lambda *given, **named: made.append((given, named)))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    device = torch.device("cuda", 1)
    parts = SimpleNamespace(device=device, checks_one_step_late=True)
    AsyncDevice(parts, Progress(), None)
    assert made == [((device,), {"priority": -1})]
    with beside(device):
        assert made[1:] == made[:1]


LEAVING = [
    (2, "SIGKILL", "forward", 11),
    (2, "SIGKILL", "update", 7),
    (2, "SIGKILL", "evaluation", 2),
    (3, "SIGSTOP", "backward", 11),
]


@pytest.mark.slow
@pytest.mark.parametrize("leaving", LEAVING, ids=str)
def test_at_most_the_step_under_way_is_lost(
    leaving: tuple[int, str, str, int], tmp_path: Path, undisturbed: Undisturbed
) -> None:
    world_size, how, phase, call = leaving
    *others, victim = range(world_size)
    notes, argv = tmp_path / "notes", [*FLAGS, "--output_dir", tmp_path / "runs"]
    env = plan(notes, rank=victim, phase=phase, call=call, signal=how)
    with start_training(argv, world_size, env=env) as running:
        running.wait_for((notes / "left").exists, timeout_s=60, what="the fault")
        if how == "SIGKILL":  # torchrun ends the others; a stopped rank they find out themselves
            running.wait_for(lambda: victim not in running.living(), timeout_s=20, what="an end")
            for rank in others:
                running.kill(rank, signal.SIGTERM)
        finished = running.wait(60)
    assert finished.statuses[victim] == -signal.SIGKILL
    assert {finished.statuses[rank] for rank in others} <= {75}
    num_done = len(list(notes.glob(f"sum-*-{victim}"))) - NUM_WARM_UPS
    assert num_done > 1
    assert saved_step(tmp_path / "runs") == num_done
    assert f"the state after step {num_done} is saved" in finished.output
    env, run = plan(tmp_path / "again"), only_run(tmp_path / "runs")
    train([*argv, "--resume", run], world_size, env=env).ok()
    assert last_tensors(tmp_path / "runs") == undisturbed(world_size)


@pytest.mark.parametrize("victim", slow_after(1, [2, 0]))
def test_a_rank_that_waits_for_a_dead_one_saves_at_once(victim: int, tmp_path: Path) -> None:
    # No signal comes, as none does until torchrun has seen the death; and the lowest that is left
    # can't save.
    notes = tmp_path / "notes"
    first, second = [rank for rank in range(3) if rank != victim]
    fault = {"rank": victim, "phase": "backward", "call": 10, "signal": "SIGKILL"}
    env = plan(notes, **fault, unreadable=first)
    argv = [*FLAGS, "--stop_grace_s", "3000", "--hang_after_s", "600"]
    with start_training([*argv, "--output_dir", tmp_path / "runs"], 3, env=env) as running:
        running.wait_for((notes / "left").exists, timeout_s=60, what="the fault")
        finished = running.wait(40)
    assert finished.statuses == tuple(-9 if rank == victim else 75 for rank in range(3))
    assert (notes / "head_start").read_text() == ("1.0" if victim else "0.0")
    num_done = len(list(notes.glob(f"sum-*-{victim}"))) - NUM_WARM_UPS
    [checkpoint] = find_checkpoints(tmp_path / "runs")
    assert step_of(checkpoint) == num_done
    if victim:  # rank 0 is waited for; else any of the two is the first
        assert "could not be saved by this rank" in finished.outputs[first]
        assert "why: " in finished.outputs[0]
    output = finished.outputs[second]
    assert f"the state after step {num_done} is saved" in output
    assert f"lost another rank (Connection closed by peer: rank {victim} ended, in " in output
    took_s = checkpoint.stat().st_mtime - (notes / "left").stat().st_mtime
    assert took_s < 15, "it waited for a signal or a limit"


@pytest.mark.parametrize("dump", slow_after(1, ["stuck", "written"]))
def test_a_device_that_is_stuck_in_a_kernel_of_its_own_is_named(dump: str, tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    env = plan(notes, rank=1, phase="forward", call=11, signal="kernel", dump=dump)
    argv = [*FLAGS, "--output_dir", tmp_path / "runs", "--hang_after_s", "1"]
    finished = train(argv, 2, env=env, timeout_s=60)
    assert set(finished.statuses) <= {1 if dump == "stuck" else 75, -signal.SIGKILL}
    num_done = len(list(notes.glob("sum-*-1"))) - NUM_WARM_UPS
    # Both main threads wait for the sum of the same step: the devices tell them apart.
    assert f"rank 1, step {num_done + 1}, backward, " in finished.outputs[0]
    assert f"rank 0 waits in all-reduce of step {num_done + 1}" in finished.outputs[0]
    assert saved_step(tmp_path / "runs") == num_done
    traces = (tmp_path / "runs").glob("*/hangs/*/rank_0_nccl.json")
    found = [trace.read_text() for trace in traces]
    assert found == (['{"entries": []}'] if dump == "written" else [])


@pytest.mark.parametrize(
    "case",
    [
        # Whether the gradients of a step are computed, and whether the device has begun its update.
        (None, None, Phase.ALL_REDUCE, Phase.ALL_REDUCE),
        ((False, False), None, Phase.ALL_REDUCE, Phase.BACKWARD),
        ((True, False), None, Phase.ALL_REDUCE, Phase.ALL_REDUCE),
        # The work of the next step is queued behind a sum that others have not joined.
        ((True, False), False, Phase.ALL_REDUCE, Phase.ALL_REDUCE),
        # No launch fits into the queue any more.
        ((True, False), None, Phase.FORWARD, Phase.ALL_REDUCE),
        ((False, False), None, Phase.FORWARD, Phase.FORWARD),
        ((True, True), False, Phase.ALL_REDUCE, Phase.BACKWARD),
        ((True, True), True, Phase.ALL_REDUCE, Phase.ALL_REDUCE),
        ((True, True), None, Phase.BACKWARD, Phase.BACKWARD),
        ((True, False), None, Phase.DATA, Phase.DATA),
    ],
    ids=str,
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_the_device_tells_what_a_rank_is_at(case: tuple[Any, ...], world_size: int) -> None:
    last, current, host, device = case

    def event(is_reached: bool | None) -> Any:
        return None if is_reached is None else SimpleNamespace(is_reached=lambda: is_reached)

    update = last and SimpleNamespace(computed=event(last[0]), before=event(last[1]))
    parts = SimpleNamespace(group=SimpleNamespace(world_size=world_size))
    step = SimpleNamespace(computed=event(current))
    watched = SimpleNamespace(_parts=parts, _last=update, _current=step)
    alone = Phase.BACKWARD if host == Phase.ALL_REDUCE else host
    assert AsyncDevice.phase_of(watched, host) == (device if world_size == 2 else alone)


def test_a_wait_for_the_device_blocks_and_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, bool]] = []

    def event(**flags: bool) -> SimpleNamespace:
        made.append(flags)
        return SimpleNamespace(record=lambda: None)

    monkeypatch.setattr(torch.cuda, "Event", event)
    Event()
    assert made == [{"blocking": True}], "else each rank takes a core of the loader's workers"


class Switch:
    """A device event that the test sets."""

    def __init__(self) -> None:
        self.is_set = False

    def is_reached(self) -> bool:
        return self.is_set

    def wait(self) -> None:
        assert self.is_set


def test_a_state_holds_until_the_next_update_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hardened_ddp.step.async_device.Event", Switch)
    weights = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.AdamW([weights], fused=True)
    group = Group(Launch(), torch.device("cpu"))
    parts = SimpleNamespace(device=group.device, optimizer=optimizer, group=group)
    parts.checks_one_step_late = False
    progress = Progress(step=4)
    device = AsyncDevice(parts, progress, SimpleNamespace(loss_sum=0.5))
    device.begin(SimpleNamespace(buffers=(), totals_before=(0.25,)))
    assert device.find(0) is None  # nothing is known to be done
    device._current.begun.is_set = True
    found = device.find(0)
    assert (found.progress.step, found.loss) == (4, 0.25)
    device.before_update()
    progress.step = 5
    device.after_update()
    before = device.find(0)
    assert (before.progress.step, before.loss) == (4, 0.25)
    assert before.still_holds()
    before.next.before.is_set = True  # type: ignore[attr-defined]
    assert not before.still_holds()
    assert device.find(0) is None  # half updated
    before.next.after.is_set = True  # type: ignore[attr-defined]
    after = device.find(0)
    assert (after.progress.step, after.loss) == (5, 0.5)

"""What people train (averages, Muon, sampling, adapters) keeps the promises: kill, retry, resize.

Each of FEATURES is a run with other flags. In a drill it meets faults inside of steps, a signal and
a kill at random steps, and the same command is given again: all tensors of the last checkpoint,
also those of optimizer and averages, are those of the undisturbed run.
"""

import random
import signal
from pathlib import Path

import pytest

from ddp_drills.fault import Fault
from ddp_drills.injections import Injection
from tests.drills.forked import forked_drills
from tests.harness.marks import slow_after
from tests.harness.ranks import train
from tests.harness.run_folder import last_tensors, samples_by_step

NUM_STEPS = 27
FEATURES: dict[str, list[str]] = {
    "ema": ["--ema=0.9", "--eval_every=0"],
    "ema every": ["--ema=0.9", "--ema_every=3", "--optimizer=sgd", "--eval_every=0"],
}


def random_faults(name: str) -> tuple[Injection, ...]:
    """Draw a fault inside of a step, a NaN, a stop and a kill, at steps that name decides."""
    chance = random.Random(name)
    steps = sorted(chance.sample(range(2, NUM_STEPS - 1, 3), 4))
    kinds = [
        {"kind": "raise", "phase": chance.choice(["forward", "backward"])},
        {"kind": "nan", "phase": "loss"},
        {"kind": "pause", "phase": "forward", "signal": signal.SIGTERM},
        {
            "kind": "pause",
            "phase": chance.choice(["forward", "optimizer"]),
            "signal": signal.SIGKILL,
        },
    ]
    chance.shuffle(kinds)
    found = []
    for step, kind in zip(steps, kinds, strict=True):
        rank = chance.randrange(2)
        found.append(Injection(step=step, ranks=(rank,), victim=rank, **kind))
    return tuple(found)


@pytest.mark.parametrize("name", slow_after(1, FEATURES))
def test_faults_and_kills_leave_no_trace(name: str, tmp_path: Path) -> None:
    drills = forked_drills(tmp_path, flags=FEATURES[name])
    fault = Fault(name="faults", text=name, injections=random_faults(name), ends="several starts")
    verdict = drills.run(fault)
    assert not verdict.problems, drills.output_of(fault)
    assert "equal to the undisturbed run" in verdict.weights


@pytest.mark.slow
@pytest.mark.parametrize("name", FEATURES)
def test_faults_that_are_learned_of_late_leave_no_trace(name: str, tmp_path: Path) -> None:
    flags = [*FEATURES[name], "--no_shared_memory"]
    drills = forked_drills(tmp_path, flags=flags, model="tests.late_looks:mlp")
    fault = Fault(
        name="faults", text=name, injections=random_faults(f"late {name}"), ends="several starts"
    )
    verdict = drills.run(fault)
    assert not verdict.problems, drills.output_of(fault)


@pytest.mark.slow
@pytest.mark.parametrize("name", FEATURES)
def test_other_numbers_of_ranks_take_the_same_samples(name: str, tmp_path: Path) -> None:
    flags = ["--cpu_only", "--num_workers=0", "--ledger", "--model=mlp", "--run_name=run"]
    flags += ["--global_batch_size=48", "--lr_schedule=constant", *FEATURES[name]]
    for world_size, last in ((2, 7), (3, 12), (1, 16), (2, 33)):
        train([*flags, "--output_dir", tmp_path / "cut", "--max_steps", str(last)], world_size).ok()
    train([*flags, "--output_dir", tmp_path / "whole", "--max_steps=33"], 2).ok()
    cut, whole = (samples_by_step(tmp_path / name / "run") for name in ("cut", "whole"))
    assert cut == whole
    assert len(cut) == 33
    assert last_tensors(tmp_path / "cut").keys() == last_tensors(tmp_path / "whole").keys()

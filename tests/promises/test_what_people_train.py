"""What people train (averages, Muon, sampling, adapters) keeps the promises: kill, retry, resize.

Each of FEATURES is a run with other flags. In a drill it meets faults inside of steps, a signal and
a kill at random steps, and the same command is given again: all tensors of the last checkpoint,
also those of optimizer and averages, are those of the undisturbed run.
"""

import json
import random
import signal
from pathlib import Path

import pytest

from ddp_drills.fault import Fault
from ddp_drills.injections import Injection
from ddp_drills.runner import Drills
from ddp_drills.work import Work
from tests.drills.forked import forked_drills
from tests.harness.ranks import train
from tests.marks import slow_after
from tests.run_folder import samples_by_step

NUM_STEPS = 27
FEATURES: dict[str, list[str]] = {
    "ema and muon": ["--ema=0.9", "--optimizer=muon", "--eval_every=0"],
    "ema every and evaluations": [
        *("--ema=0.9", "--ema_every=3", "--optimizer=sgd"),
        *("--eval_every_steps=4", "--eval_max_batches=1", "--eval_batch_size=64"),
    ],
    "balanced": ["--sampling=balanced"],
    "balanced once": ["--sampling=balanced", "--no_replacement", "--num_workers=1"],
    "own sampling": ["--sampling=tests.data.test_sampling:every_third"],
    "mix": [],
}
UPDATES = ("ema and muon", "ema every and evaluations")
"""Those that concern the update, which ranks that learn late of a fault have to take back."""

MIX = "mix:digits,tests.data.test_sampling:dark"
MIX_ARGS = {"weights": [3, 1], "ends": "all"}


def drills_of(name: str, folder: Path, *flags: str, model: str = "mlp") -> Drills:
    data = {"dataset": MIX, "dataset_args": MIX_ARGS} if name == "mix" else {}
    work = Work(num_ranks=2, model=model, **data)
    return forked_drills(folder, flags=[*FEATURES[name], *flags], work=work)


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
def test_faults_and_kills_do_not_change_the_weights(name: str, tmp_path: Path) -> None:
    drills = drills_of(name, tmp_path)
    fault = Fault(name="faults", text=name, injections=random_faults(name), ends="several starts")
    verdict = drills.run(fault)
    assert not verdict.problems, drills.output_of(fault)
    assert "equal to the undisturbed run" in verdict.weights


@pytest.mark.slow
@pytest.mark.parametrize("name", UPDATES)
def test_faults_that_are_learned_of_late_do_not_change_the_weights(
    name: str, tmp_path: Path
) -> None:
    drills = drills_of(name, tmp_path, "--no_shared_memory", model="tests.late_looks:mlp")
    fault = Fault(
        name="faults", text=name, injections=random_faults(f"late {name}"), ends="several starts"
    )
    verdict = drills.run(fault)
    assert not verdict.problems, drills.output_of(fault)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FEATURES if name != UPDATES[1]])
def test_other_numbers_of_ranks_take_the_same_samples(name: str, tmp_path: Path) -> None:
    flags = ["--cpu_only", "--num_workers=0", "--ledger", "--model=mlp", "--run_name=run"]
    flags += ["--global_batch_size=48", "--lr_schedule=constant", *FEATURES[name]]
    if name == "mix":
        flags += ["--dataset", MIX, "--dataset_args", json.dumps(MIX_ARGS)]
    for world_size, last in ((2, 7), (3, 12), (1, 33)):
        train([*flags, "--output_dir", tmp_path / "cut", "--max_steps", str(last)], world_size).ok()
    train([*flags, "--output_dir", tmp_path / "whole", "--max_steps=33"], 2).ok()
    cut, whole = (samples_by_step(tmp_path / name / "run") for name in ("cut", "whole"))
    assert cut == whole
    assert len(cut) == 33

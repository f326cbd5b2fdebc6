"""What people train (averages, Muon, sampling, adapters) keeps the promises: kill, retry, resize.

Each of FEATURES is a run with other flags. In a drill it meets faults inside of steps, a signal and
a kill at random steps, and the same command is given again: all tensors of the last checkpoint,
also those of optimizer and averages, are those of the undisturbed run.
"""

import json
import random
import signal
from pathlib import Path
from typing import Any

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
    "balanced once": ["--sampling=balanced", "--no_replacement"],
    "own sampling": ["--sampling=tests.data.test_sampling:every_third"],
    "mix": [],
    # of 8 samples, a rank would have one batch
    "tokens": ["--task=tokens", "--global_batch_size=16"],
    "regression": ["--global_batch_size=8"],
}
UPDATES = ("ema and muon", "ema every and evaluations")
"""Those that concern the update, which ranks that learn late of a fault have to take back."""

# What they train, if it is not mlp on the digits.
WORKS: dict[str, dict[str, Any]] = {
    "mix": {
        "dataset": "mix:digits,tests.data.test_sampling:dark",
        "dataset_args": {"weights": [3, 1], "ends": "all"},
    },
    "tokens": {
        "dataset": "tests.token_data:ragged",
        "model": "tests.token_data:TinyLM",
        "model_args": {"dropout": 0.2},
    },
    "regression": {"dataset": "tests.token_data:slopes"},
}


def drills_of(name: str, folder: Path, *, is_late: bool) -> Drills:
    model = {"model": "tests.late_looks:mlp"} if is_late else {}
    flags = [*FEATURES[name], *(["--no_shared_memory"] if is_late else [])]
    work = Work(num_ranks=2, **{**WORKS.get(name, {}), **model})
    return forked_drills(folder, flags=flags, work=work)


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


CASES = [(name, False) for name in FEATURES] + [(name, True) for name in UPDATES]


@pytest.mark.parametrize("case", slow_after(1, CASES), ids=str)
def test_faults_and_kills_do_not_change_the_weights(case: tuple[str, bool], tmp_path: Path) -> None:
    name, is_late = case
    drills = drills_of(name, tmp_path, is_late=is_late)
    faults = random_faults(f"late {name}" if is_late else name)
    fault = Fault(name="faults", text=name, injections=faults, ends="several starts")
    verdict = drills.run(fault)
    assert not verdict.problems, drills.output_of(fault)
    assert "equal to the undisturbed run" in verdict.weights


@pytest.mark.slow
@pytest.mark.parametrize("name", ["balanced", "balanced once", "own sampling", "mix", "tokens"])
def test_other_numbers_of_ranks_take_the_same_samples(name: str, tmp_path: Path) -> None:
    flags = ["--cpu_only", "--num_workers=0", "--ledger", "--model=mlp", "--run_name=run"]
    flags += ["--global_batch_size=48", "--lr_schedule=constant", "--epochs=100", *FEATURES[name]]
    for setting, value in WORKS.get(name, {}).items():
        flags += [f"--{setting}", value if isinstance(value, str) else json.dumps(value)]
    for world_size, last in ((2, 7), (3, 12), (1, 33)):
        train([*flags, "--output_dir", tmp_path / "cut", "--max_steps", str(last)], world_size).ok()
    train([*flags, "--output_dir", tmp_path / "whole", "--max_steps=33"], 2).ok()
    cut, whole = (samples_by_step(tmp_path / name / "run") for name in ("cut", "whole"))
    assert cut == whole
    assert len(cut) == 33

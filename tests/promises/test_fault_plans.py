"""Ten faults in one run of a hundred steps, by a seeded plan of (rank, step, phase, kind).

The same command is given again whenever the run stops. At the end the weights are those of the
undisturbed run, bit for bit, unless memory made a micro-batch smaller, which rounds otherwise; the
replicas are equal, and the ledger has every sample exactly once. More plans: --plans N.

And what people train: each of FEATURES is a run with other flags, which meets such faults too.
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

NUM_STEPS, NUM_FAULTS = 100, 10
NUM_RANKS = 2
FLAGS = (f"--max_steps={NUM_STEPS}", "--eval_every=0", "--num_workers=1", "--batch_size=8")
FLAGS += ("--multiprocessing_context=fork",)  # a worker that imports torch takes 5 s of CPU time
RESTARTS = {"SIGTERM": signal.SIGTERM, "SIGKILL": signal.SIGKILL}
KINDS = {
    # kind of the plan: (what ddp_drills/injectors.py calls it, in which phases)
    "raise": ("raise", ("forward", "backward")),
    "raise in the loss": ("too few", ("loss",)),
    "NaN": ("nan", ("loss",)),
    "memory": ("memory", ("forward", "backward")),
    "kill a worker": ("kill a worker", ("forward",)),
    **dict.fromkeys(RESTARTS, ("pause", ("forward", "backward", "optimizer"))),
}
Plan = list[tuple[int, int, str, str]]


def plan_of(seed: int) -> Plan:
    """Draw (rank, step, phase, kind) ten times. Memory runs out in every other plan only."""
    chance = random.Random(seed)
    # WHY not closer: after a restart a rank knows its step when it has done one.
    steps = sorted(chance.sample(range(2, NUM_STEPS // 4 - 1), NUM_FAULTS))
    once = ["kill a worker", "SIGKILL", "SIGTERM"]
    often = ["raise", "raise in the loss", "NaN", *(["memory"] if seed % 2 else [])]
    kinds = [*once, *often, *(chance.choice(often) for _ in range(NUM_FAULTS))][:NUM_FAULTS]
    chance.shuffle(kinds)
    return [
        (chance.randrange(NUM_RANKS), 4 * step, chance.choice(KINDS[kind][1]), kind)
        for step, kind in zip(steps, kinds, strict=True)
    ]


def fault_of(seed: int) -> Fault:
    """Make one fault of a plan."""
    plan = plan_of(seed)
    injections = []
    for rank, step, phase, kind in plan:
        how: dict[str, Any] = {"kind": KINDS[kind][0], "signal": RESTARTS.get(kind, 0)}
        injections += [Injection(step=step, ranks=(rank,), victim=rank, phase=phase, **how)]
    told = (f"{kind} on rank {rank} in {phase} of step {s}" for rank, s, phase, kind in plan)
    has_split = any(kind == "memory" for *_, kind in plan)
    return Fault(
        name=f"plan-{seed}",
        text="; ".join(told),
        injections=tuple(injections),
        ends="several starts",
        keeps="equal replicas" if has_split else "same weights",
    )


@pytest.fixture(scope="module")
def drills(tmp_path_factory: pytest.TempPathFactory) -> Drills:
    folder = tmp_path_factory.mktemp("plans")
    return forked_drills(folder, num_ranks=NUM_RANKS, flags=FLAGS)


@pytest.mark.slow
def test_ten_faults_in_a_hundred_steps_do_not_change_the_weights(
    plan_seed: int, drills: Drills
) -> None:
    fault = fault_of(plan_seed)
    verdict = drills.run(fault)
    print(fault.text, verdict.ended, sep="\n")
    assert not verdict.problems, drills.output_of(fault)
    board = drills.folder / fault.name / "board"
    assert len(list(board.glob("injected-*"))) == NUM_FAULTS


NUM_FEATURE_STEPS = 27
FEATURES: dict[str, list[str]] = {
    "ema and muon": ["--ema=0.9", "--optimizer=muon", "--eval_every=0"],
    "ema every and evaluations": [
        *("--ema=0.9", "--ema_every=3", "--optimizer=sgd"),
        *("--eval_every_steps=4", "--eval_max_batches=1", "--eval_batch_size=64"),
    ],
    "balanced": ["--sampling=balanced"],
    "balanced once": ["--sampling=balanced", "--no_replacement"],
    "own sampling": ["--sampling=tests.data.test_sampler:every_third"],
    "mix": [],
    # of 8 samples, a rank would have one batch
    "tokens": ["--task=tokens", "--global_batch_size=16"],
    "regression": ["--global_batch_size=8"],
}
UPDATES = ("ema and muon", "ema every and evaluations")
"""Those that concern the update, which ranks that learn late of a fault have to take back."""

# What they train, if it is not mlp on the digits.
WORKS: dict[str, dict[str, Any]] = {
    "mix": {"dataset": "mix:digits,tests.data.test_sampler:dark"},
    "tokens": {"dataset": "tests.token_data:ragged", "model": "tests.token_data:TinyLM"},
    "regression": {"dataset": "tests.token_data:slopes"},
}
WORKS["mix"]["dataset_args"] = {"weights": [3, 1], "ends": "all"}
WORKS["tokens"]["model_args"] = {"dropout": 0.2}


def drills_of(name: str, folder: Path, *, is_late: bool) -> Drills:
    model = {"model": "tests.late_looks:mlp"} if is_late else {}
    flags = [*FEATURES[name], *(["--no_shared_memory"] if is_late else [])]
    work = Work(num_ranks=2, **{**WORKS.get(name, {}), **model})
    return forked_drills(folder, flags=flags, work=work)


def random_faults(name: str) -> tuple[Injection, ...]:
    """Draw a fault inside of a step, a NaN, a stop and a kill, at steps that name decides."""
    chance = random.Random(name)
    steps = sorted(chance.sample(range(2, NUM_FEATURE_STEPS - 1, 3), 4))
    killed = {"signal": signal.SIGKILL}
    kinds = [
        {"kind": "raise", "phase": chance.choice(["forward", "backward"])},
        {"kind": "nan", "phase": "loss"},
        {"kind": "pause", "phase": "forward", "signal": signal.SIGTERM},
        {"kind": "pause", "phase": chance.choice(["forward", "optimizer"]), **killed},
    ]
    chance.shuffle(kinds)
    drawn = [(step, chance.randrange(2), kind) for step, kind in zip(steps, kinds, strict=True)]
    return tuple(Injection(step=s, ranks=(r,), victim=r, **kind) for s, r, kind in drawn)


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
@pytest.mark.parametrize("name", ["balanced", "own sampling", "mix", "tokens"])
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

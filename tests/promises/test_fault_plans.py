"""Ten faults in one run of a hundred steps, by a seeded plan of (rank, step, phase, kind).

The same command is given again whenever the run stops. At the end the weights are those of the
undisturbed run, bit for bit, unless memory made a micro-batch smaller, which rounds otherwise; the
replicas are equal, and the ledger has every sample exactly once. More plans: --plans N.
"""

import random
import signal

import pytest

from ddp_drills.fault import Fault
from ddp_drills.injections import Injection
from ddp_drills.runner import Drills
from tests.drills.forked import forked_drills

NUM_STEPS, NUM_FAULTS = 100, 10
NUM_RANKS = 2
FLAGS = (f"--max_steps={NUM_STEPS}", "--eval_every=0", "--num_workers=1", "--batch_size=8")
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
    kinds = once + often + [chance.choice(often) for _ in range(NUM_FAULTS)]
    kinds = kinds[:NUM_FAULTS]
    chance.shuffle(kinds)
    return [
        (chance.randrange(NUM_RANKS), 4 * step, _phase_of(kind, chance), kind)
        for step, kind in zip(steps, kinds, strict=True)
    ]


def fault_of(seed: int) -> Fault:
    """Make one fault of a plan."""
    plan = plan_of(seed)
    injections = [
        Injection(
            kind=KINDS[kind][0],
            phase=phase,
            step=step,
            ranks=(rank,),
            victim=rank,
            signal=RESTARTS.get(kind, 0),
        )
        for rank, step, phase, kind in plan
    ]
    has_split = any(kind == "memory" for *_, kind in plan)
    return Fault(
        name=f"plan-{seed}",
        text="; ".join(
            f"{kind} on rank {rank} in {phase} of step {s}" for rank, s, phase, kind in plan
        ),
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


def _phase_of(kind: str, chance: random.Random) -> str:
    return chance.choice(KINDS[kind][1])

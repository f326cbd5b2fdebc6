"""Whatever happens, and whenever: the same command goes on, to the weights of the undisturbed run.

A round is one run of more than a hundred steps, with faults at random moments, started again each
time by the same command. Its seed fixes which faults, on which rank, and after which step; the
moment within the step, or within a save, is chance. More rounds: --rounds N; another set: --seed N.
"""

import json
import random
import signal
from pathlib import Path
from typing import NamedTuple

from hardened_ddp.checkpoint.folder import find_newest
from hardened_ddp.reporting.summary import finished_at
from tests.harness.processes import is_alive, kill, wait_until
from tests.harness.ranks import Finished, start_program, start_training, train
from tests.marks import Undisturbed
from tests.run_folder import last_tensors, only_run, read_summary

SMALL: list[str | Path] = ["--cpu_only", "--batch_size", "8", "--epochs", "2"]
SMALL += ["--model", "tests.plugins:paced_mlp", "--model_args", "{pause_s: 0.01}"]
SMALL += ["--log_interval", "1", "--checkpoint_every_steps", "5", "--ledger", "--run_name", "run"]
SMALL += ["--num_workers", "0", "--tensorboard", "false", "--stop_grace_s", "1.5"]
NUM_STEPS = {2: 180, 3: 120}
"""By world size: 2 epochs of 1,437 samples in steps of 16 or 24."""

LEAVE_ALONE_S = 40.0
TRY_S = 60.0

UNDER_TORCHRUN = ("kill the agent", "kill a rank of torchrun")
SIGNALS = {"kill a rank": signal.SIGKILL, "SIGTERM to a rank": signal.SIGTERM}
SIGNALS |= {"SIGUSR1 to a rank": signal.SIGUSR1}
KINDS = (*SIGNALS, "kill all ranks", "stop a rank for a while", "stop a rank for good")
KINDS += UNDER_TORCHRUN


class Fault(NamedTuple):
    kind: str
    after_step: int
    victim: int


def plan_of(seed: int) -> tuple[int, list[Fault]]:
    """Draw the world size and the faults of a round. Each kind comes up in four rounds."""
    chance = random.Random(seed)
    world_size = 2 + seed % 2
    kinds = [KINDS[(seed + other) % len(KINDS)] for other in (0, len(KINDS) // 2)]
    chance.shuffle(kinds)
    last = NUM_STEPS[world_size] - 40
    steps = sorted(chance.randrange(5, last) for _ in kinds)
    drawn = zip(kinds, steps, strict=True)
    return world_size, [Fault(kind, step, chance.randrange(world_size)) for kind, step in drawn]


class Watch:
    """Looks at the run folder all the time: how far is it, and is there a valid checkpoint?"""

    def __init__(self, output_dir: Path) -> None:
        self.metrics = output_dir / "run" / "metrics.jsonl"
        self.checkpoints = output_dir / "run" / "checkpoints"
        self.has_seen_one = False
        self.begin = 0

    def start(self) -> None:
        """Heed only steps that are done from now on."""
        self.begin = self.metrics.stat().st_size if self.metrics.exists() else 0

    def look(self) -> None:
        """Raise AssertionError if there was a valid checkpoint before and is none now."""
        found = find_newest(self.checkpoints)[0] if self.checkpoints.is_dir() else None
        assert found or not self.has_seen_one, "no valid checkpoint any more"
        self.has_seen_one = found is not None

    def is_past(self, step: int) -> bool:
        """Say whether step was done, by the newest line of the metrics."""
        self.look()
        if not self.metrics.exists():
            return False
        new = self.metrics.read_bytes()[self.begin :].decode()
        steps = [json.loads(line)["step"] for line in new.split("\n")[:-1]]
        return bool(steps) and steps[-1] > step


def run(output: Path, world_size: int) -> Finished:
    return train([*SMALL, "--output_dir", output], world_size)


def test_faults_at_random_moments_end_in_the_weights_of_the_undisturbed_run(
    chaos_seed: int, tmp_path: Path, undisturbed: Undisturbed
) -> None:
    world_size, faults = plan_of(chaos_seed)
    argv = [*SMALL, "--output_dir", tmp_path]
    watch = Watch(tmp_path)
    for fault in faults:
        print(f"round {chaos_seed}, {world_size} ranks: {fault}")
        watch.start()
        disturb = disturb_torchrun if fault.kind in UNDER_TORCHRUN else disturb_ranks
        disturb(argv, world_size, fault, watch)
        watch.look()
        if finished_at(tmp_path / "run") is not None:
            break  # the fault did not end it
    run(tmp_path, world_size).ok()
    folder = only_run(tmp_path)
    assert read_summary(folder)["step"] == NUM_STEPS[world_size]
    assert last_tensors(tmp_path) == undisturbed(world_size)
    verified = train(["verify-ledger", folder], launcher="none").ok()
    assert verified.output.count("1437 samples, each exactly once") == 2


def disturb_ranks(argv: list[str | Path], world_size: int, fault: Fault, watch: Watch) -> None:
    """Start the ranks, cause the fault, and wait until all have left."""
    with start_training(argv, world_size) as running:
        running.wait_for(lambda: watch.is_past(fault.after_step), timeout_s=TRY_S, what="its step")
        victim, others = fault.victim, {*range(world_size)} - {fault.victim}
        match fault.kind:
            case kind if kind in SIGNALS:
                running.kill(victim, SIGNALS[kind])
            case "kill all ranks":
                for rank in range(world_size):
                    running.kill(rank)
            case "stop a rank for a while":
                running.kill(victim, signal.SIGSTOP)
                if fault.after_step % 2:  # the others may have been told to stop meanwhile
                    running.kill(min(others), signal.SIGTERM)
                watch.look()
                running.kill(victim, signal.SIGCONT)
            case "stop a rank for good":
                running.kill(victim, signal.SIGSTOP)
                for rank in others:
                    running.kill(rank, signal.SIGTERM)
                running.wait_for(
                    lambda: set(running.living()) <= {victim}, timeout_s=TRY_S, what="their end"
                )
                running.kill(victim)
        running.wait_for(
            lambda: watch.look() or not running.living(), timeout_s=LEAVE_ALONE_S, what="the end"
        )


def disturb_torchrun(argv: list[str | Path], world_size: int, fault: Fault, watch: Watch) -> None:
    """Do it to a torchrun, which restarts its ranks; a killed one leaves none behind."""
    launch = ["torchrun", "--standalone", f"--nproc_per_node={world_size}", "--max_restarts=2"]
    with start_program([*launch, "ddp_training.py", *argv]) as command:
        command.wait_for(lambda: watch.is_past(fault.after_step), timeout_s=TRY_S, what="its step")
        pids = [command.pid_of_rank(rank) for rank in range(world_size)]
        if fault.kind == "kill the agent":
            kill(command.pid)
        elif (pid := pids[fault.victim]) is not None:
            kill(pid)
            command.wait(timeout_s=TRY_S).ok()
    started = [pid for pid in pids if pid is not None]
    wait_until(lambda: not any(map(is_alive, started)), LEAVE_ALONE_S, f"the end of {started}")

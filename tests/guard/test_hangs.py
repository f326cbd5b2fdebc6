"""A rank that hangs is named with its step, phase and sample; the run goes on and loses nothing."""

import re
import signal
import threading
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from hardened_ddp.errors import HangError
from hardened_ddp.guard import hang_rules as rules
from hardened_ddp.guard.hang import HangWatch
from hardened_ddp.guard.hang_rules import LONG_FACTOR, Report, decide, limits_ns, longest_wait_s
from hardened_ddp.guard.slow import NUM_REPORTS, SlowRanks
from hardened_ddp.ranks import threads
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.launch import Launch
from hardened_ddp.ranks.phase import LIMITS, NUM_FIRST_STEPS, NUM_PHASES, SINCE, Phase, Tracker
from hardened_ddp.ranks.stacks import is_debugged
from hardened_ddp.reporting.goodput import read_attempts
from hardened_ddp.training.survivor_save import read_failures
from tests.harness.ranks import Finished, run_command, run_program, start_training, train
from tests.marks import slow_after
from tests.run_folder import find_checkpoints, last_tensors, only_run, step_of

POINTS = ["--cpu_only", "--batch_size", "2", "--log_interval", "1", "--eval_every", "0"]
POINTS += ["--checkpoint_every_steps", "0", "--lr_schedule", "constant", "--epochs", "3"]
PLAIN = [*POINTS, "--dataset", "tests.plugins:points", "--num_workers", "0"]
HANGING = [*PLAIN, "--model", "tests.plugins:hanging", "--hang_after_s", "2"]
LEFT = HangError.exit_status


def hung_in(output: Path) -> tuple[Path, str]:
    """Give the folder of the one hang in the one run, and the verdict."""
    [verdict] = output.glob("*/hangs/*/verdict.txt")
    return verdict.parent, verdict.read_text(encoding="utf-8")


def check_saved(finished: Finished, output: Path) -> None:
    """The last completed step is on the disk, and the failure is noted for the next start."""
    [checkpoint] = find_checkpoints(output)
    assert f"the state after step {step_of(checkpoint)} is saved" in finished.output
    [failure] = read_failures(only_run(output))  # three at one step end the restarts
    assert failure["step"] == step_of(checkpoint)
    assert not failure["is_peer"]


HANGS = [(2, 1, "sleep"), (3, 0, "sleep", "--no_shared_memory"), (2, 1, "hold")]


@pytest.mark.parametrize("case", slow_after(1, HANGS), ids=str)
def test_a_rank_that_hangs_in_forward_is_named_and_the_others_save_and_leave(
    case: tuple[int, int, str, *tuple[str, ...]], tmp_path: Path
) -> None:
    world_size, rank, how, *flags = case
    argv = [*HANGING, *flags, "--model_args", f"{{rank: {rank}, how: {how}}}"]
    finished = train([*argv, "--output_dir", tmp_path], world_size, timeout_s=60)
    killed = -signal.SIGKILL if how == "hold" else LEFT
    assert finished.statuses == tuple(killed if r == rank else LEFT for r in range(world_size))
    folder, verdict = hung_in(tmp_path)
    others = [r for r in range(world_size) if r != rank]
    waiting = f"ranks {others[0]}, {others[1]} wait" if others[1:] else f"rank {others[0]} waits"
    samples = "" if how == "hold" else r" samples \[\d+, \d+\],"
    held = ", native code holds the GIL" if how == "hold" else ""
    pattern = rf"rank {rank}, step (\d+), forward,{samples} \d+ s{held}; {waiting} in all-reduce"
    assert re.match(rf"{pattern} of step \1\n", verdict), verdict
    assert "[DDP-G05] " + verdict.strip() in finished.outputs[others[0]]
    stacks = [(folder / f"rank_{r}.txt").read_text(encoding="utf-8") for r in range(world_size)]
    assert "tests/plugins.py" in stacks[rank]
    assert all("tests/plugins.py" not in stacks[r] and "step.py" in stacks[r] for r in others)
    check_saved(finished, tmp_path)


@pytest.mark.slow
def test_a_rank_that_only_one_neighbour_sees_silent_is_ended_all_the_same(tmp_path: Path) -> None:
    argv = [*PLAIN, "--model", "tests.plugins:hanging_unseen", "--hang_after_s", "2"]
    argv += ["--model_args", "{rank: 2, how: hold}", "--output_dir", tmp_path]
    finished = train(argv, 3, timeout_s=30)
    assert finished.statuses == (LEFT, LEFT, -signal.SIGKILL)
    folder, _ = hung_in(tmp_path)
    assert "tests/plugins.py" in (folder / "rank_2.txt").read_text(encoding="utf-8")
    check_saved(finished, tmp_path)


@pytest.mark.slow
def test_a_stopped_process_is_named_as_such_and_ended(tmp_path: Path) -> None:
    victim = 0
    argv = [*PLAIN, "--model", "mlp", "--epochs", "1000", "--hang_after_s", "2"]
    with start_training([*argv, "--output_dir", tmp_path], 2) as running:
        running.wait_for(lambda: "step 20/" in running.output(0), timeout_s=60, what="20 steps")
        running.kill(victim, signal.SIGSTOP)
        finished = running.wait(30)
    assert finished.statuses[victim] == -signal.SIGKILL
    assert finished.statuses[1 - victim] == LEFT
    folder, verdict = hung_in(tmp_path)
    assert re.match(rf"rank {victim}, step \d+, .*, \d+ s, the process is stopped", verdict)
    assert f"rank {1 - victim} waits in " in verdict
    assert "is stopped" in (folder / f"rank_{victim}.txt").read_text(encoding="utf-8")
    check_saved(finished, tmp_path)


@pytest.mark.slow
def test_a_hang_in_the_data_names_the_sample(tmp_path: Path) -> None:
    # Sample 33 may come in the first steps, where a hang takes long to be told from a slow start.
    flags = ["--dataset", "tests.plugins:points_that_hang", "--loader_timeout_s", "2"]
    flags += ["--dataset_args", "{index: 433, size: 600}", "--num_workers", "0"]
    argv = [*POINTS, *flags, "--model", "mlp", "--hang_after_s", "2", "--output_dir", tmp_path]
    finished = train(argv, 2, timeout_s=60)
    assert finished.statuses == (LEFT, LEFT)
    folder, verdict = hung_in(tmp_path)
    found = re.match(r"rank (\d), step (\d+), data, sample 433, \d+ s", verdict)
    assert found is not None, verdict
    assert "in __getitem__" in (folder / f"rank_{found[1]}.txt").read_text(encoding="utf-8")
    check_saved(finished, tmp_path)


@pytest.mark.slow
def test_after_a_hang_torchrun_restarts_to_the_same_weights(tmp_path: Path) -> None:
    undisturbed = [*PLAIN, "--model", "tests.plugins:hanging", "--model_args", "{rank: 9}"]
    train([*undisturbed, "--output_dir", tmp_path / "undisturbed"], 2).ok()
    once = f"{{marker: {tmp_path / 'hung'}}}"
    argv = ["torchrun", "--standalone", "--nproc_per_node=2", "--max_restarts=2"]
    argv += ["ddp_training.py", *map(str, HANGING), "--model_args", once]
    done = run_program([*argv, "--output_dir", tmp_path / "hung_once"], timeout_s=90).ok()
    assert "[DDP-G05] rank 1, step" in done.output
    saved = re.search(r"the state after step (\d+) is saved", done.output)
    assert f"from step {saved[1]}\n" in done.output
    assert last_tensors(tmp_path / "hung_once") == last_tensors(tmp_path / "undisturbed")
    first, _ = read_attempts(only_run(tmp_path / "hung_once"))
    assert first["step"] == int(saved[1])


@pytest.mark.slow
def test_a_job_that_is_stopped_as_a_whole_and_goes_on_did_not_hang(tmp_path: Path) -> None:
    argv = [*PLAIN, "--epochs", "9", "--max_steps", "60", "--hang_after_s", "6"]
    argv += ["--timeout_s", "7", "--model", "tests.plugins:paced_mlp"]
    argv += ["--model_args", "{pause_s: 0.05}"]
    with start_training([*argv, "--output_dir", tmp_path], 2) as running:
        running.wait_for(lambda: "step 20/" in running.output(0), timeout_s=60, what="20 steps")
        running.kill(1, signal.SIGSTOP)
        threading.Event().wait(0.3)  # rank 0 now waits for it in a sum
        running.kill(0, signal.SIGSTOP)
        threading.Event().wait(8)  # the pause itself is what is tested: longer than any limit
        running.kill(0, signal.SIGCONT)  # first, so that it finds that rank 1 is not there
        threading.Event().wait(0.3)
        running.kill(1, signal.SIGCONT)
        finished = running.wait(60).ok()
    assert "a hang was suspected" not in finished.output
    assert "[DDP-G05]" not in finished.output
    assert not (only_run(tmp_path) / "hangs").exists()


@pytest.mark.slow
def test_a_slow_start_and_a_slow_evaluation_are_no_hangs(tmp_path: Path) -> None:
    argv = [*PLAIN, "--model", "tests.plugins:SlowAtFirst", "--eval_every", "1", "--epochs", "2"]
    argv += ["--hang_after_s", "0.5", "--output_dir", tmp_path]
    finished = train(argv, 2, timeout_s=90).ok()
    assert "a hang was suspected" not in finished.output
    assert "[DDP-G05]" not in finished.output
    assert finished.outputs[0].count("test accuracy") >= 2


def test_waiting_that_was_asked_for_is_no_hang(tmp_path: Path) -> None:
    """Sample 133 takes 3 s, in a step after the first ones; a hang would end the run after 1 s."""
    argv = [*POINTS, "--dataset", "tests.plugins:points_that_hang", "--num_workers", "0"]
    argv += ["--dataset_args", "{index: 133, size: 200, pause_s: 3}", "--epochs", "1"]
    argv += ["--loader_timeout_s", "60", "--model", "mlp", "--hang_after_s", "1"]
    argv += ["--output_dir", tmp_path]
    train(argv, 1, timeout_s=60).ok()


def test_a_slow_rank_is_named_with_its_split_of_the_step_time(tmp_path: Path) -> None:
    argv = [*PLAIN, "--model", "tests.plugins:Straggling", "--epochs", "900"]
    with start_training([*argv, "--output_dir", tmp_path], 3) as running:
        running.wait_for(lambda: "is slow" in running.output(0), timeout_s=90, what="a name")
        output = running.output(0)
    told = r"rank 1 is slow: \d+(\.\d+)? ms of work a step beside .* ms of the others \(median\): "
    assert re.search(rf"{told}.*forward \d+(\.\d+)? ms", output), output
    assert "rank 0 is slow" not in output


def at(rank: int, step: int, phase: int, age_s: float, **others: object) -> Report:
    return Report(rank, step, phase, age_s, 60.0, **others)  # type: ignore[arg-type]  # by the test


def waits(rank: int, step: int, age_s: float, **others: object) -> Report:
    return at(rank, step, Phase.ALL_REDUCE, age_s, **others)


SAMPLE, SAMPLES = (9912,), tuple(range(9))
VERDICTS: list[tuple[list[Report], str | None]] = [
    (
        [waits(0, 412, 62), at(1, 412, Phase.DATA, 63, samples=SAMPLE), waits(2, 412, 62)],
        "rank 1, step 412, data, sample 9912, 63 s; ranks 0, 2 wait in all-reduce of step 412",
    ),
    # A GPU's rank queues work of later steps before it has to wait.
    (
        [at(0, 414, Phase.FORWARD, 61), at(1, 412, Phase.FORWARD, 61, samples=SAMPLES)],
        "rank 1, step 412, forward, samples [0, 1, 2, 3, 4, 5, 6, 7 and 1 more], 61 s; "
        "rank 0 is in forward of step 414",
    ),
    (
        [waits(0, 7, 61), at(1, 7, Phase.AGREEMENT, 70)],
        "all ranks wait for each other: rank 0 waits in all-reduce of step 7, "
        "rank 1 waits in agreement on a stop of step 7, 70 s",
    ),
    (
        [waits(0, 7, 61), waits(1, 7, 61, state=rules.STOPPED)],
        "rank 1, step 7, all-reduce, 61 s, the process is stopped (SIGSTOP); "
        "rank 0 waits in all-reduce of step 7",
    ),
    # Nobody is late by itself, but the wait would soon end in a timeout.
    (
        [waits(0, 7, 541), at(1, 7, Phase.EVALUATION, 5)],
        "rank 1, step 7, evaluation, 5 s; rank 0 waits in all-reduce of step 7",
    ),
    (
        [waits(0, 7, 541)],  # alone
        "rank 1 can't be reached: its host, its network or its process is stopped; "
        "rank 0 waits in all-reduce of step 7",
    ),
    ([waits(0, 7, 500), at(1, 7, Phase.FORWARD, 59)], None),
    ([waits(0, 7, 500)], None),
    ([waits(0, 7, 61), waits(1, 7, 59)], None),
]


@pytest.mark.parametrize(("reports", "text"), VERDICTS, ids=range(len(VERDICTS)))
def test_the_verdict_names_who_holds_up_the_others(reports: list[Report], text: str | None) -> None:
    missing = (1,) if len(reports) == 1 else ()
    verdict = decide(reports, wait_limit_s=540, missing=missing)
    assert (verdict and verdict.text) == text


@pytest.mark.parametrize("state", [rules.HELD, rules.SILENT, "D"])
def test_what_keeps_a_rank_from_answering_is_said(state: str) -> None:
    reports = [waits(0, 7, 9), at(1, 7, Phase.FORWARD, 9, state=state)]
    verdict = decide(reports, wait_limit_s=540)
    assert verdict.ranks == (1,)
    assert re.match(r"rank 1, step 7, forward, 9 s, [a-z].*; rank 0 waits", verdict.text)


def test_a_phase_may_take_five_times_the_longest_and_never_less_than_the_floor() -> None:
    longest = [0.0] * NUM_PHASES
    longest[Phase.FORWARD] = 20.0
    limits = limits_ns(hang_after_s=60, longest_s=longest, is_warm=True, least_s={Phase.DATA: 150})
    assert limits[Phase.FORWARD] == 100 * 10**9
    assert limits[Phase.ALL_REDUCE] == 60 * 10**9
    assert limits[Phase.DATA] == 150 * 10**9
    assert limits[Phase.EVALUATION] == LONG_FACTOR * 60 * 10**9
    cold = limits_ns(hang_after_s=60, longest_s=longest, is_warm=False, least_s={})
    assert min(cold) == LONG_FACTOR * 60 * 10**9


def test_threads_that_ask_a_gpu_are_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_ready", [])
    group = Group(Launch(), torch.device("cpu"))
    group.device = torch.device("cuda", 0)
    with HangWatch(group, tmp_path, hang_after_s=0):
        assert len(threads._ready) == 2
    assert not threads._ready


def test_a_limit_learns_neither_from_first_steps_nor_from_a_pause_of_a_job(tmp_path: Path) -> None:
    tracker = Tracker()
    group = Group(Launch(), torch.device("cpu"), tracker=tracker)
    watch = HangWatch(group, tmp_path, hang_after_s=60)
    for step in range(NUM_FIRST_STEPS + 2):
        is_first = step < NUM_FIRST_STEPS
        tracker.enter(Phase.FORWARD)
        tracker.words[SINCE] -= 3600 * 10**9  # it began an hour ago
        for _ in range(50 if is_first else 20):
            watch._age(1.0)
        tracker.end_step(step)
        assert tracker.is_warm != is_first
        watch._age(1.0)
        watch._set_limits()
        limit_s = LONG_FACTOR * 60 if is_first else 5 * 20
        assert tracker.words[LIMITS + Phase.FORWARD] == limit_s * 10**9
    assert {"forward", "data"} <= tracker.read_split().keys()
    assert tracker.read_split() == {}


def work(**seconds: float) -> Mapping[str, float]:
    return {name.replace("_", "-"): value for name, value in seconds.items()}


def test_a_rank_is_slow_after_several_reports_and_is_named_once() -> None:
    slow = SlowRanks()
    told = []
    for number in range(NUM_REPORTS + 2):
        splits = {
            0: (number, work(data=0.001, forward=0.019, all_reduce=0.021)),
            1: (number, work(data=0.025, forward=0.016)),
            2: (number, work(data=0.001, forward=0.020, all_reduce=0.020)),
        }
        told += slow.note(splits)
        told += slow.note(splits)  # nothing new
        assert len(told) == (number + 1 >= NUM_REPORTS)
    assert told == [
        "rank 1 is slow: 41 ms of work a step beside 20.5 ms of the others (median): data 25 ms, "
        "forward 16 ms"
    ]
    for number in range(NUM_REPORTS + 2, 2 * NUM_REPORTS + 2):
        quick = work(data=0.001, forward=0.019)
        told += slow.note({rank: (number, quick) for rank in range(3)})
    assert told[1:] == ["rank 1 is no longer slow: 20 ms of work a step"]


def test_twice_as_long_is_not_slow_where_that_is_less_than_a_millisecond() -> None:
    slow = SlowRanks()
    for number in range(2 * NUM_REPORTS):
        assert not slow.note({0: (number, work(forward=4e-4)), 1: (number, work(forward=8e-4))})


@pytest.mark.parametrize(("timeout_s", "patience_s"), [(2, 1), (8, 5), (30, 27), (600, 540)])
def test_a_verdict_has_time_before_torchs_own_timeout(timeout_s: float, patience_s: float) -> None:
    assert longest_wait_s(timeout_s) == patience_s


def test_a_debugger_is_seen(tmp_path: Path) -> None:
    assert not is_debugged(threading.get_ident())
    code = (
        "import pdb, threading, sys; from hardened_ddp.ranks.stacks import is_debugged\n"
        "main, debugger = threading.get_ident(), pdb.Pdb()\n"
        "debugger.user_line = lambda frame: (print(is_debugged(main)), debugger.set_quit())\n"
        "debugger.set_trace(); x = 1\n"
        "y = 2\n"
    )
    done = run_command(["python", "-c", code], timeout_s=30)
    assert done.stdout.startswith("True"), done.output

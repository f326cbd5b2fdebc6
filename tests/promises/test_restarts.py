"""Restarts by the launcher: each goes on where the last attempt ended, on whatever ranks it has."""

import shutil
import signal
from pathlib import Path

import pytest

from hardened_ddp.errors import CheckpointError, PeerLostError
from hardened_ddp.reporting.summary import finished_at, write_summary
from hardened_ddp.training.survivor_save import read_failures
from tests import run_folder
from tests.harness.processes import kill
from tests.harness.ranks import held_port, run_program, start_program, start_training, train
from tests.marks import slow_after
from tests.ranks.test_two_hosts import await_steps
from tests.run_folder import (
    is_past,
    last_tensors,
    only_run,
    read_summary,
    samples_by_step,
    saved_step,
)

POINTS: list[str | Path] = ["--dataset", "tests.plugins:points", "--cpu_only", "--batch_size", "2"]
POINTS += ["--log_interval", "1", "--eval_every", "0", "--checkpoint_every_steps", "0"]
STEADY: list[str | Path] = ["--cpu_only", "--batch_size", "12", "--num_workers", "0", "--ledger"]
STEADY += ["--lr_schedule", "constant", "--log_interval", "1", "--eval_every", "0"]
PACED = ["--model", "tests.plugins:paced_mlp"]
EVALUATED: list[str | Path] = ["--dataset", "tests.plugins:points_slow_to_test", "--cpu_only"]
EVALUATED += ["--model", "mlp", "--batch_size", "4", "--eval_batch_size", "4"]
EVALUATED += ["--num_workers", "0", "--log_interval", "5"]

# Each attempt does two steps or more (its first forward is the warm-up's), and dies.
DYING: list[str | Path] = [*POINTS, "--model", "tests.plugins:dying", "--run_name", "run"]
DYING += ["--model_args", "{forward_number: 4}", "--epochs", "100", "--timeout_s", "60"]


@pytest.mark.slow
def test_ten_of_ten_restarts_go_on_at_the_next_step(tmp_path: Path) -> None:
    """Ranks are started as torchrun starts them again: on the same port, and with their count."""
    env = {"MASTER_PORT": str(held_port()), "TORCHELASTIC_RUN_ID": "job"}
    for count in range(11):
        again = {**env, "TORCHELASTIC_RESTART_COUNT": str(count)}
        train([*DYING, "--output_dir", tmp_path], 2, env=again)
        assert len(read_failures(tmp_path / "run")) == count + 1
    failures = read_failures(tmp_path / "run")
    steps = [failure["step"] for failure in failures]
    assert all(now > before for before, now in zip([0, *steps], steps, strict=False))
    assert saved_step(tmp_path) == steps[-1]
    assert len({failure["error"].partition("(")[0] for failure in failures}) == 1


@pytest.mark.slow
def test_a_restart_goes_on_in_its_run_whatever_resume_said(tmp_path: Path) -> None:
    argv = [*POINTS, "--model", "tests.plugins:dying", "--model_args", "{forward_number: 8}"]
    argv += ["--resume", "never", "--output_dir", tmp_path]
    # its agent, by which a restart finds its run, is its ranks' parent
    torchrun = ["torchrun", "--standalone", "--nproc_per_node=2", "--max_restarts=1"]
    finished = run_program([*torchrun, "ddp_training.py", *argv], timeout_s=120)
    run = only_run(tmp_path)
    assert f"resuming {run}" in finished.output
    assert len(read_failures(run)) == 2


@pytest.mark.slow
def test_a_stop_that_comes_while_another_rank_hangs_saves_the_last_step(tmp_path: Path) -> None:
    undisturbed = [*STEADY, "--no_shared_memory", "--epochs", "2", *PACED]
    undisturbed += ["--checkpoint_every_steps", "0"]
    train([*undisturbed, "--output_dir", tmp_path / "undisturbed"], 2).ok()
    output = tmp_path / "faulty"
    argv = [*undisturbed, "--stop_grace_s", "1.5", "--output_dir", output]
    with start_training(argv, 2) as running:
        running.wait_for(lambda: is_past(output, 10), timeout_s=60, what="10 steps")
        running.kill(1, signal.SIGSTOP)
        running.kill(0, signal.SIGTERM)
        running.wait_for(lambda: running.living() == [1], timeout_s=20, what="rank 0's end")
        running.kill(1)
        finished = running.wait(10)
    assert finished.statuses == (PeerLostError.exit_status, -signal.SIGKILL)
    saved = saved_step(output)
    assert 10 < saved < 120
    assert f"the state after step {saved} is saved" in finished.output
    train([*argv, "--resume", only_run(output)], 2).ok()
    assert last_tensors(output) == last_tensors(tmp_path / "undisturbed")


@pytest.mark.parametrize("case", slow_after(1, [(0,), (1, "--no_shared_memory")]), ids=str)
def test_a_rank_that_hangs_is_left_after_the_timeout(
    case: tuple[int, *tuple[str, ...]], tmp_path: Path
) -> None:
    victim, *flags = case
    argv = [*STEADY, *flags, *PACED, "--timeout_s", "3", "--output_dir", tmp_path]
    argv += ["--hang_after_s", "0"]  # with a watch, see test_hangs.py
    with start_training([*argv, "--checkpoint_every_steps", "0"], 2) as running:
        running.wait_for(lambda: is_past(tmp_path, 10), timeout_s=60, what="10 steps")
        running.kill(victim, signal.SIGSTOP)
        running.wait_for(lambda: running.living() == [victim], timeout_s=25, what="the other's end")
        running.kill(victim)
        finished = running.wait(10)
    assert finished.statuses[1 - victim] == PeerLostError.exit_status
    saved = saved_step(tmp_path)
    assert saved > 10
    assert f"the state after step {saved} is saved" in finished.output


@pytest.mark.slow
def test_another_batch_size_on_resume_changes_later_steps_and_no_epochs(tmp_path: Path) -> None:
    argv = [*POINTS, "--model", "mlp", "--run_name", "run", "--ledger", "--output_dir", tmp_path]
    train([*argv, "--batch_size", "4", "--epochs", "3", "--max_steps", "5"], 2).ok()
    finished = train([*argv, "--batch_size", "5", "--epochs", "3", "--max_steps", "0"], 1).ok()
    assert "the global batch changes from 8 to 5" in finished.output
    summary = read_summary(tmp_path / "run")
    # 40 samples: an epoch of 5 steps of 8, then two epochs of 8 steps of 5.
    assert (summary["step"], summary["epoch"]) == (21, 3)
    verified = train(["verify-ledger", tmp_path / "run"], launcher="none").ok()
    assert verified.output.count("40 samples, each exactly once") == 3


@pytest.mark.slow
def test_a_last_evaluation_that_was_cut_short_is_done_by_the_next_start(tmp_path: Path) -> None:
    argv = [*EVALUATED, "--epochs", "1", "--checkpoint_every_steps", "5", "--run_name", "run"]
    argv += ["--ledger", "--output_dir", tmp_path, "--dataset_args", f"{{pace: {tmp_path}/pace}}"]
    (tmp_path / "pace").touch()
    # Of an earlier course of the run: it must not speak for this one.
    (tmp_path / "run").mkdir()
    write_summary(tmp_path / "run", {"status": "finished", "step": 5})
    with start_training(argv, 2) as running:
        running.wait_for(
            lambda: bool(run_folder.find_checkpoints(tmp_path)), timeout_s=60, what="a save"
        )
        for rank in (0, 1):
            running.kill(rank)
        running.wait(20)
    (tmp_path / "pace").unlink()
    assert finished_at(tmp_path / "run") is None
    assert [*map(run_folder.step_of, run_folder.find_checkpoints(tmp_path))] == [5]
    resumed = train(argv, 2).ok()
    assert "epoch 1 done" in resumed.outputs[0]
    summary = read_summary(tmp_path / "run")
    assert (summary["status"], summary["step"], summary["epoch"]) == ("finished", 5, 1)
    assert summary["test_accuracy"] is not None
    assert "run is finished: 5 steps are done" in train(argv, 2).ok().outputs[0]
    verified = train(["verify-ledger", tmp_path / "run"], launcher="none").ok()
    assert "40 samples, each exactly once" in verified.output


@pytest.mark.slow
def test_a_run_whose_last_save_fails_is_not_finished(tmp_path: Path) -> None:
    argv = [*EVALUATED, "--epochs", "1", "--checkpoint_every_steps", "0", "--run_name", "run"]
    argv += ["--output_dir", tmp_path, "--dataset_args", f"{{pace: {tmp_path}/pace}}"]
    (tmp_path / "pace").touch()
    checkpoints = tmp_path / "run" / "checkpoints"
    with start_training(argv, 1) as running:
        running.wait_for(lambda: "step 10/10" in running.output(0), timeout_s=60, what="the steps")
        if checkpoints.exists():
            shutil.rmtree(checkpoints)
        checkpoints.write_text("in the way")
        (tmp_path / "pace").unlink()
        finished = running.wait(30)
    assert finished.statuses == (CheckpointError.exit_status,)
    assert "[DDP-K01]" in finished.output
    assert finished_at(tmp_path / "run") is None
    checkpoints.unlink()
    train(argv).ok()
    assert finished_at(tmp_path / "run") == 10


def test_any_number_of_ranks_goes_on_with_the_same_samples_in_each_step(tmp_path: Path) -> None:
    """4 ranks, then 2, 3 and 1, each from the middle of an epoch; one rank does it all beside."""
    alone = [*STEADY, "--batch_size", "48", "--epochs", "2", "--output_dir", tmp_path / "alone"]
    train([*alone, "--run_name", "run"], 1).ok()
    argv = [*STEADY, "--epochs", "2", "--output_dir", tmp_path / "changing", "--run_name", "run"]
    for world_size, last in ((4, 11), (2, 25), (3, 41), (1, 0)):
        finished = train([*argv, "--max_steps", str(last)], world_size).ok()
        assert ("global batch stays 48" in finished.outputs[0]) == (world_size < 4)
    alone_run, run = tmp_path / "alone" / "run", tmp_path / "changing" / "run"
    assert samples_by_step(run) == samples_by_step(alone_run)
    assert len(samples_by_step(run)) == 60
    losses, expected = map(run_folder.losses_of, (run, alone_run))
    assert losses.keys() == expected.keys()
    # The same sums in another order of additions, fed back over 60 steps.
    assert all(losses[step] == pytest.approx(expected[step], abs=2e-3) for step in expected)
    verified = train(["verify-ledger", run], launcher="none").ok()
    assert verified.output.count("1437 samples, each exactly once") == 2


@pytest.mark.slow
def test_a_node_that_joins_or_dies_changes_nothing_but_the_speed(tmp_path: Path) -> None:
    """Two agents with elastic rendezvous: one starts alone, one joins it, and is killed."""
    launch = ["torchrun", "--nnodes=1:2", "--nproc_per_node=1", "--max_restarts=3"]
    launch += ["--rdzv_backend=c10d", f"--rdzv_endpoint=127.0.0.1:{held_port()}", "--rdzv_id=job"]
    output = tmp_path / "elastic"
    train_it = ["--local_addr=127.0.0.1", "ddp_training.py", *map(str, STEADY)]
    train_it += ["--epochs", "1000", "--batch_size", "24", "--checkpoint_every_steps", "0"]
    train_it += ["--model", "tests.plugins:paced_mlp", "--output_dir", str(output)]
    train_it += ["--run_name", "elastic"]
    # WHY not both: on one machine both agents would take themselves for the host of the endpoint
    host, guest = (["--rdzv_conf=last_call_timeout=5" + more] for more in ("", ",is_host=0"))
    # WHY: torch 2.13's agents wait for each other for ever when a node joins and they share it
    env = {"GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with start_program([*launch, *host, *train_it], env=env) as first:
        first.wait_for(lambda: is_past(output, 5), timeout_s=60, what="5 steps")
        with start_program([*launch, *guest, *train_it], env=env) as second:
            await_steps(first, output, num_ranks=2)
            # at once with its rank, as a node that loses power
            for pid in (second.pid, *second.living_ranks()):
                kill(pid)
            told = second.stderr  # which agent has rank 0 depends on their process ids
        await_steps(first, output, num_ranks=1)
        first.kill(0, signal.SIGTERM)
        completed = first.wait(timeout_s=60)
    run = only_run(output)
    # WHY not always 2: on a busy machine the agents may need one round more to agree who is there
    assert (completed.output + told).count("resuming") in (2, 3)
    summary = read_summary(run)
    assert summary["status"] == "stopped"
    alone = [*STEADY, "--batch_size", "24", "--model", "mlp", "--epochs", "1000"]
    alone += ["--max_steps", str(summary["step"])]
    train([*alone, "--run_name", "run", "--output_dir", tmp_path / "alone"], 1).ok()
    assert samples_by_step(run) == samples_by_step(tmp_path / "alone" / "run")

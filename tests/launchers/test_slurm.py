"""train.slurm and srun on a real Slurm of two nodes that the tests start themselves."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.processes import ROOT
from tests.harness.ranks import run_command, train
from tests.own_loop.test_own_loops import check_launched
from tests.run_folder import find_checkpoints, last_tensors, only_run, read_summary
from tests.settings.test_next_commands import command_after
from tests.slurm_cluster import SlurmCluster, why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # WHY: Slurm looks at time limits only every 30 seconds
    pytest.mark.skipif(bool(why_not()), reason=why_not()),
]
SMALL = ["--cpu_only", "--model", "mlp", "--num_workers", "0"]
# As the README has them.
SRUN = "srun --ntasks=2 python ddp_training.py --epochs 2"
SBATCH = "sbatch --nodes=2 --ntasks-per-node=1 train.slurm --epochs 2"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    # WHY: train.slurm calls it, and it makes the shared folders, which no test must leave behind.
    run_command([ROOT / "setup.sh", "--print_python"], timeout_s=120).ok()
    with SlurmCluster(tmp_path_factory.mktemp("slurm") / "cluster") as started:
        yield started


def test_srun_of_one_task_per_rank_ends_in_the_weights_of_torchrun(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    argv = SRUN.replace("srun", "srun --nodes=1").split()
    runs, whole = tmp_path / "runs", tmp_path / "torchrun"
    done = cluster.run(*argv, *SMALL, "--output_dir", runs, timeout_s=120).ok()
    first = read_summary(only_run(runs))
    assert first["world_size"] == 2
    train([*SMALL, "--epochs", "2", "--output_dir", whole], 2).ok()
    assert last_tensors(runs) == last_tensors(whole)
    resume = command_after(done.output, "resume: ")
    assert resume.startswith("srun --ntasks=2 ")
    cluster.run("bash", "-c", f"{resume} --epochs 3", timeout_s=120).ok()
    again = read_summary(only_run(runs))
    assert again["world_size"] == 2
    assert again["step"] > first["step"]


def test_a_loop_of_ones_own_under_srun_loses_no_commit(
    cluster: SlurmCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    check_launched(tmp_path, "srun", "--ntasks=2", sys.executable, "loop.py", env=cluster.env)


def test_a_job_at_its_time_limit_saves_and_is_queued_again_and_loses_nothing(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    # As long as the file is there, a sample takes its time: the job then meets its limit.
    # WHY a limit only once it trains: Slurm gives its signal to the job steps of that moment, up
    # to 60 seconds early.
    pace = tmp_path / "slow"
    pace.touch()
    run = ["--cpu_only", "--num_workers", "0", "--batch_size", "10", "--epochs", "40"]
    run += ["--model", "mlp", "--dataset", "tests.plugins:paced_points"]
    run += ["--dataset_args", f"{{pace: {pace}}}"]
    argv = ["--time=10", "--signal=USR1@50", *SBATCH.split()[1:], *run]
    job, output = cluster.submit(argv, env={"OUTPUT_DIR": str(tmp_path / "requeued")})
    wait_for_steps(cluster, job, tmp_path / "requeued")
    cluster.end_in(job, minutes=2)
    cluster.wait_for_state(job, "PENDING", "FAILED")
    text = output.read_text()
    assert "restart 0 of at most 20: 2 ranks on 2 nodes" in text
    assert "head node 127.0.0.1" in text
    assert "SIGUSR1: stopping" in text, text
    assert "stopped and saved; queued again" in text, text
    stopped_at = read_summary(only_run(tmp_path / "requeued"))
    assert stopped_at["status"] == "stopped"
    assert 0 < stopped_at["step"] < 800
    pace.unlink()
    cluster.start_now(job, minutes=10)
    state = cluster.wait_for_state(job, "COMPLETED", "FAILED")
    text = output.read_text()
    assert state == "COMPLETED", text
    assert "restart 1 of at most 20" in text
    assert "train.slurm: the run is finished" in text
    assert only_run(tmp_path / "requeued").name == f"slurm-{job}"
    assert f"resuming {only_run(tmp_path / 'requeued')} from step {stopped_at['step']}" in text
    train([*run, "--output_dir", tmp_path / "whole"], 2).ok()
    assert last_tensors(tmp_path / "requeued") == last_tensors(tmp_path / "whole")


def test_a_cancelled_job_saves_and_is_not_requeued(cluster: SlurmCluster, tmp_path: Path) -> None:
    argv = ["train.slurm", *SMALL, "--epochs", "1000", "--log_interval", "1"]
    job, _ = cluster.submit(argv, env={"OUTPUT_DIR": str(tmp_path)})
    wait_for_steps(cluster, job, tmp_path)
    cluster.cancel(job)
    cluster.wait_for_state(job, "CANCELLED")
    assert cluster.show(job)["Restarts"] == "0"
    assert find_checkpoints(tmp_path)


def wait_for_steps(cluster: SlurmCluster, job: str, runs: Path) -> None:
    """Wait until a job trains."""
    cluster.wait_until(lambda: any(runs.glob("*/metrics.jsonl")), what=f"steps of job {job}")

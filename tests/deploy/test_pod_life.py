"""The life of pods with a mirror: evicted, killed for memory, updated, replaced on empty disks.

A pod is its ranks, with a disk of its own. A node that is gone: tests/ranks/test_two_hosts.py; the
status and the termination log of a pod: tests/launchers/test_status.py.
"""

import io
import shutil
import signal
import time
from pathlib import Path

import pytest

from ddp_runs.ledger_check import check_ledger
from tests.harness.ranks import Running, start_training, train
from tests.run_folder import last_tensors, read_summary, samples_by_step

POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
GRACE_S = 15.0  # what a node that shuts down gives
RUN = ["--cpu_only", "--num_workers", "0", "--batch_size", "10", "--max_steps", "150", "--ledger"]
RUN += ["--model", "mlp", "--no_tensorboard", "--lr_schedule", "constant", "--run_name", "r"]
RUN += ["--checkpoint_every_steps", "3", "--log_interval", "1", "--epochs", "10"]


class Pods:
    """Starts pods of one run, each on an empty disk; slow steps as long as there is a file."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pace = folder, folder / "pace"
        self.pace.touch()

    def words(self, name: str, mirror: str = "mirror") -> list[str]:
        data = ["--dataset=tests.plugins:paced_points", f"--dataset_args={{pace: {self.pace}}}"]
        places = [f"--mirror=file://{self.folder}/{mirror}", f"--output_dir={self.folder}/{name}"]
        return [*RUN, *data, *(places if mirror else places[1:])]

    def start(self, name: str) -> Running:
        return start_training(self.words(name), 2, env=POD)


def evict(pod: Running) -> tuple[int, ...]:
    """End a pod as the kubelet does: SIGTERM, 15 s, SIGKILL. Return the statuses of its ranks."""
    for rank in (0, 1):
        pod.kill(rank, signal.SIGTERM)
    end = time.monotonic() + GRACE_S
    while pod.living() and time.monotonic() < end:
        time.sleep(0.02)
    pod.kill_all()
    return pod.wait(10).statuses


def num_sent(pod: Running) -> int:
    return sum("is on the mirror" in line for line in pod.output(0).splitlines())


@pytest.mark.slow
def test_evicted_killed_and_updated_pods_end_in_the_weights_of_one_run(tmp_path: Path) -> None:
    pods = Pods(tmp_path)
    with pods.start("one") as pod:
        pod.wait_for(lambda: num_sent(pod) > 0, timeout_s=60, what="a copy")
        statuses = evict(pod)
    stopped = read_summary(tmp_path / "one" / "r")
    if statuses == (3, 3):  # it came to its end within 15 s
        assert stopped["status"] == "stopped"
    else:
        assert statuses == (-9, -9), "a pod that ends with another status is not started again"
    shutil.copytree(tmp_path / "mirror", tmp_path / "mirror-of-one")
    with pods.start("two") as pod:
        pod.wait_for(lambda: num_sent(pod) > 0, timeout_s=60, what="a copy of the second pod")
        if statuses == (3, 3):
            assert f"fetched the checkpoint of step {stopped['step']} " in pod.output(0)
        pod.kill_all()  # out of memory: 137, and nothing is saved
    for rank in (1, 0):  # a rolling update ends one worker after the other
        with pods.start(f"before-{rank}") as pod:
            pod.wait_for(lambda pod=pod: num_sent(pod) > 0, timeout_s=60, what="a copy")
            pod.kill(rank, signal.SIGTERM)
            assert pod.wait(60).statuses == (3, 3), "both are started again, together"
    pods.pace.unlink()
    third = train(pods.words("three"), 2, env=POD, timeout_s=120).ok()
    step = read_summary(tmp_path / "before-0" / "r")["step"]
    assert f"fetched the checkpoint of step {step} " in third.output
    train(pods.words("whole", mirror=""), 2, timeout_s=120).ok()
    assert last_tensors(tmp_path / "three") == last_tensors(tmp_path / "whole")
    one_worker = train(pods.words("alone", "mirror-of-one"), 1, env=POD, timeout_s=120).ok()
    assert "fetched the checkpoint of step" in one_worker.output
    whole = samples_by_step(tmp_path / "whole" / "r")
    for name in ("three", "alone"):
        run = tmp_path / name / "r"
        assert samples_by_step(run) == whole, "another number of workers takes the same samples"
        said = io.StringIO()
        assert check_ledger(run, output=said) == 0, said.getvalue()

"""Progress for Kubeflow's status server, which is a small one of these tests."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.launchers_env import Launch
from hardened_ddp.reporting.rank_status import RankStatus
from hardened_ddp.reporting.status_writer import KUBEFLOW_URL as URL
from hardened_ddp.reporting.status_writer import StatusWriter, Work, post_progress
from tests.harness.ranks import train
from tests.reporting.conftest import Posts

RUN = ["--cpu_only", "--num_workers", "0", "--batch_size", "10", "--no_tensorboard", "--model"]
RUN += ["mlp", "--dataset", "tests.plugins:points", "--max_steps", "4", "--output_dir"]


def variables(url: str, folder: Path) -> dict[str, str]:
    """Give the variables that the operator sets."""
    (folder / "token").write_text("first\n")
    return {URL: url, "KUBEFLOW_TRAINER_SERVER_TOKEN": str(folder / "token")}


@pytest.mark.slow
def test_one_rank_tells_the_end_of_a_run_and_no_failure_of_it_matters(
    server: tuple[str, Posts], tmp_path: Path
) -> None:
    url, posts = server
    env = variables(url, tmp_path)
    train([*RUN, tmp_path / "one"], 2, env=env, timeout_s=60).ok()
    token, content = posts[-1]
    told = content["trainerStatus"]
    assert token == "Bearer first"
    assert told["progressPercentage"] == 100
    assert {"name": "step", "value": "4"} in told["metrics"]
    assert told["lastUpdatedTime"].endswith("Z")
    assert len(posts) == 2  # the run took less than 10 s, and the other rank is silent
    refusing = {URL: env[URL] + "/refused", "KUBEFLOW_TRAINER_SERVER_TOKEN": "/no/such/token"}
    train([*RUN, tmp_path / "two"], env=refusing, timeout_s=60).ok()


def test_a_token_is_read_each_time_and_what_fails_is_ignored(
    server: tuple[str, Posts], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, posts = server
    env = variables(url, tmp_path)
    monkeypatch.setenv(URL, env[URL])
    status = RankStatus(rank=0, state="running", step=30, total_steps=40)
    post_progress(status, env)
    (tmp_path / "token").write_text("second")
    post_progress(status, env)
    assert [token for token, _ in posts] == ["Bearer first", "Bearer second"]
    assert posts[0][1]["trainerStatus"]["progressPercentage"] == 75
    writer = StatusWriter(tmp_path, Group(Launch(), torch.device("cpu")))
    writer._end.set()
    for url in (env[URL] + "/refused", "no url", "http://127.0.0.1:1/", env[URL] + "/garbage"):
        writer._repeat(partial(post_progress, status, {URL: url}), 1.0)
    assert len(posts) == 4
    call: Any = vars(writer._threads[1])["_target"]
    assert call.keywords == {"share": 1.0}  # a slow server is told as often as another one
    read: list[int] = []
    writer.attach(Work(epoch=lambda: read.append(1) or min([])))
    writer._repeat(writer._tell_kubeflow, 1.0)  # a status that can't be read at one moment
    assert read

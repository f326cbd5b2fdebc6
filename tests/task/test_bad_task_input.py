"""Bad input of tasks, metrics, batches and streams: one clear error each, before the first step."""

import contextlib
import io
import shlex
from pathlib import Path

import pytest
import torch

import ddp_training
from hardened_ddp.errors import HardenedError
from hardened_ddp.preflight.probe import check_evaluation
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.launch import Launch
from hardened_ddp.reporting.events import Events
from hardened_ddp.settings.cli import parse
from hardened_ddp.settings.layers import resolve
from hardened_ddp.training.evaluation import check_stop_when
from tests.harness.ranks import run_ranks, train
from tests.marks import sections

COMMON = ["--cpu_only", "--no_config", "--num_workers", "0", "--model", "mlp"]
CASES = {
    told: shlex.split(words.replace("bad:", "tests.bad_tasks:"))
    for told, words in sections(Path(__file__).with_name("bad_input.txt")).items()
}
"""Words of the error, and the command, in which bad: is tests.bad_tasks:."""


def build_each(cases: list[list[str]]) -> list[list[str]]:
    """Put a run of each together, up to its first step; give the error's code, text and fix."""
    found = []
    for words in cases:
        output = io.StringIO()
        try:
            with contextlib.redirect_stderr(output):
                settings = resolve(parse([*COMMON, *words]), world_size=1)
                group = Group(Launch(), torch.device("cpu"))
                parts = ddp_training.build(settings, group, None, Events())
                check_evaluation(parts)
                if parts.config.loop.stop_when:
                    check_stop_when(parts)
                parts.close()
            found.append(["", "no error", ""])
        except HardenedError as error:
            found.append([error.code, error.message, error.fix])
        except Exception as error:  # WHY broad: a traceback is what must not be
            found.append(["TRACEBACK", repr(error), ""])
    return found


FIXES = {"'pixels'": "pixels is (", "image_folder": "'{root: /x}'"}
FIXES |= {"fit no task": "--task classification | multilabel"}


@pytest.fixture(scope="module")
def errors() -> dict[str, list[str]]:
    """What each case ends with. One process for all of them: each takes some milliseconds."""
    [found] = run_ranks(build_each, 1, [*CASES.values()])
    return dict(zip(CASES, found, strict=True))


@pytest.mark.parametrize("told", CASES)
def test_each_is_one_error_before_the_first_step(told: str, errors: dict[str, list[str]]) -> None:
    code, message, fix = errors[told]
    assert code.startswith("DDP-"), message
    assert told in message
    assert fix
    for words, wanted in FIXES.items():
        assert words not in told or wanted in fix


def test_a_nan_label_that_only_reading_can_find_is_told_when_its_step_comes(tmp_path: Path) -> None:
    argv = ["--cpu_only", "--num_workers", "0", "--output_dir", str(tmp_path)]
    argv += ["--dataset", "tests.bad_tasks:table", "--task", "regression"]
    argv += ["--dataset_args", "{label: later NaN, test_label: float}"]
    argv += ["--model", "tests.bad_tasks:Model", "--model_args", "{shape: [1]}"]
    done = train([*argv, "--global_batch_size", "4"])
    assert any(done.statuses), done.output
    assert "the model's output is finite, its loss is not: look at the labels" in done.output
    assert "Traceback" not in done.output

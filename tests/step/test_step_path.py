"""The benchmark that counts the code of a step: its bars hold, and it counts."""

import re

import pytest

from tests.harness.ranks import run_program


@pytest.mark.slow
def test_it_counts_a_step_a_save_and_a_resume() -> None:
    command = ["python", "benchmarks/step_path.py", "--verbose"]
    # WHY again: on a busy machine each step that is watched may be one that asks for a stop
    for _ in range(3):
        done = run_program(command, timeout_s=300)
        if not done.status:
            break
    output = done.ok().output
    figures = re.findall(r"^  (\w+) +(\d+) .* PASS$", output, re.MULTILINE)
    step = ["frames", "files", "functions"]
    assert [name for name, _ in figures] == [*step, *step, "save", "resume"], output
    assert all(int(count) > 0 for _, count in figures)
    for expected in ("ddp_training.py: fit", "checkpoint/disk.py", "training/run_folder.py"):
        assert expected in output

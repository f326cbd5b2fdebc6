"""The benchmark of the control plane plays its ranks, and measures with the product's own code."""

import pytest

from tests.ranks import run_command


@pytest.mark.slow
def test_it_measures_each_part_with_few_ranks() -> None:
    done = run_command(
        ["python", "benchmarks/control_plane.py", "--ranks", "12"], timeout_s=90
    ).ok()
    rows = [line for line in done.stdout.splitlines() if " bar " in line]
    assert len(rows) == 4
    assert all(line.endswith("ok") for line in rows), done.stdout

"""benchmarks/explain_compared.py: what it reads in torchrun's last block, and how it judges."""

import json
from pathlib import Path

import pytest

from benchmarks.explain_compared import Answer, ask_nvrx, ask_torchrun

BLOCK = """\
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
Failures:
[1]:
  rank      : 1 (local_rank: 1)
  traceback : Traceback (most recent call last):
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_12:37:08
  rank      : 0 (local_rank: 0)
  exitcode  : -6 (pid: 10142)  (SIGABRT)
  error_file: <N/A>
  traceback : """


@pytest.mark.parametrize(
    ("output", "answer"),
    [
        (f"{BLOCK}Signal 6 (SIGABRT) received by PID 10142\n", Answer(0, "Signal 6 (SIGABRT)")),
        (f"{BLOCK}Traceback (most recent call last):\n", Answer(0, "the exception")),
        (f"{BLOCK}To enable traceback see: https\n", Answer(0, "an exit status")),
        ("step 1 loss 2.3\n", Answer(None, "no report")),
    ],
)
def test_the_last_block_names_a_rank_and_maybe_an_exception(output: str, answer: Answer) -> None:
    assert ask_torchrun(output) == answer


@pytest.mark.parametrize(
    ("named", "guilty", "judged"),
    [
        (1, 1, "right"),
        (0, 1, "wrong: rank 0"),
        (0, None, "names rank 0"),
        (None, None, "none"),
        (None, 1, "not named"),
    ],
)
def test_a_rank_is_judged_by_what_the_reproducer_knows(
    named: int | None, guilty: int | None, judged: str
) -> None:
    assert Answer(named, "").judged(guilty) == judged


@pytest.mark.parametrize(
    ("failure", "answer"),
    [
        ({"rank": "3", "failure_class": "observed_exception"}, Answer(3, "observed_exception")),
        ({"rank": None, "failure_class": None}, Answer(None, "nothing")),
        (None, Answer(None, "nothing")),
    ],
)
def test_what_nvrx_answers(
    failure: dict[str, object] | None, answer: Answer, tmp_path: Path
) -> None:
    python = tmp_path / "python"
    reply = json.dumps({"decision": "RESTART", "primary_failure": failure})
    python.write_text(f"#!/bin/sh\necho '{reply}'\n")
    python.chmod(0o755)
    assert ask_nvrx(str(python), tmp_path / "x.log") == (answer, "RESTART")

"""explain on short logs: the cause of each, and the rank at fault where the evidence names one.

The logs are in short_logs.txt: after the title of each stand the verdict and, if that matters, of
whom. What logs.made_of() fills in begins with @; @says has words of the answer.
"""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.explain.logs import (
    code_of,
    explain_text,
    joined,
    made_of,
    of_rank,
    rank_of,
    timeouts,
    traceback_of,
    waiting,
    with_other_size,
)
from tests.marks import sections

KEY_ERROR = traceback_of("KeyError: 'label'")
OTHERS_OF_1000 = [f"[rank{rank}]: step 7 | loss 2.5" for rank in range(2, 1000)]
OTHERS_OF_4 = [f"<gpu-a.{number}/12:30:07> step 7" for number in range(4)]
SUB_GROUP = ("PG ID 0 PG GUID 0(default_pg)", "PG ID 5 PG GUID 37(TENSOR)")
STEPS = [f"step {n}" for n in range(4)]
OF_8 = dict.fromkeys(range(8), 808)
OTHER_GROUP = waiting("ALLREDUCE 18233, ALLREDUCE 18233, ALLGATHER 12, ALLREDUCE 18233").replace(
    "PG ID 0 PG GUID 0(default_pg) Rank 2]  failure", "PG ID 3 PG GUID 7(TENSOR) Rank 0]  failure"
)
IN_IT = "@says rank 2 in ALLGATHER number 12 of 9801523 elements, of another group"
# fmt: off
LONG_OR_CHANGED: Mapping[str, str] = {
    "a line of each of 1000 ranks between those of a traceback: python-keyerror of rank 1":
        joined(*([line, *OTHERS_OF_1000] for line in of_rank(1, KEY_ERROR))),
    "a rank whose line was cut off: nccl-timeout of nobody":
        joined(["@says nothing is known of rank 7"],
               timeouts(OF_8, world_size=8).splitlines()[:9]),
    "an operation that was cut off is no other one: nccl-timeout of nobody":
        waiting("ALLREDUCE 90, ALLREDUCE 90, ALLREDUCE 90, untold").rpartition("EDUCE")[0],
    "numbers of different groups are not compared: nccl-timeout":
        f"{IN_IT}\n{OTHER_GROUP}",
    "a rank that says nothing, for which one in another group may wait: nccl-timeout of rank 1":
        joined([line for line in OTHER_GROUP.splitlines() if "[rank1]" not in line]),
    "of two ranks one has another size, and nobody knows which: collective-mismatch of nobody":
        with_other_size(timeouts({0: 90, 1: 90}, world_size=2), rank=1),
    "ranks of a sub-group are not those of the job: nccl-timeout of nobody":
        timeouts({0: 90, 1: 90, 3: 90}, world_size=8).replace(*SUB_GROUP),
    "a rank that may be in no such sub-group: nccl-timeout of nobody":
        timeouts({0: 90, 1: 90, 2: 90}, world_size=4).replace(*SUB_GROUP),
    "a prefix that nobody knows, with numbers that are no rank: python-keyerror of nobody":
        joined(["@says train.py:37"],
               *([f"<gpu-a.3/12:30:05> {line}", *OTHERS_OF_4] for line in KEY_ERROR)),
    "what was logged, long before the exception that ended it: python-valueerror of nobody":
        joined(traceback_of("requests.ConnectionError: Max retries exceeded with url: /a"), STEPS,
               traceback_of("ValueError: the mask and the input differ in length"),
               80 * [60 * "="]),
    "of many error lines the last one counts, after words of success, too: unknown":
        joined(["{'train_runtime': 12.1}", ""],
               *([f"ERROR: could not upload part {n}", f"step {n}"] for n in range(40)),
               ["ERROR: giving up"]),
}
# fmt: on
ANSWER = ("guilty", "cause", "evidence", "later", "exceptions", "confidence")
LOGS = {**sections(Path(__file__).with_name("short_logs.txt")), **LONG_OR_CHANGED}


@pytest.mark.parametrize("name", LOGS)
def test_the_cause_and_the_rank_at_fault(name: str, tmp_path: Path) -> None:
    text, words = made_of(LOGS[name])
    found = explain_text(text, tmp_path)
    rank = rank_of(found)
    whose = "nobody" if rank is None else f"rank {rank}"
    assert name.rpartition(": ")[2] in (code_of(found), f"{code_of(found)} of {whose}")
    answer = json.dumps({part: found[part] for part in ANSWER})
    assert not [word for word in words if word not in answer]

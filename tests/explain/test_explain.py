"""explain on composed logs: causes, ranks, forms of logs, healthy logs, and what is not a log."""

import gzip
import json
import pickle
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import ddp_training
from ddp_doctor.explain.catalogue import CAUSES
from ddp_doctor.explain.matching import Matcher, literal_of
from ddp_doctor.explain.reader import Search
from tests.explain import healthy
from tests.explain.composed import (
    LOGS,
    PEER,
    WITHOUT_LOG,
    Composed,
    block_of,
    log_of,
    timeouts,
    traceback_of,
)
from tests.explain.explained import code_of, explain, explain_text, rank_of
from tests.explain.variants import FORMS
from tests.harness.marks import slow_after
from tests.harness.processes import ROOT, clean_environment

SPOKEN_BY_RANK = 3
KEY_ERROR = traceback_of("KeyError: 'label'")


def of_rank(rank: int, lines: list[str]) -> list[str]:
    return [f"[rank{rank}]: {line}" for line in lines]


def joined(*parts: list[str]) -> str:
    return "\n".join(line for part in parts for line in part) + "\n"


class TestCatalogue:
    def test_it_has_the_causes_of_all_families(self) -> None:
        others = [cause for cause in CAUSES if not cause.code.startswith(("DDP-", "python-"))]
        assert len(others) >= 150
        assert len({cause.code for cause in CAUSES}) == len(CAUSES)

    def test_every_phrase_can_be_looked_for_and_compiled(self) -> None:
        for cause in CAUSES:
            for phrase in cause.phrases:
                assert literal_of(phrase)
                re.compile(phrase)

    def test_a_cause_has_a_program_that_fails_a_composed_log_or_the_reason_why_not(self) -> None:
        programs = "".join(path.read_text() for path in Path(__file__).parent.glob("failing_*.py"))
        shown = {
            *re.findall(r'reproduces?\(\s*"([\w-]+)"', programs),
            *(case.code for case in LOGS),
        }
        codes = {cause.code for cause in CAUSES if not cause.code.startswith(("DDP-", "python-"))}
        assert codes - shown == WITHOUT_LOG.keys()

    def test_a_cause_says_what_to_do_outside_of_this_suite(self) -> None:
        for cause in CAUSES:
            assert cause.why, cause.code
            assert cause.confirm, cause.code
            assert len(cause.fix) > 10, cause.code

    def test_the_first_search_finds_every_line_that_a_phrase_matches(self) -> None:
        search = Search(Matcher(CAUSES).words())
        for case in LOGS:
            assert search.line_starts(case.text.encode()), case.code


TIMEOUT, MISMATCH = "nccl-timeout", "collective-mismatch"


def waiting(calls: Sequence[Sequence[str]], *, is_told: bool) -> str:
    """Make the log of an NCCL timeout: in what each rank waits, and if told in which group."""
    text = timeouts({rank: int(seq) for rank, (_, seq) in enumerate(calls)}, world_size=len(calls))
    lines = []
    for line in text.splitlines():
        op = next((op for rank, (op, _) in enumerate(calls) if f"[rank{rank}]" in line), "")
        if is_told or "failure detected" not in line:
            lines.append(line.replace("OpType=ALLREDUCE", f"OpType={op}"))
    return "\n".join(lines) + "\n"


CHAIN = """\
Traceback (most recent call last):
  File "/opt/python3.11/socket.py", line 836, in create_connection
    sock.connect(sa)
ConnectionRefusedError: [Errno 111] Connection refused

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "/home/me/train.py", line 152, in load
    urllib.request.urlopen(url)
urllib.error.URLError: <urlopen error [Errno 111] Connection refused>
"""
AGENT = """\
Traceback (most recent call last):
  File "/opt/env/lib/python3.11/site-packages/torch/distributed/launcher/api.py", line 383, in run
    error = json.load(file)
json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)
"""
SIZES = """\
Traceback (most recent call last):
  File "/home/me/train.py", line 12, in main
    model.load_state_dict(state)
RuntimeError: Error(s) in loading state_dict for Linear:
\tsize mismatch for weight: copying a param with shape torch.Size([2, 2]) from checkpoint, \
the shape in current model is torch.Size([5, 2]).
"""


@pytest.mark.parametrize("form", slow_after(6, FORMS))
def test_a_cause_is_found_in_every_form_of_its_log(form: str, tmp_path: Path) -> None:
    wrong = []
    for case in LOGS:
        found = explain_text(FORMS[form](log_of(case, rank=SPOKEN_BY_RANK, other=5)), tmp_path)
        rank = rank_of(found)
        if code_of(found) != case.code or not is_right(case, rank, form):
            wrong.append(f"{case.code}: {code_of(found)}, rank {rank}")
    assert not wrong


def is_right(case: Composed, rank: int | None, form: str) -> bool:
    if case.code == "nccl-store-get":
        return rank == 0
    if not case.is_raised or (form == "cut at the top" and rank is None):
        return rank is None or form in ("srun on one task", "torchrun tee", "mpirun")
    return rank == (SPOKEN_BY_RANK if case.names_rank else None)


class TestRanks:
    """Who is guilty: only what the evidence names."""

    def test_the_first_exception_and_not_the_rank_that_lost_it(self, tmp_path: Path) -> None:
        text = joined(of_rank(0, traceback_of(PEER)), of_rank(5, KEY_ERROR))
        found = explain_text(text, tmp_path)
        assert (code_of(found), rank_of(found)) == ("python-keyerror", 5)
        assert "train.py:37" in found["cause"]["sentence"]

    def test_lines_of_ranks_that_alternate(self, tmp_path: Path) -> None:
        echo, root = of_rank(0, traceback_of(PEER)), of_rank(2, KEY_ERROR)
        text = joined([line for pair in zip(echo, root, strict=False) for line in pair])
        found = explain_text(text, tmp_path)
        assert (code_of(found), rank_of(found)) == ("python-keyerror", 2)

    def test_a_traceback_goes_on_behind_a_line_of_each_of_1000_ranks(self, tmp_path: Path) -> None:
        others = [f"[rank{rank}]: step 7 | loss 2.5" for rank in range(2, 1000)]
        lines = [part for line in of_rank(1, KEY_ERROR) for part in (line, *others)]
        found = explain_text(joined(lines), tmp_path)
        assert (code_of(found), rank_of(found)) == ("python-keyerror", 1)

    def test_the_same_error_on_all_ranks_accuses_nobody(self, tmp_path: Path) -> None:
        text = joined(*(of_rank(rank, KEY_ERROR) for rank in range(8)))
        found = explain_text(text, tmp_path)
        assert (code_of(found), rank_of(found)) == ("python-keyerror", None)

    def test_without_prefixes_the_only_failed_process_is_named(self, tmp_path: Path) -> None:
        text = joined(KEY_ERROR) + block_of({3: 1}, root=3)
        found = explain_text(text, tmp_path)
        assert (rank_of(found), found["guilty"]["host"]) == (3, "node1")

    def test_without_prefixes_several_failed_processes_name_none(self, tmp_path: Path) -> None:
        text = joined(KEY_ERROR, traceback_of(PEER)) + block_of({0: 1, 3: 1}, root=0)
        found = explain_text(text, tmp_path)
        assert (code_of(found), rank_of(found)) == ("python-keyerror", None)

    def test_a_killed_rank_comes_before_the_echo_of_the_others(self, tmp_path: Path) -> None:
        text = joined(of_rank(0, traceback_of(PEER))) + block_of({0: 1, 1: -9}, root=1)
        found = explain_text(text, tmp_path)
        assert (code_of(found), rank_of(found)) == ("killed-sigkill", 1)

    def test_the_kernels_pid_leads_to_the_rank(self, tmp_path: Path) -> None:
        oom = "[811.123456] Out of memory: Killed process 4001 (python) total-vm:8kB"
        found = explain_text(block_of({0: 1, 1: -9}, root=0) + oom + "\n", tmp_path)
        assert (code_of(found), rank_of(found)) == ("memory-kernel-oom", 1)

    def test_the_rank_that_is_missing_at_a_timeout(self, tmp_path: Path) -> None:
        seqs = {rank: 808 for rank in range(8) if rank != 6}
        found = explain_text(timeouts(seqs, world_size=8), tmp_path)
        assert (code_of(found), rank_of(found)) == ("nccl-timeout", 6)

    def test_a_rank_whose_line_was_cut_off_is_not_called_missing(self, tmp_path: Path) -> None:
        text = timeouts({rank: 808 for rank in range(8)}, world_size=8)
        found = explain_text("\n".join(text.splitlines()[:9]), tmp_path)
        assert (code_of(found), rank_of(found)) == ("nccl-timeout", None)
        assert found["cause"]["sentence"].startswith("The job: ")
        assert "nothing is known of rank 7" in found["cause"]["sentence"]

    def test_the_lowest_sequence_number_is_behind(self, tmp_path: Path) -> None:
        found = explain_text(timeouts({0: 90, 1: 90, 2: 88, 3: 90}, world_size=4), tmp_path)
        assert (code_of(found), rank_of(found)) == ("nccl-timeout", 2)

    @pytest.mark.parametrize("is_told", [True, False])
    @pytest.mark.parametrize(
        ("calls", "code", "guilty"),
        [
            ("ALLREDUCE 18233, ALLREDUCE 18233, ALLGATHER 18234, ALLREDUCE 18233", TIMEOUT, 2),
            ("ALLREDUCE 90, ALLREDUCE 91, ALLREDUCE 90, ALLREDUCE 90", TIMEOUT, 1),
            ("ALLREDUCE 90, ALLREDUCE 90, ALLREDUCE 91, ALLREDUCE 91", TIMEOUT, None),
            ("ALLREDUCE 90, ALLREDUCE 91", TIMEOUT, None),
            ("ALLREDUCE 90, ALLREDUCE 91, ALLREDUCE 92, ALLREDUCE 90", TIMEOUT, None),
            ("ALLREDUCE 90, ALLREDUCE 90, BROADCAST 90, ALLREDUCE 90", MISMATCH, 2),
            ("ALLREDUCE 90, ALLREDUCE 90, BROADCAST 90, BROADCAST 90", MISMATCH, None),
        ],
    )
    def test_of_watchdogs_the_rank_that_differs_from_most_is_named(
        self, calls: str, code: str, guilty: int | None, is_told: bool, tmp_path: Path
    ) -> None:
        words = [call.split() for call in calls.split(", ")]
        found = explain_text(waiting(words, is_told=is_told), tmp_path)
        assert (code_of(found), rank_of(found)) == (code, guilty)
        for op, number in words:
            assert f"{op} number {number}" in found["cause"]["sentence"]

    def test_one_rank_of_another_size_is_named_and_one_of_a_cut_log_is_not(
        self, tmp_path: Path
    ) -> None:
        text = timeouts({rank: 90 for rank in range(4)}, world_size=4)
        lines = [
            line.replace("NumelIn=9801523", "NumelIn=7") if "[rank3]" in line else line
            for line in text.splitlines()
        ]
        found = explain_text("\n".join(lines), tmp_path)
        assert (code_of(found), rank_of(found)) == (MISMATCH, 3)
        assert "rank 3 in ALLREDUCE number 90 of 7 elements" in found["cause"]["sentence"]
        # of 64 ranks three say where they are: nobody knows what most of them do
        found = explain_text(timeouts({0: 90, 1: 90, 2: 91}, world_size=64), tmp_path)
        assert (code_of(found), rank_of(found)) == (TIMEOUT, None)

    def test_numbers_of_different_groups_are_not_compared(self, tmp_path: Path) -> None:
        words = [["ALLREDUCE", "18233"] for _ in range(4)]
        words[2] = ["ALLGATHER", "12"]
        found = explain_text(waiting(words, is_told=False), tmp_path)
        assert rank_of(found) is None
        text = waiting(words, is_told=True)
        own = "PG ID 3 PG GUID 7(TENSOR) Rank 0]  failure"
        lines = [
            line.replace("PG ID 0 PG GUID 0(default_pg) Rank 2]  failure", own)
            for line in text.splitlines()
        ]
        found = explain_text("\n".join(lines), tmp_path)
        own = "rank 2 in ALLGATHER number 12 of 9801523 elements, of another group"
        assert own in found["cause"]["sentence"]
        # rank 1 may be the one that rank 2 waits for there
        silent = [line for line in lines if "[rank1]" not in line]
        found = explain_text("\n".join(silent), tmp_path)
        assert (code_of(found), rank_of(found)) == (TIMEOUT, 1)

    def test_a_rank_whose_own_log_is_not_here_is_not_named(self, tmp_path: Path) -> None:
        text = timeouts({0: 90, 1: 90, 2: 90, 3: 90}, world_size=4)
        for rank in (0, 1, 3):
            lines = [x for x in text.splitlines() if "[rank" not in x or f"[rank{rank}]" in x]
            (tmp_path / f"rank-{rank}.log").write_text("\n".join(lines))
        found = explain(tmp_path)
        assert (code_of(found), rank_of(found)) == (TIMEOUT, None)
        assert "of rank 2 there is no log here" in found["cause"]["sentence"]
        (tmp_path / "rank-2.log").write_text("Starting with 4 processes\nstep 10 loss 2.1\n")
        assert rank_of(explain(tmp_path)) == 2

    def test_half_of_the_ranks_are_not_called_missing(self, tmp_path: Path) -> None:
        found = explain_text(timeouts({0: 90, 1: 90}, world_size=4), tmp_path)
        assert (code_of(found), rank_of(found)) == (TIMEOUT, None)
        assert found["cause"]["sentence"].startswith("The job")

    @pytest.mark.parametrize("differs", [{2: ("BROADCAST", 4)}, {2: ("ALLREDUCE", 9)}])
    def test_gloos_own_check_names_the_rank_that_differs(
        self, differs: dict[int, tuple[str, int]], tmp_path: Path
    ) -> None:
        def running(rank: int) -> str:
            op, size = differs.get(rank, ("ALLREDUCE", 4))
            return (
                f"Rank {rank} is running collective: CollectiveFingerPrint(SequenceNumber=1, "
                f"OpType={op}, TensorShape=[{size}], TensorDtypes=Float, TensorDeviceTypes="
                "TensorOptions(dtype=float (default), device=cpu))"
            )

        lasts = [
            "RuntimeError: Detected mismatch between collectives on ranks. "
            f"{running(rank)}, but {running(0 if rank == 2 else 2)}.Collectives differ"
            for rank in range(4)
        ]
        text = joined(*(of_rank(rank, traceback_of(last)) for rank, last in enumerate(lasts)))
        found = explain_text(text, tmp_path)
        assert (code_of(found), rank_of(found)) == (MISMATCH, 2)
        two = joined(*(of_rank(rank, traceback_of(lasts[rank])) for rank in (1,)))
        assert rank_of(explain_text(two, tmp_path)) is None

    def test_another_size_at_one_number_is_a_mismatch_and_accuses_nobody(
        self, tmp_path: Path
    ) -> None:
        text = timeouts({0: 90, 1: 90}, world_size=2)
        lines = [
            line.replace("NumelIn=9801523", "NumelIn=7") if "[rank1]" in line else line
            for line in text.splitlines()
        ]
        found = explain_text("\n".join(lines), tmp_path)
        assert (code_of(found), rank_of(found)) == ("collective-mismatch", None)

    def test_a_list_of_ranks_is_taken_as_it_is(self, tmp_path: Path) -> None:
        last = "RuntimeError: [Rank 0]: Ranks 4, 5 failed to pass monitoredBarrier in 60000 ms"
        found = explain_text(joined(of_rank(0, traceback_of(last))), tmp_path)
        assert (code_of(found), rank_of(found)) == ("gloo-barrier", None)
        assert found["cause"]["sentence"].startswith("Ranks 4, 5")
        one = last.replace("Ranks 4, 5", "Rank 4")
        assert rank_of(explain_text(joined(of_rank(0, traceback_of(one))), tmp_path)) == 4

    def test_a_rank_is_named_though_one_that_only_noticed_spoke_first(self, tmp_path: Path) -> None:
        noticed = "RuntimeError: Detected at least one rank that exhausted inputs. Throwing."
        named = "RuntimeError: Rank 0 exhausted all inputs."
        for order in ((1, 0), (0, 1)):
            lines = (of_rank(rank, traceback_of(noticed if rank else named)) for rank in order)
            found = explain_text(joined(*lines), tmp_path)
            assert (code_of(found), rank_of(found)) == ("data-uneven", 0)

    def test_ranks_of_a_sub_group_are_not_those_of_the_job(self, tmp_path: Path) -> None:
        text = timeouts({0: 90, 1: 90, 3: 90}, world_size=8)
        text = text.replace("PG ID 0 PG GUID 0(default_pg)", "PG ID 5 PG GUID 37(TENSOR)")
        assert rank_of(explain_text(re.sub(r"\[rank\d\]:", "", text), tmp_path)) is None
        # rank 3 may be in no such group
        text = timeouts({0: 90, 1: 90, 2: 90}, world_size=4)
        text = text.replace("PG ID 0 PG GUID 0(default_pg)", "PG ID 5 PG GUID 37(TENSOR)")
        assert rank_of(explain_text(text, tmp_path)) is None

    def test_a_root_later_in_the_file_is_found(self, tmp_path: Path) -> None:
        text = timeouts({0: 90, 1: 90}, world_size=3) + joined(of_rank(2, KEY_ERROR))
        found = explain_text(text, tmp_path)
        assert (code_of(found), rank_of(found)) == ("python-keyerror", 2)
        assert found["echoes"] > 2

    def test_an_error_that_a_watchdog_passes_on_is_the_cause(self, tmp_path: Path) -> None:
        text = (
            "[rank0]:[E1122 08:08:33.1 ProcessGroupNCCL.cpp:1785] [PG ID 0 PG GUID 0 Rank 0] "
            "Process group watchdog thread terminated with exception: CUDA error: an illegal "
            "memory access was encountered\nFatal Python error: Aborted\n"
        )
        found = explain_text(text, tmp_path)
        assert (code_of(found), rank_of(found)) == ("gpu-illegal-access", 0)

    def test_a_traceback_without_an_end_does_not_hide_what_ended_the_process(
        self, tmp_path: Path
    ) -> None:
        last = "torch.multiprocessing.spawn.ProcessExitedException: process 2 terminated with "
        found = explain_text(joined(KEY_ERROR[:3], traceback_of(last + "signal SIGKILL")), tmp_path)
        assert (code_of(found), rank_of(found)) == ("killed-sigkill", 2)

    @pytest.mark.parametrize("prefix", ["", "2026-11-22T08:08:33.1Z ", "[rank1]: "])
    def test_of_a_chain_the_exception_that_is_known_is_the_cause(
        self, prefix: str, tmp_path: Path
    ) -> None:
        """Both tell one failure, so the one that comes first in the log does not hide the other."""
        lines = CHAIN.splitlines()
        found = explain_text("\n".join(prefix + line for line in lines), tmp_path)
        assert code_of(found) == "data-hub"

    def test_an_error_of_torchrun_itself_comes_after_that_of_a_rank(self, tmp_path: Path) -> None:
        """Its agent reads the error file of a rank that was killed while it wrote it."""
        found = explain_text(AGENT + AGENT.replace("launcher/api", "nn/functional"), tmp_path)
        assert found["evidence"][0]["line"] == 8
        assert code_of(explain_text(AGENT, tmp_path)) == "python-jsondecodeerror"

    def test_a_message_of_several_lines_behind_a_level(self, tmp_path: Path) -> None:
        text = "".join(f"[2026-11-22 08:08:33,1][ERROR] {line}\n" for line in SIZES.splitlines())
        assert code_of(explain_text(text, tmp_path)) == "checkpoint-size"

    def test_a_killed_rank_in_the_words_of_torch_1(self, tmp_path: Path) -> None:
        text = "Child process 17057 (local_rank 2) FAILED (exitcode -9)\n"
        found = explain_text("epoch 1\n" + text, tmp_path)
        assert (code_of(found), rank_of(found)) == ("killed-sigkill", 2)

    def test_a_crash_while_ddp_is_made_and_a_process_that_waits_in_its_end(
        self, tmp_path: Path
    ) -> None:
        stack = 'Current thread 0x00007f66 (most recent call first):\n  File "/opt/torch/'
        crash = f"Fatal Python error: Segmentation fault\n\n{stack}"
        made = f'{crash}nn/parallel/distributed.py", line 1473 in _ddp_init_helper\n'
        found = explain_text(made * 2 + "process 1 terminated with signal SIGSEGV\n", tmp_path)
        assert (code_of(found), rank_of(found)) == ("gloo-detail-crash", None)
        assert code_of(explain_text(f"{crash}a.py", tmp_path)) == "killed-segfault"
        waits = f'Timeout (0:05:00)!\n{stack}distributed/distributed_c10d.py", line 2308 in '
        found = explain_text(f"{waits}destroy_process_group\n", tmp_path)
        assert (code_of(found), rank_of(found)) == ("gloo-destroy-hang", None)

    def test_the_native_stack_of_ddp_that_outlived_its_group(self, tmp_path: Path) -> None:
        text = """Process 5084: python train.py
Thread 5084 (idle): "MainThread"
    std::thread::join (libstdc++.so.6.0.30)
    c10d::ProcessGroupGloo::~ProcessGroupGloo (libtorch_cpu.so)
    c10d::ProcessGroup::~ProcessGroup (libtorch_cpu.so)
    c10d::Reducer::~Reducer (libtorch_cpu.so)
    pybind11::detail::clear_instance (libtorch_python.so)
    <module> (train.py:61)
Thread 5090 (idle)
    pthread_cond_timedwait (libc.so.6)
    pybind11::gil_scoped_acquire::gil_scoped_acquire (libtorch_python.so)
    c10::TensorImpl::decref_pyobject (libc10.so)
    c10d::ProcessGroupGloo::AsyncWork::~AsyncWork (libtorch_cpu.so)
    c10d::ProcessGroupGloo::runLoop (libtorch_cpu.so)
"""
        assert code_of(explain_text(text, tmp_path)) == "gloo-ddp-outlives-group"

    def test_a_prefix_that_nobody_knows(self, tmp_path: Path) -> None:
        """It is learned from the first line of a traceback; its numbers may be no rank."""
        others = [f"<gpu-a.{number}/12:30:07> step 7" for number in range(4)]
        lines = [part for line in KEY_ERROR for part in (f"<gpu-a.3/12:30:05> {line}", *others)]
        found = explain_text(joined(lines), tmp_path)
        assert (code_of(found), rank_of(found)) == ("python-keyerror", None)
        assert "train.py:37" in found["cause"]["sentence"]

    def test_the_launchers_of_composer_and_determined(self, tmp_path: Path) -> None:
        text = (
            "Building trainer...\nERROR:composer.cli.launcher:Rank 2 crashed with exit code -7.\n"
        )
        found = explain_text(text, tmp_path)
        assert (code_of(found), rank_of(found)) == ("killed-bus", 2)
        quoted = (
            "Global rank 3 (PID 3812) exited with code 1\n"
            f"----------Begin global rank 3 STDERR----------\n{joined(KEY_ERROR)}"
            "----------End global rank 3 STDERR----------\n"
            "Global rank 0 (PID 3809) exited with code -15\n"
        )
        found = explain_text(quoted, tmp_path)
        assert (code_of(found), rank_of(found)) == ("python-keyerror", 3)
        prefix = "[2024-02-27T21:05:20.718657Z] fa88a9df [rank=5] || "
        found = explain_text(joined([prefix + line for line in KEY_ERROR]), tmp_path)
        assert (code_of(found), rank_of(found)) == ("python-keyerror", 5)

    def test_the_ranks_that_torchrun_ends_are_a_consequence(self, tmp_path: Path) -> None:
        """Their own log does not say why the first one failed, and nobody told the job to stop."""
        text = "W1122 08:08:33.1 9 x/api.py:900] Sending process 4000 closing signal SIGTERM\n"
        found = explain_text(text + block_of({0: -15, 1: 1}, root=1), tmp_path)
        assert (found["verdict"], rank_of(found)) == ("unknown", None)
        found = explain_text(text + block_of({0: -15}, root=0), tmp_path)
        assert code_of(found) == "stop-sigterm"

    def test_srun_that_ends_the_others_is_a_consequence(self, tmp_path: Path) -> None:
        text = (
            "srun: error: n1: task 3: Exited with exit code 1\n"
            "srun: Terminating StepId=12.0\n"
            "srun: error: n1: tasks 0-2: Killed\n"
        )
        found = explain_text(joined([f"3: {line}" for line in KEY_ERROR]) + text, tmp_path)
        assert (code_of(found), rank_of(found)) == ("python-keyerror", 3)


class TestLoggedExceptions:
    """What a program or a library caught, logged and went on from."""

    def test_what_a_library_logged_does_not_hide_what_ended_the_process(
        self, tmp_path: Path
    ) -> None:
        logged = [
            "Traceback (most recent call last):",
            '  File "/opt/env/lib/python3.11/site-packages/torch/x.py", line 2, in read_metadata',
            "    open(path)",
            "FileNotFoundError: [Errno 2] No such file or directory: '/ckpt/.metadata'",
            "Falling back to rank local metadata.",
        ]
        lines = [f"2026-11-22T08:08:33.1Z {line}" for line in (*logged, *KEY_ERROR)]
        assert code_of(explain_text(joined(lines), tmp_path)) == "python-keyerror"
        cut = joined(lines[: len(logged)])
        assert code_of(explain_text(cut, tmp_path)) == "data-missing-file"

    def test_words_of_success_do_not_hide_what_torch_says_of_a_rank(self, tmp_path: Path) -> None:
        text = joined(of_rank(1, KEY_ERROR), ["Training complete"])
        found = explain_text(text, tmp_path)
        assert (code_of(found), rank_of(found)) == ("python-keyerror", 1)

    def test_a_task_that_failed_before_another_one_finished(self, tmp_path: Path) -> None:
        exits = ["srun: error: n1: task 1: Exited with exit code 1", "0: Training complete"]
        found = explain_text(joined([f"1: {line}" for line in KEY_ERROR], exits), tmp_path)
        assert (code_of(found), rank_of(found)) == ("python-keyerror", 1)

    def test_an_operation_that_failed_is_not_called_the_programs_own_exception(
        self, tmp_path: Path
    ) -> None:
        own = [*KEY_ERROR[:2], "    raise RuntimeError(text)", "RuntimeError: a new text"]
        operation = [*own[:2], "    y = x @ w", own[3]]
        assert code_of(explain_text(joined(own), tmp_path)) == "python-raised"
        assert code_of(explain_text(joined(operation), tmp_path)) == "python-operation"

    def test_a_loss_that_is_nan_until_the_end(self, tmp_path: Path) -> None:
        bad = "{'loss': 0.0, 'grad_norm': nan, 'epoch': %d}\n"
        end = "{'train_runtime': 12.1}\n"
        nan = "".join(bad % epoch for epoch in range(3))
        assert code_of(explain_text(nan + end, tmp_path)) == "amp-nan"
        later = nan + "{'loss': 0.1, 'grad_norm': 1.0, 'epoch': 3}\n" + end
        assert code_of(explain_text(later, tmp_path)) == "healthy"


class TestFiles:
    def test_a_folder_of_torchruns_logs(self, tmp_path: Path) -> None:
        for rank, text in ((0, joined(traceback_of(PEER))), (1, joined(KEY_ERROR))):
            folder = tmp_path / "none_abc" / "attempt_0" / str(rank)
            folder.mkdir(parents=True)
            (folder / "stderr.log").write_text(text)
        found = explain(tmp_path)
        assert (code_of(found), rank_of(found)) == ("python-keyerror", 1)

    def test_a_file_for_each_slurm_task(self, tmp_path: Path) -> None:
        (tmp_path / "4711_0.out").write_text(joined(traceback_of(PEER)))
        (tmp_path / "4711_1.out").write_text(joined(KEY_ERROR))
        assert rank_of(explain(tmp_path)) == 1

    def test_a_job_of_an_array_is_no_rank(self, tmp_path: Path) -> None:
        found = explain_text(joined(KEY_ERROR), tmp_path, name="4711_3.out")
        assert (code_of(found), rank_of(found)) == ("python-keyerror", None)

    def test_an_error_file_of_torch_elastic(self, tmp_path: Path) -> None:
        folder = tmp_path / "attempt_0" / "1"
        folder.mkdir(parents=True)
        stack = "\\n".join(KEY_ERROR).replace('"', '\\"')
        (folder / "error.json").write_text(
            f'{{"message": {{"message": "x", "extraInfo": {{"py_callstack": "{stack}"}}}}}}'
        )
        found = explain(folder / "error.json")
        assert (code_of(found), rank_of(found)) == ("python-keyerror", 1)

    @pytest.mark.parametrize(("newest", "guilty"), [((7, 7, 6), 2), ((7, 7, 7), None)])
    def test_flight_recorder_dumps_name_the_rank_that_is_behind(
        self, newest: tuple[int, ...], guilty: int | None, tmp_path: Path
    ) -> None:
        for rank, last in enumerate(newest):
            entries = [
                {
                    "collective_seq_id": seq,
                    "profiling_name": "nccl:all_reduce",
                    "state": "completed" if seq < 7 else "started",
                    "input_sizes": [[4, 8]],
                    "process_group": ("0", "default_pg"),
                }
                for seq in range(3, last + 1)
            ]
            dump = {"version": "2.10", "entries": entries}
            (tmp_path / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(dump))
        found = explain(tmp_path)
        assert (code_of(found), rank_of(found)) == ("nccl-timeout", guilty)

    @pytest.mark.parametrize(
        ("last", "code", "guilty"),
        [
            ([("all_reduce", False), None], "nccl-timeout", 1),
            ([("all_reduce", True), ("broadcast", False)], "collective-mismatch", None),
        ],
    )
    def test_dumps_of_gloo_have_no_states(
        self, last: list[tuple[str, bool] | None], code: str, guilty: int | None, tmp_path: Path
    ) -> None:
        """Every entry stays scheduled: what is done is said by retired, and by pg_status."""
        for rank, call in enumerate(last):
            calls = [*[("all_reduce", seq == 2) for seq in range(1, 4)], *([call] if call else [])]
            entries = [
                {
                    "collective_seq_id": seq,
                    "profiling_name": f"gloo:{op}",
                    "state": "scheduled",
                    "retired": is_retired,
                    "input_sizes": [[4]],
                    "process_group": ("0", "default_pg"),
                    "is_p2p": False,
                }
                for seq, (op, is_retired) in enumerate(calls, start=1)
            ]
            status = {"0": {"last_completed_collective": 3}}
            dump = {"version": "2.10", "entries": entries, "pg_status": status}
            (tmp_path / f"my_dump_{rank}").write_bytes(pickle.dumps(dump))
        found = explain(tmp_path)
        assert (code_of(found), rank_of(found)) == (code, guilty)

    def test_the_status_files_of_a_run_are_no_logs(self, tmp_path: Path) -> None:
        for name, text in (
            ("logs/rank-0.log", "12:00:01 [rank 0] epoch 1/5 step 1/90  loss 2.3\n"),
            ("status/rank-0.json", '{"warnings": ["torch.OutOfMemoryError: CUDA out of memory."]}'),
        ):
            (tmp_path / name).parent.mkdir()
            (tmp_path / name).write_text(text)
        assert explain(tmp_path)["verdict"] == "healthy"

    @pytest.mark.parametrize(
        ("states", "guilty"), [(("failed", "running"), 1), (("running", "running"), None)]
    )
    def test_a_run_folder_knows_which_rank_fell_silent(
        self, states: tuple[str, str], guilty: int | None, tmp_path: Path
    ) -> None:
        (tmp_path / "logs").mkdir()
        text = "12:00:01 ERROR x: [DDP-G04] rank 0 lost another rank (Connection closed by peer)\n"
        (tmp_path / "logs" / "rank-0.log").write_text(text if guilty else "12:00:00 step 7\n")
        (tmp_path / "status").mkdir()
        for rank, state in enumerate(states):
            status = {"rank": rank, "world_size": 2, "now": 1e9 + rank, "state": state, "step": 7}
            (tmp_path / "status" / f"rank-{rank}.json").write_text(json.dumps(status))
        found = explain(tmp_path)
        assert (code_of(found), rank_of(found)) == ("killed-outside", guilty)
        # what a rank raised itself says more
        (tmp_path / "logs" / "rank-1.log").write_text(joined(KEY_ERROR))
        assert code_of(explain(tmp_path)) == "python-keyerror"

    def test_the_stacks_of_a_hang_say_where_each_rank_is(self, tmp_path: Path) -> None:
        folder = tmp_path / "hangs" / "20261122-step-7"
        folder.mkdir(parents=True)
        thread = "Thread 0x{0:016x} (most recent call first):\n"
        for rank, phase, line in ((0, "data", 12), (1, "all-reduce", 30), (2, "all-reduce", 30)):
            (folder / f"rank_{rank}.txt").write_text(
                f"rank {rank}, process 9 on n1: {phase} of step 7 for 60.1 s; its main thread is "
                "0x0000000000000002\n" + thread.format(1) + '  File "/x/thread.py", line 1 in run\n'
                "\n" + thread.format(2) + '  File "/e/lib/python3.11/ssl.py", line 2 in read\n'
                f'  File "/x/train.py", line {line} in step\n'
                '  File "/x/train.py", line 99 in <module>\n'
            )
        found = explain(tmp_path)
        assert (code_of(found), rank_of(found)) == ("DDP-G05", 0)
        assert "/x/train.py:12 in step" in found["evidence"][0]["text"]
        assert "/x/train.py:30 in step" in found["evidence"][1]["text"]
        (folder / "rank_0.txt").unlink()
        found = explain(tmp_path)
        assert (code_of(found), rank_of(found)) == ("DDP-G05", None)
        assert "missing ranks" in found["cause"]["sentence"]
        (folder / "verdict.txt").write_text("rank 0, step 7, data, 60 s\n")
        found = explain(tmp_path)
        assert (rank_of(found), len(found["evidence"])) == (0, 3)

    def test_a_pickle_with_code_in_it_is_not_run(self, tmp_path: Path) -> None:
        class Bad:
            def __reduce__(self) -> tuple[object, ...]:
                return (Path.touch, (tmp_path / "ran",))

        (tmp_path / "nccl_trace_rank_0").write_bytes(pickle.dumps({"entries": [Bad()]}))
        explain(tmp_path / "nccl_trace_rank_0")
        assert not (tmp_path / "ran").exists()

    def test_the_verdict_of_a_hang_of_our_run(self, tmp_path: Path) -> None:
        folder = tmp_path / "hangs" / "1"
        folder.mkdir(parents=True)
        text = "rank 1, step 412, data, sample 9912, 63 s; ranks 0 and 2 wait in all-reduce"
        (folder / "verdict.txt").write_text(text + "\n")
        found = explain(tmp_path)
        assert (code_of(found), rank_of(found)) == ("DDP-G05", 1)

    def test_gzip_utf_16_and_a_box_of_rich(self, tmp_path: Path) -> None:
        text = joined(KEY_ERROR)
        (tmp_path / "a.log.gz").write_bytes(gzip.compress(text.encode()))
        (tmp_path / "b.log").write_bytes(text.encode("utf-16"))
        box = (
            "╭───── Traceback (most recent call last) ─────╮\n"
            "│ /home/ana/train.py:12 in main               │\n"
            "│ ❱ 12 │   batch['label']                     │\n"
            "╰─────────────────────────────────────────────╯\n"
            "KeyError: 'label'\n"
        )
        (tmp_path / "c.log").write_text(box)
        for name in ("a.log.gz", "b.log", "c.log"):
            assert code_of(explain(tmp_path / name)) == "python-keyerror", name

    def test_standard_input(self) -> None:
        done = subprocess.run(
            [sys.executable, "ddp_training.py", "explain", "-", "--json"],
            cwd=ROOT,
            env=clean_environment(),
            input=joined(of_rank(1, KEY_ERROR)),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0
        assert '"python-keyerror"' in done.stdout

    def test_it_starts_without_torch(self) -> None:
        code = (
            "import sys; sys.argv = ['x', 'explain', 'README.md']; import ddp_training\n"
            "ddp_training.main(); sys.exit('torch' in sys.modules)"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, env=clean_environment(), timeout=60
        )
        assert done.returncode == 0

    def test_what_can_not_be_read_has_its_own_status(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert ddp_training.main(["explain", str(tmp_path / "none.log")]) == 2
        assert "none.log can't be read" in capsys.readouterr().err
        assert ddp_training.main(["explain", str(tmp_path)]) == 2
        (tmp_path / "cut.gz").write_bytes(gzip.compress(b"x" * 9999)[:20])
        assert ddp_training.main(["explain", str(tmp_path / "cut.gz")]) == 2
        for content in (b"", b"\n \n", b"\0\xff\xfe"):
            (tmp_path / "job.log").write_bytes(content)
            assert ddp_training.main(["explain", str(tmp_path / "job.log")]) == 2
            assert "job.log: no text in it" in capsys.readouterr().err


class TestHealthy:
    @pytest.mark.parametrize("name", healthy.LOGS)
    def test_a_healthy_log_is_not_called_failed(self, name: str, tmp_path: Path) -> None:
        found = explain_text(healthy.LOGS[name], tmp_path)
        assert found["verdict"] == "healthy"
        assert found["cause"] is None

    def test_there_are_enough(self) -> None:
        assert len(healthy.LOGS) >= 20


class TestUnknown:
    def test_the_first_exception_of_each_rank_is_listed(self, tmp_path: Path) -> None:
        last = "acme.engine.DriftDetected: vocabulary changed"
        lines = traceback_of(last)
        found = explain_text(joined(of_rank(2, lines), of_rank(0, traceback_of(PEER))), tmp_path)
        assert found["verdict"] == "unknown"
        assert rank_of(found) == 2
        assert [e["rank"] for e in found["exceptions"]] == [2, 0]

    def test_a_failed_process_without_a_message(self, tmp_path: Path) -> None:
        found = explain_text(block_of({3: 1}, root=3), tmp_path)
        assert found["verdict"] == "unknown"


class TestFuzz:
    @pytest.mark.parametrize("seed", range(4))
    def test_random_bytes_never_raise(self, seed: int, tmp_path: Path) -> None:
        chance = random.Random(seed)
        text = joined(of_rank(1, KEY_ERROR)) + timeouts({0: 1, 1: 2}, world_size=2)
        data = bytearray((text + block_of({1: -9}, root=1)).encode() * 4)
        for _ in range(400):
            data[chance.randrange(len(data))] = chance.randrange(256)
        for _ in range(20):
            start = chance.randrange(len(data))
            del data[start : start + chance.randrange(40)]
        log = tmp_path / "broken.log"
        log.write_bytes(bytes(data) + chance.randbytes(50_000))
        explain(log)

    def test_a_line_of_10_mb(self, tmp_path: Path) -> None:
        log = tmp_path / "long.log"
        log.write_bytes(b"x" * 10_000_000 + b"\n" + joined(KEY_ERROR).encode())
        assert code_of(explain(log)) == "python-keyerror"

    @pytest.mark.slow
    def test_200_mb_of_training_output_around_it(self, tmp_path: Path) -> None:
        log = tmp_path / "large.log"
        line = b"epoch 3 step 123 | loss 2.345 | lr 3e-4 | grad_norm 1.2 | tokens/s 123456\n"
        half = line * (100_000_000 // len(line))
        log.write_bytes(half + joined(of_rank(1, KEY_ERROR)).encode() + half)
        found = explain(log)
        assert (code_of(found), rank_of(found)) == ("python-keyerror", 1)
        assert found["evidence"][0]["line"] == len(half) // len(line) + len(KEY_ERROR)

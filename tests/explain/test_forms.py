"""explain on logs of other launchers and log libraries: JSON, messages cut by a logger, exits."""

import json
from pathlib import Path

import pytest

from tests.explain.composed import PEER, block_of, traceback_of
from tests.explain.explained import code_of, explain_text, rank_of

KEY_ERROR = "\n".join(traceback_of("KeyError: 'mask'"))
SIGTERM = "torch.distributed.elastic.multiprocessing.api:Sending process 41 closing signal SIGTERM"
FAILED = "torch.distributed.elastic.multiprocessing.api:failed (exitcode: 1) local_rank: 0 (pid: 9)"


class TestJson:
    @pytest.mark.parametrize(
        "form",
        [
            lambda line: {"log": line + "\n", "stream": "stderr"},
            lambda line: {"event": "line", "data": line + "\n", "pipe": "stderr"},
            lambda line: {"textPayload": line, "severity": "ERROR"},
            lambda line: {"jsonPayload": {"message": line}, "severity": "ERROR"},
        ],
    )
    def test_each_line_of_the_program_is_an_object(self, form: object, tmp_path: Path) -> None:
        assert callable(form)
        lines = [json.dumps(form(f"[rank3]: {line}")) for line in KEY_ERROR.splitlines()]
        found = explain_text("\n".join(lines) + "\n", tmp_path)
        assert (code_of(found), rank_of(found)) == ("python-keyerror", 3)
        assert "train.py:37" in found["cause"]["sentence"]

    def test_a_traceback_in_one_field_and_the_rank_in_another(self, tmp_path: Path) -> None:
        entry = {"level": "ERROR", "message": "failed", "exc_info": KEY_ERROR, "rank": 2}
        text = json.dumps({"level": "INFO", "message": "step 1", "rank": 2}) + "\n"
        found = explain_text(text + json.dumps(entry) + "\n", tmp_path)
        assert (code_of(found), rank_of(found)) == ("python-keyerror", 2)
        assert found["evidence"][0]["line"] == 2

    def test_metrics_as_json_are_healthy(self, tmp_path: Path) -> None:
        lines = [json.dumps({"epoch": n, "error": None, "failed": 0}) for n in range(3)]
        assert explain_text("\n".join(lines), tmp_path)["verdict"] == "healthy"


class TestMessages:
    @pytest.mark.parametrize(
        "lines",
        [
            f"WARNING:{SIGTERM}\nERROR:{FAILED}",
            f"[2024-05-08 08:47:31,261] {SIGTERM.replace('api:', 'api: [WARNING] ')}",
        ],
    )
    def test_a_loggers_line_is_no_part_of_the_message_before_it(
        self, lines: str, tmp_path: Path
    ) -> None:
        last = "ValueError: the mask and the input differ in length"
        found = explain_text("\n".join(traceback_of(last)) + f"\n{lines}\n", tmp_path)
        assert code_of(found) == "python-valueerror"

    def test_the_line_of_a_long_message_that_names_the_cause_is_shown(self, tmp_path: Path) -> None:
        last = (
            "torch.distributed.DistBackendError: NCCL error in: NCCLUtils.hpp:275, unhandled "
            "system error, NCCL version 2.20.5\nLast error:\n"
            "socketStartConnect: Connect to 10.0.0.1<40815> failed : Software caused abort"
        )
        found = explain_text("\n".join(traceback_of(last)), tmp_path)
        assert code_of(found) == "nccl-connect"
        assert any("10.0.0.1" in line["text"] for line in found["evidence"])

    def test_a_warning_before_the_error_that_ends_the_log(self, tmp_path: Path) -> None:
        died = "A worker died or was killed while executing a task by an unexpected system error."
        text = f"step 3\n2023-01-17 17:21:35,472\tWARNING worker.py:1829 -- {died}\n"
        end = "2023-01-17 17:21:35,509\tERROR trial_runner.py:980 -- Error processing event.\n"
        assert code_of(explain_text(text + end, tmp_path)) == "launch-ray-actor"
        assert explain_text(text + "step 4\nstep 5\n", tmp_path)["verdict"] == "healthy"


class TestGroups:
    def test_the_exception_in_a_group_is_the_cause(self, tmp_path: Path) -> None:
        text = """\
[rank1]:   + Exception Group Traceback (most recent call last):
[rank1]:   |   File "/home/ana/train.py", line 8, in <module>
[rank1]:   |     asyncio.run(main())
[rank1]:   |   File "/opt/env/lib/python3.11/asyncio/taskgroups.py", line 147, in __aexit__
[rank1]:   |     raise me from None
[rank1]:   | ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception)
[rank1]:   +-+---------------- 1 ----------------
[rank1]:     | Traceback (most recent call last):
[rank1]:     |   File "/home/ana/train.py", line 3, in fetch
[rank1]:     |     raise KeyError("label")
[rank1]:     | KeyError: 'label'
[rank1]:     +------------------------------------
"""
        found = explain_text(text, tmp_path)
        assert (code_of(found), rank_of(found)) == ("python-keyerror", 1)
        assert "train.py:3" in found["cause"]["sentence"]

    def test_a_group_whose_exceptions_have_no_traceback(self, tmp_path: Path) -> None:
        text = """\
  + Exception Group Traceback (most recent call last):
  |   File "/home/ana/train.py", line 76, in <module>
  |     raise ExceptionGroup("prefetch failed", [ValueError("bad shard 3")])
  | ExceptionGroup: prefetch failed (1 sub-exception)
  +-+---------------- 1 ----------------
    | ValueError: bad shard 3
    +------------------------------------
"""
        found = explain_text(text + block_of({0: -15, 3: 1}, root=3), tmp_path)
        assert (code_of(found), rank_of(found)) == ("python-raised", 3)


class TestExits:
    @pytest.mark.parametrize(
        ("words", "code"),
        [
            ("died with <Signals.SIGKILL: 9>.", "killed-sigkill"),
            ("returned non-zero exit status -11.", "killed-segfault"),
        ],
    )
    def test_a_launcher_that_only_knows_the_signal(
        self, words: str, code: str, tmp_path: Path
    ) -> None:
        last = f"subprocess.CalledProcessError: Command '['python', 'train.py']' {words}"
        assert code_of(explain_text("\n".join(traceback_of(last)), tmp_path)) == code

    def test_a_task_of_srun_that_is_a_launcher_is_no_rank(self, tmp_path: Path) -> None:
        text = (
            "slurmstepd: error: Detected 1 oom_kill event in StepId=8811.0.\n"
            "srun: error: nid002: task 1: Out Of Memory\n"
        )
        assert rank_of(explain_text(text, tmp_path)) == 1
        agent = "0: W0714 10:11:12.1 811 torch/distributed/elastic/agent/server/api.py:719] x\n"
        found = explain_text(text + agent.replace("] x", "] Received SIGTERM signal"), tmp_path)
        assert (code_of(found), rank_of(found)) == ("memory-slurm-oom", None)

    def test_the_only_process_that_torchrun_did_not_end_itself(self, tmp_path: Path) -> None:
        text = KEY_ERROR + "\n" + block_of({3: 1, 0: -15, 1: -15}, root=3)
        assert rank_of(explain_text(text, tmp_path)) == 3
        text = KEY_ERROR + "\n" + block_of({3: 1, 0: 1, 1: -15}, root=3)
        assert rank_of(explain_text(text, tmp_path)) is None

    @pytest.mark.parametrize(
        "line",
        [
            "sagemaker-containers ERROR    ExecuteUserScriptError:",
            "1.7e+09\tDEBUG\tevents\tPod: kubeflow.job-worker-0 exited with code 1\t{}",
        ],
    )
    def test_a_service_that_says_no_more_than_that_it_failed(
        self, line: str, tmp_path: Path
    ) -> None:
        assert explain_text(f"epoch 1\n{line}\n", tmp_path)["verdict"] == "unknown"

    def test_of_many_error_lines_the_last_one_counts(self, tmp_path: Path) -> None:
        lines = [f"ERROR: could not upload part {n}\nstep {n}" for n in range(40)]
        text = "\n".join(lines)
        assert explain_text(text + "\nERROR: giving up\n", tmp_path)["verdict"] == "unknown"


class TestSilent:
    """What no message tells: who ended, and what the others lost."""

    @staticmethod
    def lost_by(*ranks: int) -> str:
        lines = traceback_of(PEER)
        return "".join(f"[rank{rank}]: {line}\n" for rank in ranks for line in lines)

    def test_a_rank_that_ended_without_an_exception(self, tmp_path: Path) -> None:
        found = explain_text(self.lost_by(0, 2) + block_of({1: 3, 0: -15, 2: 1}, root=1), tmp_path)
        assert (code_of(found), rank_of(found)) == ("stop-silent", 1)

    def test_a_rank_that_finished_before_the_others(self, tmp_path: Path) -> None:
        found = explain_text(self.lost_by(1) + block_of({1: 1}, root=1), tmp_path)
        assert (code_of(found), rank_of(found)) == ("lost-finished-rank", None)

    @pytest.mark.parametrize("failures", [{1: 3, 2: 3, 0: 1}, {1: -9, 0: 1}])
    def test_nothing_is_said_where_it_is_not_sure(
        self, failures: dict[int, int], tmp_path: Path
    ) -> None:
        found = explain_text(self.lost_by(0) + block_of(failures, root=1), tmp_path)
        assert code_of(found) in ("lost-peer", "killed-sigkill")
        text = "\n".join(traceback_of(PEER)) + "\n" + block_of({1: 3, 0: 1}, root=1)
        assert code_of(explain_text(text, tmp_path)) == "lost-peer"

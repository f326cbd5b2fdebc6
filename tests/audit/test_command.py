"""The command audit as it is typed: real launchers, what it prints, how it ends, what it leaves.

And its judging from records: what a comparison must not mix up.
"""

import json
import os
import signal
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

import ddp_training
from benchmarks.audit_cases.styles import PLAIN
from ddp_doctor.audit.command import judge
from ddp_doctor.audit.endings import judge_endings
from ddp_doctor.audit.injected.recorder import Recorder
from ddp_doctor.audit.program import BUSY_STALLS, hangs
from ddp_doctor.audit.records import Follower, Rank, Ranks, Record, read_ranks
from ddp_doctor.audit.updates import judge_updates
from ddp_doctor.audit.weights import has_local_steps
from tests.harness.processes import ROOT
from tests.harness.ranks import Finished, held_port, run_command, run_program, start_command
from tests.marks import sections

PROGRAMS = sections(Path(__file__).with_name("commands.txt"))
"""alone: one process; odd: has modules of its own, is scripted and compiled, starts itself anew,
closes all files, and leaves at once."""

ALONE = PROGRAMS["alone"]
SPAWNED = PLAIN.replace("def main():\n", "def main(rank):\n    world_size = 2\n")
SPAWNED = SPAWNED.replace('("gloo")', '("gloo", rank=rank, world_size=world_size)')
SPAWNED = SPAWNED.replace("    rank, world_size = dist.get_rank(), dist.get_world_size()\n", "")
START = '    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="{port}")\n'
START += "    torch.multiprocessing.spawn(main, nprocs=2)\n"
SPAWNED = SPAWNED.replace("    main()\n", START)
FORKED = SPAWNED.replace("spawn(main, ", 'start_processes(main, start_method="fork", ')
FORKED = FORKED.replace("import torch\n", "import torch, torch._dynamo\n")  # not in each rank


def launch(script: Path) -> list[str]:
    return ["torchrun", "--nproc_per_node=2", f"--master_port={held_port()}", str(script)]


def run_audit(
    source: str, folder: Path, *options: str, launcher: Sequence[str] = (), wants_json: bool = True
) -> Finished:
    """Audit a program, of two ranks by torchrun or of another launcher; its report is JSON."""
    script = folder / "train.py"
    script.write_text(source)
    command = [*launcher, str(script)] if launcher else launch(script)
    argv = ["python", ROOT / "ddp_training.py", "audit", *["--json"] * wants_json, *options, "--"]
    return run_command([*argv, *command], timeout_s=90, cwd=folder)


def line_of(source: str) -> int:
    return next(i for i, text in enumerate(source.splitlines(), 1) if "# here" in text)


@pytest.mark.slow
def test_a_healthy_program_ends_with_0_and_the_weights_without_audit(tmp_path: Path) -> None:
    done = run_audit(PLAIN, tmp_path)
    assert done.status == 0, done.output
    report = json.loads(done.stdout)
    assert (report["healthy"], report["ranks"]) == (True, 2)
    assert not [v for v in report["verdicts"] if v["severity"] != "advice"]
    audited = torch.load(tmp_path / "model.pt", weights_only=True)
    run_program(launch(tmp_path / "train.py"), timeout_s=60, cwd=tmp_path).ok()
    plain = torch.load(tmp_path / "model.pt", weights_only=True)
    assert audited.keys() == plain.keys()
    assert all(torch.equal(audited[name], plain[name]) for name in plain)


@pytest.mark.slow
def test_of_ranks_that_spawn_starts_text_names_line_evidence_and_fix(tmp_path: Path) -> None:
    source = SPAWNED.replace("{port}", str(held_port())).replace(
        "(model(x), y)\n", "(model.module(x), y)  # here\n"
    )
    done = run_audit(source, tmp_path, launcher=["python"], wants_json=False)
    assert done.status == 1, done.output
    assert f"train.py:{line_of(source)}: error gradients-not-averaged" in done.stdout
    assert done.stdout.count(": error ") == 1
    assert "    seen: ranks 0 and 1, step 1:" in done.stdout
    assert "    fix: " in done.stdout
    assert "rank 0: 20, rank 1: 20" in done.stdout
    assert "time of a step in ms" in done.stdout


@pytest.mark.slow
def test_a_hang_is_ended_and_named_by_line(tmp_path: Path) -> None:
    barrier = "        if rank == 0:\n            dist.barrier()  # here\n"
    source = FORKED.replace("{port}", str(held_port()))
    source = source.replace("        scheduler.step()\n", "        scheduler.step()\n" + barrier)
    done = run_audit(source, tmp_path, "--hang_after", "6", launcher=["python"])
    assert done.status == 1, done.output
    mistakes = [v for v in json.loads(done.stdout)["verdicts"] if v["severity"] != "advice"]
    assert len(mistakes) == 1, done.stdout
    assert mistakes[0]["code"] in ("collectives-differ", "hang")
    assert mistakes[0]["line"] == line_of(source)
    assert any("rank 0" in fact for fact in mistakes[0]["evidence"])


@pytest.mark.slow
def test_a_program_that_is_odd_gets_an_answer_and_is_left_as_it_is(tmp_path: Path) -> None:
    for module in ("events", "records"):
        (tmp_path / f"{module}.py").write_text("OWN = 1\n")
    done = run_audit(PROGRAMS["odd"], tmp_path, launcher=["python"])
    assert done.status == 0, done.output
    assert json.loads(done.stdout) == {"verdicts": [], "healthy": True, "ranks": 1}


@pytest.mark.slow
def test_one_process_has_nothing_to_compare_and_killed_it_is_not_healthy(tmp_path: Path) -> None:
    source = ALONE + "import os\nos.kill(os.getpid(), 9)\n"
    done = run_audit(source, tmp_path, launcher=["python"], wants_json=False)
    assert done.status == 1, done.output
    told = " ".join(done.stdout.split())
    assert "error exception" in told
    assert "the program's exit status is -9" in told
    assert "nothing to compare between ranks" in told


@pytest.mark.slow
def test_a_long_program_is_ended_after_its_steps_and_leaves_no_process(tmp_path: Path) -> None:
    # conftest.py fails the test if a process is left
    done = run_audit(PLAIN.replace("range(2)", "range(100000)"), tmp_path, "--steps", "30")
    assert done.status == 0, done.output
    assert json.loads(done.stdout)["healthy"] is True


@pytest.mark.slow
def test_an_audit_that_is_interrupted_tells_what_it_has_seen(tmp_path: Path) -> None:
    loop = ALONE.replace("range(8)", "range(10**9)")
    (tmp_path / "train.py").write_text(loop + "    if step == 8:\n        open('begun', 'w')\n")
    argv = ["python", ROOT / "ddp_training.py", "audit", "--json", f"--steps={10**9}", "--"]
    with start_command([*argv, "python", "train.py"], cwd=tmp_path) as running:
        running.wait_for((tmp_path / "begun").exists, timeout_s=60, what="eight steps")
        os.kill(running.pid, signal.SIGINT)
        done = running.wait(30)
    assert done.status == 0, done.output
    assert json.loads(done.stdout) == {"verdicts": [], "healthy": True, "ranks": 1}


@pytest.mark.parametrize("steps", ["0", "-3", "many"])
def test_a_wrong_number_of_steps_is_told(steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert ddp_training.main(["audit", "--json", f"--steps={steps}", "--", "true"]) == 2
    printed = capsys.readouterr()
    assert "--steps" in printed.err
    assert "--steps" in json.loads(printed.out)["error"]


def test_what_follows_the_dashes_is_the_programs_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert ddp_training.main(["audit", "--", "false", "--help", "--steps", "x"]) == 2
    assert "could not observe the program: it fails before" in capsys.readouterr().err


def test_a_sitecustomize_of_the_user_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.own = 1\n")
    argv = ["python", ROOT / "ddp_training.py", "audit", "--json", "--", "python", "-c"]
    code = "import sys, os; assert sys.own == 1; assert 'hardened_ddp' not in sys.modules"
    done = run_command([*argv, code], timeout_s=30, env={"PYTHONPATH": str(tmp_path)})
    assert done.status == 2, done.output
    assert "(its exit status: 0)" in done.stderr
    report = json.loads(done.stdout)
    assert (report["verdicts"], report["healthy"]) == ([], False)
    assert "could not observe" in report["error"]


def test_a_source_and_a_run_give_one_answer(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(PLAIN.replace("        if rank == 0:\n    ", ""))
    rank = Rank(0, {"world": "2", "rank": "0"})
    read = judge(Ranks({0: rank}), hung=False, sources=[str(path)])
    assert [v.code for v in read] == ["same-file"]
    rank.add({"k": "exit", "error": "", "code": 0, "line": ""})  # it ended, and no file was shared
    assert judge(Ranks({0: rank}), hung=False, sources=[str(path)]) == []


def test_a_part_of_the_judging_that_fails_leaves_the_others_their_answer() -> None:
    rank = Rank(0, {"world": "1", "rank": "0"})
    rank.add({"k": "batch", "loader": 0, "number": 0})  # of no pass
    rank.add({"k": "exit", "error": "ValueError: 3", "code": 1, "line": "train.py:3"})
    ranks = Ranks({0: rank})
    assert [v.code for v in judge(ranks, hung=False)] == ["exception"]
    assert any("samples" in failure for failure in ranks.failures)


class TestRecorder:
    def test_an_error_of_the_observer_is_recorded_and_not_raised(self, tmp_path: Path) -> None:
        recorder = Recorder(str(tmp_path))

        class Owner:
            def act(self, number: int) -> int:
                return 3 // number

        def fail(*args: object) -> None:
            raise RuntimeError("own")

        recorder.wrap(Owner, "act", before=fail, after=fail)
        assert Owner().act(1) == 3
        with pytest.raises(ZeroDivisionError):  # the program's own passes through
            Owner().act(0)
        recorder.emit("init", rank=0, world=1)
        [rank] = read_ranks(tmp_path)
        assert [error["what"] for error in rank.all("error")] == ["RuntimeError('own')"] * 3

    @pytest.mark.parametrize("kind", ["function", "partial", "object", "once"])
    def test_what_a_signals_handler_raises_within_a_hook_passes_through(
        self, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # torch's handler of SIGCHLD raises so that a loader does not wait for a dead worker.
        class Caller:
            def __call__(self, number: int, frame: object) -> None:
                raise KeyError(number)

            def act(self) -> int:
                return 3

        def function(number: int, frame: object) -> None:
            raise KeyError(number)

        def once(number: int, frame: object) -> None:
            signal.signal(number, signal.SIG_DFL)
            recorder.emit("load")  # what a program records while the observer writes
            raise KeyError(number)

        handlers = {"function": function, "partial": partial(function), "object": Caller()}
        recorder = Recorder(str(tmp_path))
        monkeypatch.setattr(signal, "signal", signal.signal)
        recorder.watch_signals()
        before = signal.signal(signal.SIGUSR1, handlers.get(kind, once))
        recorder.wrap(Caller, "act", before=lambda *_: signal.raise_signal(signal.SIGUSR1))
        try:
            with pytest.raises(KeyError):
                Caller().act()
        finally:
            signal.signal(signal.SIGUSR1, before)

    def test_a_signal_amid_a_write_does_not_lock_the_program_up(self, tmp_path: Path) -> None:
        recorder = Recorder(str(tmp_path))
        with recorder._lock:  # as a flush holds it when the handler runs
            recorder.emit("init", rank=0, world=1)
        assert len(read_ranks(tmp_path)) == 1

    def test_records_of_steps_wait_for_another_and_keep_their_order(self, tmp_path: Path) -> None:
        recorder = Recorder(str(tmp_path))
        recorder.emit("init", rank=0, world=1)
        for n in range(9):
            recorder.emit("step", n=n)
        assert len((tmp_path / f"p{os.getpid()}.jsonl").read_text().splitlines()) < 2 + 9
        recorder.emit("exit", error="", code=0)
        [rank] = read_ranks(tmp_path)
        assert [step["n"] for step in rank.all("step")] == list(range(9))

    def test_a_record_that_is_cut_is_left_for_later(self, tmp_path: Path) -> None:
        path = tmp_path / f"p{os.getpid()}.jsonl"
        recorder = Recorder(str(tmp_path))
        recorder.emit("step", n=1)
        recorder.flush()
        follower = Follower(path)
        with path.open("a") as file:
            file.write('{"k": "step", "n"')
        follower.follow(1.0)
        assert follower.num_steps == 1
        with path.open("a") as file:
            file.write(": 2}\n")
        follower.follow(2.0)
        assert follower.num_steps == 2

    def test_ranks_that_wait_for_one_that_still_imports_do_not_hang(self, tmp_path: Path) -> None:
        path = tmp_path / f"p{os.getpid()}.jsonl"
        stall = '{"k": "stall", "line": "train.py:3", "is_idle": true, "waits": true}\n'
        process = '{"k": "process", "world": "4", "local_world": "2"}\n'  # on two hosts
        path.write_text(process + '{"k": "init"}\n' + stall)
        follower = Follower(path)
        follower.follow(1.0)
        assert follower.is_rank
        assert not hangs([follower], 2.0, 1.0, num_known=1)
        assert hangs([follower], 2.0, 1.0, num_known=2)
        with path.open("a") as file:
            file.write(stall * BUSY_STALLS)
        follower.follow(2.0)
        assert hangs([follower], 3.0, 1.0, num_known=1)
        path.write_text('{"k": "init"}\n')
        mute = Follower(path)  # as when DDP's end waits in native code, with the GIL
        mute.follow(1.0)
        assert [hangs([mute], now, 1.0, num_known=1) for now in (24.0, 25.5)] == [False, True]


LOST = "RuntimeError: Connection closed by peer [127.0.0.1]:13215"


def rank_with(number: int, sampled: list[int]) -> Rank:
    """Make a rank that clips averaged gradients in each sampled step."""
    rank = Rank(number, {"world": "2", "rank": str(number)})
    for step in sampled:
        rank.add({"k": "clip", "line": "train.py:9", "next_steps": {"0": step}, "g": [step],
                  "is_scaled": False, "num_backwards": 1})  # fmt: skip
        rank.add({"k": "step", "o": 0, "n": step, "g": [7]})
    return rank


def test_ranks_that_sampled_other_steps_are_not_accused_of_clipping_too_early() -> None:
    ranks = Ranks({0: rank_with(0, [*range(1, 13)]), 1: rank_with(1, [1, 2, 3, 4, 6, 8, 10, 12])})
    # the record of the optimizer is missing on purpose: only clipping is judged
    assert list(judge_updates(ranks)) == []


def test_equal_weights_of_a_second_model_are_no_local_steps_of_the_first() -> None:
    first, other = rank_with(0, []), rank_with(1, [])
    for number, rank in enumerate((first, other)):
        for step in (1, 2):  # of a GAN whose generator is past DDP
            for optimizer, weights in ((0, [10 * step + number]), (1, [step])):
                record: Record = {"o": optimizer, "n": step, "g": [7], "w": weights}
                rank.add(record | {"k": "step", "before": weights})
    assert not has_local_steps(first, other)


def ended(number: int, *, steps: int, error: str = "") -> Rank:
    rank = Rank(number, {"world": "2", "rank": str(number)})
    rank.add({"k": "step", "o": 0, "n": steps})
    rank.add({"k": "exit", "error": error, "code": int(bool(error)), "line": "/x/train.py:63"})
    return rank


def codes_of(*ranks: Rank) -> list[tuple[str, int]]:
    verdicts = judge_endings(Ranks({rank.number: rank for rank in ranks}), hung=False, status=1)
    return [(verdict.code, verdict.line) for verdict in verdicts]


def test_a_lost_connection_is_an_echo_unless_the_others_had_finished() -> None:
    alone = ended(0, steps=48, error=LOST)
    assert codes_of(alone, ended(1, steps=40)) == []
    failed = ended(1, steps=48, error="KeyError: 3")
    assert codes_of(alone, failed) == [("exception", 63)]
    finished, alone = ended(1, steps=48), ended(0, steps=48, error=LOST)
    assert codes_of(alone, finished) == [("collectives-differ", 63)]
    aborted = Rank(1, {"world": "2", "rank": "1"})
    aborted.add({"k": "step", "o": 0, "n": 48, "line": "/x/train.py:60"})
    assert codes_of(alone, aborted) == [("exception", 60)]
    call: Record = {"k": "collective", "group": "world", "ranks": [], "op": "reduce", "what": ""}
    aborted.add(call | {"line": "/x/train.py:9"})
    assert codes_of(alone, aborted) == [("collectives-differ", 9)]


@pytest.mark.parametrize("word", ["break", "continue"])
def test_the_only_way_out_of_a_loop_is_where_ranks_parted(word: str, tmp_path: Path) -> None:
    text = "for epoch in range(9):\n    for p in params:\n        break\n    train(epoch)\n"
    text += f"    if stops_early():\n        {word}\n"  # that of the inner loop does not leave it
    (path := tmp_path / "train.py").write_text(text)
    (alone := ended(0, steps=48, error=LOST)).all("exit")[0]["lines"] = [f"{path}:4"]
    assert codes_of(alone, ended(1, steps=48)) == [("collectives-differ", 6)]

"""explain on run folders of ours and of several jobs; and ddp_doctor without the repository."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from io import StringIO
from pathlib import Path

import pytest

from ddp_doctor.explain.catalogue import CAUSES
from ddp_doctor.explain.catalogue.own import STEPS, TITLES
from ddp_doctor.explain.command import run_cause, run_explain
from ddp_doctor.explain.run_folder import WAITS
from ddp_doctor.terminal import printable
from hardened_ddp import errors
from hardened_ddp.ranks.phase import FIRST_WAIT, Phase
from hardened_ddp.settings import wording
from hardened_ddp.settings.cli import parse
from tests.explain.logs import block_of, code_of, explain, joined, rank_of, traceback_of
from tests.harness.processes import ROOT

BEGAN = 1_795_445_299.0
KILLED = "rank 0 lost another rank (rank 1 left). It left no error message: it was killed"
HUNG = "rank 1, step 40, data, 61 s; rank 0 waits in all-reduce of step 40"
KEY_ERROR = joined(traceback_of("KeyError: 'label'"))


def clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) + ".250"


def log_of(*attempts: tuple[float, str]) -> str:
    """Make one rank's log: of each attempt its begin, and its last line."""
    lines = []
    for began, last in attempts:
        lines.append(f"{clock(began)} DEBUG hardened_ddp.ranks.tracker: start: starting: 0.02 s")
        lines.append(f"{clock(began + 9)} INFO x.run_report: epoch 1/5 step 10/90  loss 2.1")
        lines += [f"{clock(began + 20)} {last}"] if last else []
    return "\n".join(lines) + "\n"


def make_run(folder: Path, *, is_finished: bool, shift_s: float = 0.0) -> Path:
    """Write a run that was killed in its first attempt, and hung in its second."""
    begins = [BEGAN, BEGAN + 60, BEGAN + 120][: 2 + is_finished]
    steps = [(0, 20), (20, 40), (40, 90)]
    moment = time.strftime("%Y%m%d-%H%M%S", time.localtime(BEGAN + 80 + shift_s))
    hang = folder / "hangs" / f"{moment}-step-40"
    for path in (folder / "logs", folder / "status", hang):
        path.mkdir(parents=True)
    attempts = []
    for number, began in enumerate(begins):
        first, step = steps[number]
        attempts.append({"began_at": began, "now": began + 21, "first_step": first, "step": step})
        attempts[-1] |= {"world_size": 2, "start_up": 5.0, "ended": "finished" * (number == 2)}
    (folder / "attempts.jsonl").write_text("".join(json.dumps(a) + "\n" for a in attempts))
    failures = [{"step": 20, "error": KILLED}, {"step": 40, "error": HUNG}]
    (folder / "failures.jsonl").write_text("".join(json.dumps(f) + "\n" for f in failures))
    (hang / "verdict.txt").write_text(HUNG + "\n")
    (hang / "rank_1.txt").write_text("did not answer\n")
    said = [f"ERROR x: [DDP-G04] {KILLED}", f"ERROR x: [DDP-G05] {HUNG}", "INFO x: done"]
    for rank in range(2):
        lasts = said if rank == 0 else ["", "", ""]
        pairs = zip([began + shift_s for began in begins], lasts, strict=False)
        (folder / "logs" / f"rank-{rank}.log").write_text(log_of(*pairs))
        state = "finished" if is_finished else "failed"
        status = {"rank": rank, "world_size": 2, "now": begins[-1] + 21, "state": state, "step": 40}
        (folder / "status" / f"rank-{rank}.json").write_text(json.dumps(status))
    if is_finished:
        (folder / "summary.json").write_text('{"status": "finished", "step": 90}')
    return folder


def told(*paths: Path, status: int = 0) -> str:
    output = StringIO()
    names = [str(path) for path in paths]
    assert run_explain(names, wants_json=False, output=output) == status
    return output.getvalue()


class TestRun:
    @pytest.mark.parametrize("shift_s", [0.0, 3 * 3600.0])  # logs of a host in another time zone
    def test_kill_hang_and_end_are_told_in_order(self, shift_s: float, tmp_path: Path) -> None:
        run = make_run(tmp_path / "my run", is_finished=True, shift_s=shift_s)
        text = " ".join(told(run).split())
        assert text.startswith(f"{run} finished at step 90 since: 3 attempts, 2 failed. 1. ")
        order = [
            f"steps 0 to 20, 2 ranks: failed: {KILLED}",
            f"steps 20 to 40, 2 ranks: hung: {HUNG}",
            "steps 40 to 90, 2 ranks: finished",
            "The failure of attempt 2, the newest one",
        ]
        places = [text.index(words) for words in order]
        assert places == sorted(places)
        found = explain(run)
        assert (code_of(found), rank_of(found)) == ("DDP-G05", 1)
        assert not [e for e in found["evidence"] if KILLED in e["text"]]
        assert found["run"]["state"] == "finished"
        assert [a["has_failed"] for a in found["run"]["attempts"]] == [True, True, False]
        # nothing has to be resumed
        assert "--resume" not in text

    def test_of_a_run_that_failed_the_steps_are_commands(self, tmp_path: Path) -> None:
        run = make_run(tmp_path / "my run", is_finished=False)
        text = told(run)
        assert text.startswith(f"{run} ended at step 40: 2 attempts, 2 failed.")
        [stack] = run.glob("hangs/*/rank_1.txt")
        assert f"\n    cat '{stack}'\n" in text
        again = f"torchrun --standalone --nproc_per_node=2 ddp_training.py --resume '{run}'"
        assert f"\n    {again}\n" in text
        assert text.count("DDP_TROUBLESHOOTING.md") == 1

    def test_ranks_that_were_all_killed_at_once(self, tmp_path: Path) -> None:
        run = make_run(tmp_path / "run", is_finished=False)
        lines = (run / "attempts.jsonl").read_text()
        last = {**json.loads(lines.splitlines()[-1]), "began_at": BEGAN + 120, "now": BEGAN + 150}
        (run / "attempts.jsonl").write_text(lines + json.dumps(last) + "\n")
        for rank in range(2):
            with (run / "logs" / f"rank-{rank}.log").open("a") as file:
                file.write(log_of((BEGAN + 120, "")))
            status = json.loads((run / "status" / f"rank-{rank}.json").read_text())
            status |= {"state": "running", "now": BEGAN + 150}
            (run / "status" / f"rank-{rank}.json").write_text(json.dumps(status))
        assert code_of(explain(run)) == "killed-outside"
        text = " ".join(told(run).split())
        assert "3. " in text
        assert "2 ranks: no word of an end: all its ranks were killed at once" in text

    def test_a_rollback_is_no_failure(self, tmp_path: Path) -> None:
        run = make_run(tmp_path / "run", is_finished=True)
        attempts = [json.loads(x) for x in (run / "attempts.jsonl").read_text().splitlines()]
        back = {**attempts[2], "began_at": BEGAN + 135, "first_step": 50, "start_up": 0.0}
        attempts[2] |= {"now": BEGAN + 134, "step": 60, "ended": ""}
        lines = "".join(json.dumps(a) + "\n" for a in [*attempts, back])
        (run / "attempts.jsonl").write_text(lines)
        text = told(run)
        assert "4 attempts, 2 failed" in text
        assert "steps 40 to 60, 2 ranks: rolled back to step 50" in text
        assert code_of(explain(run)) == "DDP-G05"

    def test_damaged_files_do_not_hide_what_the_logs_say(self, tmp_path: Path) -> None:
        run = make_run(tmp_path / "run", is_finished=False)
        for name in ("attempts.jsonl", "failures.jsonl"):
            for content in (b"", b"\0\xff", b'{"began_at": 1e999}\n[]\n', b'{"step": {}}\n'):
                whole = (run / name).read_bytes()
                (run / name).write_bytes(content)
                assert code_of(explain(run)) == "DDP-G05"
                (run / name).write_bytes(whole)
        attempts = (run / "attempts.jsonl").read_text()
        for strange in ('"x"', "NaN", "[]", "1" + "0" * 400, "-1", "null"):
            (run / "attempts.jsonl").write_text(attempts.replace(": 2,", f": {strange},"))
            assert "2 attempts, 2 failed" in told(run)
            (run / "attempts.jsonl").write_text(re.sub(r": [\d.]+", f": {strange}", attempts))
            explain(run)
        (run / "attempts.jsonl").write_text(attempts)
        log = run / "logs" / "rank-0.log"
        text = log.read_text()
        log.write_text(re.sub(r"\d{4}-\d\d-\d\d (.*tracker)", r"9999-99-99 \1", text))
        assert code_of(explain(run)) == "DDP-G05"


class TestSeveral:
    def test_a_folder_of_runs_is_a_list_and_of_one_run_that_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        make_run(tmp_path / "runs" / "a b", is_finished=False)
        make_run(tmp_path / "runs" / "c", is_finished=True)
        monkeypatch.chdir(tmp_path)
        head, command, _, first, second = told(Path("runs")).splitlines()
        assert head == "2 jobs, 1 with a failure. All about one of them:"
        assert command == "  python ddp_training.py explain 'runs/a b'"
        assert first.startswith("'runs/a b'  ended at step 40: 2 attempts, 2 failed. Rank 1: ")
        assert second.startswith("runs/c      finished at step 90 since: 3 attempts, 2 failed.")
        # one of them, by what is to be typed
        assert told(Path(shlex.split(command)[-1])).startswith("runs/a b ended at step 40")
        output = StringIO()
        run_explain(["runs"], wants_json=True, output=output)
        found = json.loads(output.getvalue())
        assert [job["cause"]["code"] for job in found["jobs"]] == ["DDP-G05", "DDP-G05"]
        run = make_run(Path("one") / "a", is_finished=True)
        assert told(Path("one")).startswith(f"{run} finished at step 90 since")

    def test_logs_of_several_slurm_jobs_are_several_jobs(self, tmp_path: Path) -> None:
        (tmp_path / "slurm-101.out").write_text(KEY_ERROR + block_of({1: 1}, root=1))
        (tmp_path / "slurm-102.out").write_text("epoch 1\nTraining complete\n")
        (tmp_path / "slurm-103.out").write_text("")
        text = told(tmp_path, status=1)
        assert re.search(r"slurm-101\.out'?  Rank 1 on node1: ", text)
        assert re.search(r"slurm-102\.out'?  no failure\n", text)
        assert "slurm-103.out: no text in it" in text

    def test_files_that_each_tell_of_a_whole_job_are_several_jobs(self, tmp_path: Path) -> None:
        (tmp_path / "bert.log").write_text(KEY_ERROR + block_of({1: 1}, root=1))
        raised = joined(traceback_of("ValueError: x is 3"))
        (tmp_path / "vit.log").write_text(raised + block_of({1: 1}, root=1))
        text = told(tmp_path)
        assert text.startswith("2 jobs, 2 with a failure.")
        assert "bert.log" in text.splitlines()[3]


class TestSteps:
    def test_every_error_of_ours_has_steps(self) -> None:
        codes = {e.code for e in vars(errors).values() if hasattr(e, "exit_status")}
        assert codes <= STEPS.keys()
        assert all(any(command for _, command in steps) for steps in STEPS.values())

    @pytest.mark.parametrize("command", sorted({c for steps in STEPS.values() for _, c in steps}))
    def test_a_step_has_settings_and_commands_that_exist(self, command: str) -> None:
        words = {"run": "runs/x", "log": "x.log", "stack": "x.txt"}
        words["again"] = "python ddp_training.py --resume runs/x"
        typed = shlex.split(command.format_map(words))
        if "ddp_training.py" in typed and "--help" not in typed:
            parse(typed[typed.index("ddp_training.py") + 1 :])
        if typed[:1] == ["python"]:
            assert (ROOT / typed[1]).exists()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has ddp_doctor, and nothing else of the repository."""
    folder = tmp_path_factory.mktemp("alone")
    shutil.copytree(ROOT / "ddp_doctor", folder / "ddp_doctor")
    return folder


def run(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    """Run it with the standard library only: -S leaves site-packages out."""
    argv = [sys.executable, "-S", "-m", "ddp_doctor", *words]
    how = {"capture_output": True, "text": True, "timeout": 60}
    return subprocess.run(argv, cwd=folder, env={"PATH": "/usr/bin:/bin"}, **how)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("explain job.log --json", '"memory-gpu"'),
        ("explain --cause graph-unused", "find_unused_parameters=True"),
        ("audit --source train.py", "no mistakes found"),
    ],
)
def test_it_works_alone_with_the_standard_library(words: str, told: str, alone: Path) -> None:
    (alone / "job.log").write_text(
        joined(traceback_of("torch.OutOfMemoryError: CUDA out of memory"))
    )
    (alone / "train.py").write_text("import torch\n")
    done = run(alone, *words.split())
    assert done.returncode == 0, done.stderr
    assert told in done.stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("explain", ""),
        ("explain --cause graph-unusd", "graph-unusd"),
        ("audit", "next: python -m ddp_doctor audit"),
        ("audit --source missing.py", "can't be read"),
        ("audit -- no-such-program train.py", "no-such-program can't be started"),
    ],
)
def test_a_mistake_is_one_message_and_status_2(words: str, told: str, alone: Path) -> None:
    done = run(alone, *words.split())
    assert done.returncode == 2
    assert done.stderr.startswith("ddp_doctor: error: ")
    assert told in done.stderr
    assert "next: " in done.stderr
    assert "Traceback" not in done.stderr


def test_it_knows_every_code_of_the_trainer_and_the_phases_in_which_a_rank_waits() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    ours = [cls for cls in classes if issubclass(cls, errors.HardenedError)]
    first = {cls.code: (cls.__doc__ or "").splitlines()[0].rstrip(".") for cls in ours}
    assert {code: text[0].lower() + text[1:] for code, text in first.items()} == TITLES
    assert {phase.label for phase in Phase if phase >= FIRST_WAIT} == WAITS


def test_text_that_steers_a_terminal_is_escaped_as_the_trainer_does() -> None:
    text = "".join(map(chr, range(0x2100))) + "a\r\nb"
    assert printable(text) == wording.printable(text)
    assert "\x1b" not in printable(text)


def test_every_cause_is_printed_in_full_by_its_code() -> None:
    for cause in CAUSES:
        output = StringIO()
        assert run_cause(cause.code, output=output) == 0
        words = " ".join(output.getvalue().split())
        steps = [text.removesuffix(":") for text, _ in STEPS.get(cause.code, ())]
        fixes = steps or (cause.fix, cause.lightning)
        parts = (cause.title, *fixes, cause.confirm, cause.or_else)
        assert [part for part in parts if " ".join(part.split()) not in words] == [], cause.code
        assert all(phrase in output.getvalue() for phrase in cause.phrases), cause.code
        assert ". . " not in words, "no words of its own, and a full stop for them"

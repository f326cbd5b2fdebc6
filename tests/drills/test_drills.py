"""The drills: each fault ends with its verdict, on 2 ranks and some on 1, 3 and 4; and the command.

The ranks are forked here, which saves the import of torch; what the command itself does, with
processes of its own, some tests try as it is typed.
"""

import io
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from ddp_drills import processes
from ddp_drills.command import list_faults, markdown, read_work, report, write_table
from ddp_drills.compare import Record, distance
from ddp_drills.fault import Fault
from ddp_drills.faults import all_faults, find
from ddp_drills.injections import DEPENDS_ON_PARTS, Board, Injection
from ddp_drills.injectors import tensors_of
from ddp_drills.runner import Drills
from hardened_ddp.errors import HardenedError
from hardened_ddp.settings.cli import parse
from tests.drills.forked import forked_drills
from tests.harness.ranks import run_command, run_program
from tests.marks import slow_after

Where = int | str
"""How many ranks; late: 2 ranks, whose gradients the hooks of DDP average, and which learn of a bad
gradient one step later, as on GPUs."""

DrillsOf = Callable[[Where], Drills]
# The others are slow: these show each a way that a run can end.
QUICK = ("kill-forward", "raise-loss-one", "sigterm-data", "bad-sample-left-out")
# Workers import torch, which takes longer than the rest, and the loader of a rank is its own.
ON_ONE_RANK = ("worker-segfault", "worker-bus", "worker-exit", "worker-hang", "memory-data")
ON_MORE_RANKS = ("sigterm-evaluation", "memory-forward", "other-data")
ON_FOUR_RANKS = ("kill-sum",)
# A kill in forward, and a signal, come so in test_fault_plans.py.
LATE = ("nan-repeated", "kill-optimizer", "kill-sum", "raise-optimizer", "bit-flip", "bad-sample")
LATE += ("kill-checkpoint",)
CASES: list[tuple[str, Where]] = [(name, 2) for name in QUICK]
CASES += [(f.name, 1 + (f.name not in ON_ONE_RANK)) for f in all_faults() if f.name not in QUICK]
CASES += [(name, 3) for name in ON_MORE_RANKS] + [(name, 4) for name in ON_FOUR_RANKS]
CASES += [(name, "late") for name in LATE]


@pytest.fixture(scope="module")
def drills_of(tmp_path_factory: pytest.TempPathFactory) -> DrillsOf:
    """Give the drills by where they run: with one undisturbed run for all of them."""

    @cache
    def drills(where: Where) -> Drills:
        folder = tmp_path_factory.mktemp("drills")
        if isinstance(where, int):
            return forked_drills(folder, num_ranks=where)
        return forked_drills(folder, flags=["--no_shared_memory"], model="tests.late_looks:mlp")

    return drills


@pytest.mark.parametrize(
    "case",
    slow_after(len(QUICK), CASES),
    ids=lambda case: case[0] if case[1] == 2 else f"{case[0]}-{case[1]}",
)
def test_a_fault_ends_with_its_verdict(case: tuple[str, Where], drills_of: DrillsOf) -> None:
    name, where = case
    fault = find(name)
    output, drills = io.StringIO(), drills_of(where)
    [verdict] = report(drills, [fault], output)
    # what the command would have said
    assert verdict.passed, f"{output.getvalue()}{drills.output_of(fault)}"


@pytest.mark.slow
def test_a_drill_with_a_wrong_expectation_fails(drills_of: DrillsOf) -> None:
    """One that goes on is expected to stop, with words that nobody says, and the other way."""
    sleep = Injection(kind="sleep", phase="forward")
    facts = {"text": "nothing at all", "ends": "stops", "code": "DDP-G04", "injections": (sleep,)}
    goes_on = Fault(name="wrong-1", **facts)
    verdict = drills_of(2).run(goes_on)
    assert not verdict.passed
    assert "it finished, but should have stopped" in verdict.problems
    assert "no rank wrote: DDP-G04" in verdict.problems
    never = replace(goes_on, name="wrong-2", ends="continues", code="", injections=())
    [told] = drills_of(2).run(never).problems
    assert told == "the fault did not happen: does the run have enough steps?"


@pytest.mark.slow
def test_other_weights_unequal_replicas_and_lost_samples_are_found(drills_of: DrillsOf) -> None:
    bit = Injection(kind="bit", phase="update", ranks=(0,))
    flip = Fault(name="wrong-3", text="", injections=(bit,))
    left_out = find("bad-sample-left-out")
    strict = replace(left_out, name="wrong-4", keeps="same weights", leaves_out=False)
    assert "the weights differ from the undisturbed run" in drills_of(2).run(strict).problems
    exact = replace(left_out, name="wrong-5", flags=(), ends="continues")
    assert any("continue by itself" in problem for problem in drills_of(2).run(exact).problems)
    verdict = drills_of(2).run(flip)
    assert not verdict.passed, "a bit that flips on rank 0 is found by somebody"


def test_weights_beyond_rounding_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = find("memory-backward")
    ones = torch.ones(1000)
    weights = {"undisturbed": ones, "rounded": ones + 1e-6, "one wrong gradient": ones + 3e-3}
    monkeypatch.setattr(Record, "parameters", lambda run: {"w": weights[run.folder.name]})
    runs = {}
    for name in weights:
        (tmp_path / name).mkdir()
        runs[name] = Record(tmp_path / name, Board(tmp_path / name), 2)
    near = distance(fault, runs["rounded"], runs["undisturbed"])
    assert near == (True, "1e-06 of their size away from the undisturbed run")
    assert not distance(fault, runs["one wrong gradient"], runs["undisturbed"])[0]
    runs["one wrong gradient"].board.write(DEPENDS_ON_PARTS, True)
    assert distance(fault, runs["one wrong gradient"], runs["undisturbed"]) == (True, "")


class TestTable:
    def test_each_fault_has_a_name_of_its_own_a_text_a_verdict_and_a_code_that_exists(self) -> None:
        faults = all_faults()
        names = [fault.name for fault in faults]
        assert len(set(names)) == len(names) >= 80
        assert all(fault.text and fault.verdict for fault in faults)
        codes = {HardenedError.code, *(c.code for c in HardenedError.__subclasses__())}
        assert {fault.code for fault in faults} <= {"", *codes}

    def test_the_list_is_told_without_torch(self) -> None:
        argv = ["python", "-X", "importtime", "ddp_training.py", "drill"]
        completed = run_command(argv, timeout_s=30).ok()
        for fault in all_faults():
            assert fault.name in completed.stdout
        assert "| torch\n" not in completed.stderr.replace("  ", "")
        told = "\n".join(list_faults()).replace("python3 ", "python ")  # as pytest was started
        assert completed.stdout.splitlines() == told.splitlines()


class TestCommand:
    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (["kil-sum"], "no drill is called 'kil-sum'; did you mean kill-sum?"),
            (["kill-sum", "--ranks", "1"], "needs 2 ranks or more"),
            (["kill-sum", "--ranks", "many"], "--ranks: found 'many'"),
            (["kill-sum", "--epoch", "3"], "did you mean --epochs?"),
            (["kill-sum", "--run_name", "x"], "--run_name: a drill sets that by itself"),
        ],
    )
    def test_what_it_can_not_do_is_told_before_any_start(self, words: list[str], told: str) -> None:
        completed = run_command(["python", "ddp_training.py", "drill", *words], timeout_s=30)
        assert completed.status == 2
        assert told in completed.stderr

    def test_settings_reach_the_ranks_as_they_were_typed(self) -> None:
        words = ["nan-once", "--amp", "off", "--optimizer_args", "{eps: 0.1}", "--cpu_only"]
        flags = read_work(parse(["drill", *words]), 2).flags
        assert "--amp=off" in flags  # not "off", as YAML needs it
        assert '--optimizer_args={"eps": 0.1}' in flags

    @pytest.mark.slow
    def test_a_work_that_fails_by_itself_is_told_and_has_status_1(self, tmp_path: Path) -> None:
        argv = ["python", "ddp_training.py", "drill", "nan-once", "--cpu_only", "--ranks", "1"]
        argv += ["--dataset", "tests.plugins:points", "--model", "tests.plugins:Faulty"]
        argv += ["--model_args", "{first: 5}"]
        completed = run_program(argv, timeout_s=170, env={"TMPDIR": str(tmp_path)})
        assert completed.status == 1, completed.output
        assert "the run fails without any fault" in completed.stdout
        assert "the loss is nan" in completed.stdout


@pytest.mark.slow
def test_one_drill_as_it_is_typed_with_a_model_and_data_of_the_user(tmp_path: Path) -> None:
    argv = ["python", "ddp_training.py", "drill", "nan-once", "--cpu_only"]
    argv += ["--dataset", "tests.plugins:points", "--dataset_args", "{size: 96}"]
    argv += ["--model", "tests.plugins:FailingOnce", "--batch_size", "6", "--ranks", "2"]
    table = tmp_path / "table.md"
    argv += ["--table", str(table)]
    completed = run_command(argv, timeout_s=170, env={"TMPDIR": str(tmp_path)})
    assert completed.status == 0, completed.output
    for word in ("drill nan-once: the loss of one rank is NaN, once", "PASS", "the loss is nan"):
        assert word in completed.stdout
    assert "equal to the undisturbed run, bit for bit; replicas equal" in completed.stdout
    assert "| `nan-once` |" in table.read_text(encoding="utf-8")
    assert not list(tmp_path.glob("drill-*")), "a drill that passes leaves nothing"


def test_old_shared_memory_is_no_leftover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "SHARED_MEMORY", tmp_path)
    (tmp_path / "torch_7_1_0").touch()  # of an earlier process with the same id
    started = processes.Ranks([(["true"], {})], tmp_path / "log")
    started._seen.add(7)
    (tmp_path / "torch_7_2_0").touch()
    (tmp_path / "torch_8_2_0").touch()
    assert started.end() == ["/dev/shm/torch_7_2_0 was left"]


def test_a_table_is_written_in_its_place_and_leaves_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "table.md"
    table = markdown([], 2)
    table[0] += " the first day"
    write_table(path, [*table, "| `kill-sum` | old |", "| `not-there` | gone |"])
    path.write_text(f"# Title\n\n{path.read_text(encoding='utf-8')}\nThe end.\n", encoding="utf-8")
    other = [f"{table[0]} the next day", *table[1:]]
    write_table(path, [*other, "| `kill-sum` | new |", "| `kill-data` | first |"])
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = ["| `kill-sum` | new |", "| `kill-data` | first |"]
    assert lines == ["# Title", "", *other, *rows, "", "The end."]


class TestBoard:
    def test_a_note_is_left_once_and_a_pause_ends_when_told_to(self, tmp_path: Path) -> None:
        board = Board(tmp_path)
        board.set_injections([Injection(kind="raise", phase="forward", ranks=(-1,))])
        assert board.injections() == [Injection(kind="raise", phase="forward", ranks=(-1,))]
        assert board.claim("injected-0-1")
        assert not board.claim("injected-0-1")
        assert board.num_injected() == 1
        assert not board.is_bad_sample(5, may_choose=False)
        assert board.is_bad_sample(5, may_choose=True)
        assert not Board(tmp_path).is_bad_sample(6, may_choose=True)
        assert Board(tmp_path).is_bad_sample(5, may_choose=False)

    def test_ranks_are_counted_from_either_end(self) -> None:
        injection = Injection(kind="raise", phase="forward", ranks=(0, -2))
        assert [rank for rank in range(4) if injection.is_for(rank, 4)] == [0, 2]
        assert [rank for rank in range(2) if injection.is_for(rank, 2)] == [0]
        assert Injection(kind="raise", phase="forward").is_for(3, 4)


def test_a_fault_in_backward_hits_whether_the_task_takes_the_loss_or_the_logits() -> None:
    logits = torch.ones(2, 3, requires_grad=True) * 1
    loss = logits.mean()
    for output in ({"loss": loss, "logits": logits}, (loss, logits)):
        assert [id(tensor) for tensor in tensors_of(output)] == [id(logits), id(loss)]
    assert [id(tensor) for tensor in tensors_of({"logits": logits, "loss": None})] == [id(logits)]
    assert [id(tensor) for tensor in tensors_of({"loss": loss})] == [id(loss)]
    assert tensors_of(logits.detach()) == []


def test_a_full_disk_cuts_no_compiled_file_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, str]] = []
    monkeypatch.setattr(processes, "Ranks", lambda started, log: told.append(started[0][1]))
    for outside in ("full disk", ""):
        start = processes.Start(flags=[], log=Path(), num_ranks=1, port=1, outside=outside)
        processes.start_ranks({}, start)
    assert [env.get("PYTHONDONTWRITEBYTECODE") for env in told] == ["1", None]

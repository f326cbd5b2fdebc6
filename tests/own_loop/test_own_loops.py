"""Own loops under protect: after any fault the same command ends in the undisturbed run's bits.

The examples first, on forked ranks; then loops of other kinds, and ranks that others start. A loop
is the text of an example, and a fault happens before a line of it, in a step, on a rank.
"""

import ast
import difflib
import io
import json
import os
import random
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

from ddp_runs.ledger_check import check_ledger
from hardened_ddp.errors import HangError, OwnLoopError, PeerLostError
from hardened_ddp.guard import stop
from hardened_ddp.own_loop import last_commit
from hardened_ddp.own_loop.batches import Seeded
from hardened_ddp.own_loop.last_commit import LastCommit
from hardened_ddp.training.state import Saver
from tests.harness.processes import ROOT
from tests.harness.ranks import Finished, held_port, run_command, run_program, start_ranks
from tests.launchers.test_run_with import MPI_ENV
from tests.marks import sections, slow_after
from tests.run_folder import find_checkpoints, fingerprints, only_run, step_of

EXAMPLES = ROOT / "examples" / "own_loops"
PROGRAMS = sections(Path(__file__).with_name("programs.txt"))
SMALL = ("epochs(5) -> epochs(2)", "steps(40) -> steps(12)")
EVERY_RANK = -1
LOOPS = ("gan", "sam", "average", "ppo", "two_sets")
KILLED, LEFT, MISUSED = -9, PeerLostError.exit_status, OwnLoopError.exit_status
STEP = 5  # of a fault: of the first epoch, and after the bodies in which all is copied
_PART = "torch.utils.data.Subset(data, range(100 + 90 * epoch))"
_OWN = f"run.batches(loader) -> run.batches(DataLoader({_PART}, 10), name=f'data{{epoch}}')"
HIDDEN = "w.add_(c) -> w.data.add_(c)", "w.sub_(c) -> w.data.sub_(c)"
State = tuple[Any, ...]
_done: list["Fault"] = []


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to one rank."""

    act: str
    """kill, stop (SIGTERM), raise, or hang."""

    rank: int = 1
    step: int = 5
    line: int = 0
    after_s: float = 0.0


def text_of(name: str, *changes: str) -> str:
    """Return an example, made short; changes: what to replace, as OLD -> NEW."""
    text = (EXAMPLES / "protected" / f"{name}.py").read_text(encoding="utf-8")
    for change in (*SMALL, *changes):
        old, new = change.split(" -> ")
        assert old in text or change in SMALL, old
        text = text.replace(old, new)
    return text


def body_of(text: str) -> list[int]:
    """Return where the statements of the body begin, to its commit."""
    loops = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.For)]
    loop = max((node for node in loops if "run." in ast.unparse(node.iter)), key=lambda n: n.lineno)
    inner = (node for node in ast.walk(loop) if isinstance(node, ast.stmt) and node is not loop)
    lines = sorted({node.lineno for node in inner})
    return [line for line in lines if line <= line_of(text, "run.commit()")]


def line_of(text: str, part: str) -> int:
    """Return the number of the first line that holds part."""
    return next(n for n, line in enumerate(text.splitlines(), 1) if part in line)


def run_loop(text: str, fault: Fault | None, before: Callable[[], None] | None) -> None:
    """Be a rank that runs a program."""
    if before is not None:
        before()
    if fault is not None and fault.act == "stop":
        stop.MAX_INTERVAL = 1  # WHY: a loop as short as these ends before ranks look for a stop
    content: dict[str, Any] = {"__name__": "__main__"}  # Any: a module's
    if fault is not None and fault.rank in (int(os.environ["RANK"]), EVERY_RANK):
        lines = text.splitlines()
        line = lines[fault.line - 1]
        lines.insert(fault.line - 1, line[: len(line) - len(line.lstrip())] + "fault(run.step)")
        text, content["fault"] = "\n".join(lines), partial(_act, fault)
    exec(compile(text, "own_loop.py", "exec"), content)


def _act(fault: Fault, step: int) -> None:
    if step != fault.step or _done:
        return
    _done.append(fault)
    if fault.after_s:
        threading.Timer(fault.after_s, _do, (fault.act,)).start()
    else:
        _do(fault.act)


def _do(act: str) -> None:
    if act == "raise":
        raise ValueError("a mistake of the user's own")
    if act == "hang":
        threading.Event().wait()
    os.kill(os.getpid(), signal.SIGTERM if act == "stop" else signal.SIGKILL)


def launch(
    text: str, world_size: int = 2, *, fault: Fault | None = None, before: Any = None
) -> Finished:
    """Run a program on ranks in the working folder, to its end. Does not raise if one fails."""
    with start_ranks(run_loop, world_size, text, fault, before) as running:
        return running.wait(60.0)


def state_of(folder: Path) -> tuple[Any, ...]:  # Any: JSON
    """Return all of the newest checkpoint: step, place, numbers, tensors."""
    newest = find_checkpoints(folder / "runs")[-1]
    meta = json.loads((newest / "manifest.json").read_text(encoding="utf-8"))["meta"]
    return meta, fingerprints(newest / "state.safetensors")


def checkpoints_of(folder: Path) -> list[int]:
    """List the steps of the checkpoints, oldest first."""
    return [step_of(path) for path in find_checkpoints(folder / "runs")]


def is_exact(folder: Path) -> str:
    """Return what the ledgers say if a sample was not taken exactly once; else nothing."""
    run, output = only_run(folder / "runs"), io.StringIO()
    has_ledger = (run / "data").is_dir()
    return output.getvalue() if has_ledger and check_ledger(run, output=output) else ""


def save_what_is_there() -> None:
    """Have survivors save the tensors as they lie."""
    LastCommit.take = lambda self, *, is_beside: {n: t.detach() for n, t in self._live.items()}


def trust_stamps() -> None:
    """Have no tensor copied and compared: what changes no stamp counts as unwritten."""
    LastCommit.before_forward = lambda self: None  # type: ignore[method-assign]
    last_commit.NUM_FIRST, last_commit.INSPECTED_EVERY = 0, 10**9


@pytest.fixture(autouse=True)
def _place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., State]:
    """Give the last state of a loop to which nothing happens."""

    @cache
    def state(text: str, world_size: int = 2) -> State:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder := tmp_path_factory.mktemp("undisturbed"))
            launch(text, world_size).ok()
            assert is_exact(folder) == ""
            return state_of(folder)

    return state


def restart(text: str, truth: State, world_size: int = 2) -> None:
    """Run it again to its end, with the bits and the samples of the undisturbed run."""
    launch(text, world_size).ok()
    assert state_of(Path()) == truth
    assert is_exact(Path()) == ""


def costs_nothing(text: str, fault: Fault, saved: int, truth: State) -> Finished:
    """Have a fault happen, after which the state of step saved is there; and run it again."""
    finished = launch(text, fault=fault)
    assert finished.statuses != (0, 0)
    assert checkpoints_of(Path())[-1] == saved
    restart(text, truth)
    return finished


def after_epoch(text: str, *lines: str) -> str:
    """Add lines that follow the last batch of each epoch."""
    end = "        if dist.get_rank() == 0:\n"
    return text.replace(end, "".join(f"        {line}\n" for line in lines) + end)


def kills_of(name: str, *changes: str, seed: int = 0) -> list[Any]:  # Any: pytest's
    """List a kill before each line of the body, and some at random moments."""
    body, choose = body_of(text_of(name, *changes)), random.Random(f"{name} {seed}")
    kills = [Fault(act="kill", rank=choose.randrange(2), step=STEP, line=line) for line in body]
    for _ in range(2):
        moment = {"line": body[0], "after_s": choose.uniform(1e-4, 6e-3)}
        moment |= {"rank": choose.randrange(2), "step": choose.randrange(3, 10)}
        kills.append(Fault(act="kill", **moment))
    return [(name, changes, kill) for kill in kills]


# Of all these, as many as there is time for; a change of the rule is tried with [::1].
CASES = [case for name in LOOPS for case in kills_of(name)[1::9]] + kills_of("sam", *HIDDEN)[3::9]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "changes", "kill"), CASES)
def test_a_rank_that_is_killed_anywhere_costs_no_commit(
    name: str, changes: tuple[str, ...], kill: Fault, undisturbed: Callable[..., State]
) -> None:
    text = text_of(name, *changes)
    truth = undisturbed(text)
    finished = launch(text, fault=kill)
    assert sorted(finished.statuses) == [KILLED, LEFT], finished.describe()
    if name == "average" and not checkpoints_of(Path()):
        # its all-reduce between update and commit fails: nothing is saved, the last one stands
        restart(text, truth)
        return
    saved = checkpoints_of(Path())[-1]  # WHY one more: the other rank may have finished its body
    assert saved in (kill.step, kill.step + 1) or kill.after_s
    restart(text, truth)


def test_a_rank_that_is_killed_between_two_updates_costs_no_commit(
    undisturbed: Callable[..., State],
) -> None:
    again = "as run: -> as run:\n    G, D = DDP(G.module), DDP(D.module)"  # as for unfrozen layers
    text = text_of("gan", "epochs(2) -> epochs(1)", again)
    kill = Fault(act="kill", line=line_of(text, "loss_G = "))
    finished = costs_nothing(text, kill, STEP, undisturbed(text))
    assert sorted(finished.statuses) == [KILLED, LEFT], finished.describe()


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["what is there", "stamps alone"])
def test_other_rules_of_what_a_survivor_saves_give_other_bits(
    rule: str, undisturbed: Callable[..., State], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controls: without the rule the tests above would see it."""
    changes = HIDDEN if rule == "stamps alone" else ()
    text = text_of("sam", *changes)
    line = line_of(text, "loss = ")
    before = save_what_is_there if rule == "what is there" else trust_stamps
    for attempt in range(5):  # WHY: in its first all-reduce yet, rank 0 has not written the weights
        (folder := tmp_path / str(attempt)).mkdir()
        monkeypatch.chdir(folder)
        launch(text, fault=Fault(act="kill", line=line + 1, step=STEP), before=before)
        launch(text, before=before).ok()
        if state_of(Path()) != undisturbed(text):
            return
    pytest.fail("the survivor saved the right bits without the rule")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world_size"), [("average", 2), ("gan", 1), ("two_sets", 3)])
def test_a_stop_on_any_rank_stops_all_at_one_commit(
    name: str, world_size: int, undisturbed: Callable[..., State]
) -> None:
    """Other numbers of ranks go on with the same samples in each step."""
    text = text_of(name)
    truth = undisturbed(text)
    finished = launch(text, fault=Fault(act="stop", line=body_of(text)[0])).ok()
    assert "SIGTERM: stopping at step" in finished.outputs[0]
    assert checkpoints_of(Path())[-1] < truth[0]["step"]
    resumed = launch(text.replace("(data, 50)", "(data, 70)"), world_size).ok()
    assert ("batch_size 70 is not used: all" in resumed.outputs[0]) == (name == "gan")
    assert is_exact(Path()) == ""
    meta, tensors = state_of(Path())
    assert (meta["step"], meta["place"]) == (truth[0]["step"], truth[0]["place"])
    assert world_size != 2 or (meta, tensors) == truth


@pytest.mark.slow
@pytest.mark.parametrize("changes", [(), (_OWN,)], ids=["one loader", "one for each epoch"])
def test_an_exception_in_the_body_costs_no_commit(
    changes: tuple[str, ...], undisturbed: Callable[..., State]
) -> None:
    text = text_of("sam", *changes)
    fault = Fault(act="raise", line=body_of(text)[1])
    finished = costs_nothing(text, fault, STEP, undisturbed(text))
    assert finished.statuses == (LEFT, 1), finished.describe()
    assert "a mistake of the user's own" in finished.outputs[0]  # of the other rank


@pytest.mark.slow
def test_if_all_are_killed_the_last_checkpoint_stands(undisturbed: Callable[..., State]) -> None:
    text = text_of("ppo", "protect( -> protect(save_every=3, folder=")
    kill = Fault(act="kill", rank=EVERY_RANK, step=8, line=body_of(text)[-1])
    costs_nothing(text, kill, 6, undisturbed(text_of("ppo")))


EVALUATIONS = ["with torch.no_grad(): model(z)", "model(z)", "model.eval()(z); model.train()"]


@pytest.mark.parametrize("evaluation", slow_after(1, EVALUATIONS))
def test_an_evaluation_after_the_epoch_costs_no_sample_that_zip_took_too_many(
    evaluation: str, undisturbed: Callable[..., State]
) -> None:
    text = text_of("two_sets")
    launch(after_epoch(text, evaluation)).ok()
    assert state_of(Path()) == undisturbed(text)
    assert is_exact(Path()) == ""


@pytest.mark.slow
def test_a_repeated_loader_gives_what_one_per_epoch_does(undisturbed: Callable[..., State]) -> None:
    again, epochs = 'again = run.batches(labeled, name="labeled", repeat=True)\n', "for epoch in "
    text = text_of("two_sets", f"        {again} -> ", f"    {epochs} ->     {again}    {epochs}")
    truth = undisturbed(text)
    assert truth == undisturbed(text_of("two_sets"))
    in_next = Fault(act="kill", step=truth[0]["step"] - 2, line=body_of(text)[-1])
    assert -9 in launch(text, fault=in_next).statuses
    restart(text, truth)


@pytest.mark.slow
def test_a_resume_of_three_ranks_gives_the_same_bits(undisturbed: Callable[..., State]) -> None:
    text = text_of("sam", "4))) -> 4)), find_unused_parameters=True)")
    truth = undisturbed(text, 3)
    launch(text, 3, fault=Fault(act="stop", step=1, line=body_of(text)[0])).ok()
    end = truth[0]["step"] // 2
    at_end = Fault(act="raise", step=end, line=body_of(text)[-1] + 1)
    assert 1 in launch(text, 3, fault=at_end).statuses
    assert checkpoints_of(Path())[-1] == end
    restart(text, truth, 3)


def with_average(condition: str = "True") -> str:
    """Give a loop that averages its weights after each epoch."""
    text = text_of(
        "sam",
        "with protect -> average = torch.optim.swa_utils.AveragedModel(model.module)\nwith protect",
        "opt=opt -> opt=opt, average=average",
        "as run: -> as run:\n    model = DDP(model.module)",  # it writes the weights, as they are
    )
    return after_epoch(text, f"if {condition}: average.update_parameters(model.module)")


@pytest.mark.slow
def test_what_one_rank_alone_writes_after_the_last_batch_is_an_error_of_all() -> None:
    finished = launch(with_average("epoch == 1 and dist.get_rank() == 1"), 2)
    assert set(finished.statuses) <= {MISUSED, LEFT}, finished.describe()
    told = "registered tensors are not the same after step 20: rank 1 differs from rank 0 in av"
    assert told in finished.output


@pytest.mark.slow
def test_what_follows_an_epoch_is_done_once_and_saved(undisturbed: Callable[..., State]) -> None:
    text = with_average()
    assert KILLED in launch(text, fault=Fault(act="kill", step=14, line=body_of(text)[-1])).statuses
    for _ in range(2):  # a run that is finished stays as it is
        restart(text, undisturbed(text))
    assert checkpoints_of(Path())[-1] == 2 * 10 + 1  # the one after the last epoch


@pytest.mark.slow
def test_a_rank_that_hangs_is_named_and_costs_no_commit(undisturbed: Callable[..., State]) -> None:
    text = text_of("gan", "protect( -> protect(hang_after_s=2.0, folder=")
    fault = Fault(act="hang", line=line_of(text, "loss_G = "))
    finished = costs_nothing(text, fault, STEP, undisturbed(text_of("gan")))
    assert finished.statuses == (HangError.exit_status,) * 2, finished.describe()
    assert f"rank 1, step {STEP}, forward" in finished.output
    assert "max_restarts" not in finished.output
    assert "rank 0 waits in all-reduce" in finished.output
    [stacks] = Path("runs").glob("*/hangs/*")
    assert "own_loop.py" in (stacks / "rank_1.txt").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_collective_that_one_rank_calls_alone_is_one_error_and_costs_no_commit() -> None:
    barrier = "if run.step == 5 and dist.get_rank() == 0:\n                dist.barrier()"
    text = text_of("two_sets", "protect( -> protect(hang_after_s=2.0, folder=")
    finished = launch(text.replace("run.commit()", f"{barrier}\n            run.commit()"))
    assert finished.statuses == (HangError.exit_status,) * 2, finished.describe()
    assert "all ranks wait for each other: rank 0 waits in all-reduce of step 5" in finished.output
    assert "Traceback" not in finished.output
    assert checkpoints_of(Path())[-1] in (5, 6)  # the other rank may have finished the body


MISTAKES = sections(Path(__file__).with_name("mistakes.txt"))
"""Words of the error, and the change of an example that is the mistake: OLD -> NEW."""


@pytest.mark.parametrize("text", slow_after(1, MISTAKES))
def test_a_mistake_is_one_error_that_says_what_to_do(text: str) -> None:
    finished = launch(text_of("two_sets", MISTAKES[text].removesuffix("\n")), 2)
    assert set(finished.statuses) <= {MISUSED, LEFT}, finished.describe()
    assert MISUSED in finished.statuses
    # N: how soon it is noticed depends on the pace
    pattern = re.escape(text).replace(r"commit\ N", r"commit\ \d+")
    assert re.search(pattern, finished.output)
    assert "Traceback" not in finished.output


_RAISES = "if not loss.isfinite(): raise ValueError"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("save_every", "step", "more", "told", "saved"),
    [
        ("2", 3, "", "NaN after commit 4: it is not saved", [2]),
        ("'auto'", 0, "", "NaN after commit 1: it is not saved", []),
        ("0", 15, "", "NaN after commit 20: it is not saved", []),
        ("3", 4, _RAISES, "ValueError", [3]),
    ],
    ids=["due", "looked at", "at the end", "seen by the loop"],
)
def test_weights_that_became_nan_replace_no_checkpoint(
    save_every: str, step: int, more: str, told: str, saved: list[int]
) -> None:
    spoil = f"if run.step == {step}: [p.data.fill_(torch.nan) for p in model.parameters()]"
    seed = "seed=__import__('numpy').int64(0), "  # as a program may have computed it
    text = text_of("two_sets", f"protect( -> protect(save_every={save_every}, {seed}folder=")
    finished = launch(
        text.replace("run.commit()", f"{more}\n            {spoil}\n            run.commit()")
    )
    assert 0 not in finished.statuses, finished.describe()
    assert told in finished.output
    assert checkpoints_of(Path()) == saved


def save_by_the_clock() -> None:
    Saver.is_time = lambda self: self._writer is not None  # type: ignore[method-assign]


@pytest.mark.slow
def test_weights_that_are_nan_when_the_clock_asks_for_a_save_are_not_saved() -> None:
    spoil = "if run.step == 4: [p.data.fill_(torch.nan) for p in model.parameters()]"
    text = text_of("two_sets").replace("run.commit()", f"{spoil}\n            run.commit()")
    launch(text, before=save_by_the_clock)
    assert 0 < checkpoints_of(Path())[-1] <= 4


def test_names_may_have_dots_and_half_a_launchers_environment_is_one_error(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", PROGRAMS["twice in one process"]]
    env = {"PYTHONPATH": str(ROOT)}
    done = run_program(argv, timeout_s=60, cwd=tmp_path, env=env).ok()
    assert "resumed: 1 [2.0, 2.0] [-1.0, -1.0] 16" in done.output  # bytes: how often it is saved
    done = run_program(argv, timeout_s=60, cwd=tmp_path, env={**env, "RANK": "0"})
    assert done.status == MISUSED
    assert "[DDP-L01] RANK set, but not LOCAL_RANK" in done.output
    assert "Traceback" not in done.output


@pytest.mark.slow
def test_other_names_or_another_seed_on_resume_are_refused_and_nothing_is_loaded() -> None:
    text = text_of("ppo", "steps(12) -> steps(4)")
    launch(f"{text}dist.barrier()\n").ok()  # the program's own process group lives on
    finished = launch(text.replace("critic=critic, ", "").replace("opt=opt", "best=[1], opt=opt"))
    assert set(finished.statuses) == {MISUSED}
    assert "[DDP-C02] opt updates 4 tensors of no registered model" in finished.output
    finished = launch(text.replace("opt=opt", "other=[1], opt=opt"))
    assert "the checkpoint has actor, critic, opt, and protect is given" in finished.output
    finished = launch(text.replace("opt=opt", "opt=opt, seed=7"))
    assert "were shuffled with seed=0, and protect is given seed=7" in finished.output


@pytest.mark.slow
def test_an_evaluation_draws_the_same_after_a_resume(undisturbed: Callable[..., State]) -> None:
    seen = "opt=opt -> opt=opt, seen=seen", "with protect -> seen = {}\nwith protect"
    evaluation = ("drawn = torch.rand(()) + run.rng.random()", "dist.all_reduce(drawn)")
    text = after_epoch(text_of("two_sets", *seen), *evaluation, "seen[epoch] = drawn.item()")
    fault = Fault(act="raise", step=10, line=line_of(text, "dist.all_reduce"))
    costs_nothing(text, fault, 10, undisturbed(text))


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_an_example_runs_without_protect_too_and_few_lines_differ(name: str) -> None:
    plain, protected = (
        (EXAMPLES / kind / f"{name}.py").read_text(encoding="utf-8")
        for kind in ("plain", "protected")
    )
    launch(plain).ok()
    before, after = ([line.strip() for line in t.split("\n")] for t in (plain, protected))
    marks = [line[0] for line in difflib.ndiff(before, after) if line[1:].strip()]
    assert max(marks.count("+"), marks.count("-")) <= 10


class Padded(Dataset[Any]):
    """Token lists that are padded to the longest of their batch, as a Hub set's transform does."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        longest = max(indices)
        rows = [[index] * index + [0] * (longest - index) for index in indices]
        return [torch.tensor(row) + torch.rand(()) for row in rows]


class Noise(Dataset[Any]):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.rand(())


def seeded(dataset: Dataset[Any], *batches: list[int], seed: int = 0) -> list[torch.Tensor]:
    """Read batches as run.batches does, in the first pass."""
    keys = [[(0, index) for index in batch] for batch in batches]
    return list(DataLoader(Seeded(dataset, seed), batch_sampler=keys))


def test_a_dataset_that_reads_a_batch_at_once_gives_what_a_loader_of_torch_gets() -> None:
    batches = [3, 1], [2, 5]
    found = seeded(Padded(), *batches)
    assert [batch.shape for batch in found] == [(2, 3), (2, 5)]
    plain = list(DataLoader(Padded(), batch_sampler=batches))
    assert all(torch.equal(a.floor(), b.floor()) for a, b in zip(found, plain, strict=True))
    assert all(map(torch.equal, found, seeded(Padded(), *batches)))
    assert torch.equal(found[1], seeded(Padded(), batches[1])[0])  # as after a resume
    assert not torch.equal(found[1], seeded(Padded(), batches[1], seed=1)[0])


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_sample_draws_the_same_numbers_in_any_batch_also_of_a_subset(depth: int) -> None:
    dataset: Dataset[Any] = Noise()
    for _ in range(depth):  # it has __getitems__, which must not make its numbers the batch's
        dataset = Subset(dataset, range(6))
    together = torch.cat(seeded(dataset, [3, 1, 2, 5]))
    assert torch.equal(together, torch.cat(seeded(Noise(), [3], [1, 2], [5])))
    assert len(together.unique()) == 4


SCALED = (
    "1e-2) -> 1e-2)\nscaler = torch.amp.GradScaler('cpu', init_scale=256.0, growth_interval=3)",
    "loss.backward() -> scaler.scale(loss).backward()",
    "guess = model( -> guess = torch.compile(model, backend='eager')(",
    "opt.step() -> scaler.step(opt); scaler.update()",
    "opt=opt -> opt=opt, scaler=scaler",
)
HEAD, *_REST = PROGRAMS.values()
CLOSURE, TEACHER, AVERAGE, LOOP = (HEAD + program for program in _REST[:4])
KINDS = {
    "a GradScaler": "scaler.step",
    "LBFGS and a closure": "a line to die at",
    "a teacher that forward moves": "loss.backward()",
    "an average of buffers, too": "(model(points)",
}
DIES = f"""import os
            if run.step == {STEP} and dist.get_rank() == 1 and os.path.exists("die"):
                os.unlink("die")
                os.kill(os.getpid(), 9)
            """


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_is_killed_in_a_loop_of_this_kind_costs_no_commit(
    kind: str, undisturbed: Callable[..., State]
) -> None:
    texts = text_of("two_sets", *SCALED), CLOSURE, TEACHER, AVERAGE
    text = dict(zip(KINDS, texts, strict=True))[kind]
    finished = launch(text, fault=Fault(act="kill", line=line_of(text, KINDS[kind])))
    assert finished.statuses == (PeerLostError.exit_status, -9), finished.describe()
    assert checkpoints_of(Path())[-1] in (STEP, STEP + 1)  # the other may have finished it
    restart(text, undisturbed(text))


def check_launched(tmp_path: Path, *argv: str, env: Any = None, text: str = LOOP) -> str:
    """Run a loop, whose rank 1 dies, and again; it ends in the state of forked ranks.

    Returns what the first start has told. A torchrun is forked, but for the first one of LOOP.
    """
    (tmp_path / "loop.py").write_text(text, encoding="utf-8")
    (tmp_path / "die").touch()
    env = {**(env or {}), "PYTHONPATH": str(ROOT)}
    how: dict[str, Any] = {"timeout_s": 90, "cwd": tmp_path, "env": env}
    again = run_program if argv[0] == "torchrun" else run_command
    first = (run_command if text == LOOP else again)(argv, **how)
    assert first.status
    assert checkpoints_of(tmp_path) == [STEP], first.describe()
    resumed = again(argv, **how).ok()
    assert f"resuming {only_run(tmp_path / 'runs')} from step {STEP}" in resumed.output
    found = state_of(tmp_path)
    shutil.rmtree(tmp_path / "runs")
    loop, main, _ = text.partition("if __name__")
    launch(loop + ("loop()" if main else "")).ok()
    assert state_of(Path()) == found
    return first.stderr


@pytest.mark.slow
@pytest.mark.parametrize("group", ["of protect", "of the program"])
def test_under_torchrun_the_same_command_continues_after_a_kill(group: str, tmp_path: Path) -> None:
    argv = ["torchrun", "--standalone", "--nproc_per_node=2", "loop.py"]
    text = LOOP if group == "of protect" else text_of("gan", f"loss_G =  -> {DIES}loss_G = ")
    told = check_launched(tmp_path, *argv, text=text)
    assert text != LOOP or f"to resume: {' '.join(argv)}" in told


@pytest.mark.slow
def test_under_mpirun_a_rank_that_is_killed_costs_no_commit(tmp_path: Path) -> None:
    """Where protect makes the process group."""
    if shutil.which("mpirun") is None:
        pytest.skip("mpirun is not installed on this machine (see .ci/run)")
    check_launched(tmp_path, "mpirun", "-np", "2", sys.executable, "loop.py", env=MPI_ENV)


@pytest.mark.slow
def test_under_spawn_a_rank_that_is_killed_costs_no_commit(tmp_path: Path) -> None:
    """Where the process group is the program's, and no environment says who is who."""
    check_launched(tmp_path, sys.executable, "loop.py", "spawn", str(held_port()))

"""Replay and diff: a step again, bit for bit, and why two runs part."""

import io
import json
import os
import random
import re
import shlex
import shutil
import signal
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, cast

import pytest
import torch
from torch import nn

from ddp_runs import replay as replaying
from ddp_runs import tools
from ddp_runs.replay import Wish, replay, run_bisect, run_diff, show
from ddp_runs.replay_rank import Condition, Found, Gone, Replay, blame
from ddp_runs.replay_records import differences, read_digests
from ddp_runs.report_plots import marks_of
from ddp_runs.run_files import read_run
from hardened_ddp.checkpoint.folder import choose_drops
from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.batches.ledger import DIGESTS, RECORD, LedgerWriter
from hardened_ddp.data.batches.sampler import EpochOrder, Window
from hardened_ddp.errors import ConfigError, HardenedError, RunFolderError
from hardened_ddp.model.checksum import checksum
from hardened_ddp.settings.cli import parse
from hardened_ddp.step import records as recording
from hardened_ddp.step.gradient import Attempt, Outcome
from hardened_ddp.step.left_out import LeftOut
from hardened_ddp.step.parts import Parts
from hardened_ddp.step.progress import Progress
from hardened_ddp.step.records import Records, hash_of
from hardened_ddp.training.state import Saved
from tests.drills.forked import run_trainer_forked
from tests.harness.ranks import train
from tests.plugins import Points

HERE = "tests.runs.test_replay"
FAULT = "REPLAY_TEST_FAULT"
"""Of these starts only: kind, rank, the first and the last forward that it hits; ..."""

NUM_STEPS = int(os.environ.get("REPLAY_STEPS", "0"))
"""How many random steps of a run with every fault are replayed; 0: three that differ most."""

FORWARDS = [0]
"""Of this process. WHY not of the model: a retry would put it back."""


class Course(nn.Module):
    """Has what a replay must get right, dropout and BatchNorm; a variable says where it fails."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(3, 8), nn.BatchNorm1d(8)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(8, num_classes)
        rank = os.environ.get("RANK", "0")
        faults = [fault.split() for fault in os.environ.get(FAULT, "").split(";") if fault]
        self.faults = [(kind, int(a), int(b)) for kind, who, a, b in faults if who == rank]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        FORWARDS[0] += self.training
        for kind, first, last in self.faults if self.training else ():
            if first <= FORWARDS[0] <= last:
                if kind == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if kind == "noise":
                    inputs = inputs + 1e-3 * (1 + int.from_bytes(os.urandom(1)))
                    continue
                if kind == "raise":
                    raise ValueError("a fault that happens once")
                inputs = inputs * float("nan")
        logits: torch.Tensor = self.head(self.drop(self.norm(self.first(inputs)).relu()))
        return logits


class Kept(Points):
    """Points with these coordinates, of which a test changes some."""

    def __init__(self, values: torch.Tensor) -> None:
        super().__init__(len(values))
        self.values = values

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return self.values[index].clone(), int(index % 2)


def kept_points(train: bool, root: str) -> Points:
    return Kept(torch.load(Path(root, "points.pt"))) if train else Points(17)


def random_points() -> torch.Tensor:
    return torch.randn(48, 3, generator=torch.Generator().manual_seed(1))


def poisoned_points(train: bool, value: float) -> Points:
    """Give points of which number 29 has a coordinate of this value."""
    values = random_points()
    values[29, 1] = value
    return Kept(values) if train else Points(17)


STEADY: list[str | Path] = ["--cpu_only", "--model", f"{HERE}:Course", "--digests", "on"]
STEADY += ["--batch_size", "4", "--num_workers", "0", "--eval_every", "0", "--tracker", "none"]
SMALL = ["--dataset", "tests.plugins:points_without_a_package", "--epochs", "2"]
SMALL += ["--run_name", "run", "--checkpoint_every_steps", "4"]


def run_of(tmp_path: Path, *more: str | Path, ranks: int = 1, fault: str = "") -> Path:
    """Train, whatever comes of it; return the run folder."""
    env = {FAULT: fault} if fault else {}
    launcher: Literal["torchrun", "none"] = "torchrun" if ranks > 1 else "none"
    train([*STEADY, *more, "--output_dir", tmp_path], ranks, env=env, launcher=launcher)
    return tmp_path / "run"


@pytest.fixture(scope="module")
def small_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("small")
    more = ["--mirror", f"file://{folder}/mirror", "--keep_milestones", "16"]
    return run_of(folder, *SMALL, *more)


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the processes of a replay forked, as those of all tests: they need not import torch."""
    monkeypatch.setattr(replaying, "run_trainer", run_trainer_forked)


def replayed(run: Path, step: int, **wish: object) -> tuple[SimpleNamespace, str]:
    """Replay a step; return what was found, and what is printed."""
    wanted = Wish(step=step, **wish)  # type: ignore[arg-type]  # as given
    done = replay(run, wanted, output=io.StringIO())
    output = io.StringIO()
    show(done, output)
    return SimpleNamespace(**done), output.getvalue()


def test_a_step_is_the_same_again_and_tells_what_was_in_it(small_run: Path) -> None:
    sample = int(EpochOrder(40, 0, 1).take(28, 32)[0])  # of step 17
    done, text = replayed(small_run, 17, without=[sample, 999], open=sample, debug=True)
    log = (small_run / "replays" / "step-17" / "replay.log").read_text(encoding="utf-8")
    assert "Anomaly Detection has been enabled" in log
    number = 17 - done.begun_at + 1  # a writer that is busy leaves checkpoints out
    assert (done.equal, done.parted) == (number, None)
    steps = "1 step" if number == 1 else f"{number} steps"
    assert f"{steps} equal bit for bit: samples, loss, all of the gradient" in text
    assert "samples that weigh most, of 4; weight: the change of the gradient without it" in text
    assert len(re.findall(r"^ +\d+ +0( +\d\S*){3}$", text, re.MULTILINE)) == 4  # three numbers each
    assert "not among the samples of step 17: 999" in text
    [layers] = re.findall(r"gradient norm by layer: (.*)", text)
    assert sorted(re.findall(r"([a-z.]+) \d", layers)) == ["first", "head", "norm"]
    assert f"sample {sample}: no file" in text
    assert [path.name for path in (small_run.parent / "mirror").iterdir()] == ["run"]  # no replay
    assert f"with and without sample {sample}, 999, in it and after it:" in text
    [loss] = re.findall(r"^step 17: loss (\S+),", text, re.MULTILINE)
    [with_it, without] = re.findall(r"^  step 17: loss (\S+) / (\S+);", text, re.MULTILINE)[0]
    assert with_it == loss != without


class Dropped(nn.Sequential):
    """Has no BatchNorm, so that the samples of a batch are independent; but dropout."""

    def __init__(self, num_classes: int) -> None:
        super().__init__(nn.Linear(3, 64), nn.Dropout(0.5), nn.Linear(64, num_classes))


RAGGED = ["--dataset", "tests.token_data:ragged", "--task", "tokens", "--model_args"]
RAGGED += ["{dropout: 0.3, width: 512}", "--model", "tests.token_data:TinyLM"]
RAGGED += ["--batch_size", "8", "--accumulation_steps", "1"]


@pytest.mark.parametrize(
    "model",
    [["--model", f"{HERE}:Dropped"], ["--model", f"{HERE}:Course"], RAGGED],
    ids=["independent", "mixed by BatchNorm", "cut by length"],
)
def test_the_losses_of_samples_are_those_of_the_step_also_with_dropout(
    model: list[str], tmp_path: Path
) -> None:
    run = run_of(tmp_path, *SMALL, "--epochs", "1", "--accumulation_steps", "2", *model)
    log = (run / "logs" / "rank-0.log").read_text(encoding="utf-8")
    assert ("in two parts" in log) == (model is RAGGED)
    text = replayed(run, 3)[1]
    losses = [float(text) for text in re.findall(r"^ +\d+ +0 +(\S+)", text, re.MULTILINE)]
    assert len(losses) == 8
    assert sum(losses) == pytest.approx(read_digests(run).steps[3].main.loss, rel=1e-4)


def test_a_step_that_was_left_out_is_shown_too(tmp_path: Path) -> None:
    run = run_of(tmp_path, *SMALL, "--continue_on_error", fault="nan 0 6 13")
    step = next(step for step, found in read_digests(run).steps.items() if found.main.left_out)
    done, text = replayed(run, step)
    assert done.parted is None
    assert f"step {step} was left out: it changed no weight" in text
    assert "samples that weigh most, of 4" in text


@pytest.mark.slow
def test_steps_of_a_run_with_every_fault_are_the_same_again(tmp_path: Path) -> None:
    flags = [*SMALL, "--dataset", "tests.plugins:points", "--epochs", "4"]
    flags += ["--dataset_args", "{size: 120, broken: [5, 77]}"]
    flags += ["--continue_on_error", "--keep_milestones", "8", "--global_batch_size", "12"]
    # three steps without a finite loss: back to a checkpoint, and once more without the fault
    run_of(tmp_path, *flags, ranks=2, fault="nan 1 24 50;kill 1 74 99")
    run_of(tmp_path, *flags, ranks=3, fault="kill 2 14 99")  # resized, and killed again
    run = run_of(tmp_path, *flags, ranks=2)
    digests = read_digests(run)
    starts = {step.facts["step"]: step.facts["world_size"] for step in digests.steps.values()}
    assert {*starts.values()} == {2, 3}
    assert len(starts) > 3  # and a rollback is a start of its own
    last = max(digests.steps)
    assert [*digests.steps] == list(range(last + 1))
    chance = random.Random(1)
    resized = next(step for step, size in starts.items() if size == 3)
    steps = [chance.randrange(12), resized + 1, chance.randrange(last - 8, last + 1)]
    if NUM_STEPS:
        steps = sorted(chance.sample(range(last + 1), NUM_STEPS))
    for step in steps:
        done, text = replayed(run, step)
        assert done.parted is None, (step, text)
        assert done.equal == step - done.begun_at + 1
        assert "bit for bit" in text


@pytest.mark.slow
def test_behind_a_step_that_is_not_the_same_again_nothing_is_claimed(tmp_path: Path) -> None:
    flags = [*SMALL, "--checkpoint_every_steps", "0", "--lr_schedule", "cosine"]
    run = run_of(tmp_path, *flags, "--warmup_steps", "0", fault="noise 0 9 9")
    done, text = replayed(run, 12)
    at, _ = done.parted
    assert 0 < at < 12
    assert done.equal == at
    assert f"equality ended at step {at}: its " in text
    assert "is not what the run did" in text
    assert "with --deterministic" in text
    assert "bit for bit" not in text
    rate = read_digests(run).steps[12].main.rate
    text = bisected(run, f"lr < {rate * 1.0001}")
    assert "holds first at step 12: recorded when it was done" in text
    assert f"equality ended at step {at}" in text
    assert "not known: equality ended" in bisected(run, "norm(head) > 1e9")
    assert "proved" not in text


@pytest.mark.slow
def test_the_command_replays_with_processes_of_its_own_also_on_fewer_ranks(tmp_path: Path) -> None:
    run = run_of(tmp_path, *SMALL, "--model", "mlp", ranks=2)
    shutil.copytree(run, other := tmp_path / "whole")
    path = run / DIGESTS / "0001-rank-1.bin"  # as if this rank were killed in step 7
    head, _, rows = path.read_bytes().partition(b"\n")
    path.write_bytes(head + b"\n" + rows[: 7 * RECORD.size + 9])
    assert "equal in all" in train(["diff", run, other], launcher="none").ok().output
    done = train(["replay", run, "--step", "7"], launcher="none").ok()
    assert re.search(r"\d+ steps? equal bit for bit", done.output)
    assert "samples that weigh most, of 8" in done.output
    text = replayed(other, 7, ranks=1)[1]
    assert re.search(r"on 1 instead of 2 ranks: .*: \d steps? with the same loss up to", text)


def bisected(run: Path, when: str) -> str:
    output = io.StringIO()
    run_bisect({"run": str(run), "when": when, "horizon": "2", "any_code": ""}, [], output=output)
    return output.getvalue()


POISONED = ["--dataset", f"{HERE}:poisoned_points", "--epochs", "2", "--run_name", "run"]
POISONED += ["--model", "mlp", "--checkpoint_every_steps", "4", "--optimizer", "sgd"]


GUILTY = EpochOrder(48, 0, 0).take(0, 48).tolist().index(29) // 4
"""The first step that takes the poisoned sample."""


def test_the_sample_that_makes_a_loss_large_is_found_and_proved(tmp_path: Path) -> None:
    flags = [*POISONED, "--dataset_args", "{value: -1000.0}", "--log_interval", "2"]
    run = run_of(tmp_path / ("a" * 90 + " folder with spaces"), *flags)
    text = bisected(run, "loss > 5")
    assert f"loss > 5 holds first at step {GUILTY}: recorded when it was done" in text
    assert f"proved: step {GUILTY} without sample 29 does not lead to it" in text
    report = train(["watch", run, "--once"], launcher="none").ok()
    assert re.search(
        rf"spike +\S+ by step \d+: .*replay {re.escape(shlex.quote(str(run)))} --step \d+",
        report.output,
    )
    marks = [text for _, kind, text in marks_of(read_run(run)) if kind == "spike"]
    assert any(f"--step {GUILTY}" in text for text in marks)
    with pytest.raises(ConfigError, match="which is no condition"):
        bisected(run, "loss is large")
    with pytest.raises(ConfigError, match="accuracy/tested was not recorded"):
        bisected(run, "accuracy/tested > 2")
    assert "> 2 holds at no step: by 12 reports" in bisected(run, "accuracy/train > 2")


@pytest.mark.parametrize("guilty", [[0], [9], [15], [0, 1], [3, 12]])
def test_the_guilty_samples_are_found_wherever_they_stand_among_the_others(
    guilty: list[int],
) -> None:
    def trial(_: object, last: int, at: int = -1, gone: Gone = (), looks: int = -1) -> list[Found]:
        rows = [{"sample": number} for number in range(16)]  # of these the first weighs most
        is_healed = at == 5 and (gone is None or {*guilty} <= {*gone})
        hurts = {True: 1.0, False: 9.0}  # two steps later
        return [
            {"step": step, "rows": rows, "loss": hurts[is_healed or step < 7]}
            for step in range(4, 1 + (last if looks < 0 else looks))
        ]

    replay = SimpleNamespace(condition=Condition.parse("loss > 3"), trial=trial)
    found = blame(cast(Replay, replay), cast(Saved, None), range(4, 8), 11)
    assert (found["step"], found["samples"]) == (5, guilty)
    named = f"sample{'s' * (len(guilty) > 1)} {' and '.join(map(str, guilty))}"
    assert found["proof"] == f"proved: step 5 without {named} does not lead to it"


@pytest.mark.slow
def test_weights_that_became_nan_are_found_between_checkpoints(tmp_path: Path) -> None:
    flags = [*POISONED, "--dataset_args", "{value: .nan}", "--check_inputs", "false"]
    flags += ["--step_retry", "off", "--log_interval", "12", "--clip_grad_norm", "1000"]
    run = run_of(tmp_path, *flags)
    text = bisected(run, "nan in weights")
    assert f"nan in weights holds first at step {GUILTY}" in text
    assert "without sample 29" in text
    norm = bisected(run, "norm(layers.3) > 1e9")
    assert f"holds first at step {GUILTY}" in norm
    text = bisected(run, "nan in grad_norm")
    assert f"holds first at step {GUILTY}: recorded when it was done" in text


MISUSE: list[tuple[Callable[[Path], object], type[HardenedError], str]] = [
    (lambda run: replayed(run, 99), ConfigError, "no step 99 with a digest: the last one is 19"),
    (lambda run: replayed(run, 20), ConfigError, "no step 20 with a digest: the last one is 19"),
    (lambda run: replay_unfinished(run, 20), ConfigError, "no step 20 with a digest: the last"),
    (lambda run: shutil.rmtree(run / DIGESTS), RunFolderError, "has no digests"),
    (lambda run: change(run, 9, {"step": 2}), RunFolderError, "checkpoint from before step 3"),
    (lambda run: change(run, 9, {}, "tests.plugins"), ConfigError, "by other code: tests.plugins"),
]


def replay_unfinished(run: Path, step: int) -> None:
    """Replay a step of a run that was killed before its summary."""
    (run / "summary.json").unlink()
    replayed(run, step)


def change(run: Path, step: int, facts: Mapping[str, object], code: str = "") -> None:
    """Change what the digests of a run say: of a step the gradient, and facts, and some code."""
    for path in (run / DIGESTS).glob("*.bin"):
        head, _, raw = path.read_bytes().partition(b"\n")
        known = json.loads(head) | facts
        if code:
            known["code"][code] = "0"
        rows = [list(RECORD.unpack_from(raw, at)) for at in range(0, len(raw), RECORD.size)]
        rows[step][7] += 1
        kept = b"".join(RECORD.pack(*row) for row in rows if row[0] >= known["step"])
        path.write_bytes(json.dumps(known).encode() + b"\n" + kept)


@pytest.mark.parametrize(("spoil", "error", "words"), MISUSE)
def test_misuse_is_one_clear_error(
    spoil: Callable[[Path], object],
    error: type[HardenedError],
    words: str,
    small_run: Path,
    tmp_path: Path,
) -> None:
    run = shutil.copytree(small_run, tmp_path / "run")
    with pytest.raises(error, match=words) as caught:
        (spoil(run), replayed(run, 3))
    assert caught.value.fix


@pytest.mark.parametrize("command", [["replay", "--step", "3"], ["bisect", "--when", "loss > 1"]])
def test_a_replay_has_a_folder_of_its_own(command: list[str]) -> None:
    words = [*command, "runs/first", "--output_dir", "other", "--run_name", "mine"]
    with pytest.raises(ConfigError, match=r"--output_dir: it runs in .*; --run_name: it runs in"):
        tools.run_tool(parse(words, edited_file=""))
    with pytest.raises(ConfigError, match="--step: found '\u00b2', needs a whole number"):
        replaying.whole("\u00b2", "step")


def test_settings_of_a_replay_reach_the_trainer_as_they_were_typed() -> None:
    words = ["--amp", "off", "--dataset", "a b/c", "--dataset_args", "{size: 3}", "--digests", "on"]
    given = parse(["replay", "runs/first", "--step", "3", *words], edited_file="")
    flags = tools._settings_of(given)
    assert "--amp=off" in flags
    run = {"resume": "runs/first"}
    assert parse(flags, edited_file="").settings.values | run == given.settings.values


def parted(one: Path, other: Path) -> str:
    output = io.StringIO()
    status = run_diff({"run": f"{one}\n{other}"}, output=output)
    text = output.getvalue()
    assert status == ("they part at step" in text)
    assert len(text.splitlines()) < 24  # one screen
    return text


def test_a_valid_checkpoint_tells_that_no_weight_is_nan(small_run: Path, tmp_path: Path) -> None:
    told = "nan in weights holds at no step: the checkpoint of step 20, the last one, has none\n"
    assert bisected(small_run, "nan in weights") == told  # nothing is replayed
    run = shutil.copytree(small_run, tmp_path / "run")
    for path in (run / "checkpoints" / "step-000000020").glob("*.safetensors"):
        path.write_bytes(b"")
    text = bisected(run, "nan in weights")
    assert re.search(r"holds at no step: steps \d+ to 19 were replayed", text)


def test_a_setting_is_named(small_run: Path, tmp_path: Path) -> None:
    other = run_of(tmp_path, *SMALL, "--learning_rate", "0.004", "--log_interval", "7")
    text = parted(small_run, other)
    assert "they part at step 1: the same samples, of the same bytes, give another loss" in text
    assert "settings: --learning_rate 0.003 / 0.004\n" in text  # and not the other one
    assert re.search(r"step 1: loss \S+ / \S+; lr \S+ / \S+; samples 4 / 4", text)  # no norm


def test_runs_without_a_step_in_common_are_not_equal(small_run: Path, tmp_path: Path) -> None:
    halves = [shutil.copytree(small_run, tmp_path / name) for name in ("one", "two")]
    for half, part in zip(halves, (slice(None, 9), slice(9, None)), strict=True):
        [path] = (half / DIGESTS).glob("*.bin")
        head, _, raw = path.read_bytes().partition(b"\n")
        records = [raw[at : at + RECORD.size] for at in range(0, len(raw), RECORD.size)]
        path.write_bytes(head + b"\n" + b"".join(records[part]))
    with pytest.raises(RunFolderError, match="both runs: one has those of 0 to 8, the other 9 to"):
        parted(*halves)


@pytest.mark.slow
def test_other_ranks_threads_and_samples_are_named(small_run: Path, tmp_path: Path) -> None:
    seed = run_of(tmp_path / "seed", *SMALL, "--seed", "5")
    text = parted(small_run, seed)
    assert "they part at step 0: it takes other samples" in text
    assert "--seed 0 / 5" in text
    threads = shutil.copytree(small_run, tmp_path / "threads")
    change(threads, 3, {"threads": 2})
    text = parted(small_run, threads)
    assert "they part at step 3: the same loss, another gradient" in text
    assert "machine:  threads 1 / 2" in text
    ranks = run_of(tmp_path / "2", *SMALL, "--global_batch_size", "4", "--batch_size", "2", ranks=2)
    text = parted(small_run, ranks)
    assert "ranks:    world_size 1 / 2" in text
    assert "added up in another order" in text


def test_a_fault_that_was_healed_is_no_difference(small_run: Path, tmp_path: Path) -> None:
    other = run_of(tmp_path, *SMALL, fault="raise 0 9 9")
    text = parted(small_run, other)
    assert "equal in all 20 steps" in text
    assert "0 in the first run, 1 in the second" in text


@pytest.mark.slow
def test_a_sample_is_named_by_a_byte_and_a_module_by_a_line_that_differs(tmp_path: Path) -> None:
    values = random_points()
    code = "from torch import nn\ndef build(num_classes):\n    return nn.Linear(3, num_classes)\n"
    flags = ["--dataset", f"{HERE}:kept_points", "--epochs", "3", "--run_name", "run"]
    flags += ["--model", "mymodel:build"]
    runs = []
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / "mymodel.py").write_text(f"{code}# {name}\n", encoding="utf-8")
        if name == "two":
            values.view(torch.uint8)[29, 5] ^= 1
        torch.save(values, tmp_path / name / "points.pt")
        args = f"{{root: {tmp_path / name}}}"
        argv = [*STEADY, *flags, "--dataset_args", args, "--output_dir", tmp_path / f"run-{name}"]
        train(argv, launcher="none", cwd=tmp_path).ok()
        runs.append(tmp_path / f"run-{name}" / "run")
    text = parted(*runs)
    assert re.search("^code: +mymodel$", text, re.MULTILINE)
    assert "the same samples, of other bytes" in text
    assert "sample 29 differs" in text
    torch.save(values, tmp_path / "one" / "points.pt")  # now both are the same
    text = parted(*runs)
    assert "one of them has changed since its run" in text
    one, two = map(read_digests, runs)
    two.starts[-1]["libraries"]["yaml"] = "0.1"
    assert any("yaml" in text for text in differences(one.starts[-1], two.starts[-1])["machine"])


class Freeing(torch.optim.SGD):
    """Needs no gradient any more when it has used it."""

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.zero_grad()


def test_a_gradient_is_recorded_as_the_update_gets_it(tmp_path: Path) -> None:
    run = run_of(tmp_path, *SMALL, "--optimizer", f"{__name__}:Freeing")
    assert all(step.main.low and step.main.high for step in read_digests(run).steps.values())


def test_the_last_start_counts_and_a_record_that_is_cut_off_does_not(tmp_path: Path) -> None:
    (tmp_path / DIGESTS).mkdir()
    for start, first, steps in ((1, 0, range(6)), (2, 3, range(3, 5)), (3, 4, range(4, 9))):
        schema = 1 if start == 3 else 2  # an earlier version had other records
        head = json.dumps({"schema": schema, "step": first, "world_size": 1}).encode() + b"\n"
        raw = b"".join(
            RECORD.pack(s, 0, 0, 0, 8, 0, 0, start, 0, 1.0, 8.0, 0.0, 0.1) for s in steps
        )
        raw += RECORD.pack(5, 0, 0, 0, 8, 0, 0, 9, 0, 1.0, 8.0, 0.0, 0.1)[:-1]
        (tmp_path / DIGESTS / f"{start:04d}-rank-0.bin").write_bytes(head + raw)
    digests = read_digests(tmp_path)
    assert {number: step.main.low for number, step in digests.steps.items()} == {
        0: 1, 1: 1, 2: 1, 3: 2
    }  # fmt: skip


def test_milestones_are_spread_over_the_run_and_none_that_was_dropped_is_wanted_again() -> None:
    steps: list[int] = []
    for new in range(10, 20_000, 10):
        steps = [new, *steps]
        drops = choose_drops(steps, keep_last=3, protected=(), milestones=8)
        steps = [step for step in steps if step not in drops]
        assert len(steps) <= 3 + 8
        farthest = max(a - b for a, b in zip(steps, [*steps[1:], 0], strict=True))
        assert farthest <= 2 * new / 8 + 10  # as the start and --help say


def test_the_start_tells_what_milestones_cost_and_how_far_any_step_is(small_run: Path) -> None:
    log = (small_run / "logs" / "rank-0.log").read_text(encoding="utf-8")
    assert "16 milestones, 0 MB with AdamW; each step" in log
    assert "at most 3 steps, plus the time between two saves, behind one" in log  # 20 steps


@pytest.mark.parametrize("waits", [False, True])
def test_records_of_a_gpu_wait_for_a_report_and_those_of_a_cpu_do_not(
    waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = list[tuple[float, ...]]()
    monkeypatch.setattr(recording, "_MOST_WAITING", 3)
    weight, rate = nn.Parameter(torch.ones(3)), torch.tensor(0.5)
    weight.grad = torch.ones(3)
    known = {"config": SimpleNamespace(run=SimpleNamespace(digests="on")), "is_async_device": waits}
    known["gradients"] = SimpleNamespace(local=SimpleNamespace(parameters=[weight]))
    known |= {"optimizer": SimpleNamespace(param_groups=[{"lr": rate}])}
    parts = SimpleNamespace(**known, group=SimpleNamespace(is_main=True))
    records = Records(cast(Parts, parts), progress := Progress(), cast(LeftOut, None))
    file = SimpleNamespace(add=lambda raw: written.append(RECORD.unpack(raw)))
    records.digests = cast(LedgerWriter, file)
    for step, outcome in enumerate((Outcome.DONE, Outcome.DONE, Outcome.EMPTY, Outcome.DONE)):
        progress.step = step
        attempt = SimpleNamespace(window=Window(0, 0, 4), batches=[], count=4, outcome=outcome)
        attempt.losses, attempt.norm = [torch.tensor(0.5), torch.tensor(2.0)], torch.tensor(step)
        records.commit(cast(Attempt, attempt))
        rate += 0.25  # in place, as a schedule does with the tensor of an optimizer on a GPU
    assert len(written) == (3 if waits else 4)  # so many as have room; the last waits for a report
    records._write()
    pair = tuple(checksum([weight.grad]).tolist())
    assert [row[7:9] for row in written] == [pair, pair, (0, 0), pair]
    numbers = [(2.5, 4.0, step, 0.5 + step / 4) for step in (0.0, 1.0, 2.0, 3.0)]
    assert [row[9:] for row in written] == numbers


def test_of_a_large_batch_the_first_bytes_are_hashed_and_no_more_is_copied() -> None:
    plain = torch.randn(64, 3, 64, 64)
    batch = SimpleNamespace(inputs=plain, targets=torch.arange(64))
    copied = list[int]()

    class Copying(torch.Tensor):
        def contiguous(self, *given: Any, **named: Any) -> torch.Tensor:
            copied.append(self.nbytes)
            return self.as_subclass(torch.Tensor).contiguous()

    wanted = hash_of([cast(Batch, batch)])
    assert wanted == zlib.crc32(plain.numpy().tobytes()[: 1 << 20])
    column = SimpleNamespace(inputs=torch.arange(8).view(1, 8)[:, 4], targets=None)  # of one sample
    assert hash_of([cast(Batch, column)]) == zlib.crc32(torch.tensor([4]).numpy().tobytes())
    batch.inputs = plain.to(memory_format=torch.channels_last).as_subclass(Copying)
    assert hash_of([cast(Batch, batch)] * 3) == wanted
    assert 1 << 20 <= sum(copied) <= (1 << 20) + 4 * 3 * 64 * 64 * 4

"""The model's replicas: equal weights, equal buffers, and parameters without gradient by name.

--compile: with every setting of DDP, and no more compilations than training and testing need.
"""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.batches.sampler import Window
from hardened_ddp.errors import HardenedError, ModelError, UnusedParameterError
from hardened_ddp.gradients.by_ddp import ByDdp, sum_gradients_of
from hardened_ddp.gradients.sums import GradientSum, LocalGradients, Marks
from hardened_ddp.guard.divergence import differing_on_many
from hardened_ddp.model.moving_buffers import MovingBuffers
from hardened_ddp.model.precision import Precision
from hardened_ddp.model.reach import Reach
from hardened_ddp.model.replica import compile_model
from hardened_ddp.preflight.probe import Findings, choose_find_unused, probe
from hardened_ddp.preflight.trial import Trial
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.launch import read_launch
from hardened_ddp.settings.config import Config
from hardened_ddp.task.classification import Classification
from hardened_ddp.task.regression import Regression
from tests.harness.ranks import import_in_server, run_ranks, train
from tests.ranks.test_shared_sum import rendezvous
from tests.run_folder import only_run, read_summary

CPU = torch.device("cpu")


class Branching(nn.Module):
    """Uses its second layer only if told to."""

    def __init__(self, uses_second: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 3), nn.Linear(3, 3)
        self.uses_second = uses_second

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs)
        return self.second(hidden) if self.uses_second else hidden


def look_at(model: nn.Module, group: Group) -> Findings:
    samples = [Batch(torch.randn(2, 4), torch.tensor([0, 2]), torch.arange(2)) for _ in range(2)]
    task = Classification(num_classes=3)
    return probe(Trial(model, task, Precision("off", CPU), group), samples)


def do_backward(sums: GradientSum, inputs: torch.Tensor, *, keeps_local: bool = False) -> None:
    """Compute and add up the gradients of one step of two samples. Collective: all ranks."""
    window = Window(epoch=0, start=0, size=2)
    sums.begin(window, keeps_local=keeps_local)
    with sums.around(is_last=True):
        sums.call(inputs).sum().backward()
    mine = Marks(has_failed=False, num_samples=1, count=0.0)
    assert sums.finish(mine, window=window, on_device=False) is not None  # collective


def use_a_part_only_without_ddp() -> bool:
    group = rendezvous(shared_memory=False)
    model = Branching(uses_second=True)
    sums = sum_gradients_of(model, group, Config(), finds_unused=True)
    do_backward(sums, torch.ones(2, 4), keeps_local=True)  # collective
    assert model.second.weight.grad is not None
    model.zero_grad()
    model.uses_second = False
    do_backward(sums, torch.ones(2, 4))  # collective
    sums.release()
    group.close()
    return model.second.weight.grad is not None


def test_a_part_that_was_used_in_a_step_without_ddp_may_be_unused_in_the_next() -> None:
    assert run_ranks(use_a_part_only_without_ddp, 2) == [False, False]


def probe_branching() -> str:
    group = rendezvous()
    findings = look_at(Branching(uses_second=group.launch.rank == 0), group)
    group.close()
    return findings.unused


def test_probe_names_parameters_that_are_unused_on_one_rank_only() -> None:
    told = "2 parameters get no gradient on some ranks or batches: "
    told += "rank 0: none; rank 1: second.bias, second.weight"
    assert run_ranks(probe_branching, 2) == [told, told]


def train_branching(shared_memory: bool) -> list[float]:
    """Train with find_unused_parameters chosen by the probe; return the second layer's weights."""
    group = rendezvous(shared_memory=shared_memory)
    torch.manual_seed(0)
    model = Branching(uses_second=group.launch.rank == 0)
    on = choose_find_unused("auto", look_at(model, group))
    sums = sum_gradients_of(model, group, Config(), finds_unused=on)
    for _ in range(3):
        do_backward(sums, torch.ones(2, 4))  # collective
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
    group.close()
    return model.second.weight.flatten().tolist() + model.first.weight.flatten().tolist()


@pytest.mark.parametrize("shared_memory", [False, True])
def test_auto_trains_a_model_that_uses_parameters_on_one_rank_only(shared_memory: bool) -> None:
    first, second = run_ranks(train_branching, 2, shared_memory)
    assert first == second


def test_find_unused_is_on_where_needed_and_refused_by_name_where_it_is_off() -> None:
    needed = Findings("1 parameter gets no gradient on all ranks: second.weight")
    assert choose_find_unused("auto", needed)
    assert choose_find_unused("on", needed)
    assert not choose_find_unused("auto", Findings())
    assert choose_find_unused("on", Findings())
    with pytest.raises(UnusedParameterError, match=r"second\.weight"):
        choose_find_unused("off", needed)


def probe_failing() -> str:
    group = rendezvous()
    model = nn.Linear(4, 3 if group.launch.rank == 0 else 2)
    try:
        look_at(model, group)
    except HardenedError as error:
        return f"{type(error).__name__}: {error.message}"
    finally:
        group.close()
    return "no error"


def test_a_model_that_fails_on_one_rank_fails_on_all_with_one_message() -> None:
    for message in run_ranks(probe_failing, 2):
        assert message.startswith("ModelError")
        assert "rank 1" in message
        assert "(2, 2)" in message


class Remembers(nn.Module):
    """Makes a tensor in its first forward that it reads in the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.before: torch.Tensor | None = None
        self.last: torch.Tensor | None = None

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        mean = inputs.mean()
        self.before = mean if self.before is None else self.before * 0.9 + mean
        self.last = inputs * 2
        return self.layer(inputs - self.before)


def test_a_tensor_that_forward_makes_and_reads_is_told(caplog: pytest.LogCaptureFixture) -> None:
    model = Remembers()
    findings = look_at(model, Group(read_launch({}), CPU))
    assert findings.own_tensors == ("before",)
    assert findings.outputs == ("last",)
    assert "that it reads in the next one: before." in caplog.text
    assert model.before is None
    assert model.last is None


class OfUser(Regression):
    """A task of the user's own: what is put back after a trial are its attributes, too."""

    learns = ("mean",)
    mean: float | None = None

    def check(self, output: torch.Tensor, batch: Batch) -> None:
        self.mean = float(batch.targets.mean())


def test_what_a_task_of_the_user_learned_is_kept_when_trials_are_undone() -> None:
    group, task = Group(read_launch({}), CPU), OfUser()
    trial = Trial(nn.Linear(4, 1), task, Precision("off", CPU), group)
    probe(trial, [Batch(torch.randn(2, 4), torch.tensor([1.0, 4.0]), torch.arange(2))])
    trial.attributes.reset()
    assert task.learned() == {"mean": 2.5}


@pytest.mark.parametrize(
    ("value", "is_finite"), [(1.0, True), (3e38, True), (torch.inf, False), (torch.nan, False)]
)
def test_large_gradients_whose_sum_is_too_large_are_numbers(value: float, is_finite: bool) -> None:
    model = nn.Linear(4, 3)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)
    assert LocalGradients(model).are_finite() is is_finite


@pytest.mark.parametrize("can_send_nan", [True, False])
def test_ranks_with_gpus_ask_each_other_only_if_a_failed_one_could_tell(can_send_nan: bool) -> None:
    asked = []
    gpus = SimpleNamespace(device=torch.device("cuda"), start_max=asked.append)
    sums = ByDdp.__new__(ByDdp)
    sums.group, sums._can_send_nan = gpus, can_send_nan  # type: ignore[assignment]
    assert sums._read(False) == (False, False)
    assert len(asked) == can_send_nan


@pytest.mark.parametrize("missing", ["_reset_state", "_rebuild_buckets"])
def test_without_a_private_name_of_the_reducer_an_error_ends_the_attempt(missing: str) -> None:
    called = []
    names = {"_reset_state", "_rebuild_buckets"} - {missing}
    reducer = SimpleNamespace(**{name: lambda name=name: called.append(name) for name in names})
    ddp: Any = SimpleNamespace(
        reducer=reducer,
        module=nn.Linear(2, 2),
        register_comm_hook=lambda state, hook: None,
        find_unused_parameters=False,
    )
    sums = ByDdp(ddp, Group(read_launch({}), CPU))
    assert not sums.tells_of_failures
    sums.begin(Window(0, 2, 4), keeps_local=False)
    assert not sums.send_nan_for_rest()
    sums.start_over()
    sums._renew()
    assert called == [*names]
    assert not sums._are_old


BUFFERS = {
    "of_single": torch.zeros(3, 2),
    "of_half": torch.zeros(4, dtype=torch.bfloat16),
    "of_double": torch.zeros(2, dtype=torch.float64),
    "of_count": torch.zeros((), dtype=torch.int64),
    "of_negative": torch.zeros(2, dtype=torch.int32),
    "of_flag": torch.zeros(2, dtype=torch.bool),
    "of_wave": torch.zeros(2, dtype=torch.complex64),
}


def with_teacher() -> nn.ModuleDict:
    """Give a layer with a frozen one of its form."""
    return nn.ModuleDict({"layer": nn.Linear(3, 2), "of": nn.Linear(3, 2).requires_grad_(False)})


def made_equal() -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Make buffers and moving parameters that differ between the ranks equal; return both."""
    group, big = rendezvous(), 2**62 + 12345  # no float holds it
    rank = group.launch.rank
    module = nn.Module()
    values = [1.5 + rank, 0.5 * rank, 1e-20 + rank, big + rank, -7 - rank, rank == 0]
    for name, value in zip(BUFFERS, [*values, complex(rank, -rank)], strict=True):
        module.register_buffer(name, BUFFERS[name].fill_(value))
    buffers = MovingBuffers(module, [*BUFFERS])
    buffers.equalize(group)  # collective
    torch.manual_seed(rank)
    teacher = with_teacher()
    MovingBuffers(teacher, ["of.weight", "of.bias"]).equalize(group)  # collective
    group.close()
    return [t.clone() for t in map(buffers._now, BUFFERS)], teacher["of"].state_dict()


def test_floats_become_the_mean_and_integers_and_parameters_those_of_rank_0_bit_for_bit() -> None:
    (first, weights), *others = run_ranks(made_equal, 4)
    torch.manual_seed(0)
    expected = with_teacher()["of"].state_dict()
    for buffers, parameters in [(first, weights), *others]:
        assert all(map(torch.equal, buffers, first))
        assert all(torch.equal(parameters[name], expected[name]) for name in expected)
    floats, others = [[[3.0, 3.0]] * 3, [0.75] * 4, [1.5, 1.5]], [2**62 + 12345, [-7] * 2]
    wanted = [*floats, *others, [True, True], [complex(1.5, -1.5)] * 2]
    assert [buffer.tolist() for buffer in first] == wanted


def test_copies_of_buffers_take_no_kernel_for_each() -> None:
    module = nn.Sequential(*(nn.BatchNorm1d(2) for _ in range(20)))
    copies = MovingBuffers(module, [name for name, _ in module.named_buffers()]).copies()
    addresses = {copy.untyped_storage().data_ptr() for copy in copies.each}
    assert len(addresses) == 2  # one for each dtype


def test_a_frozen_base_that_is_much_larger_than_what_is_trained_is_not_copied() -> None:
    module = nn.Sequential(nn.Linear(30, 30).requires_grad_(False), nn.Linear(30, 2))
    assert not Reach(module).may_move()
    module = nn.Sequential(nn.Linear(30, 30).requires_grad_(False), nn.Linear(30, 30))
    assert list(Reach(module).may_move()) == ["0.weight", "0.bias"]


def compare_still(values: list[float]) -> list[str]:
    group = rendezvous()
    mine = torch.full((3,), values[group.launch.rank])
    found = differing_on_many(group, {"equal": torch.zeros(2), "mine": mine})
    group.close()
    return found


VALUES = [([1.0, 2.0], ["mine"]), ([1.0, 1.0], []), ([1.0, 2.0, 3.0], ["mine"])]
VALUES += [([1.0, 1.0, 3.0], [])]  # a flipped bit of rank 2: the replicas differ, nothing moves


@pytest.mark.parametrize(("values", "found"), VALUES)
def test_a_moving_buffer_differs_on_several_ranks(values: list[float], found: list[str]) -> None:
    assert run_ranks(compare_still, len(values), values) == [found] * len(values)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch will remove quantized tensors
def test_a_quantized_buffer_that_moves_is_refused_by_name() -> None:
    module = nn.Module()
    module.register_buffer("codes", torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8))
    alone, two = SimpleNamespace(world_size=1), SimpleNamespace(world_size=2)
    buffers = MovingBuffers(module, ["codes"])
    buffers.equalize(cast(Any, alone))
    with pytest.raises(ModelError, match="the buffer codes is quantized and changes in forward"):
        buffers.equalize(cast(Any, two))


DIGITS = ["--cpu_only", "--no_shared_memory", "--compile", "--no_tensorboard"]
DIGITS += ["--model", "tests.plugins:Compiled", "--bucket_cap_mb", "1"]
EPOCH = [*DIGITS, "--epochs", "1", "--batch_size", "128"]


@pytest.fixture
def the_compiler_is_imported_once() -> None:
    import_in_server("torch._inductor.compile_fx")


def compilations(text: str) -> list[str]:
    """Return what torch compiled: the number of a part of the model, each time."""
    return re.findall(r"^compiled part (\d+)", text, re.MULTILINE)


@pytest.mark.usefixtures("the_compiler_is_imported_once")
@pytest.mark.slow
def test_an_epoch_compiles_for_training_for_its_last_batch_and_for_the_test(tmp_path: Path) -> None:
    finished = train([*EPOCH, "--output_dir", tmp_path], 2).ok()
    found = compilations(finished.outputs[0])
    assert len(set(found)) == 1
    assert len(found) <= 3  # for training, its last batch of another size, and the test


WAYS = [["--find_unused_parameters", "on", "--step_retry", "off", "--comm_hook", "fp16"]]
WAYS += [["--model_args", "{spare: true}", "--no_gradient_as_bucket_view"]]


@pytest.mark.parametrize("flags", WAYS, ids=" ".join)
@pytest.mark.usefixtures("the_compiler_is_imported_once")
@pytest.mark.slow
def test_compiled_it_trains_as_plain_whatever_ddp_does(flags: list[str], tmp_path: Path) -> None:
    short = [*EPOCH, "--max_steps", "2", "--accumulation_steps", "2", "--eval_every", "0", *flags]
    plain = [word for word in short if word != "--compile"]
    compiled = train([*short, "--output_dir", tmp_path / "compiled"], 2).ok()
    assert compilations(compiled.outputs[0])
    train([*plain, "--output_dir", tmp_path / "plain"], 2).ok()
    losses = [read_summary(only_run(tmp_path / n))["train_loss"] for n in ("compiled", "plain")]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.slow
def test_a_container_of_torch_itself_is_compiled_too() -> None:
    model = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
    names = list(model.state_dict())
    inputs = torch.randn(3, 4)
    expected = model(inputs)
    graphs = []

    def note(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compile_model(model, backend=note)
    assert torch.allclose(model(inputs), expected)
    assert len(graphs) == 1
    assert list(model.state_dict()) == names

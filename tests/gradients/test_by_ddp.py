"""DDP's hooks: a rank that has no memory left while it sends gradients keeps no other waiting.

What reads a sum waits for the other ranks on a GPU: it must not count as this rank's work.
"""

from collections.abc import Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hardened_ddp.gradients.by_ddp import _places, sum_gradients_of
from hardened_ddp.gradients.sums import Marks, sum_with_marks
from hardened_ddp.guard import divergence
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.launch import Launch
from hardened_ddp.ranks.phase import PHASE, Phase
from hardened_ddp.settings.cli import parse
from hardened_ddp.settings.layers import resolve
from hardened_ddp.step.step import Stepper
from tests.harness.ranks import run_ranks
from tests.marks import slow_after
from tests.step.test_steps import parts_of, stepper_of

TOKENS = ["--dataset", "tests.token_data:sequences", "--dataset_args", "{size: 132}"]
TOKENS += ["--model", "tests.token_data:TinyLM", "--task", "tokens", "--no_shared_memory"]
TOKENS += ["--batch_size", "4", "--bucket_cap_mb", "1e-4", "--num_workers", "0"]
POINTS = ["--dataset", "tests.plugins:points", "--dataset_args", "{size: 144}", "--model", "mlp"]
POINTS += ["--no_shared_memory", "--batch_size", "4", "--bucket_cap_mb", "1e-4"]
# By step: the rank without memory, and before which of what it launches. The buckets of the steps
# after a fault and a good step are new ones of DDP.
FAULTS = {2: (1, "first"), 4: (0, "middle"), 7: (1, "last"), 8: (1, "first")}
NUM_STEPS = 10


def refuse_once(act: Callable[..., Any], number: int, is_meant: Callable[..., bool]) -> Any:
    """Do as act does, but for call number of those that are meant: there is no memory for it."""
    left = [number]

    def acted(*args: Any, **named: Any) -> Any:
        if is_meant(*args, **named):
            left[0] -= 1
            if left[0] == -1:
                # WHY not OutOfMemoryError: smaller micro-batches add up in another order
                raise RuntimeError("the hook fails, as a test has it")
        return act(*args, **named)

    return acted


def no_memory(kind: str, where: str, num_buckets: int, num_launches: int) -> Any:
    """Let one operation of the hook have no memory."""
    if kind == "all_reduce":
        number = {"first": 0, "middle": num_launches // 2, "last": num_launches - 1}[where]
        is_async = lambda *_, async_op=False, **__: async_op  # noqa: E731
        return mock.patch.object(dist, kind, refuse_once(dist.all_reduce, number, is_async))
    number = {"first": 0, "middle": num_buckets // 2, "last": num_buckets - 1}[where]
    to_half = lambda _, *to: to == (torch.float16,)  # noqa: E731
    half = refuse_once(torch.Tensor.to, number, to_half)
    return mock.patch.object(torch.Tensor, "to", half)


def trained(argv: list[str], kind: str) -> tuple[list[int], int, dict[str, float], dict[str, Any]]:
    """Train with faults of this kind; return steps with one, buckets, figures and tensors."""
    parts = parts_of(argv)
    stepper = stepper_of(parts)
    buckets: Any = parts.gradients
    num_buckets, found = len(buckets._layout), []
    is_beside = buckets._sums_count and buckets._sent_as is not None
    windows = list(parts.train_loader.windows(0, 0))[:NUM_STEPS]
    assert len(windows) == NUM_STEPS
    undo = stepper.gradient.undo
    for step, (window, batches) in enumerate(windows):
        rank, where = FAULTS.get(step, (-1, "")) if kind else (-1, "")
        with ExitStack() as stack:
            if rank == parts.group.launch.rank:
                stack.enter_context(no_memory(kind, where, num_buckets, num_buckets + is_beside))
            undone = stack.enter_context(mock.patch.object(stepper.gradient, "undo"))
            undone.side_effect = undo
            stepper.train_step(window, batches)
        found += [step] * undone.call_count
    totals = stepper.read_totals()
    state = [*parts.replica.module.state_dict().values()]
    state += [v for s in parts.optimizer.state.values() for v in s.values()]
    tensors = {str(n): torch.as_tensor(value).tolist() for n, value in enumerate(state)}
    parts.group.close()
    return found, num_buckets, totals, tensors


FORMS = [
    (2, TOKENS, "all_reduce"),
    (3, [*TOKENS, "--find_unused_parameters", "on"], "all_reduce"),
    (2, [*TOKENS, "--comm_hook", "fp16"], "all_reduce"),
    (3, [*POINTS, "--no_gradient_as_bucket_view"], "all_reduce"),
    (3, [*TOKENS, "--comm_hook", "fp16", "--find_unused_parameters", "on"], "to"),
]


@pytest.mark.parametrize("form", slow_after(2, FORMS), ids=str)
def test_a_bucket_without_memory_keeps_no_other_waiting(form: tuple[int, list[str], str]) -> None:
    world_size, argv, kind = form
    whole = run_ranks(trained, world_size, argv, "")
    faulty = run_ranks(trained, world_size, argv, kind)
    for (no_faults, _, *expected), (faults, num_buckets, *found) in zip(whole, faulty, strict=True):
        assert no_faults == []
        assert faults == [*FAULTS]
        assert num_buckets >= 3
        assert found == expected


class NewMemory(TorchDispatchMode):
    """Counts the bytes of memory that operations take."""

    num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        before = {_address(leaf) for leaf in tree_leaves((args, kwargs))}
        new = [t for t in tree_leaves(found) if torch.is_tensor(t) and _address(t) not in before]
        self.num_bytes += sum(tensor.untyped_storage().nbytes() for tensor in new)
        return found


def _address(value: object) -> int:
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else 0


def do_two_steps(stepper: Stepper) -> None:
    """In the second one, rank 1 fails before the first bucket."""
    parts = stepper.parts
    for step, (window, batches) in enumerate(list(parts.train_loader.windows(0, 0))[:2]):
        fails = step == parts.group.launch.rank == 1
        with no_memory("all_reduce", "first", 0, 0) if fails else ExitStack():
            stepper.train_step(window, batches)
    parts.group.close()


def memory_for_nan(argv: list[str]) -> int:
    """Fail on rank 1 before the first bucket; return the bytes that it takes to send NaN."""
    parts = parts_of(argv)
    stepper = stepper_of(parts)
    buckets: Any = parts.gradients
    send, taken = buckets.send_nan_for_rest, NewMemory()

    def watched() -> bool:
        with taken:
            return bool(send())

    buckets.send_nan_for_rest = watched
    do_two_steps(stepper)
    return taken.num_bytes


WAYS: list[list[str]] = [["--find_unused_parameters", "on"], ["--comm_hook", "fp16"]]


@pytest.mark.parametrize("how", slow_after(1, WAYS), ids=str)
def test_nan_is_sent_from_memory_that_is_there(how: list[str]) -> None:
    assert run_ranks(memory_for_nan, 2, [*TOKENS, *how]) == [0, 0]


def bytes_after_backwards(argv: list[str]) -> list[tuple[int, int]]:
    """Return the bytes of the buckets, and with gradients, after each micro-batch of two steps."""
    parts = parts_of(argv)
    stepper = stepper_of(parts)
    buckets: Any = parts.gradients
    found = []
    add = stepper.gradient.totals.add

    def watched(*args: Any) -> None:
        add(*args)
        gradients = [p.grad for p in parts.gradients.local.parameters if p.grad is not None]
        memory = {t.untyped_storage()._cdata: t.untyped_storage() for t in gradients}
        memory |= {t.untyped_storage()._cdata: t.untyped_storage() for t in buckets._flats}
        found.append((sum(flat.nbytes for flat in buckets._flats), sum(map(len, memory.values()))))

    stepper.gradient.totals.add = watched  # type: ignore[method-assign]
    do_two_steps(stepper)
    return found


def test_gradients_that_stay_local_take_no_memory_beside_the_buckets() -> None:
    argv = [*TOKENS, "--batch_size", "2", "--accumulation_steps", "2"]
    for found in run_ranks(bytes_after_backwards, 2, argv):
        assert len(found) >= 5  # of a good step, and of one with a retry
        assert all(in_all == in_buckets > 0 for in_buckets, in_all in found)


def test_ddp_does_not_look_for_inputs_to_move_to_the_gpu() -> None:
    model = torch.nn.Linear(2, 2)
    ddp = mock.Mock(module=model, reducer=None, find_unused_parameters=False)
    config = resolve(parse(["--step_retry", "off"]), world_size=2).config
    group: Any = SimpleNamespace(world_size=2, device=torch.device("meta"), shared=None)
    name = "hardened_ddp.gradients.by_ddp.DistributedDataParallel"
    with mock.patch(name, return_value=ddp) as made:
        sum_gradients_of(model, group, config, finds_unused=False)
    [(given, named)] = made.call_args_list
    assert (given, named.get("device_ids")) == ((model,), None)


@pytest.mark.parametrize(
    "parameter",
    [
        torch.empty(2, 3),
        torch.empty(3, 2).t(),
        torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.empty(2, 3, 4, 4, 4).to(memory_format=torch.channels_last_3d),
    ],
    ids=lambda parameter: str(parameter.stride()),
)
def test_a_gradient_lies_in_its_bucket_as_the_parameter_in_memory(parameter: torch.Tensor) -> None:
    # So does DDP's: the order of additions is that of the places.
    flat = torch.arange(parameter.numel() + 1.0)[1:]
    [place] = _places(flat, [parameter])
    assert place.stride() == parameter.stride()
    assert sorted(place.flatten().tolist()) == flat.tolist()
    [rows] = _places(flat, [parameter.new_empty(parameter.numel() * 2)[::2]])  # with gaps
    assert rows.stride() == (1,)


CPU = torch.device("cpu")


# A mock of Tensor.tolist and float() notes the phase; on a GPU these are what waits.
def sum_marks(group: Group) -> None:
    gradient = nn.Parameter(torch.ones(2))
    mine = Marks(has_failed=False, num_samples=1, count=torch.tensor(3.0))
    assert sum_with_marks([gradient], mine, group) is not None


def compare(group: Group) -> None:
    group.world_size = 2
    assert divergence._gather_if_different(group, {"weight": torch.ones(2)}) == [{}, {}]


@pytest.mark.parametrize("act", [sum_marks, compare])
def test_a_sum_is_read_while_the_phase_is_that_of_the_sum(
    act: Callable[[Group], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = Group(Launch(), CPU)
    group.tracker.enter(Phase.OPTIMIZER)
    seen: list[int] = []

    def noting(read: Callable[..., Any]) -> Callable[..., Any]:
        def read_noted(tensor: torch.Tensor, *given: Any) -> Any:
            seen.append(group.tracker.words[PHASE])
            return read(tensor, *given)

        return read_noted

    monkeypatch.setattr(Group, "sum_", lambda self, tensor: tensor)
    monkeypatch.setattr(Group, "gather_json", lambda self, value: [{}, {}])
    for name in ("tolist", "__float__"):
        monkeypatch.setattr(torch.Tensor, name, noting(getattr(torch.Tensor, name)))
    act(group)
    assert seen[0] == Phase.ALL_REDUCE
    assert group.tracker.words[PHASE] == Phase.OPTIMIZER

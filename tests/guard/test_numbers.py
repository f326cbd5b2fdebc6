"""Numbers that go wrong: found before they reach the weights, named, and taken back."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from hardened_ddp.guard.divergence import judge
from hardened_ddp.model.average import AVERAGE
from hardened_ddp.model.checksum import checksums, combine
from tests.gradients.test_by_ddp import NewMemory
from tests.harness.ranks import train
from tests.marks import Undisturbed, slow_after
from tests.run_folder import find_checkpoints, last_tensors, only_run, read_summary, step_of
from tests.step.test_step_retry import run


def spoiled(**arguments: Any) -> list[str]:
    return ["--model", "tests.plugins:Spoiled", "--model_args", str(arguments)]


CULPRITS = [
    ("nan", "the loss is nan; blocks.1.1 (Spoiler) produced the first nan, of finite inputs"),
    ("gradient", "not finite; in backward blocks.1.1 (Spoiler) produced the first inf"),
    ("own", "the model (Spoiled) produced the first nan, in its own forward, before head (Linear)"),
]


@pytest.mark.parametrize("culprit", slow_after(1, CULPRITS), ids=lambda culprit: culprit[0])
def test_the_module_that_first_gives_nan_is_named_with_rank_and_samples(
    culprit: tuple[str, str], tmp_path: Path
) -> None:
    kind, words = culprit
    # inf within the hooks of DDP
    hooks = ["--no_shared_memory"] if kind == "gradient" else []
    finished = run(tmp_path, 2, *spoiled(kind=kind), *hooks)
    assert finished.statuses == (1, 1)
    # WHY the newest: on a slow machine an earlier one is due by its time
    checkpoint = max(find_checkpoints(tmp_path), key=step_of)
    [line] = [line for line in finished.output.splitlines() if "DDP-S03" in line]  # by one rank
    # nothing of that step is in the checkpoint, and all before it is
    assert f"rank 1, step {step_of(checkpoint)}, samples [" in line
    assert words in line


def test_a_sample_that_is_nan_is_named(tmp_path: Path) -> None:
    flags = ["--dataset", "tests.plugins:faulty_points", "--no_check_inputs", *spoiled()]
    flags += ["--dataset_args", "{size: 48, flags: '', faults: {13: nan}}"]
    finished = run(tmp_path, 2, *flags)
    assert finished.statuses == (1, 1)
    assert "samples [13]: the loss is nan; the input itself is not finite" in finished.output


OFTEN = ["--checkpoint_every_steps", "4", "--ledger"]


@pytest.mark.parametrize("flags", slow_after(1, [(), ("--ema", "0.9")]), ids=str)
def test_steps_without_finite_numbers_are_rolled_back_and_done_again(
    flags: tuple[str, ...], tmp_path: Path, undisturbed: Undisturbed
) -> None:
    # A step given up is seven forwards: three tries, and each of its four samples alone.
    faulty = spoiled(kind="nan", first=13, last=13 + 3 * 7 - 1)
    finished = run(tmp_path / "faulty", 2, *faulty, *OFTEN, *flags, "--continue_on_error").ok()
    words = "3 steps in a row had no finite loss or gradient: going back to the checkpoint of"
    assert words in finished.output
    tensors = last_tensors(tmp_path / "faulty")  # with the averages
    assert tensors == undisturbed(2, *spoiled(), *flags)
    assert any(name.startswith(AVERAGE) for name in tensors) == ("--ema" in flags)
    assert is_exact(tmp_path / "faulty")
    summary = read_summary(only_run(tmp_path / "faulty"))
    assert (summary["num_rollbacks"], summary["num_left_out"]) == (1, 0)
    assert summary["time"]["lost"] > 0


@pytest.mark.slow
def test_steps_that_stay_without_finite_numbers_stop_all_ranks(tmp_path: Path) -> None:
    faulty = spoiled(kind="nan", first=13)
    finished = run(tmp_path, 2, *faulty, *OFTEN, "--continue_on_error")
    assert finished.statuses == (1, 1)
    assert "3 steps in a row had no finite loss or gradient, again, after" in finished.output
    assert finished.outputs[0].count("going back to the checkpoint of") == 1
    assert finished.outputs[0].count("blocks.1.1 (Spoiler) produced the first nan") >= 6
    told = finished.outputs[0].partition("had no finite")[0].rpartition("step ")[2]
    first = int(told.partition(":")[0])
    assert all(step_of(checkpoint) < first - 3 for checkpoint in find_checkpoints(tmp_path))


def flipping(**arguments: Any) -> list[str]:
    return ["--model", "tests.plugins:Flipping", "--model_args", str(arguments)]


FLIPS = [{"at": 11}, {"at": 11, "rank": 0, "what": "nan"}, {"at": 11, "what": "state"}]


@pytest.mark.parametrize("flip", slow_after(1, FLIPS), ids=str)
def test_a_bit_that_flips_on_one_of_two_ranks_does_not_change_the_weights(
    flip: dict[str, Any], tmp_path: Path, undisturbed: Undisturbed
) -> None:
    faulty = [*flipping(**flip), *OFTEN, "--check_replicas_every", "6"]
    finished = run(tmp_path / "faulty", 2, *faulty).ok()
    for output in finished.outputs:
        assert "[DDP-S05]" in output
    assert "rank 1 differs from rank 0 in model.first.weight" in finished.output
    assert "the replicas differed: going back to the checkpoint of step 4" in finished.output
    assert last_tensors(tmp_path / "faulty") == undisturbed(2, *flipping())
    assert is_exact(tmp_path / "faulty")
    summary = read_summary(only_run(tmp_path / "faulty"))
    assert (summary["num_rollbacks"], summary["num_diverged"]) == (1, 1)


@pytest.mark.slow
def test_the_checkpoint_to_go_back_to_is_kept(tmp_path: Path, undisturbed: Undisturbed) -> None:
    few = ["--checkpoint_every_steps", "2", "--keep_last", "1", "--check_replicas_every", "6"]
    finished = run(tmp_path / "faulty", 2, *flipping(at=17), *few).ok()
    found = re.search(r"going back to the checkpoint of step (\d+)", finished.outputs[0])
    assert int(found[1]) <= 12  # the newest one by then: a writer that is busy leaves some out
    assert last_tensors(tmp_path / "faulty") == undisturbed(2, *flipping())


@pytest.mark.slow
def test_a_rank_that_differs_gets_the_others_state(
    tmp_path: Path, undisturbed: Undisturbed
) -> None:
    never = ["--checkpoint_every_steps", "0", "--check_replicas_every", "1"]
    flip = flipping(at=11, rank=0, after=True)
    finished = run(tmp_path / "faulty", 3, *flip, *never).ok()
    assert "rank 0 differs from rank 1 in model.first.weight" in finished.outputs[2]
    assert "all ranks continue with the state of rank 1" in finished.outputs[0]
    assert last_tensors(tmp_path / "faulty") == undisturbed(3, *flipping())


STOPS = [
    (2, ["--checkpoint_every_steps", "0"], "and no checkpoint is from before: rank 1 differs"),
    (3, ["--step_retry", "off"], "rank 1 differs from rank 0 in model.first.weight"),
]


@pytest.mark.parametrize("stop", slow_after(1, STOPS), ids=lambda stop: stop[1][0])
def test_without_a_state_to_take_all_ranks_stop_and_doubtful_ones_are_set_aside(
    stop: tuple[int, list[str], str], tmp_path: Path
) -> None:
    world_size, flags, words = stop
    often = ["--checkpoint_every_steps", "7", *flags, "--check_replicas_every", "6"]
    finished = run(tmp_path, world_size, *flipping(at=10), *often)
    assert finished.statuses == (1,) * world_size
    assert "DDP-S05" in finished.output
    assert words in finished.output
    # A checkpoint of step 7, after the comparison of step 6, may be of either state.
    assert not find_checkpoints(tmp_path)


def test_every_bit_counts_in_a_checksum() -> None:
    tensors = {
        "weight": torch.randn(70_000),
        "half": torch.randn(3, 5).bfloat16(),
        "count": torch.tensor(3),
        "mask": torch.tensor([True, False]),
        "image": torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    }
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    seen = {tuple(combine(checksums(tensors)).tolist())}
    places = [("weight", i) for i in (0, 1, 32_767, 32_768, 69_999)]
    places += [("half", 14), ("count", 0), ("mask", 1), ("image", 95)]
    for name, place in places:
        byte = tensors[name].flatten()[place : place + 1].clone().view(torch.uint8)
        every = 31 if name == "weight" and place < 69_999 else 1
        for bit in [0] if name == "mask" else range(0, 8 * len(byte), every):
            changed = byte.clone()
            changed[bit // 8] ^= 1 << bit % 8
            flat = before[name].flatten().clone()
            flat[place] = changed.view(flat.dtype)[0]
            other = {**tensors, name: flat.view_as(tensors[name])}
            seen.add(tuple(combine(checksums(other)).tolist()))
    assert len(seen) == 1 + 4 * 2 + 32 + 16 + 64 + 1 + 32
    assert all(torch.equal(tensors[name], before[name]) for name in tensors)


@pytest.mark.parametrize("other", [60_000, 60_001, 65_541])  # also in the same half of a word
def test_values_that_changed_places_are_seen(other: int) -> None:
    values = torch.randn(70_000)
    swapped = values.clone()
    swapped[[5, other]] = values[[other, 5]]
    assert not torch.equal(*(combine(checksums({"values": t})) for t in (values, swapped)))


@pytest.mark.parametrize("start", [0, 1, 7, 32_770])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64])
def test_changes_that_cancel_in_a_linear_sum_are_seen(dtype: torch.dtype, start: int) -> None:
    values = torch.zeros(70_000, dtype=dtype)
    changed = values.clone()
    values[start : start + 4] = torch.tensor([1, 2, 2, 1], dtype=dtype)
    changed[start : start + 4] = torch.tensor([2, 1, 1, 2], dtype=dtype)
    signs = values.clone()
    signs[[start, start + 2]] *= -1  # the highest bit of two words, or of two of their halves
    found = {str(checksums({"values": t}).tolist()) for t in (values, changed, signs)}
    assert len(found) == 3


def test_the_factors_of_a_checksum_are_made_in_little_memory() -> None:
    factors = 2 * 32_768 * 8
    with NewMemory() as taken:
        checksums({"": torch.ones(1)})
    assert taken.num_bytes < 2.6 * factors  # they, as much again, and a workspace of half of them


def test_a_part_of_another_tensor_has_the_checksum_of_its_copy() -> None:
    flat = torch.randn(90_001)
    parts = [flat[1:], flat[3:70_000], flat[5:6], flat[:0], flat[:80_000].view(200, 400).t()]
    for part in (*parts, torch.empty_strided((1,), (4,)).fill_(2.0)):
        assert torch.equal(checksums({"": part}), checksums({"": torch.tensor(part.tolist())}))


def test_the_verdict_names_the_ranks_that_differ_from_most() -> None:
    same, other, third = ({"a": "1", "b": number} for number in "234")
    found = judge([other, same, same])
    assert (found.odd, found.source) == ([0], 1)
    assert found.text == "rank 0 differs from rank 1 in b"
    found = judge([same, same, other, third])
    assert (found.odd, found.source) == ([0, 1, 2, 3], None)
    assert found.text == "rank 2 differs from rank 0 in b; rank 3 differs from rank 0 in b"


def is_exact(output: Path) -> bool:
    done = train(["verify-ledger", only_run(output)], launcher="none")
    assert "each exactly once" in done.output
    return done.statuses == (0,)

"""The order of an epoch, and how ranks share it: every sample once, on any number of ranks.

--sampling and mix: which samples an epoch has, from any cursor, and the ledger proves it.
"""

import io
import math
import time
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from ddp_runs.ledger_check import check_ledger
from hardened_ddp.data.batches import sampler as sampler_module
from hardened_ddp.data.batches.permutation import permute
from hardened_ddp.data.batches.sampler import EpochOrder, WindowSampler, share_of, split_evenly
from hardened_ddp.data.batches.sampling import Samples, Sampling, build_sampling, counts_by_weight
from hardened_ddp.data.sources.datasets import build_data
from hardened_ddp.data.sources.mix import Mix
from hardened_ddp.errors import DataError
from hardened_ddp.settings.config import DataConfig
from tests.data.scripted import make_loader
from tests.harness.ranks import train
from tests.run_folder import only_run

LARGE = sampler_module.MAX_KEPT_ORDER + 4099  # odd, and a keyed permutation


def make_sampler(size: int, *, world_size: int = 1, **how: Any) -> WindowSampler:
    given = {"rank": 0, "global_batch": 8, "seed": 3, "batch_size": 4, **how}
    return WindowSampler(range(size), num_replicas=world_size, **given)  # its length is used


def global_order(size: int, world_sizes: list[int], **how: object) -> list[int]:
    """Run an epoch in which each step has another world size; return what it took, in order."""
    taken: list[int] = []
    cursor = step = 0
    end = make_sampler(size, **how).end
    while cursor < end:
        world_size = world_sizes[step % len(world_sizes)]
        how["world_size"] = world_size
        ranks = [make_sampler(size, rank=rank, **how) for rank in range(world_size)]
        window = next(ranks[0].windows(cursor))
        for sampler in ranks:
            for indices in sampler.micro_batches(window):
                taken += indices.tolist()
        cursor, step = window.stop, step + 1
    return taken


@pytest.mark.parametrize("size", [1, 2, 3, 16, 17, 65, 257, 1000, 4097, LARGE])
def test_an_order_has_every_sample_once(size: int) -> None:
    order = EpochOrder(size, seed=1, epoch=2).take(0, size)
    assert order.dtype == torch.int64
    assert torch.equal(order.sort().values, torch.arange(size))
    computed = permute(np.arange(size, dtype=np.uint64), num_samples=size, keys=[99])
    assert sorted(computed.tolist()) == list(range(size))


@pytest.mark.parametrize("size", [1000, LARGE])
def test_an_order_depends_on_seed_and_epoch_and_on_nothing_else(size: int) -> None:
    first = EpochOrder(size, seed=1, epoch=2).take(0, 500)
    torch.manual_seed(7)
    assert torch.equal(EpochOrder(size, seed=1, epoch=2).take(0, 500), first)
    for seed, epoch in ((1, 3), (2, 2), (2, 1)):
        other = EpochOrder(size, seed=seed, epoch=epoch).take(0, 500)
        assert (other == first).float().mean() < 0.05


def test_an_order_stays_the_same_over_versions() -> None:
    # WHY pinned: a resumed run must go on in the order that it began with.
    order = EpochOrder(10, seed=0, epoch=0).take(0, 10)
    assert order.tolist() == [2, 9, 0, 7, 3, 4, 5, 8, 6, 1]
    assert EpochOrder(10**9, 0, 0).take(0, 3).tolist() == [220888298, 4419216, 831747538]


def test_a_billion_samples_cost_no_time_and_no_memory() -> None:
    start = time.process_time()
    order = EpochOrder(10**9, seed=0, epoch=0)
    found = order.take(10**9 - 64, 10**9)
    # The whole permutation would take 10 s and 8 GB.
    assert time.process_time() - start < 1.0
    assert len(set(found.tolist())) == 64
    assert 0 <= int(found.min()) <= int(found.max()) < 10**9


def test_shares_and_parts_are_near_equal_and_no_part_is_empty() -> None:
    for size, shares in ((7, [(0, 3), (3, 5), (5, 7)]), (2, [(0, 1), (1, 2), (2, 2)])):
        assert [share_of(size, rank=rank, world_size=3) for rank in range(3)] == shares
    assert split_evenly(0, 4) == split_evenly(0, 0) == []
    assert split_evenly(4, 1) == [(0, 4)]
    assert split_evenly(5, 2) == [(0, 3), (3, 5)]
    assert split_evenly(2, 3) == [(0, 1), (1, 2)]


@pytest.mark.parametrize("size", [1, 3, 5, 8, 61, 1000])
def test_any_number_of_ranks_takes_the_order_of_one(size: int) -> None:
    alone = global_order(size, [1])
    assert sorted(alone) == list(range(size))
    assert alone == EpochOrder(size, seed=3, epoch=0).take(0, size).tolist()
    for world_sizes in ([2], [3], [4], [4, 4, 2, 3]):
        assert global_order(size, world_sizes) == alone


@pytest.mark.parametrize("cursor", [0, 1, 8, 13, 60, 61])
def test_an_epoch_can_start_at_any_cursor(cursor: int) -> None:
    sampler = make_sampler(61)
    parts = [part for window in sampler.windows(cursor) for part in sampler.micro_batches(window)]
    taken = [index for part in parts for index in part.tolist()]
    assert taken == EpochOrder(61, seed=3, epoch=0).take(cursor, 61).tolist()


@pytest.mark.parametrize("size", [5, 61, 64])
@pytest.mark.parametrize("drop_last", [False, True])
def test_it_is_a_distributed_sampler_to_its_users(size: int, drop_last: bool) -> None:
    how = {"world_size": 3, "drop_last": drop_last}
    samplers = [make_sampler(size, rank=rank, **how) for rank in range(3)]
    for epoch in (0, 1):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        parts = [list(sampler) for sampler in samplers]
        assert [len(part) for part in parts] == [len(sampler) for sampler in samplers]
        together = sorted(index for part in parts for index in part)
        assert len(together) == len(set(together)) == samplers[0].end
    assert isinstance(samplers[0], torch.utils.data.DistributedSampler)
    assert parts[0] != list(make_sampler(size, world_size=3, drop_last=drop_last))


def test_drop_last_leaves_out_the_short_last_window_only() -> None:
    sampler = make_sampler(61, drop_last=True)
    assert [window.size for window in sampler.windows()] == [8] * 7
    assert (sampler.num_windows, sampler.end) == (7, 56)
    # From a cursor that no window begins at, the windows still end where the epoch ends.
    assert list(sampler.windows(50)) == [sampler_module.Window(0, 50, 6)]
    alone = make_sampler(5, drop_last=True)  # the only window is kept
    assert [window.size for window in alone.windows()] == [5]


def test_two_epochs_can_be_read_at_the_same_time() -> None:
    sampler = make_sampler(40)
    mixed = [sampler.order(epoch).take(0, 5).tolist() for epoch in (0, 1, 0, 1)]
    assert mixed[0] == mixed[2] != mixed[1] == mixed[3]
    first, _ = sampler.order(0), sampler.order(1)
    assert sampler.order(0) is first  # workers read ahead while an epoch ends


@pytest.mark.parametrize("size", [1, 6000, 8193, sampler_module.MAX_KEPT_ORDER, LARGE])
@pytest.mark.parametrize(("world_size", "drop_last"), [(64, False), (4096, True)])
def test_of_many_each_rank_takes_its_share(size: int, world_size: int, drop_last: bool) -> None:
    global_batch = 32 * world_size
    for rank in (0, world_size // 2, world_size - 1):
        how = {"global_batch": global_batch, "batch_size": 8, "drop_last": drop_last}
        sampler = make_sampler(size, rank=rank, world_size=world_size, **how)
        windows = [*sampler.windows_of(0, min(13, size - 1)), *sampler.windows_of(1)]
        # at the end a step is taken again, as after a fault
        for window in [*windows, *sampler.windows_of(2), windows[0]]:
            start, stop = share_of(window.size, rank=rank, world_size=world_size)
            taken = [index for part in sampler.micro_batches(window) for index in part.tolist()]
            whole = whole_order(size, window.epoch)
            assert taken == whole[window.start + start : window.start + stop].tolist()


@cache
def whole_order(size: int, epoch: int) -> torch.Tensor:
    return EpochOrder(size, seed=3, epoch=epoch).take(0, size)


CLASSES = [0] * 60 + [1] * 30 + [3] * 10


def rare(num: int = 100) -> TensorDataset:
    """Make a data set with three classes of very different size; class 2 has no sample."""
    return TensorDataset(torch.arange(num, dtype=torch.float32), torch.tensor(CLASSES[:num]))


def dark(train: bool, num_tests: int = 10) -> Dataset[Any] | None:
    """Give digits of which all pixels are 0: with digits, a data set of the same shape."""
    images = torch.zeros(50 if train else num_tests, 1, 8, 8)
    data = TensorDataset(images, torch.arange(len(images)) % 10)
    data.num_classes = 10  # type: ignore[attr-defined]
    return data if len(data) else None


def every_third(dataset: Any, *, seed: int, epoch: int) -> Any:
    return np.random.default_rng([seed, epoch]).permutation(len(dataset))[::3]


def restless(dataset: Any, *, seed: int, epoch: int) -> Any:
    return np.random.default_rng().permutation(len(dataset))


def shrinking(dataset: Any, *, seed: int, epoch: int) -> Any:
    return np.arange(len(dataset) - epoch)


def outside(dataset: Any, *, seed: int, epoch: int) -> Any:
    return [len(dataset)]


def sampling_of(sampling: str, dataset: Any = None, *, seed: int = 0, **more: Any) -> Sampling:
    config = DataConfig(sampling=sampling, **more)
    found = build_sampling(rare() if dataset is None else dataset, config, seed=seed)
    assert found is not None
    return found


def epoch_of(sampling: Sampling, epoch: int = 0) -> list[int]:
    return sampling.order(epoch).tolist()


def classes_of(samples: list[int]) -> Counter[int]:
    return Counter(CLASSES[i] for i in samples)


def test_balanced_draws_each_class_as_often_and_the_same_samples_each_time() -> None:
    sampling = sampling_of("balanced", samples_per_epoch=6000)
    samples = epoch_of(sampling)
    counts = classes_of(samples)
    assert counts.keys() == {0, 1, 3}
    assert all(abs(count - 2000) < 4 * 37 for count in counts.values())  # 4 standard deviations
    assert epoch_of(sampling_of("balanced", samples_per_epoch=6000)) == samples
    assert epoch_of(sampling, 1) != samples != epoch_of(sampling_of("balanced", seed=1))
    assert sampling_of("balanced").length == 100
    with pytest.raises(DataError, match="has no list of them as targets or labels"):
        sampling_of("balanced", ["a", "b"])


def test_without_replacement_each_class_has_as_many_as_the_rarest() -> None:
    sampling = sampling_of("balanced", replacement=False)
    epochs = [epoch_of(sampling, epoch) for epoch in range(3)]
    for samples in epochs:
        assert classes_of(samples) == {0: 10, 1: 10, 3: 10}
        assert len(set(samples)) == 30
    assert set(epochs[0]) != set(epochs[1])
    with pytest.raises(DataError, match="an epoch has 30 at most"):
        sampling_of("balanced", replacement=False, samples_per_epoch=31)
    assert sampling_of("balanced", Subset(rare(), range(50, 100)), replacement=False).length == 30
    loader = make_loader(rare(), rank=9, world_size=10)  # its first samples are beyond 3
    loader.sampler.sampling, loader.sampler.end = sampling_of("balanced", samples_per_epoch=3), 3
    assert loader.sample_batches(torch.device("cpu"))


@pytest.mark.parametrize("form", ["txt", "npy"])
def test_weights_of_a_file(form: str, tmp_path: Path) -> None:
    weights = np.array([0.0] * 50 + [1.0] * 40 + [4.0] * 10)
    path = tmp_path / f"weights.{form}"
    np.save(path, weights) if form == "npy" else np.savetxt(path, weights)
    samples = epoch_of(sampling_of(f"weights:{path}", samples_per_epoch=8000))
    assert min(samples) >= 50
    assert abs(sum(sample >= 90 for sample in samples) - 4000) < 4 * 45
    once = sampling_of(f"weights:{path}", replacement=False)
    assert once.length == 20
    epochs = [epoch_of(once, epoch) for epoch in range(200)]
    assert all(len(set(epoch)) == 20 and min(epoch) >= 50 for epoch in epochs)
    # 10 of an epoch are expected to be of the heavy ones: a share of them each time.
    heavy = sum(sample >= 90 for epoch in epochs for sample in epoch) / 200
    assert 7 < heavy < 10
    path.write_text("1 2 x")
    with pytest.raises(DataError, match="can't be read"):
        sampling_of(f"weights:{path}")
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"can't be read|has 0 numbers"):
        sampling_of(f"weights:{path}")
    np.savetxt(tmp_path / "few.txt", weights[1:])
    with pytest.raises(DataError, match="has 99 numbers for 100 samples"):
        sampling_of(f"weights:{tmp_path / 'few.txt'}")
    np.savez(tmp_path / "several.npz", weights)
    (tmp_path / "several.npz").rename(tmp_path / "several.npy")
    with pytest.raises(DataError, match="can't be read"):
        sampling_of(f"weights:{tmp_path / 'several.npy'}")
    for number in (1e308, np.nan, np.inf, 0.0):  # the sum of the first is infinite
        np.save(tmp_path / "odd.npy", np.full(100, number))
        with pytest.raises(DataError, match="or some below 0, NaN, or all 0"):
            sampling_of(f"weights:{tmp_path / 'odd.npy'}")


def test_a_function_of_ones_own_gives_the_order_or_is_refused() -> None:
    own = sampling_of("tests.data.test_sampler:every_third", seed=3)
    assert epoch_of(own, 2) == every_third(rare(), seed=3, epoch=2).tolist()
    with pytest.raises(DataError, match="gives other samples when it is called again"):
        sampling_of("tests.data.test_sampler:restless")
    with pytest.raises(DataError, match="gave indices from 100 to 100, of 100 samples, in epoch 0"):
        sampling_of("tests.data.test_sampler:outside")
    with pytest.raises(DataError, match="gave 99 samples, and 100 in epoch 0, in epoch 1"):
        sampling_of("tests.data.test_sampler:shrinking").order(1)


def test_an_order_is_made_once_for_the_ranks_and_the_ledger() -> None:
    made: list[int] = []

    def order(epoch: int) -> Samples:
        made.append(epoch)
        return np.arange(3)

    sampling = Sampling("own", 3, "", order)
    for epoch in (0, 0, 1, 0):
        assert sampling.order(epoch).tolist() == [0, 1, 2]
    assert made == [0, 1]


@pytest.mark.parametrize(
    ("ends", "length", "counts"),
    [("first", 0, [75, 25]), ("all", 0, [180, 60]), ("steps", 40, [30, 10])],
)
def test_an_epoch_of_a_mix_ends_as_its_rule_says(ends: str, length: int, counts: list[int]) -> None:
    mix = Mix([range(75), range(60)], [3.0, 1.0], ends)
    sampling = sampling_of("none", mix, samples_per_epoch=length)
    samples = epoch_of(sampling)
    first = Counter(sample for sample in samples if sample < 75)
    second = Counter(sample for sample in samples if sample >= 75)
    assert [first.total(), second.total()] == counts
    for found, size in ((first, 75), (second, 60)):  # each sample once before any comes again
        full, rest = divmod(found.total(), size)
        assert set(found.values()) <= {full, full + 1}
        assert sum(count == full + 1 for count in found.values()) == rest
    assert samples != sorted(samples)


def test_a_mix_has_the_classes_and_tests_of_its_parts_by_weight_and_refuses_others() -> None:
    name = "mix:digits,tests.data.test_sampler:dark"
    part = build_data(DataConfig(dataset=name, dataset_args={"args": [{}, {"num_tests": 0}]}))
    assert len(part.test) == 360  # type: ignore[arg-type]
    data = build_data(DataConfig(dataset=name, dataset_args={"weights": [3, 1], "ends": "first"}))
    assert (data.num_classes, len(data.train), len(data.test)) == (10, 1487, 370)  # type: ignore[arg-type]
    assert float(data.train[1436][0].sum()) > 0 == float(data.train[1437][0].sum())
    wrong = [
        ({"weights": [1]}, "weights .1."),
        ({"ends": "sometime"}, "ends 'sometime'"),
        ({"args": [{}]}, "2 data sets and args"),
        ({"args": [3, 4]}, "2 data sets and args"),
        ({"weights": [1, math.inf]}, "weights .1, inf"),
        ({"shares": [1, 2]}, "does not take dataset_args"),
    ]
    for arguments, told in wrong:
        with pytest.raises(DataError, match=told):
            build_data(DataConfig(dataset=name, dataset_args=arguments))
    with pytest.raises(DataError, match="both say what an epoch has"):
        sampling_of("balanced", data.train)
    with pytest.raises(DataError, match="part 2 has no samples"):
        sampling_of("none", Mix([range(75), range(0)], [3.0, 1.0], "all"))
    assert counts_by_weight([1, 1, 1], 10) == [4, 3, 3]
    assert counts_by_weight([0.7, 0.2, 0.1], 5) == [4, 1, 0]


@pytest.mark.slow
def test_the_ledger_knows_what_was_drawn_and_a_run_keeps_its_sampling(tmp_path: Path) -> None:
    argv = ["--cpu_only", "--model", "mlp", "--sampling", "balanced", "--ledger", "--eval_every=0"]
    argv += ["--num_workers=0", "--output_dir", str(tmp_path), "--run_name", "run", "--epochs=3"]
    train([*argv, "--max_steps", "100"], 2).ok()
    run = only_run(tmp_path)

    def told(status: int) -> str:
        output = io.StringIO()
        assert check_ledger(run, output=output) == status
        return output.getvalue()

    assert "epoch 0: 1437 samples, each as often as it was drawn" in told(0)
    changed = [*argv, "--sampling", "none", "--max_steps", "110"]
    output_text = train(changed, 2).outputs[0]
    assert "sampling: the checkpoint has balanced, and this run draws other samples" in output_text
    drawn = np.load(run / "ledger" / "order-000000.npy")
    np.save(run / "ledger" / "order-000000.npy", np.where(drawn == drawn[5], drawn[6], drawn))
    assert "not as often as drawn" in told(1)
    (run / "ledger" / "order-000000.npy").write_bytes(b"")  # as after a power cut
    assert "drawn for it is not known" in told(1)

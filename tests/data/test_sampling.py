"""--sampling and mix: which samples an epoch has, from any cursor, and the ledger proves it."""

import io
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from ddp_runs.ledger_check import check_ledger
from hardened_ddp.data.batches.sampling import Samples, Sampling, build_sampling, counts_by_weight
from hardened_ddp.data.sources.datasets import build_data
from hardened_ddp.data.sources.mix import Mix
from hardened_ddp.errors import DataError
from hardened_ddp.settings.config import DataConfig
from tests.harness.ranks import train
from tests.run_folder import only_run

CLASSES = [0] * 60 + [1] * 30 + [3] * 10


def rare(num: int = 100) -> TensorDataset:
    """Make a data set with three classes of very different size; class 2 has no sample."""
    return TensorDataset(torch.arange(num, dtype=torch.float32), torch.tensor(CLASSES[:num]))


def dark(train: bool) -> Dataset[Any]:
    """Give digits of which all pixels are 0: with digits, a data set of the same shape."""
    images = torch.zeros(50 if train else 10, 1, 8, 8)
    data = TensorDataset(images, torch.arange(len(images)) % 10)
    data.num_classes = 10  # type: ignore[attr-defined]
    return data


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
    half = Subset(rare(), range(50, 100))
    assert sampling_of("balanced", half, replacement=False).length == 30


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
    own = sampling_of("tests.data.test_sampling:every_third", seed=3)
    assert epoch_of(own, 2) == every_third(rare(), seed=3, epoch=2).tolist()
    with pytest.raises(DataError, match="gives other samples when it is called again"):
        sampling_of("tests.data.test_sampling:restless")
    with pytest.raises(DataError, match="gave indices from 100 to 100, of 100 samples, in epoch 0"):
        sampling_of("tests.data.test_sampling:outside")
    with pytest.raises(DataError, match="gave 99 samples, and 100 in epoch 0, in epoch 1"):
        sampling_of("tests.data.test_sampling:shrinking").order(1)


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
    arguments = {"weights": [3, 1], "ends": "first"}
    name = "mix:digits,tests.data.test_sampling:dark"
    data = build_data(DataConfig(dataset=name, dataset_args=arguments))
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

"""Datasets: what is opened by which name, what is found out of it, and what a mistake is told.

Datasets, models and collates by import path, package.module:callable: the same words for all.
"""

import gzip
import importlib.util
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from hardened_ddp.data import foreign_code
from hardened_ddp.data.batches.collate import find_collate
from hardened_ddp.data.batches.fetch import Fetcher
from hardened_ddp.data.batches.images import MemoryImages
from hardened_ddp.data.batches.workers import plan_workers, read_cpu_quota
from hardened_ddp.data.sources import built_in
from hardened_ddp.data.sources.datasets import build_data, prepare_data
from hardened_ddp.data.sources.hub_sets import find_place
from hardened_ddp.errors import DataError, HardenedError, MissingPackageError, ModelError
from hardened_ddp.model.zoo import build_model, check_model
from hardened_ddp.settings.config import DataConfig, ModelConfig
from hardened_ddp.streams.formats import open_files
from tests.harness.processes import ROOT
from tests.harness.ranks import run_command
from tests.marks import sections

HERE = "tests.data.test_datasets"


class Pairs(torch.utils.data.Dataset[Any]):
    """A map-style dataset of somebody else."""

    def __init__(self, size: int = 20, *, num_classes: int | None = 2, noise: float = 0.0) -> None:
        self.size = size
        self.noise = noise
        if num_classes is not None:
            self.num_classes = num_classes

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 4, 4), float(index)) + self.noise * torch.rand(1), index % 2


def open_pairs(
    *,
    train: bool,
    size: int = 20,
    noise: float = 0.0,
    num_classes: int | None = 2,
    says: Mapping[str, Any] | None = None,
) -> Pairs:
    """says: attributes of the dataset."""
    dataset = Pairs(min(size, 20 if train else 4), noise=noise, num_classes=num_classes)
    for name, value in (says or {}).items():
        setattr(dataset, name, value)
    return dataset


class Unseeded(Pairs):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 4, 4), random.SystemRandom().random()), index % 2


def open_unseeded(*, train: bool, root: str = "") -> Pairs:
    return Unseeded()


def open_without_test(*, train: bool) -> Pairs | None:
    return Pairs() if train else None


def open_unlabelled(*, train: bool) -> Any:
    dataset = TensorDataset(torch.zeros(4, 2))
    dataset.num_classes = 2  # type: ignore[attr-defined]
    return dataset


def open_broken(*, train: bool) -> Any:
    raise ValueError("the index file is cut off")


DOWNLOADS: list[tuple[bool, str]] = []


def open_downloaded(*, train: bool, data_dir: str, download: bool) -> Pairs:
    if download:
        DOWNLOADS.append((train, data_dir))
    return Pairs()


def config(dataset: str, **settings: Any) -> DataConfig:
    name = f"{HERE}:{dataset}" if dataset.startswith("open_") else dataset
    return DataConfig(dataset=name, **settings)


def test_digits_are_the_1797_of_scikit_learn() -> None:
    data = build_data(config("digits"))
    assert isinstance(data.train, MemoryImages)
    assert isinstance(data.test, MemoryImages)
    assert (len(data.train), len(data.test)) == (1437, 360)
    assert (data.num_classes, data.input_shape, data.in_memory) == (10, (1, 8, 8), True)
    assert data.class_names == tuple("0123456789")
    image, label = data.train[0]
    assert (image.shape, image.dtype, label.dtype) == ((1, 8, 8), torch.float32, torch.int64)
    assert abs(float(data.train.images.mean())) < 0.01
    assert abs(float(data.train.images.std()) - 1) < 0.01
    # Each of the 1,797 is in one part: the classes add up to what the data set's authors count.
    labels = torch.cat([data.train.labels, data.test.labels])
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert data.test.labels.bincount().min() > 20


def test_missing_or_bad_digits_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "datasets" / "data"
    folder.mkdir(parents=True)
    (folder / "digits.csv.gz").write_bytes(gzip.compress(b"1,2,3\n"))
    damaged = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    for spec, told in ((None, r"(?s)scikit-learn.*pip install"), (damaged, "can't be opened")):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, spec=spec: spec)
        with pytest.raises(DataError, match=told):
            build_data(config("digits"))


def test_synthetic_images_are_a_function_of_their_number() -> None:
    arguments = {"num_samples": 10**9, "image_size": 8, "channels": 1, "num_classes": 4}
    first, second = (build_data(config("synthetic", dataset_args=arguments)) for _ in range(2))
    assert (len(first.train), first.num_classes) == (10**9, 4)  # type: ignore[arg-type]
    assert first.input_shape == (1, 8, 8)
    for index in (0, 5, 10**9 - 1):
        (image, label), (again, again_label) = first.train[index], second.train[index]
        assert torch.equal(image, again)
        assert label == again_label
    assert first.test is not None
    assert not torch.equal(first.train[0][0], first.test[0][0])


def test_a_name_is_spelled_in_its_usual_ways_or_gets_the_nearest_one(tmp_path: Path) -> None:
    for name in ("fashion-mnist", "FashionMNIST", "Image_Folder", "CIFAR10"):
        with pytest.raises(DataError) as caught:
            build_data(config(name, data_dir=str(tmp_path), download=False))
        assert "no dataset is called" not in caught.value.message
    with pytest.raises(DataError, match=r"did you mean cifar10\?") as caught:
        build_data(config("ciffar10"))
    assert "digits | synthetic | mnist" in caught.value.fix


def test_your_own_dataset_gets_its_arguments_or_is_told(caplog: pytest.LogCaptureFixture) -> None:
    data = build_data(config("open_pairs", dataset_args={"size": 7}, augment=True))
    assert len(data.train) == 7  # type: ignore[arg-type]
    assert (data.num_classes, data.input_shape, data.in_memory) == (2, (3, 4, 4), False)
    assert data.class_names == ("0", "1")
    assert "augment is on, running without" in caplog.text
    listed = {"num_classes": None, "says": {"targets": [0, 1, 4, 1]}}
    assert build_data(config("open_pairs", dataset_args=listed)).num_classes == 5
    wrong = {"num_classes": 2, "says": {"targets": [0, 1, 4, 2]}}
    build_data(config("open_pairs", dataset_args=wrong), leaves_out=True)
    assert "its label is 4" in caplog.text
    assert "2 such samples will be left out" in caplog.text
    assert build_data(config("open_without_test")).test is None
    for name in ("digits", "open_pairs"):
        with pytest.raises(DataError, match=r"does not take dataset_args.*colour") as caught:
            build_data(config(name, dataset_args={"colour": 1}))
        assert ("size" in caught.value.fix) == (name == "open_pairs")
    with pytest.raises(DataError, match=r"index file is cut off \(.*test_datasets.py:\d+\)"):
        build_data(config("open_broken"))


def test_classes_may_be_unknown_until_a_model_needs_them() -> None:
    assert not build_data(config("open_unlabelled")).labels_are_classes
    assert build_data(config("open_pairs", dataset_args={"num_classes": None})).num_classes == 0
    with pytest.raises(DataError, match="does not say how many classes"):
        build_model(ModelConfig(model="mlp"), num_classes=0, input_shape=(2,))


def test_the_fingerprint_follows_the_data_and_not_its_place() -> None:
    def fingerprint(dataset: str, **arguments: Any) -> str:
        return build_data(config(dataset, dataset_args=arguments)).fingerprint

    same = fingerprint("synthetic", image_size=8)
    assert fingerprint("synthetic", image_size=8) == same
    others = [
        fingerprint("synthetic", image_size=16),
        fingerprint("synthetic", image_size=8, num_samples=11),
        fingerprint("synthetic", image_size=8, test_samples=11),
        fingerprint("digits"),
        fingerprint("open_pairs"),
        fingerprint("open_pairs", size=19),
    ]
    assert len({same, *others}) == 1 + len(others)
    # Of random samples the seeded value counts, and looking at them moves nobody else's numbers.
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    assert fingerprint("open_pairs", noise=1.0) == fingerprint("open_pairs", noise=1.0)
    assert torch.equal(torch.rand(1), expected)
    # Of samples that no seed repeats only the number counts; and of no data its folder.
    assert fingerprint("open_unseeded") == fingerprint("open_unseeded")
    assert fingerprint("open_unseeded", root="/a") == fingerprint("open_unseeded", root="/b")


def test_only_what_can_download_is_prepared(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "data"
    prepare_data(config("open_downloaded", data_dir=str(folder), download=False))
    prepare_data(config("digits", data_dir=str(folder)))
    assert not DOWNLOADS
    assert not folder.exists()
    prepare_data(config("open_downloaded", data_dir=str(folder)))
    assert [train for train, _ in DOWNLOADS] == [True, False]
    assert {place for _, place in DOWNLOADS} == {str(folder)}
    build_data(config("open_downloaded", data_dir=str(folder)))
    assert len(DOWNLOADS) == 2
    DOWNLOADS.clear()


def write_mnist(folder: Path, *, images: np.ndarray, labels: np.ndarray) -> None:
    """Write MNIST's files, in its format, with these images in both parts."""
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        head = np.array([0x803, *images.shape], dtype=">i4").tobytes()
        (raw / f"{part}-images-idx3-ubyte").write_bytes(head + images.tobytes())
        head = np.array([0x801, len(labels)], dtype=">i4").tobytes()
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(head + labels.tobytes())


def test_mnist_is_kept_as_bytes_and_normalised_by_the_batch(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 256, (12, 28, 28), dtype=np.uint8)
    write_mnist(tmp_path, images=images, labels=np.arange(12, dtype=np.uint8) % 10)
    data = build_data(config("mnist", data_dir=str(tmp_path), download=False))
    assert isinstance(data.train, MemoryImages)
    assert data.train.images.dtype == torch.uint8
    assert (data.num_classes, data.input_shape) == (10, (1, 28, 28))
    found, labels = data.train.__getitems__([3, 11])
    expected = (torch.from_numpy(images[[3, 11]]).float() / 255 - 0.1307) / 0.3081
    torch.testing.assert_close(found, expected[:, None])
    assert labels.tolist() == [3, 1]


def test_colour_images_get_their_channels_first(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
    source = SimpleNamespace(data=pixels, targets=[0, 1, 2, 3], classes=list("abcdefghij"))
    torchvision = SimpleNamespace(datasets=SimpleNamespace(CIFAR10=lambda *a, **k: source))
    monkeypatch.setattr(built_in, "import_torchvision", lambda: torchvision)
    data = build_data(config("cifar10"))
    found, _ = data.train[2]
    mean, deviation = torch.tensor([0.4914, 0.4822, 0.4465]), torch.tensor([0.2470, 0.2435, 0.2616])
    expected = (torch.from_numpy(pixels[2]) / 255 - mean) / deviation
    torch.testing.assert_close(found, expected.permute(2, 0, 1))


def test_missing_and_damaged_files_come_with_the_steps_by_hand(tmp_path: Path) -> None:
    for is_there in (False, True):
        with pytest.raises(DataError, match="can't be found whole") as caught:
            build_data(config("mnist", data_dir=str(tmp_path), download=False))
        assert "download.py --dataset mnist" in caught.value.fix
        if not is_there:
            images = np.zeros((2, 28, 28), np.uint8)
            write_mnist(tmp_path, images=images, labels=np.zeros(2, np.uint8))
            for path in (tmp_path / "MNIST" / "raw").iterdir():
                path.write_bytes(path.read_bytes()[:-1])
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="can't be written"):
        prepare_data(config("open_downloaded", data_dir=str(tmp_path / "file" / "data")))


def write_pictures(root: Path, part: str, names: list[str]) -> None:
    image = pytest.importorskip("PIL.Image")
    for number, name in enumerate(names):
        (root / part / name).mkdir(parents=True)
        for index in range(3):
            colour = (40 * index, 100 * number, 0)
            image.new("RGB", (20, 14), colour).save(root / part / name / f"{index}.png")


def test_a_folder_of_pictures_has_one_class_per_sub_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        build_data(config("image_folder", dataset_args={"root": str(tmp_path)}))
    write_pictures(tmp_path, "train", ["cat", "dog"])
    write_pictures(tmp_path, "val", ["cat", "dog"])
    arguments = {"root": str(tmp_path), "image_size": 8}
    data = build_data(config("image_folder", dataset_args=arguments))
    assert data.class_names == ("cat", "dog")
    assert (data.input_shape, data.in_memory) == ((3, 8, 8), False)
    assert len(data.train) == 6  # type: ignore[arg-type]
    batch = Fetcher(data.train, seed=0)[(0, torch.arange(6))]
    assert batch.targets.tolist() == [0, 0, 0, 1, 1, 1]
    # A broken picture is one bad sample, and names itself.
    broken = tmp_path / "train" / "cat" / "1.png"
    broken.write_bytes(broken.read_bytes()[:40])
    batch = Fetcher(data.train, seed=0)[(0, torch.arange(6))]
    assert [bad.index for bad in batch.bad] == [1]
    assert batch.indices.tolist() == [0, 2, 3, 4, 5]
    write_pictures(tmp_path, "train", ["owl"])
    with pytest.raises(DataError, match="different classes \\(owl"):
        build_data(config("image_folder", dataset_args=arguments))


@pytest.mark.slow
def test_torchvision_is_imported_whether_its_build_fits_or_not(tmp_path: Path) -> None:
    programs = sections(Path(__file__).with_name("torchvision.txt"))
    (tmp_path / "its_model.py").write_text(programs["model"])
    argv, env = [sys.executable, "-c", programs["import"]], {"PYTHONPATH": f"{ROOT}:{tmp_path}"}
    done = run_command(argv, timeout_s=90, cwd=tmp_path, env=env).ok()
    assert done.stdout.count("FOUND 3") == 2
    assert "WARNED" not in done.stdout, "nothing needs to be done"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ModuleNotFoundError("No module named torchvision"), "not installed"),
        (ImportError("undefined symbol: _ZN"), "does not fit torch.*undefined symbol"),
    ],
)
def test_a_torchvision_that_cannot_be_had_is_refused(
    error: ImportError, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> None:
        raise error

    monkeypatch.setattr(foreign_code.importlib, "import_module", refuse)
    with pytest.raises(DataError, match=told) as caught:
        foreign_code.import_torchvision.__wrapped__()
    assert "pip install" in caught.value.fix


def test_augmentation_does_not_depend_on_the_batch() -> None:
    images = torch.randint(0, 256, (30, 3, 16, 16), dtype=torch.uint8)
    scale = ((0.5,) * 3, (0.25,) * 3)
    data = MemoryImages(images, torch.arange(30), classes=["a"], scale=scale).augmented()
    together, _ = data.fetch(torch.arange(30), seed=1, epoch=2)
    shuffled = torch.randperm(30)
    assert torch.equal(data.fetch(shuffled, seed=1, epoch=2)[0], together[shuffled])
    alone = torch.cat([data.fetch(torch.tensor([i]), seed=1, epoch=2)[0] for i in range(30)])
    assert torch.equal(alone, together)
    for seed, epoch in ((1, 3), (2, 2)):
        assert not torch.equal(data.fetch(torch.arange(30), seed=seed, epoch=epoch)[0], together)


def test_augmentation_shifts_every_way_and_mirrors_colour_only() -> None:
    shifted = {(row, column) for row in (2, 3, 4) for column in (0, 1, 2)}
    mirrored = {(row, 7 - column) for row, column in shifted}
    for channels, expected in ((1, shifted), (3, shifted | mirrored)):
        images = torch.zeros(400, channels, 8, 8)
        images[:, :, 3, 1] = 1.0
        data = MemoryImages(images, torch.zeros(400), classes=["a"]).augmented()
        found = data.fetch(torch.arange(400), seed=0, epoch=0)[0][:, 0]
        assert {(row, column) for _, row, column in found.nonzero().tolist()} == expected


@pytest.mark.parametrize(
    ("files", "cpus"),
    [
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu.max": "not a number\n"}, None),
    ],
)
def test_a_cpu_quota_is_read(tmp_path: Path, files: dict[str, str], cpus: float | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert read_cpu_quota(tmp_path) == cpus


def plan(monkeypatch: pytest.MonkeyPatch, *, cpus: int, ranks: int = 1, **facts: Any) -> Any:
    """Plan for a machine with this many CPUs."""
    monkeypatch.setattr("hardened_ddp.data.batches.workers.cpu_budget", lambda: cpus)
    settings = {key: facts.pop(key) for key in ("num_workers", "prefetch_factor") if key in facts}
    needed = {"in_memory": False, "uses_gpu": False, "batch_bytes": 1000, **facts}
    return plan_workers(DataConfig(**settings), local_world_size=ranks, **needed)


def test_workers_follow_the_cpus_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan(monkeypatch, cpus=16, in_memory=True).num_workers == 0
    assert plan(monkeypatch, cpus=64).num_workers == 8
    assert plan(monkeypatch, cpus=8, ranks=2).num_workers == 3
    assert plan(monkeypatch, cpus=2, ranks=2).num_workers == 0
    assert plan(monkeypatch, cpus=2, ranks=2, uses_gpu=True).num_workers == 1
    assert plan(monkeypatch, cpus=1, ranks=8, uses_gpu=True).num_workers == 1
    found = plan(monkeypatch, cpus=4, ranks=2, num_workers=6)
    assert (found.num_workers, found.reason) == (6, "")


def test_batches_too_large_for_shm_mean_fewer_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    room = SimpleNamespace(free=64 * 2**20)  # the 64 MiB of a container
    monkeypatch.setattr("shutil.disk_usage", lambda path: room)
    asked = {"cpus": 8, "num_workers": 4, "prefetch_factor": 4}
    for batch_mib, expected in ((1, (4, 4)), (5, (4, 2)), (20, (2, 1)), (100, (0, 1))):
        found = plan(monkeypatch, **asked, batch_bytes=batch_mib * 2**20)
        assert (found.num_workers, found.prefetch_factor) == expected
        assert bool(found.reason) == (batch_mib > 1)
    # The ranks of a node share it.
    found = plan(monkeypatch, **asked, batch_bytes=2**20, ranks=8)
    assert found.num_workers * found.prefetch_factor * 8 * 1.5 <= 64


NUMBER = 3


def open_dataset(path: str) -> None:
    build_data(DataConfig(dataset=path))


def open_model(path: str) -> None:
    build_model(ModelConfig(model=path), num_classes=2, input_shape=(1, 8, 8))


def open_collate(path: str) -> None:
    find_collate([], path)


WAYS: dict[str, tuple[Callable[[str], None], type[HardenedError]]] = {
    "dataset": (open_dataset, DataError),
    "model": (open_model, ModelError),
    "collate": (open_collate, DataError),
}
MISTAKES = sections(Path(__file__).with_name("bad_paths.txt"))


@pytest.mark.parametrize("setting", WAYS)
@pytest.mark.parametrize("path", MISTAKES)
def test_a_path_that_is_of_no_use_is_refused_in_the_same_words(setting: str, path: str) -> None:
    load, kind = WAYS[setting]
    with pytest.raises(kind, match=MISTAKES[path].strip()) as caught:
        load(path)
    assert caught.value.message.startswith(f"--{setting} {path} ")
    assert caught.value.fix


def test_a_broken_module_names_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = "try:\n    {}['key']\nexcept KeyError as e:\n    raise ImportError('no Bert') from e\n"
    sources = {
        "broken": ("import os\nos.gone()\n", r"no attribute 'gone' \(.*broken_module.py:2\)", ""),
        "unread": ("import os\nos.(\n", r"SyntaxError: .*\(unread_module.py, line 2\)", "fix it"),
        "lazy": (lazy, r"no Bert.*; caused by KeyError: 'key'", ""),
        "script": ("import sys\nsys.exit(2)\n", r"SystemExit\(2\).*script_module.py:2", "__main__"),
    }
    monkeypatch.syspath_prepend(tmp_path)
    for name, (text, told, fix) in sources.items():
        (tmp_path / f"{name}_module.py").write_text(text)
        with pytest.raises(ModelError, match=told) as caught:
            open_model(f"{name}_module:it")
        assert fix in caught.value.fix


@pytest.mark.parametrize("place", ["./pets", "/no/such/pets", "~/no/pets", "a/b/pets"])
def test_a_folder_that_is_missing_is_told_before_a_library_is_imported(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "pets").mkdir()
    assert find_place("hf:~/pets", error=DataError) == str(tmp_path / "pets")
    assert find_place("hf:owner/pets", error=DataError) == "owner/pets"
    for streaming in (False, True):
        with pytest.raises(DataError, match=r"there is no such folder; .* that exists is /"):
            build_data(DataConfig(dataset=f"hf:{place}", streaming=streaming))
    with pytest.raises(ModelError, match=r"there is no such folder; .* that exists is /"):
        open_model(f"hf:{place}")


def test_an_absent_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match="--dataset hf:set needs datasets, which is not"):
        build_data(DataConfig(dataset="hf:set"))
    model = ModelConfig(model="hf:vit")
    with pytest.raises(MissingPackageError, match="--model hf:vit needs transformers, which is"):
        build_model(model, num_classes=2, input_shape=(1, 8, 8))
    with pytest.raises(MissingPackageError, match="needs pyarrow, which is not installed"):
        open_files("parquet:/etc/hos*", train=True)


def test_a_first_layer_for_grey_images_gives_what_three_equal_channels_gave() -> None:
    models = []
    for channels in (3, 1):
        torch.manual_seed(0)
        config = ModelConfig(model="squeezenet1_1")
        models.append(build_model(config, num_classes=5, input_shape=(channels, 64, 64)).eval())
    rgb, grey = models
    image = torch.rand(2, 1, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(grey(image), rgb(image.expand(-1, 3, -1, -1)))


@pytest.mark.parametrize("shape", [(), (3,), (4, 4), (1, 2, 4, 4)], ids=str)
def test_the_default_model_says_that_it_needs_images(shape: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match="simple_cnn needs images") as caught:
        build_model(ModelConfig(), num_classes=2, input_shape=shape, task="classification")
    assert "--model mlp" in caught.value.fix
    with pytest.raises(ModelError, match="at least 4x4, not 3x8") as caught:
        build_model(ModelConfig(), num_classes=2, input_shape=(1, 3, 8), task="classification")
    assert "--model mlp" in caught.value.fix


def test_a_misspelled_name_is_answered_with_the_nearest_ones() -> None:
    with pytest.raises(ModelError, match=r"'simple_cn' \(did you mean simple_cnn"):
        check_model("simple_cn")
    with pytest.raises(ModelError, match="no model is called 'nonet'"):
        check_model("nonet")

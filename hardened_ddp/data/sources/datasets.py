"""Datasets by name or by import path.

prepare_data may download, on one rank of each node; build_data only opens, on every rank. A wrong
name, missing files and no network are each a DataError before training.
Does not own: the order of samples (data/batches/sampler.py), reading them (data/batches/loader.py).
"""

import contextlib
import functools
import inspect
import logging
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from hardened_ddp.data.batches.collate import find_collate
from hardened_ddp.data.batches.images import MemoryImages
from hardened_ddp.data.foreign_code import describe, import_callable, line_of_user
from hardened_ddp.data.sources import facts
from hardened_ddp.data.sources.built_in import (
    DOWNLOADABLE,
    SyntheticImages,
    by_hand,
    open_digits,
    open_downloadable,
    open_folder,
)
from hardened_ddp.data.sources.downloads import TIMEOUT_S, fetch_dataset, is_here, locked
from hardened_ddp.data.sources.facts import AnyDataset
from hardened_ddp.data.sources.hub_sets import PREFIX, load_part, open_hub_set
from hardened_ddp.data.sources.mix import PREFIX as MIX
from hardened_ddp.data.sources.mix import open_mix, parts_of
from hardened_ddp.errors import ANY_FAILURE, DataError, HardenedError
from hardened_ddp.settings.config import DataConfig
from hardened_ddp.settings.wording import nearest

log = logging.getLogger(__name__)

BUILT_IN: Mapping[str, Callable[..., Dataset[Any]]] = {
    "digits": open_digits,
    "synthetic": SyntheticImages,
    **{name: functools.partial(open_downloadable, name) for name in DOWNLOADABLE},
}
STREAM_FORMATS = ("text", "parquet", "tar")  # of streams/formats.py
NAMES = (*BUILT_IN, "image_folder")


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskData:
    """What to train on, what to test on, and their shape."""

    train: AnyDataset
    test: AnyDataset | None
    # Outputs that a model needs for the labels: classes, or numbers of one label. 0: not known.
    num_classes: int
    label_size: int  # numbers in the label of one sample
    # Of one sample, without the batch: (channels, height, width). Empty if it has none.
    input_shape: tuple[int, ...]

    # Labels are integers below num_classes, and not in a format that only the model knows.
    labels_are_classes: bool
    class_names: tuple[str, ...]
    fingerprint: str  # differs if name, arguments, length or one of a few samples differs
    told: str  # the lengths and the beginning of the fingerprint, for a message
    in_memory: bool  # read by the batch from memory: worker processes would only slow it down


def prepare_data(config: DataConfig) -> None:
    """Download what is missing. Call on one rank of each node. Raises DataError."""
    name = _known_name(config.dataset)
    if name.startswith(MIX):
        for part in parts_of(config):
            prepare_data(part)
        return
    taken = inspect.signature(find_source(name, config)).parameters
    if not config.download or "download" not in taken:
        return
    folder = Path(config.data_dir)
    with _ready_to_download(folder):
        if name not in DOWNLOADABLE:
            for train in (True, False):
                _open(name, config, train=train, download=True)
        elif not is_here(name, folder):
            try:
                fetch_dataset(name, folder, say=log.info)
            except DataError as error:
                raise DataError(error.message, fix=error.fix or by_hand(name, folder)) from error


def build_data(
    config: DataConfig, *, leaves_out: bool = False, task: str = "auto", evaluates: bool = True
) -> TaskData:
    """Open the training and the test set; downloads nothing. Rank-local. Raises DataError.

    leaves_out: samples with a label out of range will be left out, so they are not an error here.
    task: as --task names it. evaluates: else a test stream is not counted, which may have no end.
    """
    name = _known_name(config.dataset)
    train, test = _open_both(name, config, evaluates=evaluates)
    facts.check_classes((train, test), config.dataset)
    if config.augment and isinstance(train, MemoryImages):
        train = train.augmented()
    elif config.augment and name != "image_folder":
        log.warning(
            "augment is on, running without: %s has no augmentation (add it in the dataset's "
            "__getitem__; random numbers there are seeded per sample)",
            config.dataset,
        )
    collate = find_collate(train, config.collate)
    example = facts.read_example(train, config.dataset, collate)
    inputs, targets = example.inputs, example.targets
    is_number = isinstance(targets, torch.Tensor) and targets.dim() == 1
    is_integer = is_number and not (targets.is_floating_point() or targets.is_complex())
    are_classes = is_integer and task in ("auto", "classification")
    num_classes = facts.count_outputs(train, targets, are_classes=are_classes)
    are_classes &= num_classes > 0
    if are_classes:
        facts.check_labels(train, num_classes, config.dataset, leaves_out=leaves_out)
        facts.check_labels(test, num_classes, f"{config.dataset} (test)", leaves_out=leaves_out)
    digest, told = facts.fingerprint(
        # WHY without what was counted: a run may be resumed with an evaluation, or without one
        (train, None if getattr(test, "is_counted", False) else test),
        name=config.dataset,
        arguments=config.dataset_args,
        collate=collate,
    )
    # one input has a shape of its own unless it is nested, or a mapping
    has_shape = isinstance(inputs, torch.Tensor) and not inputs.is_nested
    return TaskData(
        train=train,
        test=test,
        num_classes=num_classes,
        input_shape=tuple(inputs.shape[1:]) if has_shape else (),
        label_size=facts.label_size(targets),
        labels_are_classes=are_classes,
        class_names=tuple(map(str, getattr(train, "classes", None) or range(num_classes))),
        fingerprint=digest,
        told=f"{told}, with fingerprint {digest[:16]}",
        in_memory=facts.is_in_memory(train),
    )


def _open_both(
    name: str, config: DataConfig, *, evaluates: bool
) -> tuple[AnyDataset, AnyDataset | None]:
    """Open both parts, streams as views."""
    train, test = (_open(name, config, train=train) for train in (True, False))
    if test is not None and not facts.is_map_style(test):
        from hardened_ddp.streams.views import view_in_order  # WHY here: only for a stream

        test = view_in_order(test, config.dataset, evaluates=evaluates)
    if train is not None and not facts.is_map_style(train):
        from hardened_ddp.streams.views import view_of

        train = view_of(train, config.dataset)
    if train is None or len(train) == 0:  # type: ignore[arg-type]  # map-style: it has a length
        raise DataError(f"dataset {config.dataset} has no training sample", fix="check its folder")
    if test is not None and len(test) == 0:  # type: ignore[arg-type]  # as above
        test = None
    return train, test


def _known_name(name: str) -> str:
    if ":" in name:
        return name
    folded = name.lower().replace("-", "").replace("_", "")
    found = next((known for known in NAMES if known.replace("_", "") == folded), None)
    if found is None:
        near = nearest(name, NAMES)
        raise DataError(
            f"no dataset is called {name!r}" + (f" (did you mean {near}?)" if near else ""),
            fix=f"--dataset {' | '.join(NAMES)} | hf:FOLDER | text:GLOB | parquet:GLOB | "
            "tar:GLOB | mix:NAME,NAME | package.module:callable",
        )
    return found


def _open(
    name: str, config: DataConfig, *, train: bool, download: bool = False
) -> AnyDataset | None:
    """Call what opens this dataset with dataset_args; its failures become a DataError."""
    build = find_source(name, config)
    signature = inspect.signature(build)
    offered = {"data_dir": config.data_dir, "download": download}
    extra = {key: value for key, value in offered.items() if key in signature.parameters}
    arguments = {"train": train, **extra, **config.dataset_args}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        set_here = [key for key in signature.parameters if key not in ("train", *offered)]
        raise DataError(
            f"dataset {name} does not take dataset_args {dict(config.dataset_args)}: {error}",
            fix=f"it takes: {', '.join(set_here) or 'nothing'}"
            + ("; and it must take train=True or train=False" if ":" in name else ""),
        ) from error
    try:
        dataset: AnyDataset | None = build(**arguments)
    except HardenedError:
        raise
    except ANY_FAILURE as error:  # WHY broad: the user's code; its file and line go in the message
        log.debug("opening the dataset %s failed", name, exc_info=True)
        raise DataError(
            f"dataset {name} can't be opened: {describe(error)}{line_of_user(error)}",
            fix="fix it, or its --dataset_args; the traceback is in this rank's log file",
        ) from error
    if dataset is not None:
        facts.check_opened(dataset, name)
    return dataset


def find_source(name: str, config: DataConfig) -> Callable[..., Any]:
    """Find what to call with train=True or train=False to get a dataset. Raises DataError."""
    name = _known_name(name)
    if name.startswith(PREFIX):
        if not config.streaming:
            return functools.partial(open_hub_set, name)
        from hardened_ddp.streams.adapters import open_hub_stream

        return functools.partial(open_hub_stream, name, load_part)
    if name.startswith(MIX):
        for part in parts_of(config):
            find_source(part.dataset, part)
        return functools.partial(open_mix, config, _open)
    if name.partition(":")[0] in STREAM_FORMATS:
        from hardened_ddp.streams.formats import open_files

        return functools.partial(open_files, name)
    if ":" in name:
        return import_callable(name, setting="dataset", error=DataError)
    return BUILT_IN.get(name, functools.partial(open_folder, config))


@contextlib.contextmanager
def _ready_to_download(folder: Path) -> Iterator[None]:
    """Make the folder, lock it for one process at a time, and limit each wait for the network.

    WHY a lock: the folder may be shared by several nodes, or by two runs.
    """
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder / "download"))
        except OSError as error:
            raise DataError(
                f"data_dir {folder.resolve()} can't be written: {error}",
                fix="--data_dir FOLDER, a writable one; --no_download if all files are there",
            ) from error
        stack.callback(socket.setdefaulttimeout, socket.getdefaulttimeout())
        socket.setdefaulttimeout(TIMEOUT_S)
        yield

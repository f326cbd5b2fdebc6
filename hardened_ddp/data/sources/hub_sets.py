"""Sets of the datasets library, by folder or by name: --dataset hf:PATH_OR_NAME.

Owns loading them, and their rows: of images as (image, label), in [-1, 1], as most image models
expect; of tokenised texts as a mapping, padded at their end, so that padding is neither attended to
nor counts in the loss. A PATH is what save_to_disk() wrote, or a
folder that load_dataset() can read; a NAME is looked up on the Hub once per node, when the data is
prepared, and read from the library's cache after that. Does not own: sets that are read as a stream
(streams/adapters.py).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from hardened_ddp.data.batches.images import IMAGE_COLUMNS, LABEL_COLUMNS, pixels_of
from hardened_ddp.data.foreign_code import import_extra
from hardened_ddp.errors import DataError, HardenedError

PREFIX = "hf:"
_TEST_PARTS = ("validation", "valid", "val", "test")
IDS, MASK, LABELS = "input_ids", "attention_mask", "labels"
NO_LABEL = -100  # as in torch's cross-entropy
_USUAL = (IDS, MASK, "token_type_ids")

Sample = dict[str, torch.Tensor]


class HubImages(Dataset[tuple[torch.Tensor, int]]):
    """One part of an image set. Any: rows of the datasets library."""

    def __init__(self, rows: Any, *, image: str, label: str, image_size: int) -> None:
        self.rows, self.image, self.label, self.image_size = rows, image, label, image_size
        self.targets = torch.as_tensor(np.asarray(rows[label][:]), dtype=torch.int64)
        if names := getattr(rows.features[label], "names", None):
            self.classes = list(names)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        pixels = pixels_of(self.rows[int(index)][self.image], self.image_size)
        return pixels, int(self.targets[index])


class HubTokens(Dataset[Sample]):
    """One part of a tokenised set. Any: rows of the datasets library."""

    uses_randomness = False
    in_memory = False

    def __init__(
        self, rows: Any, *, label: str, columns: Sequence[str], pad: int | None, num_classes: int
    ) -> None:
        """columns: of the inputs; none: the usual ones. pad: the token at the end of short rows."""
        self.label = label
        self.inputs = [name for name in columns or _USUAL if name in rows.features]
        self.rows = rows.with_format("torch", columns=[*dict.fromkeys([*self.inputs, label])])
        pc = import_extra("pyarrow.compute", what="a tokenised set")
        lengths = pc.min_max(pc.list_value_length(rows.data.column(IDS))).as_py()
        differ = lengths["min"] != lengths["max"]
        self.makes_mask = differ and MASK not in self.inputs and MASK in (columns or _USUAL)
        feature = rows.features[label]
        values = getattr(feature, "feature", None)  # of a list
        if values is None:
            self.targets = torch.as_tensor(rows.with_format("torch")[label][:])
            if differ and pad is None:
                raise DataError(
                    f"texts of {lengths['min']} to {lengths['max']} tokens have one label each "
                    f"(column {label}): some models look for the padding, to find the last token",
                    fix="--dataset_args '{pad: NUMBER}': pad_token_id of the model's tokenizer",
                )
        self.pad = pad or 0
        if names := getattr(values or feature, "names", None):
            self.classes = list(names)
        elif num_classes:
            self.num_classes = num_classes

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        return list(map(self._sample_of, self.rows.__getitems__([int(i) for i in indices])))

    def collate_fn(self, samples: Sequence[Sample]) -> Sample:
        fills = {IDS: self.pad, LABELS: NO_LABEL}
        batch = {}
        for name, first in samples[0].items():
            parts, fill = [sample[name] for sample in samples], fills.get(name, 0)
            batch[name] = pad_sequence(parts, True, fill) if first.dim() else torch.stack(parts)
        return batch

    def _sample_of(self, row: Mapping[str, torch.Tensor]) -> Sample:
        sample = {name: row[name] for name in self.inputs}
        labels = row[self.label]
        if self.makes_mask:
            sample[MASK] = torch.ones_like(row[IDS])
        if self.label == IDS and MASK in sample:  # WHY: the set may have padding of its own
            labels = labels.masked_fill(sample[MASK] == 0, NO_LABEL)
        return {**sample, LABELS: labels}


def open_hub_set(
    name: str,
    *,
    train: bool,
    data_dir: str,
    download: bool,
    image: str = "",
    label: str = "",
    image_size: int = 0,
    train_part: str = "train",
    test_part: str = "",
    subset: str = "",
    columns: Sequence[str] = (),
    pad: int | None = None,
    num_classes: int = 0,
) -> HubImages | HubTokens | None:
    """Open the training or the test part; None if there is no part to test on.

    image, label: columns; by default the usual names are tried. image_size: scale images to this
    height and width; 0: don't scale. subset: one of several sets under the same name. columns, pad,
    num_classes: of texts, see HubTokens.
    """
    part: dict[str, Any] = {"train": train, "train_part": train_part, "test_part": test_part}
    rows = load_part(name, subset, **part, data_dir=data_dir, download=download)
    if rows is None:
        return None
    is_text = not image and IDS in rows.features and not set(IMAGE_COLUMNS) & rows.features.keys()
    if not is_text:
        image = _column(name, rows, image, IMAGE_COLUMNS)
    label = _column(name, rows, label, LABEL_COLUMNS)
    if is_text:
        return HubTokens(rows, label=label, columns=columns, pad=pad, num_classes=num_classes)
    return HubImages(rows, image=image, label=label, image_size=image_size)


def find_place(name: str, *, error: type[HardenedError]) -> str:
    """Return the folder or the Hub's name behind hf:, also of a model.

    Raises error for a folder that is missing: to the libraries it looks like a name.
    """
    place = name.removeprefix(PREFIX)
    path = Path(place).expanduser()
    if path.exists():
        return str(path)
    if place.startswith((".", "/", "~")) or place.count("/") > 1:
        above = next(parent for parent in path.absolute().parents if parent.is_dir())
        raise error(
            f"{name}: there is no such folder; the last part of its path that exists is {above}",
            fix="check the path; a name on the Hub is NAME or OWNER/NAME",
        )
    return place


def load_part(
    name: str, subset: str, *, train: bool, train_part: str, test_part: str, **how: Any
) -> Any:
    """Load the part to train or to test on; None: there is none to test on. Raises DataError.

    how: as of load_parts. Any: its arguments; a part of a set of the datasets library.
    """
    parts = load_parts(name, subset, **how)
    wanted = [train_part] if train else [test_part] if test_part else _TEST_PARTS
    found = next((parts[key] for key in wanted if key in parts), None)
    if found is None and (train or test_part):
        raise DataError(
            f"{name} has no part {wanted[0]!r}; it has: {', '.join(map(str, parts))}",
            fix="--dataset_args '{train_part: NAME, test_part: NAME}'",
        )
    return found


def load_parts(
    name: str, subset: str, *, data_dir: str, download: bool, streaming: bool = False
) -> Mapping[str, Any]:
    """Load all parts of a folder or a name. Raises DataError.

    Runs no code of the dataset: the library dropped such datasets.
    """
    place = find_place(name, error=DataError)  # WHY first: importing the library takes longer
    datasets = import_extra("datasets", what=f"--dataset {name}")
    datasets.disable_progress_bars()
    try:
        if (Path(place) / "dataset_dict.json").is_file():
            return dict(datasets.load_from_disk(place))
        if (Path(place) / "state.json").is_file():
            return {"train": datasets.load_from_disk(place)}
        return dict(
            datasets.load_dataset(
                place,
                subset or None,
                cache_dir=str(Path(data_dir) / "huggingface"),
                download_config=datasets.DownloadConfig(local_files_only=not download),
                streaming=streaming,
            )
        )
    except Exception as error:  # WHY broad: the library passes on any error of network or files
        text = str(error).partition("\n")[0][:300]
        raise DataError(
            f"{name} can't be opened: {type(error).__name__}: {text}",
            fix="check the name; without network: on a machine with network, run "
            "load_dataset(NAME).save_to_disk(FOLDER) of the datasets package, copy FOLDER, and use "
            "--dataset hf:FOLDER",
        ) from error


def _column(set_name: str, rows: Any, given: str, usual: Sequence[str]) -> str:
    names = list(rows.features)
    if found := next((name for name in ([given] if given else usual) if name in names), ""):
        return found
    fix = "--dataset_args '{image: COLUMN, label: COLUMN}'; of a text: its tokens in a column "
    fix += f"{IDS}, made with dataset.map(), in a folder that save_to_disk() writes"
    if IDS in names:
        fix = "--dataset_args '{label: COLUMN}'; for a causal language model: '{label: input_ids}'"
    raise DataError(
        f"{set_name} has no column {given or ' or '.join(usual)}; it has: {', '.join(names)}",
        fix=fix,
    )

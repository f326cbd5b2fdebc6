"""The files of the published datasets and weights, and where they are stored.

Owns the list, taken from torchvision with its addresses, names and hashes. Weights go where
torch.hub looks for them under TORCH_HOME, which a run sets to ./models if that folder has some.
Does not own: the transfer (transfer.py), opening the data (vision.py).
"""

import difflib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hardened_ddp.data.foreign_code import import_torchvision
from hardened_ddp.data.sources.transfer import Wanted, fetch
from hardened_ddp.data.sources.vision import DOWNLOADABLE, open_downloadable
from hardened_ddp.errors import DataError

WEIGHTS_FOLDER = Path("hub") / "checkpoints"  # under TORCH_HOME
_HASH_IN_NAME = re.compile(r"-([0-9a-f]{8,})\.")


def is_here(name: str, data_dir: Path) -> bool:
    """Return whether a dataset can be opened as it lies in data_dir, also without its archives."""
    try:
        for train in (True, False):
            open_downloadable(name, train=train, data_dir=str(data_dir), download=False)
    except DataError:
        return False
    return True


def fetch_dataset(name: str, data_dir: Path, *, say: Callable[[str], None]) -> None:
    """Download a dataset to data_dir, unpack it and check that it opens. Rank-local.

    An archive that is complete already is checked by its hash. Raises DataError.
    """
    if name not in DOWNLOADABLE:
        raise DataError(
            f"{name!r} can't be downloaded", fix=f"--dataset {' | '.join(DOWNLOADABLE)}"
        )
    dataset = getattr(import_torchvision().datasets, DOWNLOADABLE[name][0])
    for wanted in files_of(dataset, data_dir):
        fetch(wanted, say=say)
    for train in (True, False):
        # The archives are here, so this only unpacks them.
        part = open_downloadable(name, train=train, data_dir=str(data_dir), download=True)
        say(f"{name}: {len(part)} samples to {'train' if train else 'test'} on")


def files_of(dataset: Any, data_dir: Path) -> Sequence[Wanted]:  # Any: a class of torchvision
    """List the archives of a dataset of torchvision."""
    if hasattr(dataset, "resources"):  # MNIST and its kin
        folder = data_dir / dataset.__name__ / "raw"
        return [
            Wanted(
                urls=[mirror + name for mirror in dataset.mirrors],
                path=folder / name,
                algorithm="md5",
                digest=digest,
            )
            for name, digest in dataset.resources
        ]
    path = data_dir / dataset.filename
    return [Wanted(urls=[dataset.url], path=path, algorithm="md5", digest=dataset.tgz_md5)]


def fetch_weights(name: str, models_dir: Path, *, say: Callable[[str], None]) -> None:
    """Download torchvision's published weights of a model to models_dir. Raises DataError."""
    fetch(weights_of(name, models_dir / WEIGHTS_FOLDER), say=say)


def weights_of(name: str, folder: Path) -> Wanted:
    """Describe the file in folder for torchvision's weights of a model. Raises DataError."""
    models = import_torchvision().models
    try:
        url: str = models.get_model_weights(name).DEFAULT.url
    except ValueError as error:
        near = difflib.get_close_matches(name, models.list_models(module=models), n=1)
        raise DataError(
            f"torchvision has no published weights of {name!r}",
            fix=f"did you mean {near[0]}?" if near else "name one of its classifiers",
        ) from error
    file_name = url.rpartition("/")[2]
    found = _HASH_IN_NAME.search(file_name)
    if found is None:
        raise DataError(f"{file_name} has no hash in its name, so it can't be checked")
    return Wanted(urls=[url], path=folder / file_name, algorithm="sha256", digest=found[1])

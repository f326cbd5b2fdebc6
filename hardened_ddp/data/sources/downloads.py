"""Download the published datasets and weights: resumed, verified, and complete or absent.

Addresses, names and hashes are torchvision's. The bytes so far are in NAME.part; the next try
requests the rest (Range). A file gets its name when its hash is right. One process at a time
downloads it, on all nodes that share its folder. Weights go where torch.hub looks for them under
TORCH_HOME, which a run sets to ./models if that folder has some.
"""

import contextlib
import fcntl
import hashlib
import http
import http.client
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hardened_ddp.data.foreign_code import import_torchvision
from hardened_ddp.data.sources.built_in import DOWNLOADABLE, open_downloadable
from hardened_ddp.errors import DataError

TIMEOUT_S = 30.0  # of one network operation
MOST_TRIES = 4  # for one address without any progress
WAIT_S = 1.0  # before the next try
_BLOCK_BYTES = 1 << 20
_NETWORK_ERRORS = (OSError, http.client.HTTPException)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A file to download."""

    urls: Sequence[str]  # its addresses; the first that works is used
    path: Path
    algorithm: str  # md5 or sha256
    digest: str  # in hexadecimal; a prefix is enough

    def is_here(self) -> bool:
        return self.path.is_file() and self.fits(self.path)

    def fits(self, path: Path) -> bool:
        with path.open("rb") as file:
            return hashlib.file_digest(file, self.algorithm).hexdigest().startswith(self.digest)


def fetch(wanted: Wanted, *, say: Callable[[str], None]) -> None:
    """Download a file unless it is here. Rank-local; waits for other processes that download it.

    Raises DataError: no address could be reached, or what they sent has another hash.
    """
    try:
        if wanted.is_here():  # WHY before: its folder may not be writable
            say(f"{wanted.path}: is complete already")
            return
        wanted.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(wanted.path):
            if not wanted.is_here():  # else another process was faster
                _fetch_from_any(wanted, say)
    except OSError as error:
        raise DataError(
            f"{wanted.path} can't be written: {error}", fix="choose another folder, or free space"
        ) from error


def _fetch_from_any(wanted: Wanted, say: Callable[[str], None]) -> None:
    reasons: list[str] = []
    part = wanted.path.with_name(wanted.path.name + ".part")
    for url in wanted.urls:
        reason = _fetch_from(url, part, say)
        if not reason and wanted.fits(part):
            part.replace(wanted.path)
            say(f"{wanted.path}: complete, {wanted.algorithm} is right")
            return
        if not reason:
            part.unlink()  # WHY: continuing from wrong bytes could never succeed
            reason = f"its content has another {wanted.algorithm} than {wanted.digest}"
        reasons.append(f"{url}: {reason}")
    raise DataError(f"{wanted.path.name} can't be fetched:\n  " + "\n  ".join(reasons))


def _fetch_from(url: str, part: Path, say: Callable[[str], None]) -> str:
    """Download to part from one address, with retries. Return the reason of a failure, or ""."""
    part.touch()
    num_idle, reason, size = 0, "", part.stat().st_size
    while num_idle < MOST_TRIES:
        try:
            say(f"{part.name}: from byte {size} of {url}")
            if _receive(url, part, size):
                return ""
            reason = "the connection was lost"
        except urllib.error.HTTPError as error:
            reason = f"the server answers {error.code} {error.reason}"
            if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
                return ""  # nothing is left to send: the hash decides
            if error.code < http.HTTPStatus.INTERNAL_SERVER_ERROR:
                return reason
        except _NETWORK_ERRORS as error:
            reason = str(getattr(error, "reason", "") or error) or type(error).__name__
        before, size = size, part.stat().st_size
        num_idle = 0 if size > before else num_idle + 1
        time.sleep(WAIT_S)
    return reason


def _receive(url: str, part: Path, start: int) -> bool:
    """Request the bytes from start on and append them; return whether all of them came."""
    headers = {"Range": f"bytes={start}-"} if start else {}
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
        is_rest = response.status == http.HTTPStatus.PARTIAL_CONTENT
        left = int(response.headers.get("Content-Length") or -1)
        with part.open("ab" if is_rest else "wb") as file:
            while block := response.read(_BLOCK_BYTES):
                file.write(block)
                left -= len(block)
    return left <= 0  # WHY not == 0: a server may omit the length, and then the hash decides


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock path for one process at a time, over all nodes that share its folder."""
    with path.with_name(f".{path.name}.lock").open("w", encoding="utf-8") as lock:
        with contextlib.suppress(OSError):  # not every network file system has locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


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
        fix = f"--dataset {' | '.join(DOWNLOADABLE)}"
        raise DataError(f"{name!r} can't be downloaded", fix=fix)
    dataset = getattr(import_torchvision().datasets, DOWNLOADABLE[name][0])
    for wanted in files_of(dataset, data_dir):
        fetch(wanted, say=say)
    for train in (True, False):
        # The archives are here, so this only unpacks them.
        part = open_downloadable(name, train=train, data_dir=str(data_dir), download=True)
        say(f"{name}: {len(part)} samples to {'train' if train else 'test'} on")


def files_of(dataset: Any, data_dir: Path) -> Sequence[Wanted]:  # Any: a class of torchvision
    if hasattr(dataset, "resources"):  # MNIST and its kin
        folder, mirrors = data_dir / dataset.__name__ / "raw", dataset.mirrors
        found = [
            ([m + name for m in mirrors], folder / name, md5) for name, md5 in dataset.resources
        ]
    else:
        found = [([dataset.url], data_dir / dataset.filename, dataset.tgz_md5)]
    return [Wanted(urls=urls, path=path, algorithm="md5", digest=md5) for urls, path, md5 in found]


def weights_of(name: str, folder: Path) -> Wanted:
    """Describe the file in folder for torchvision's weights of a model. Raises DataError."""
    models = import_torchvision().models
    try:
        url: str = models.get_model_weights(name).DEFAULT.url
    except ValueError as error:
        why = f"torchvision has no published weights of {name!r}"
        raise DataError(why, fix="name one of torchvision.models.list_models()") from error
    file_name = url.rpartition("/")[2]
    found = _HASH_IN_NAME.search(file_name)
    if found is None:
        raise DataError(f"{file_name} has no hash in its name, so it can't be checked")
    return Wanted(urls=[url], path=folder / file_name, algorithm="sha256", digest=found[1])

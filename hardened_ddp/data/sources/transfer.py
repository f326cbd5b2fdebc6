"""Download one file: resumed after a broken connection, verified, and complete or absent.

Owns the transfer over HTTP. The bytes so far are in NAME.part; the next try requests the rest
(Range). The file gets its name when its hash is right. One process at a time downloads it, so all
ranks of a node, or of several nodes with one folder, may call fetch at once.
What goes wrong here: no network, a connection that breaks, a server that sends something else.
Does not own: which files there are (published.py).
"""

import contextlib
import fcntl
import hashlib
import http
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hardened_ddp.errors import DataError

TIMEOUT_S = 30.0  # of one network operation
MOST_TRIES = 4  # for one address without any progress
WAIT_S = 1.0  # before the next try
_BLOCK_BYTES = 1 << 20
_NETWORK_ERRORS = (OSError, http.client.HTTPException)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """A file to download."""

    urls: Sequence[str]
    """Its addresses; the first that works is used."""

    path: Path
    algorithm: str
    """md5 or sha256."""

    digest: str
    """In hexadecimal; a prefix is enough."""

    def is_here(self) -> bool:
        return self.path.is_file() and self.fits(self.path)

    def fits(self, path: Path) -> bool:
        with path.open("rb") as file:
            return hashlib.file_digest(file, self.algorithm).hexdigest().startswith(self.digest)


def fetch(wanted: Wanted, *, say: Callable[[str], None]) -> None:
    """Download a file unless it is here. Rank-local; waits for other processes that download it.

    Raises DataError: no address could be reached, or what they sent has another hash.
    """
    if wanted.is_here():
        say(f"{wanted.path}: is complete already")
        return
    try:
        wanted.path.parent.mkdir(parents=True, exist_ok=True)
        with locked(wanted.path):
            if wanted.is_here():  # another process was faster
                say(f"{wanted.path}: is here now")
                return
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
    num_idle, reason = 0, ""
    while num_idle < MOST_TRIES:
        before = part.stat().st_size if part.exists() else 0
        try:
            say(f"{part.name}: from byte {before} of {url}")
            if _receive(url, part, before):
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
        after = part.stat().st_size if part.exists() else 0
        num_idle = 0 if after > before else num_idle + 1
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

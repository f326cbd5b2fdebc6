"""The quick tests under what new machines do: test --hostile [--seed N].

Owns: the conditions that a seed draws, the place of the tests (a fresh copy of the checkout, an
empty HOME, a TMPDIR of another length), the processes beside them, and the end of all of these.
Does not own: the random order (--shuffle of conftest.py), and which tests are quick (stages.py).
What goes wrong here: another user can't read this Python, as one below /root. Then the tests see a
/root of their own, with nothing in it but this Python.
"""

import argparse
import contextlib
import ctypes
import os
import random
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple, TypeVar

from tests.harness.processes import ROOT, adopt_orphans, kill_descendants
from tests.mutate import copy_tree

T = TypeVar("T")
AGAIN = "./launch_examples.sh test --hostile"
SHORT, LONG = 8, 140
"""Characters of TMPDIR."""

NUM_BUSY = 3
NUM_PORTS = 500
"""Ports that are taken at any time."""

_PORTS_PER_SECOND = 200
_END_S = 30.0
_FIRST_UID = 23456
_NEEDED = ("unshare", "setpriv", "mount")
_LEFT_OUT = ("XDG_", "LC_", "CI", "PYTEST_", "PYTHONDONTWRITEBYTECODE")
_LEFT_OUT += ("LANG", "COLUMNS", "LINES", "USER", "LOGNAME", "TMP", "TEMP", "HF_", "TORCH_HOME")
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG of <sys/prctl.h>


class Conditions(NamedTuple):
    """What differs from run to run; the rest of it is the same in all."""

    seed: int
    is_long: bool  # TMPDIR has LONG characters, or else SHORT ones
    is_narrow: bool  # COLUMNS is 40, or else not set
    is_other_user: bool  # not root, if root asks: a user whom /etc/passwd does not know
    has_space: bool  # TMPDIR has one
    is_ci: bool  # CI is set: pytest then shows each failure twice, in full


def draw(seed: int) -> Conditions:
    """Draw the conditions of a seed; any 32 seeds in a row are all combinations."""
    return Conditions(seed, *(bool(seed >> bit & 1) for bit in range(5)))


def shuffled(tests: Sequence[T], group_of: Callable[[T], str], *, seed: int) -> list[T]:
    """Put groups of tests into a random order, and the tests of each group, too."""
    groups: dict[str, list[T]] = {}
    for test in tests:
        groups.setdefault(group_of(test), []).append(test)
    generator = random.Random(seed)
    order = list(groups.values())
    generator.shuffle(order)
    for group in order:
        generator.shuffle(group)
    return [test for group in order for test in group]


def run_hostile(argv: Sequence[str]) -> int:
    """Run the quick tests, or those that argv chooses, and give pytest's exit status."""
    parser = argparse.ArgumentParser(prog="test --hostile", add_help=False, allow_abbrev=False)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1_000_000))
    given, words = parser.parse_known_args(argv)
    conditions = draw(given.seed)
    again = shlex.join([*AGAIN.split(), "--seed", str(given.seed), *words])
    began_at = time.monotonic()
    before = signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    try:
        with contextlib.ExitStack() as stack:
            place = stack.enter_context(_make_place(conditions))
            user, note = _find_user(place) if conditions.is_other_user else ([], "as it is")
            print(f"hostile: {again}\nhostile: {conditions}; user {note}", flush=True)
            for name in ["busy"] * NUM_BUSY + ["ports"]:
                stack.enter_context(_helper(name))
            tests = [sys.executable, "test_ddp_training.py", f"--shuffle={given.seed}", *words]
            status = _run_tests([*user, *tests], conditions, place)
    finally:
        signal.signal(signal.SIGTERM, before)
    verdict = "failed" if status else "passed"
    print(f"hostile: {verdict} in {time.monotonic() - began_at:.0f} s; the same again: {again}")
    return status


class _Place(NamedTuple):
    checkout: Path
    home: Path
    temporary: Path


@contextlib.contextmanager
def _make_place(conditions: Conditions) -> Iterator[_Place]:
    """Make the folders of the tests, and take them away in the end."""
    base = Path(tempfile.mkdtemp(prefix="hostile-", dir="/tmp"))
    temporary = _make_temporary(conditions)
    try:
        base.chmod(0o755)
        place = _Place(checkout=base / "checkout", home=base / "home", temporary=temporary)
        place.home.mkdir()
        copy_tree(ROOT, place.checkout)
        # WHY: some tests copy what git knows of the checkout
        for words in (["init", "--quiet"], ["add", "--all"]):
            subprocess.run(["git", *words], cwd=place.checkout, check=True, timeout=60)
        yield place
    finally:
        for folder in (temporary, base):
            _remove(folder)


def _make_temporary(conditions: Conditions) -> Path:
    """Make a folder in /tmp whose path has as many characters as it must."""
    length = (LONG if conditions.is_long else SHORT) - len("/tmp/")
    while True:
        name = secrets.token_hex(length)[:length]
        if conditions.has_space:
            name = f"{name[0]} {name[2:]}"
        with contextlib.suppress(FileExistsError):
            path = Path("/tmp", name)
            path.mkdir(mode=0o700)
            return path


def _remove(folder: Path) -> None:
    """Remove a folder in which tests may have taken rights away."""
    for parent, names, _ in os.walk(folder):
        for name in names:
            if not (path := Path(parent, name)).is_symlink():
                path.chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _find_user(place: _Place) -> tuple[list[str], str]:
    """Give the words that make a command another user's, and who that is.

    The place becomes theirs. No words, and why not, where that can't be.
    """
    if os.geteuid() != 0:
        return [], f"{os.geteuid()}, who is not root in any case"
    if missing := [name for name in _NEEDED if shutil.which(name) is None]:
        return [], f"root (no {', '.join(missing)} here)"
    known = {int(line.split(":")[2]) for line in Path("/etc/passwd").read_text().splitlines()}
    uid = next(uid for uid in count(_FIRST_UID) if uid not in known)
    script = "set -e\n" + "".join(_show_python(place.home.parent)) + 'exec "$@"'
    words = ["unshare", "--mount", "--propagation", "private", "bash", "-c", script, "bash"]
    words += ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--"]
    argv = [*words, sys.executable, "-c", "import pytest, torch"]
    tried = subprocess.run(argv, cwd="/", capture_output=True, text=True, timeout=300, check=False)
    if tried.returncode:
        return [], f"root (another can't run this Python: {tried.stderr.strip()[-200:]})"
    for folder in (place.checkout, place.home, place.temporary):
        for parent, _, files in os.walk(folder):
            for path in (Path(parent), *(Path(parent, name) for name in files)):
                os.chown(path, uid, uid, follow_symlinks=False)
    return words, f"{uid}, who is not root and has no name"


def _show_python(base: Path) -> Iterator[str]:
    """Yield lines of a shell that put what Python needs into each folder that hides it.

    In a mount namespace of its own: for all others, these folders stay as they are.
    """
    needed = {Path(sys.prefix).resolve(), Path(sys.base_prefix).resolve()}
    hidden: dict[Path, set[Path]] = {}
    for path in needed:
        closed = [parent for parent in path.parents if not parent.stat().st_mode & 0o001]
        if closed:
            hidden.setdefault(closed[-1], set()).add(path)
    for index, (folder, paths) in enumerate(hidden.items()):
        view = base / f"view-{index}"
        yield f"mkdir -p {view}; mount -t tmpfs -o mode=755 none {view}\n"
        for path in sorted(paths):
            shown = shlex.quote(str(view / path.relative_to(folder)))
            yield f"mkdir -p {shown}; mount --bind {shlex.quote(str(path))} {shown}\n"
        yield f"mount --rbind {view} {shlex.quote(str(folder))}\n"


def _run_tests(command: Sequence[str], conditions: Conditions, place: _Place) -> int:
    """Run pytest in place; whatever happens, nothing of it lives on."""
    adopt_orphans()
    env = {name: value for name, value in os.environ.items() if not name.startswith(_LEFT_OUT)}
    env |= {"LANG": "C", "LC_ALL": "C", "HOME": str(place.home), "TMPDIR": str(place.temporary)}
    env |= {"VIRTUAL_ENV": sys.prefix}
    env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', '')}"
    if conditions.is_narrow:
        env["COLUMNS"] = "40"
    if conditions.is_ci:
        env["CI"] = "true"
    tests = subprocess.Popen(command, cwd=place.checkout, env=env)
    try:
        return tests.wait()
    except (KeyboardInterrupt, SystemExit):
        # WHY: it ends its workers, and these end their ranks
        tests.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            tests.wait(_END_S)
        raise
    finally:
        tests.kill()
        tests.wait()
        kill_descendants(os.getpid())


@contextlib.contextmanager
def _helper(name: str) -> Iterator[int]:
    """Have a process beside the tests: busy, or ports. Its process id."""
    words = [sys.executable, "-m", __name__, name, str(os.getpid())]
    process = subprocess.Popen(words, cwd=ROOT)
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def take_ports() -> None:
    """Listen on NUM_PORTS ports that the kernel chooses, and free the oldest one for each new."""
    taken: list[socket.socket] = []
    while True:
        taken.append(socket.create_server(("127.0.0.1", 0)))
        if len(taken) > NUM_PORTS:
            taken.pop(0).close()
        time.sleep(1 / _PORTS_PER_SECOND)


if __name__ == "__main__":
    # the kernel ends this process with its parent, however that ends
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != int(sys.argv[2]):
        sys.exit()
    while sys.argv[1] == "busy":
        pass
    take_ports()

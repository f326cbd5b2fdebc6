"""Checkpoints under fire: a crash at any call, full and broken disks, other writers."""

import errno
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from hardened_ddp.checkpoint.disk import RunLock
from hardened_ddp.checkpoint.folder import (
    Found,
    Rejected,
    discard_newer,
    find_newest,
    list_steps,
    read_best_step,
    verify_checkpoint,
)
from hardened_ddp.checkpoint.store import CheckpointStore
from hardened_ddp.errors import CheckpointError, RunFolderError
from tests.checkpoint_states import assert_holds, disk_with, found_in, write_step
from tests.forks import run_forked
from tests.marks import slow_after

CRASHED = 9


def dying_disk(dies_at: int, *, in_the_middle: bool) -> Any:
    """Make a disk under which the process dies at the k-th call, or in the middle of it."""
    numbers = count(1)

    def around(name: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if next(numbers) == dies_at:
            if in_the_middle:
                half = (args[1][: len(args[1]) // 2],) if name == "write" else args[1:]
                call(args[0], *half)
            os._exit(CRASHED)
        return call(*args)

    def single_call(name: str, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        return around(name, partial(call, **named), args)

    def call_each_of(name: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if name != "remove":
            return around(name, call, args)
        with pytest.MonkeyPatch.context() as patch:  # the calls of shutil.rmtree
            for each in ("unlink", "rmdir"):
                patch.setattr(os, each, partial(single_call, each, getattr(os, each)))
            return call(*args)

    return disk_with(call_each_of)


def prepare_first(root: Path) -> None:
    root.parent.mkdir(parents=True)


def prepare_full(root: Path) -> None:
    """Leave a best one, an old one that the next write prunes, and a leftover of a dead writer."""
    store = CheckpointStore(root, keep_last=3)
    write_step(store, 1)
    write_step(store, 2, best={"value": 0.5})
    write_step(store, 3)
    (root / ".partial-step-000000009-000000000000-1-1").mkdir()
    os.utime(root / ".partial-step-000000009-000000000000-1-1", (1, 1))


def prepare_broken(root: Path) -> None:
    """Leave a valid one, and a broken one of the step that is written next."""
    store = CheckpointStore(root, keep_last=3)
    write_step(store, 3)
    os.truncate(write_step(store, 4) / "state.safetensors", 100)


CRASHES = [(prepare_full, True), (prepare_first, True), (prepare_broken, False)]


@pytest.mark.parametrize("crash", slow_after(1, CRASHES))
def test_a_crash_at_any_call_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, crash: tuple[Callable[[Path], None], bool]
) -> None:
    prepare, in_the_middle = crash
    template = tmp_path / "template" / "checkpoints"
    prepare(template)
    before = CheckpointStore(template, keep_last=1)
    old, old_best = find_newest(before.root)[0], read_best_step(before.root)
    outcomes = set()
    for dies_at in range(1, 200):
        root = tmp_path / f"run-{dies_at}" / "checkpoints"
        shutil.copytree(template.parent, root.parent)
        disk = dying_disk(dies_at, in_the_middle=in_the_middle)
        dying = CheckpointStore(root, keep_last=1, disk=disk)
        status = run_forked(lambda dying=dying: write_step(dying, 4, best={"value": 0.7}))
        after = CheckpointStore(root, keep_last=1)
        found, _ = find_newest(after.root)
        verdicts = [verify_checkpoint(root / f"step-{step:09d}") for step in list_steps(after.root)]
        num_broken = sum(isinstance(verdict, Rejected) for verdict in verdicts)
        assert num_broken <= (prepare is prepare_broken), "half of one is left"
        if found is not None:
            assert_holds(found)
        outcomes.add(found.step if found else None)
        assert found is not None or old is None
        best = read_best_step(after.root)
        assert best in {old_best, 4, None} - ({None} if old_best else set())
        if best is not None:
            assert isinstance(verify_checkpoint(root / f"step-{best:09d}"), Found)
        # the next start clears up and goes on
        assert run_forked(lambda after=after: write_step(after, 5, best={"value": 0.9})) == 0
        last, rejected = find_newest(after.root)
        assert last.step == 5
        assert rejected == []
        assert sorted(os.listdir(root)) == ["best.json", "step-000000005"]
        shutil.rmtree(root.parent)
        if status == 0:
            break
        assert status == CRASHED
    assert status == 0
    assert dies_at > 15, "the write made fewer calls than a safe one can"
    assert outcomes == {old.step if old else None, 4}


def store_on(root: Path, disk: Any) -> CheckpointStore:
    return CheckpointStore(root, keep_last=3, disk=disk)


def failing_disk(failing: str, number: int, *, after: int = 0, times: int = 1) -> Any:
    """Make a disk on which calls of one name fail, after the first few."""
    numbers = count()

    def around(name: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if name == failing and after <= next(numbers) < after + times:
            raise OSError(number, os.strerror(number))
        return call(*args)

    return disk_with(around)


FULL = [("make_folder", 0), ("create", 1), ("write", 0), ("write", 2), ("create", 0)]
FULL_FOR = [(errno.ENOSPC, *full) for full in FULL]
FULL_FOR += [(number, *full) for number in (errno.EDQUOT, errno.EFBIG) for full in FULL]


@pytest.mark.parametrize("full_for", FULL_FOR)
def test_a_full_disk_costs_the_oldest_checkpoint_and_the_write_goes_on(
    store: CheckpointStore, full_for: tuple[int, str, int]
) -> None:
    number, call, after = full_for
    for step in (1, 2, 3):
        write_step(store, step, best={"value": 1.0} if step == 1 else None)
    full = store_on(store.root, failing_disk(call, number, after=after))
    write_step(full, 4)
    assert list_steps(store.root) == [4, 3, 1]
    assert_holds(found_in(store))


@pytest.mark.parametrize(("call", "after"), [("rename", 0), ("sync_folder", 1)])
def test_a_disk_that_is_full_for_the_name_costs_no_checkpoint(
    store: CheckpointStore, call: str, after: int, caplog: pytest.LogCaptureFixture
) -> None:
    write_step(store, 1)
    with pytest.raises(CheckpointError, match="No space left"):
        write_step(store_on(store.root, failing_disk(call, errno.ENOSPC, after=after)), 2)
    assert list_steps(store.root) == [2, 1][call == "rename" :]
    assert not caplog.records


def test_a_course_that_was_left_goes_first_when_the_disk_is_full(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        write_step(store, step)
    discard_newer(store.root, 2)
    write_step(store_on(store.root, failing_disk("write", errno.ENOSPC)), 3)
    assert list_steps(store.root) == [3, 2, 1]
    assert not list(store.root.glob("discarded*"))


@pytest.mark.parametrize("call", ["write", "sync", "rename", "create", "sync_folder"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_broken_disk_costs_no_checkpoint(store: CheckpointStore, call: str, number: int) -> None:
    write_step(store, 1, best={"value": 1.0})
    write_step(store, 2)
    broken = store_on(store.root, failing_disk(call, number, times=99))
    with pytest.raises(CheckpointError, match=os.strerror(number)) as caught:
        write_step(broken, 3)
    if number == errno.ENOSPC:
        assert caught.match(r"\d{4} bytes are needed")
    assert list_steps(store.root)[-2:] == [2, 1]
    found_in(store)
    write_step(store, 4)
    assert not list(store.root.glob(".*"))


def test_a_file_that_hits_the_shells_limit_is_an_error_that_says_so(store: CheckpointStore) -> None:
    for step in (1, 2):
        write_step(store, step)

    def write_limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
        with pytest.raises(CheckpointError, match=r"File too large: \d+ bytes are needed") as told:
            write_step(store, 3, size=2**16)
        assert "ulimit" in told.value.fix

    assert run_forked(write_limited) == 0
    assert list_steps(store.root) == [2]
    assert not list(store.root.glob(".*"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a real disk of 3 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m,mode=700", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, timeout=60).returncode != 0:
        pytest.skip("needs the right to mount a small tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True, timeout=60)


def test_a_real_full_disk_keeps_the_newest_and_the_best(small_disk: Path) -> None:
    store = CheckpointStore(small_disk / "checkpoints", keep_last=9)
    size = 2**18  # float32: 1 MiB
    for step in (1, 2, 3):
        write_step(store, step, size=size)
    assert list_steps(store.root) == [3, 2]
    store.mark_best(2, {"value": 0.5})
    with pytest.raises(CheckpointError, match=r"No space left.*104\d{4} bytes are needed"):
        write_step(store, 4, size=size)
    assert list_steps(store.root) == [3, 2]
    assert_holds(found_in(store), size=size)
    (small_disk / "filler").write_bytes(b"x" * 2**19)
    with pytest.raises(OSError, match="No space"):
        (small_disk / "rest").write_bytes(b"x" * 2**21)
    with pytest.raises(RunFolderError, match="No space left"):
        RunLock.acquire(small_disk)
    assert not list(store.root.glob(".*"))


@pytest.mark.parametrize("is_first", [True, False])
def test_a_rename_of_another_or_unanswered_counts(store: CheckpointStore, is_first: bool) -> None:
    def lose(name: str, call: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if name != "rename":
            return call(*args)
        if is_first:
            assert run_forked(lambda: write_step(store, 1)) == 0
            return call(*args)
        call(*args)
        raise FileNotFoundError(errno.ENOENT, "lost reply")  # as on NFS

    path = write_step(store_on(store.root, disk_with(lose)), 1)
    assert_holds(verify_checkpoint(path))
    assert os.listdir(store.root) == [path.name]

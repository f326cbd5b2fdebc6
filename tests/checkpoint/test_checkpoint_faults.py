"""Checkpoints under fire: a crash at any call, full and broken disks, other writers.

What a bad disk, a stranger or an attacker changed is rejected, and never executed.
"""

import errno
import hashlib
import json
import os
import pickle
import resource
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from hardened_ddp.checkpoint import folder
from hardened_ddp.checkpoint.disk import RunLock
from hardened_ddp.checkpoint.store import CheckpointStore
from hardened_ddp.errors import CheckpointError, RunFolderError
from tests.checkpoint_states import assert_holds, disk_with, found_in, reason_of, write_step
from tests.forks import run_forked
from tests.marks import sections, slow_after


def test_a_flipped_bit_in_any_page_of_the_state_is_seen(store: CheckpointStore) -> None:
    path = write_step(store, 1, size=2**18) / "state.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:
        for offset in [*range(0, 400, 7), *range(0, size, 4096), size - 1]:
            flip(file, offset, bit=offset // 4096 % 8)
            assert "sha256 of state.safetensors differs" in reason_of(path.parent), offset
            flip(file, offset, bit=offset // 4096 % 8)
    assert isinstance(folder.verify_checkpoint(path.parent), folder.Found)


def flip(file: Any, offset: int, *, bit: int) -> None:
    file.seek(offset)
    byte = file.read(1)[0]
    file.seek(offset)
    file.write(bytes([byte ^ 1 << bit]))
    file.flush()


def test_a_flipped_bit_anywhere_in_the_manifest_is_seen(store: CheckpointStore) -> None:
    path = write_step(store, 1) / "manifest.json"
    raw = path.read_bytes()
    wanted = folder.decode_manifest(raw)
    for offset in range(len(raw)):
        for bit in range(8):
            changed = bytearray(raw)
            changed[offset] ^= 1 << bit
            try:
                manifest = folder.decode_manifest(bytes(changed))
            except ValueError:
                continue
            assert manifest == wanted, (offset, bit)
        path.write_bytes(bytes(changed))
        assert isinstance(folder.verify_checkpoint(path.parent), folder.Rejected)


@pytest.mark.parametrize("name", ["state.safetensors", "manifest.json"])
def test_a_file_cut_anywhere_is_seen(store: CheckpointStore, name: str) -> None:
    path = write_step(store, 1) / name
    raw = path.read_bytes()
    for cut in range(100):
        path.write_bytes(raw[: len(raw) * cut // 100])
        assert isinstance(folder.verify_checkpoint(path.parent), folder.Rejected)
    path.write_bytes(raw + b"x")
    assert isinstance(folder.verify_checkpoint(path.parent), folder.Rejected)


def link_away(path: Path) -> None:
    """Replace a path by a link to what it was."""
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def make_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("spoil", "name", "reason"),
    [
        (link_away, "", "is a symbolic link"),
        (link_away, "state.safetensors", "state.safetensors is a symbolic link"),
        (link_away, "manifest.json", "manifest.json is a symbolic link"),
        (make_pipe, "manifest.json", "manifest.json is not a regular file"),
        (make_folder, "state.safetensors", "state.safetensors is not a regular file"),
    ],
)
def test_what_a_stranger_could_have_put_there_is_rejected(
    store: CheckpointStore, spoil: Callable[[Path], None], name: str, reason: str
) -> None:
    path = write_step(store, 1)
    spoil(path / name)
    assert reason in reason_of(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", ["", "state.safetensors", "manifest.json"])
def test_a_colleagues_run_is_read_and_no_strangers_file(store: CheckpointStore, name: str) -> None:
    path = write_step(store, 1)
    os.chown(path / name, 65534, 65534)
    assert "belongs to user 65534 and not to you (0)" in reason_of(path)
    everything = (store.root.parent, store.root, path, *path.iterdir())
    for each in everything:
        os.chown(each, 65534, 65534)
    assert isinstance(folder.verify_checkpoint(path), folder.Found)
    os.chown(path / name, 65533, 65533)
    assert "belongs to user 65533 and not to you (0)" in reason_of(path)


@pytest.mark.parametrize("level", ["checkpoints", "run"])
def test_no_write_goes_through_a_link(store: CheckpointStore, tmp_path: Path, level: str) -> None:
    write_step(store, 1)
    victim = store.root if level == "checkpoints" else store.root.parent
    outside = tmp_path / "outside"
    victim.rename(outside)
    victim.symlink_to(outside)
    before = sorted(outside.rglob("*"))
    with pytest.raises(CheckpointError, match="a link or a file"):
        write_step(store, 2)
    assert sorted(outside.rglob("*")) == before
    if level == "checkpoints":
        found, rejected = folder.find_newest(store.root)
        assert found is None
        assert [verdict.reason for verdict in rejected] == ["is a symbolic link"]


def test_a_folder_removed_during_the_run_is_made_again(store: CheckpointStore) -> None:
    write_step(store, 1)
    shutil.rmtree(store.root.parent)
    write_step(store, 2)
    assert folder.list_steps(store.root) == [2]


def test_removing_a_checkpoint_does_not_follow_links(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("x")
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    (write_step(store, 1) / "link").symlink_to(precious)
    (store.root / "step-000000002").symlink_to(precious)
    write_step(store, 3)
    assert os.listdir(store.root) == ["step-000000003"]
    assert (precious / "thesis.txt").exists()


class _Evil:
    """A pickle that makes a file when it is loaded."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._marker),)


@pytest.mark.parametrize("name", ["state.safetensors", "state.pt", "manifest.json", "best.json"])
@pytest.mark.parametrize("as_archive", [False, True], ids=["pickle", "torch.save"])
def test_a_pickle_is_never_executed(
    store: CheckpointStore, tmp_path: Path, name: str, as_archive: bool
) -> None:
    marker = tmp_path / "executed"
    path = write_step(store, 1)
    target = store.root / name if name == "best.json" else path / name
    if as_archive:
        torch.save(_Evil(marker), target)
    else:
        target.write_bytes(pickle.dumps(_Evil(marker)))
    if name == "state.safetensors":  # with a manifest that vouches for it
        forge(path)
        with pytest.raises(CheckpointError):
            folder.load_checkpoint(found_in(store))
    elif name != "manifest.json":
        folder.load_checkpoint(found_in(store))
    else:
        assert folder.find_newest(store.root)[0] is None
    folder.read_best_step(store.root)
    write_step(store, 2)
    assert not marker.exists()
    pickle.loads(pickle.dumps(_Evil(marker)))
    assert marker.exists(), "the pickle of this test does nothing, so the test shows nothing"


def forge(path: Path, **changes: Any) -> None:
    """Rewrite a manifest so that its digest, and the state's size and sha256, are right."""
    target = path / "manifest.json"
    body = json.loads(target.read_bytes())
    content = (path / "state.safetensors").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    body["files"] = {"state.safetensors": {"size_bytes": len(content), "sha256": digest}}
    body |= changes
    body.pop("digest")
    body["digest"] = folder._digest(body)
    target.write_text(json.dumps(body))


HOSTILE = sections(Path(__file__).with_name("hostile_manifests.txt"))
"""What is hostile: why it is rejected; and the keys that are changed."""


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_manifest_is_rejected_with_its_reason(store: CheckpointStore, kind: str) -> None:
    path = write_step(store, 1)
    forge(path, **json.loads(HOSTILE[kind]))
    assert kind.partition(": ")[2] in reason_of(path)


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b"null", b"{", b"\xff\xfe\x00", b"[" * 10**6, b'{"schema":' + b"9" * 10**5 + b"}"],
    ids=["empty", "list", "null", "cut", "no text", "deep", "digits"],
)
def test_a_manifest_that_is_no_manifest_is_rejected(store: CheckpointStore, raw: bytes) -> None:
    path = write_step(store, 1)
    (path / "manifest.json").write_bytes(raw)
    assert "manifest.json" in reason_of(path) or "recursion" in reason_of(path)
    os.truncate(path / "manifest.json", 2**40)  # sparse: it is not read into memory
    assert f"more than {folder.MAX_MANIFEST_BYTES} bytes" in reason_of(path)


@pytest.mark.parametrize(
    "content",
    [
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 66)
        + b'{"w":{"dtype":"F32","shape":[1048576],"data_offsets":[0,4194304]}}',
        struct.pack("<Q", 62) + b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}        ',
        b"",
    ],
    ids=["endless header", "no object", "more than the file", "backwards", "other tensors"],
)
def test_a_hostile_state_with_manifest_is_an_error(store: CheckpointStore, content: bytes) -> None:
    path, problem = write_step(store, 1), "missing in the checkpoint: w"
    if content:
        (path / "state.safetensors").write_bytes(content + b"\0" * 8)
        problem = "can't be read as safetensors"
    forge(path, tensors={"w": {"shape": [2], "dtype": "float32"}})
    with pytest.raises(CheckpointError, match=problem):
        folder.load_checkpoint(found_in(store))


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
    old, old_best = folder.find_newest(before.root)[0], folder.read_best_step(before.root)
    outcomes = set()
    for dies_at in range(1, 200):
        root = tmp_path / f"run-{dies_at}" / "checkpoints"
        shutil.copytree(template.parent, root.parent)
        disk = dying_disk(dies_at, in_the_middle=in_the_middle)
        dying = CheckpointStore(root, keep_last=1, disk=disk)
        status = run_forked(lambda dying=dying: write_step(dying, 4, best={"value": 0.7}))
        after = CheckpointStore(root, keep_last=1)
        found, _ = folder.find_newest(after.root)
        verdicts = [
            folder.verify_checkpoint(root / f"step-{step:09d}")
            for step in folder.list_steps(after.root)
        ]
        num_broken = sum(isinstance(verdict, folder.Rejected) for verdict in verdicts)
        assert num_broken <= (prepare is prepare_broken), "half of one is left"
        if found is not None:
            assert_holds(found)
        outcomes.add(found.step if found else None)
        assert found is not None or old is None
        best = folder.read_best_step(after.root)
        assert best in {old_best, 4, None} - ({None} if old_best else set())
        if best is not None:
            assert isinstance(folder.verify_checkpoint(root / f"step-{best:09d}"), folder.Found)
        # the next start clears up and goes on
        assert run_forked(lambda after=after: write_step(after, 5, best={"value": 0.9})) == 0
        last, rejected = folder.find_newest(after.root)
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
    assert folder.list_steps(store.root) == [4, 3, 1]
    assert_holds(found_in(store))


@pytest.mark.parametrize(("call", "after"), [("rename", 0), ("sync_folder", 1)])
def test_a_disk_that_is_full_for_the_name_costs_no_checkpoint(
    store: CheckpointStore, call: str, after: int, caplog: pytest.LogCaptureFixture
) -> None:
    write_step(store, 1)
    with pytest.raises(CheckpointError, match="No space left"):
        write_step(store_on(store.root, failing_disk(call, errno.ENOSPC, after=after)), 2)
    assert folder.list_steps(store.root) == [2, 1][call == "rename" :]
    assert not caplog.records


def test_a_course_that_was_left_goes_first_when_the_disk_is_full(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        write_step(store, step)
    folder.discard_newer(store.root, 2)
    write_step(store_on(store.root, failing_disk("write", errno.ENOSPC)), 3)
    assert folder.list_steps(store.root) == [3, 2, 1]
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
    assert folder.list_steps(store.root)[-2:] == [2, 1]
    found_in(store)
    write_step(store, 4)
    assert not list(store.root.glob(".*"))


def test_a_file_that_hits_the_shells_limit_is_an_error_that_says_so(store: CheckpointStore) -> None:
    for step in (1, 2):
        write_step(store, step)

    def write_limited() -> None:
        sys.dont_write_bytecode = True  # else it is cut, too
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
        with pytest.raises(CheckpointError, match=r"File too large: \d+ bytes are needed") as told:
            write_step(store, 3, size=2**16)
        assert "ulimit" in told.value.fix

    assert run_forked(write_limited) == 0
    assert folder.list_steps(store.root) == [2]
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
    assert folder.list_steps(store.root) == [3, 2]
    store.mark_best(2, {"value": 0.5})
    with pytest.raises(CheckpointError, match=r"No space left.*104\d{4} bytes are needed"):
        write_step(store, 4, size=size)
    assert folder.list_steps(store.root) == [3, 2]
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
    assert_holds(folder.verify_checkpoint(path))
    assert os.listdir(store.root) == [path.name]

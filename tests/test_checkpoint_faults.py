"""Checkpoints under fire: crashes, full disks, flipped bits, strangers and hostile files."""

import errno
import json
import os
import pickle
import resource
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hardened_ddp.checkpoint import verify as verify_module
from hardened_ddp.checkpoint.disk import Disk
from hardened_ddp.checkpoint.files import CheckpointStore
from hardened_ddp.checkpoint.folder import probe_folder
from hardened_ddp.checkpoint.manifest import (
    MAX_MANIFEST_BYTES,
    _digest,
    decode_manifest,
)
from hardened_ddp.checkpoint.verify import Found, Rejected
from hardened_ddp.errors import CheckpointError, RunFolderError
from tests.forks import run_forked

CRASHED = 9


def state(step: int, *, size: int = 300) -> dict[str, torch.Tensor]:
    return {
        "model.w": torch.arange(size, dtype=torch.float32) + step,
        "model.b": torch.full((3,), step).bfloat16(),
        "optimizer.step": torch.tensor(step),
    }


def assert_holds(store: CheckpointStore, found: Found, *, size: int = 300) -> None:
    tensors, meta = store.load(found)
    expected = state(found.step, size=size)
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)
    assert meta == {"step": found.step}


def write(store: CheckpointStore, step: int, *, size: int = 300, best: float | None = None) -> Path:
    return store.write(step, tensors=state(step, size=size), meta={"step": step}, best_metric=best)


def reason_of(path: Path) -> str:
    verdict = verify_module.verify_checkpoint(path)
    assert isinstance(verdict, Rejected)
    return verdict.reason


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    return CheckpointStore(tmp_path / "run" / "checkpoints", keep_last=3)


# --- crashes -------------------------------------------------------------------------------------


class DyingDisk:
    """A disk under which the process dies at the k-th call, or in the middle of it."""

    def __init__(self, dies_at: int, *, in_the_middle: bool) -> None:
        self.num_calls = 0
        self._dies_at = dies_at
        self._in_the_middle = in_the_middle

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.num_calls += 1
            if self.num_calls == self._dies_at:
                if self._in_the_middle:
                    half = (args[1][: len(args[1]) // 2],) if name == "write" else args[1:]
                    getattr(Disk(), name)(args[0], *half)
                os._exit(CRASHED)
            return getattr(Disk(), name)(*args)

        return call


def prepare_first(root: Path) -> None:
    root.parent.mkdir(parents=True)


def prepare_full(root: Path) -> None:
    """Leave a best one, an old one that the next write prunes, and a leftover of a dead writer."""
    store = CheckpointStore(root, keep_last=3)
    write(store, 1)
    write(store, 2, best=0.5)
    write(store, 3)
    (root / ".partial-step-000000009-000000000000-1-1").mkdir()
    os.utime(root / ".partial-step-000000009-000000000000-1-1", (1, 1))


def prepare_broken(root: Path) -> None:
    """Leave a valid one, and a broken one of the step that is written next."""
    store = CheckpointStore(root, keep_last=3)
    write(store, 3)
    os.truncate(write(store, 4) / "state.safetensors", 100)


@pytest.mark.parametrize("in_the_middle", [False, True], ids=["before a call", "in a call"])
@pytest.mark.parametrize("prepare", [prepare_first, prepare_full, prepare_broken])
def test_a_crash_at_any_call_leaves_the_old_or_the_new_checkpoint(
    tmp_path: Path, prepare: Callable[[Path], None], in_the_middle: bool
) -> None:
    template = tmp_path / "template" / "checkpoints"
    prepare(template)
    before = CheckpointStore(template, keep_last=1)
    old, old_best = before.find_valid()[0], before.best_step()
    outcomes = set()
    for dies_at in range(1, 200):
        root = tmp_path / f"run-{dies_at}" / "checkpoints"
        shutil.copytree(template.parent, root.parent)
        disk: Any = DyingDisk(dies_at, in_the_middle=in_the_middle)
        dying = CheckpointStore(root, keep_last=1, disk=disk)
        status = run_forked(lambda dying=dying: write(dying, 4, best=0.7))
        after = CheckpointStore(root, keep_last=1)
        found, _ = after.find_valid()
        if found is not None:
            assert_holds(after, found)
        outcomes.add(found.step if found else None)
        assert found is not None or old is None
        best = after.best_step()
        assert best in {old_best, 4, None} - ({None} if old_best else set())
        if best is not None:
            assert isinstance(after.verify(root / f"step-{best:09d}"), Found)
        # the next start clears up and goes on
        assert run_forked(lambda after=after: write(after, 5, best=0.9)) == 0
        last, rejected = after.find_valid()
        assert last is not None
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


# --- changed bytes -------------------------------------------------------------------------------


def test_a_flipped_bit_in_any_page_of_the_state_is_seen(store: CheckpointStore) -> None:
    path = write(store, 1, size=2**18) / "state.safetensors"
    size = path.stat().st_size
    with path.open("r+b") as file:
        for offset in [*range(0, 400, 7), *range(0, size, 4096), size - 1]:
            flip(file, offset, bit=offset // 4096 % 8)
            assert "sha256 of state.safetensors differs" in reason_of(path.parent), offset
            flip(file, offset, bit=offset // 4096 % 8)
    assert isinstance(store.verify(path.parent), Found)


def flip(file: Any, offset: int, *, bit: int) -> None:
    file.seek(offset)
    byte = file.read(1)[0]
    file.seek(offset)
    file.write(bytes([byte ^ 1 << bit]))
    file.flush()


def test_a_flipped_bit_anywhere_in_the_manifest_is_seen(store: CheckpointStore) -> None:
    path = write(store, 1) / "manifest.json"
    raw = path.read_bytes()
    wanted = decode_manifest(raw)
    for offset in range(len(raw)):
        for bit in range(8):
            changed = bytearray(raw)
            changed[offset] ^= 1 << bit
            try:
                manifest = decode_manifest(bytes(changed))
            except ValueError:
                continue
            assert manifest == wanted, (offset, bit)
        path.write_bytes(bytes(changed))
        assert isinstance(store.verify(path.parent), Rejected)


@pytest.mark.parametrize("name", ["state.safetensors", "manifest.json"])
def test_a_file_cut_anywhere_is_seen(store: CheckpointStore, name: str) -> None:
    path = write(store, 1) / name
    raw = path.read_bytes()
    for cut in range(100):
        path.write_bytes(raw[: len(raw) * cut // 100])
        assert isinstance(store.verify(path.parent), Rejected)
    path.write_bytes(raw + b"x")
    assert isinstance(store.verify(path.parent), Rejected)


def test_a_missing_file_is_named(store: CheckpointStore) -> None:
    path = write(store, 1)
    (path / "state.safetensors").unlink()
    assert reason_of(path) == "state.safetensors is missing"
    (path / "manifest.json").unlink()
    assert reason_of(path) == "manifest.json is missing: its writing was not finished"


# --- hostile files -------------------------------------------------------------------------------


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
    path = write(store, 1)
    target = store.root / name if name == "best.json" else path / name
    if as_archive:
        torch.save(_Evil(marker), target)
    else:
        target.write_bytes(pickle.dumps(_Evil(marker)))
    if name == "state.safetensors":  # with a manifest that vouches for it
        forge(path)
    found, rejected = store.find_valid()
    if found is not None:
        try:
            store.load(found)
            assert name in ("state.pt", "best.json")
        except CheckpointError:
            assert name == "state.safetensors"
    else:
        assert len(rejected) == 1
    store.best_step()
    write(store, 2)
    assert not marker.exists()
    pickle.loads(pickle.dumps(_Evil(marker)))
    assert marker.exists(), "the pickle of this test does nothing, so the test shows nothing"


def forge(path: Path, **changes: Any) -> None:
    """Rewrite a manifest so that its digest, and the state's size and sha256, are right."""
    target = path / "manifest.json"
    body = json.loads(target.read_bytes())
    content = (path / "state.safetensors").read_bytes()
    record = {
        "size_bytes": len(content),
        "sha256": verify_module.hashlib.sha256(content).hexdigest(),
    }
    body["files"] = {"state.safetensors": record}
    body |= changes
    body.pop("digest")
    body["digest"] = _digest(body)
    target.write_text(json.dumps(body))


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "a newer schema": ({"schema": 2}, "schema 2, newer than 1"),
    "no schema": ({"schema": None}, "no usable schema"),
    "a schema of another type": ({"schema": True}, "no usable schema"),
    "a path that leads out": ({"files": {"../../etc/passwd": {}}}, "outside the checkpoint"),
    "an absolute path": ({"files": {"/etc/passwd": {}}}, "outside the checkpoint"),
    "a file too many": ({"files": {"state.safetensors": {}, "x": {}}}, "and not state"),
    "no files": ({"files": {}}, "and not state.safetensors"),
    "files of another type": ({"files": ["state.safetensors"]}, "no list of files"),
    "an absurd size": (
        {"files": {"state.safetensors": {"size_bytes": 2**70, "sha256": "0" * 64}}},
        "no usable size",
    ),
    "a negative size": (
        {"files": {"state.safetensors": {"size_bytes": -1, "sha256": "0" * 64}}},
        "no usable size",
    ),
    "no sha256": ({"files": {"state.safetensors": {"size_bytes": 1}}}, "no usable size and sha256"),
    "another step": ({"step": 2}, "belongs to step 2"),
    "a negative step": ({"step": -1}, "no usable step"),
    "meta of another type": ({"meta": []}, "no usable step or meta"),
    "an absurd shape": (
        {"tensors": {"w": {"shape": [2**70], "dtype": "float32"}}},
        "no usable shape and dtype for the tensor 'w'",
    ),
    "tensors of another type": ({"tensors": {"w": 1}}, "no usable shape"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_manifest_is_rejected_with_its_reason(store: CheckpointStore, kind: str) -> None:
    changes, reason = HOSTILE[kind]
    path = write(store, 1)
    forge(path, **changes)
    assert reason in reason_of(path)


@pytest.mark.parametrize(
    "raw",
    [b"", b"[]", b"null", b"{", b"\xff\xfe\x00", b"[" * 10**6, b'{"schema":' + b"9" * 10**5 + b"}"],
    ids=["empty", "list", "null", "cut", "no text", "deep", "digits"],
)
def test_a_manifest_that_is_no_manifest_is_rejected(store: CheckpointStore, raw: bytes) -> None:
    path = write(store, 1)
    (path / "manifest.json").write_bytes(raw)
    assert "manifest.json" in reason_of(path) or "recursion" in reason_of(path)


def test_a_manifest_of_absurd_size_is_not_read_into_memory(store: CheckpointStore) -> None:
    path = write(store, 1)
    os.truncate(path / "manifest.json", 2**40)  # sparse
    assert f"more than {MAX_MANIFEST_BYTES} bytes" in reason_of(path)


@pytest.mark.parametrize(
    "header",
    [
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 66)
        + b'{"w":{"dtype":"F32","shape":[1048576],"data_offsets":[0,4194304]}}',
        struct.pack("<Q", 62) + b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[8,0]}}        ',
    ],
    ids=["endless header", "no object", "more than the file", "backwards"],
)
def test_a_hostile_state_that_its_manifest_vouches_for_is_an_error(
    store: CheckpointStore, header: bytes
) -> None:
    path = write(store, 1)
    (path / "state.safetensors").write_bytes(header + b"\0" * 8)
    forge(path)
    found, _ = store.find_valid()
    assert found is not None
    with pytest.raises(CheckpointError, match="can't be read as safetensors"):
        store.load(found)


def test_a_state_with_other_tensors_than_its_manifest_says_is_an_error(
    store: CheckpointStore,
) -> None:
    path = write(store, 1)
    forge(path, tensors={"w": {"shape": [2], "dtype": "float32"}})
    found, _ = store.find_valid()
    assert found is not None
    with pytest.raises(CheckpointError, match="missing in the checkpoint: w"):
        store.load(found)


# --- strangers and links -------------------------------------------------------------------------


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
        (lambda path: path.chmod(0o777), "", "every user may write to the folder (mode 777)"),
        (lambda path: path.chmod(0o666), "state.safetensors", "every user may write to state"),
        (lambda path: path.chmod(0o646), "manifest.json", "every user may write to manifest"),
    ],
)
def test_what_a_stranger_could_have_put_there_is_rejected(
    store: CheckpointStore, spoil: Callable[[Path], None], name: str, reason: str
) -> None:
    path = write(store, 1)
    spoil(path / name)
    assert reason in reason_of(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", ["", "state.safetensors", "manifest.json"])
def test_what_belongs_to_somebody_else_is_rejected(store: CheckpointStore, name: str) -> None:
    path = write(store, 1)
    os.chown(path / name, 65534, 65534)
    assert "belongs to user 65534 and not to you (0)" in reason_of(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_mount_that_gives_all_files_one_owner_and_mode_does_not_lose_the_run(
    store: CheckpointStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(store, 1)
    for each in (path, *path.iterdir()):
        os.chown(each, 65534, 65534)
        each.chmod(0o777)
    odd = path.lstat()
    monkeypatch.setattr(verify_module, "_status_of_new_folder", lambda _: odd)
    assert isinstance(store.verify(path), Found)


def test_the_trial_of_a_mount_leaves_nothing(store: CheckpointStore) -> None:
    path = write(store, 1)
    path.chmod(0o777)
    reason_of(path)
    assert os.listdir(store.root) == [path.name]


@pytest.mark.parametrize("level", ["checkpoints", "run"])
def test_nothing_is_written_through_a_link_that_replaced_a_folder(
    store: CheckpointStore, tmp_path: Path, level: str
) -> None:
    write(store, 1)
    victim = store.root if level == "checkpoints" else store.root.parent
    outside = tmp_path / "outside"
    victim.rename(outside)
    victim.symlink_to(outside)
    before = sorted(outside.rglob("*"))
    with pytest.raises(CheckpointError, match="a link or a file"):
        write(store, 2)
    assert sorted(outside.rglob("*")) == before


def test_a_folder_removed_during_the_run_is_made_again(store: CheckpointStore) -> None:
    write(store, 1)
    shutil.rmtree(store.root.parent)
    write(store, 2)
    assert store.steps() == [2]


def test_removing_a_checkpoint_does_not_follow_links(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis.txt").write_text("x")
    store = CheckpointStore(tmp_path / "checkpoints", keep_last=1)
    (write(store, 1) / "link").symlink_to(precious)
    (store.root / "step-000000002").symlink_to(precious)
    write(store, 3)
    assert store.steps() == [3]
    assert (precious / "thesis.txt").exists()


# --- full disks ----------------------------------------------------------------------------------


class FailingDisk:
    """A disk on which calls of one name fail, after the first few."""

    def __init__(self, name: str, number: int, *, after: int = 0, times: int = 1) -> None:
        self._name = name
        self._number = number
        self._after = after
        self._times = times

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            if name == self._name:
                self._after -= 1
                if self._after < 0 < self._times:
                    self._times -= 1
                    raise OSError(self._number, os.strerror(self._number))
            return getattr(Disk(), name)(*args)

        return call


def failing_store(root: Path, disk: Any) -> CheckpointStore:
    return CheckpointStore(root, keep_last=3, disk=disk)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
@pytest.mark.parametrize(
    ("call", "after"),
    [("make_folder", 0), ("create", 0), ("write", 0), ("write", 2), ("create", 1)],
)
def test_a_full_disk_costs_the_oldest_checkpoint_and_the_write_goes_on(
    store: CheckpointStore, number: int, call: str, after: int
) -> None:
    for step in (1, 2, 3):
        write(store, step, best=1.0 if step == 1 else None)
    full = failing_store(store.root, FailingDisk(call, number, after=after))
    write(full, 4)
    assert store.steps() == [4, 3, 1]
    found, _ = store.find_valid()
    assert found is not None
    assert_holds(store, found)


def test_a_course_that_was_left_goes_first_when_the_disk_is_full(store: CheckpointStore) -> None:
    for step in (1, 2, 3):
        write(store, step)
    store.discard_newer(2)
    write(failing_store(store.root, FailingDisk("write", errno.ENOSPC)), 3)
    assert store.steps() == [3, 2, 1]
    assert not list(store.root.glob("discarded*"))


@pytest.mark.parametrize("call", ["write", "sync", "rename", "create", "sync_folder"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_stays_broken_is_an_error_and_the_newest_and_best_stay(
    store: CheckpointStore, call: str, number: int
) -> None:
    write(store, 1, best=1.0)
    write(store, 2)
    broken = failing_store(store.root, FailingDisk(call, number, times=99))
    with pytest.raises(CheckpointError, match=os.strerror(number)) as caught:
        write(broken, 3)
    if number == errno.ENOSPC:
        needed = r"\d{4} bytes are needed, \d+ are free"
        assert caught.match(needed)
    assert store.steps()[-2:] == [2, 1]
    found, rejected = store.find_valid()
    assert found is not None
    assert rejected == []
    write(store, 4)
    assert not list(store.root.glob(".*"))


def test_a_file_that_hits_the_limit_of_the_shell_is_an_error_that_says_so(
    store: CheckpointStore,
) -> None:
    for step in (1, 2):
        write(store, step)

    def write_limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
        with pytest.raises(
            CheckpointError, match=r"File too large: \d+ bytes are needed"
        ) as caught:
            write(store, 3, size=2**16)
        assert "ulimit" in caught.value.fix

    assert run_forked(write_limited) == 0
    assert store.steps() == [2]
    assert not list(store.root.glob(".*"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a real disk of 3 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=3m,mode=700", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True, timeout=10).returncode != 0:
        pytest.skip("needs the right to mount a small tmpfs")
    yield folder
    subprocess.run(["umount", str(folder)], check=True, timeout=10)


def test_a_real_full_disk_keeps_the_newest_and_the_best(small_disk: Path) -> None:
    store = CheckpointStore(small_disk / "checkpoints", keep_last=9)
    size = 2**18  # float32: 1 MiB
    for step in (1, 2, 3):
        write(store, step, size=size)
    assert store.steps() == [3, 2]
    store.mark_best(2, 0.5)
    with pytest.raises(CheckpointError, match=r"No space left.*104\d{4} bytes are needed"):
        write(store, 4, size=size)
    assert store.steps() == [3, 2]
    found, rejected = store.find_valid()
    assert found is not None
    assert rejected == []
    assert_holds(store, found, size=size)
    (small_disk / "filler").write_bytes(b"x" * 2**19)
    with pytest.raises(OSError, match="No space"):
        (small_disk / "rest").write_bytes(b"x" * 2**21)
    with pytest.raises(RunFolderError, match="No space left"):
        probe_folder(small_disk / "checkpoints")
    assert not list(store.root.glob(".*"))


# --- other writers -------------------------------------------------------------------------------


class OvertakenDisk:
    """A disk on which another process commits the same step just before our rename."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            if name == "rename":
                assert run_forked(lambda: write(CheckpointStore(self._root, keep_last=3), 1)) == 0
            return getattr(Disk(), name)(*args)

        return call


def test_of_two_survivors_that_save_one_step_both_succeed(store: CheckpointStore) -> None:
    path = write(failing_store(store.root, OvertakenDisk(store.root)), 1)
    found = store.verify(path)
    assert isinstance(found, Found)
    assert_holds(store, found)
    assert os.listdir(store.root) == [path.name]


class ForgetfulDisk:
    """A disk that renames, and says that it did not: NFS when the reply gets lost."""

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            result = getattr(Disk(), name)(*args)
            if name == "rename":
                raise FileNotFoundError(errno.ENOENT, "lost reply")
            return result

        return call


def test_a_rename_that_worked_and_reported_an_error_counts(store: CheckpointStore) -> None:
    path = write(failing_store(store.root, ForgetfulDisk()), 1)
    assert isinstance(store.verify(path), Found)

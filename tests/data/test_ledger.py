"""The ledger: it proves exactly-once over kills and resizes, and sees what is wrong."""

import errno
import json
import os
import threading
from pathlib import Path

import numpy as np
import pytest

from ddp_runs.ledger_check import Done, verify_ledger
from ddp_training import main
from hardened_ddp.checkpoint import store
from hardened_ddp.checkpoint.disk import Disk
from hardened_ddp.data.batches.ledger import LedgerWriter, next_start
from hardened_ddp.errors import RunFolderError
from hardened_ddp.step.left_out import NAME as SKIPPED
from tests.harness.ranks import run_ranks, start_training, train
from tests.run_folder import find_checkpoints, only_run

STEADY: list[str | Path] = ["--cpu_only", "--batch_size", "12", "--epochs", "2", "--ledger"]
STEADY += ["--model", "tests.plugins:paced_mlp", "--model_args", "{pause_s: 0.01}"]
STEADY += ["--num_workers", "0", "--eval_every", "0", "--checkpoint_every_steps", "7"]
# Bad samples for both ranks, and no report of them between checkpoints.
BROKEN = [*range(5, 400, 23), *range(2, 400, 37)]
BAD: list[str | Path] = ["--dataset", "tests.plugins:points", "--cpu_only", "--batch_size", "4"]
BAD += ["--dataset_args", f"{{size: 400, broken: {BROKEN}}}", "--continue_on_error", "--ledger"]
BAD += ["--model", "tests.plugins:paced_mlp", "--model_args", "{pause_s: 0.01}", "--epochs", "3"]
BAD += ["--num_workers", "0", "--eval_every", "0", "--log_interval", "1000"]
WHOLE, PART = Done(step=3, epoch=1, cursor=0), Done(step=2, epoch=0, cursor=4)
FACTS = {"num_samples": 6, "epoch_end": 6}


def write(run: Path, steps: dict[int, list[int]], *, rank: int = 0, begin: int = 0) -> None:
    """Write one start: for each step of epoch 0 the samples that one rank brings."""
    writer = LedgerWriter(run, start=next_start(run), rank=rank, step=begin, facts=FACTS)
    for step, ids in steps.items():
        writer.bring(step, 0, [np.array(ids)])
    writer.close()
    writer.close()


def test_a_whole_epoch_is_exact_also_where_its_end_leaves_out_samples(tmp_path: Path) -> None:
    write(tmp_path, {0: [5, 1], 1: [2, 0], 2: [3, 4]})
    assert verify_ledger(tmp_path, WHOLE) == (["epoch 0: 6 samples, each exactly once"], True)
    assert verify_ledger(tmp_path, PART) == (["epoch 0: 4 samples, each exactly once"], True)
    write(tmp_path, {1: [2, 0], 2: [3, 4]}, begin=1)  # work that was lost, and done again
    assert verify_ledger(tmp_path, WHOLE)[1]
    run = tmp_path / "cut"
    run.mkdir()
    facts = {"num_samples": 7, "epoch_end": 6}
    writer = LedgerWriter(run, start=next_start(run), rank=0, step=0, facts=facts)
    writer.bring(0, 0, [np.arange(6)])
    writer.bring(1, 1, [np.arange(1, 7)])
    writer.close()
    assert verify_ledger(run, Done(step=2, epoch=2, cursor=0))[1]


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        ({0: [5, 1], 1: [5, 0], 2: [3, 4]}, "taken more than once: [5]"),
        ({0: [5, 5]}, "taken more than once: [5]"),
        ({0: [5, 1], 1: [2, 0], 2: [3, 3]}, "1 of 6 never taken, among [4]"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, steps: dict[int, list[int]], says: str) -> None:
    write(tmp_path, steps)
    lines, is_exact = verify_ledger(tmp_path, WHOLE)
    assert not is_exact
    assert says in lines[0]


def test_a_sample_that_was_reported_as_left_out_is_not_missing(tmp_path: Path) -> None:
    write(tmp_path, {0: [5, 1], 1: [2, 0], 2: [3]})
    skipped = tmp_path / "skipped_samples.jsonl"
    skipped.write_text('{"step": 2, "epoch": 0, "index": 4, "error": "broken"}\n')
    lines, is_exact = verify_ledger(tmp_path, WHOLE)
    assert is_exact
    assert "1 of them left out, as reported" in lines[0]
    for broken in (b"\0\xff\n", b"[1]\n", b'{"index": "x", "epoch": 0}\n'):
        skipped.write_bytes(broken)
        with pytest.raises(RunFolderError, match=r"line 1 of .*skipped_samples.jsonl"):
            verify_ledger(tmp_path, WHOLE)


def test_what_was_left_out_of_work_that_was_lost_does_not_count(tmp_path: Path) -> None:
    write(tmp_path, {0: [5, 1], 1: [2, 0], 2: [3]})
    write(tmp_path, {1: [2], 2: [3]}, begin=1)
    entry = {"rank": 0, "step": 2, "epoch": 0, "index": 4, "error": "broken"}
    skipped = tmp_path / "skipped_samples.jsonl"
    skipped.write_text(json.dumps({**entry, "start": 1}) + "\n")
    done = Done(step=2, epoch=0, cursor=3)
    assert verify_ledger(tmp_path, done)[1]
    lines, _ = verify_ledger(tmp_path, Done(step=3, epoch=0, cursor=5))
    assert "1 of 5 never taken" in lines[0]
    skipped.write_text(json.dumps({**entry, "step": 1, "start": 2}) + "\n" + '{"rank": 0, "st')
    assert verify_ledger(tmp_path, Done(step=2, epoch=0, cursor=4))[1]


def test_shards_of_a_stream_are_counted_one_by_one(tmp_path: Path) -> None:
    def check(*ids: int) -> tuple[list[str], bool]:
        run = tmp_path / str(len(list(tmp_path.iterdir())))
        run.mkdir()
        writer = LedgerWriter(run, start=next_start(run), rank=0, step=0, facts={"num_shards": 2})
        writer.bring(0, 0, [np.array(ids)])
        writer.close()
        return verify_ledger(run, Done(step=1, epoch=0, cursor=4, taken=[3, 1], sizes=[-1, -1]))

    assert check(0, 2, 4, 1) == (["epoch 0: 4 samples, each exactly once"], True)
    assert check(0, 2, 1, 3) == (["epoch 0: taken: 2 of 3 of shard 0, 2 of 1 of shard 1"], False)
    assert "1 taken more than once: [2]" in check(0, 2, 2, 1)[0][0]


def test_a_record_cut_off_by_a_crash_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, {0: [5, 1], 1: [2, 0], 2: [3, 4]})
    [path] = (tmp_path / "ledger").iterdir()
    for num_cut in range(1, 24):
        os.truncate(path, path.stat().st_size - 1)
        assert verify_ledger(tmp_path, PART)[1], num_cut
        assert not verify_ledger(tmp_path, WHOLE)[1], num_cut


def test_a_start_that_crashed_before_its_first_line_takes_no_step(tmp_path: Path) -> None:
    write(tmp_path, {0: [5, 1]})
    for head in (b"", b'{"schema": 1, "st'):
        write(tmp_path, {}, begin=1)
        newest = sorted((tmp_path / "ledger").iterdir())[-1]
        newest.write_bytes(head)
    write(tmp_path, {1: [2, 0], 2: [3, 4]}, begin=1)
    assert verify_ledger(tmp_path, WHOLE) == (["epoch 0: 6 samples, each exactly once"], True)
    for path in (tmp_path / "ledger").iterdir():
        path.write_bytes(b"")
    with pytest.raises(RunFolderError, match="has no ledger"):
        verify_ledger(tmp_path, WHOLE)
    for head in (b"what\nis this", b"[]\n", b'{"step": "x"}\n'):
        path.write_bytes(head)
        with pytest.raises(RunFolderError, match="not a ledger file"):
            verify_ledger(tmp_path, WHOLE)


@pytest.mark.parametrize("fails_at", range(2))
def test_a_disk_that_is_full_for_a_while_loses_nothing_of_the_ledger(
    fails_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    is_full = False

    def write_part(fd: int, data: bytes) -> int:
        if not is_full:
            return written(fd, data)
        if len(data) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return written(fd, data[: len(data) // 2])

    written = os.write
    monkeypatch.setattr("os.write", write_part)
    is_full = fails_at == 0  # for the head, or from some step on
    writer = LedgerWriter(tmp_path, start=next_start(tmp_path), rank=0, step=0, facts=FACTS)
    for step, ids in enumerate([[5, 1], [2, 0], [3, 4]]):
        is_full = is_full if step != 2 else False
        is_full = is_full or step == fails_at == 1
        writer.bring(step, 0, [np.array(ids)])
    writer.close()
    assert verify_ledger(tmp_path, WHOLE) == (["epoch 0: 6 samples, each exactly once"], True)
    assert caplog.text.count("can't be written") == 1
    (tmp_path / "x").mkdir()
    (tmp_path / "x/ledger").write_text("in the way")
    writer = LedgerWriter(tmp_path / "x", start=1, rank=0, step=0, facts=FACTS)
    writer.bring(0, 0, [np.arange(2)])
    writer.close()
    assert "2 records of the ledger could not be written" in caplog.text  # its head, too


def test_each_sample_once_over_a_kill_and_other_numbers_of_ranks(tmp_path: Path) -> None:
    argv = [*STEADY, "--output_dir", tmp_path]
    with start_training(argv, 2) as running:
        running.wait_for(lambda: len(find_checkpoints(tmp_path)) > 1, timeout_s=60, what="steps")
        for rank in (0, 1):
            running.kill(rank)
        running.wait(20)
    run = only_run(tmp_path)
    with start_training([*argv, "--resume", run], 3) as running:
        has_begun = lambda: bool([*run.glob("ledger/*-rank-2.bin")])  # noqa: E731
        running.wait_for(has_begun, timeout_s=60, what="start")
        running.kill(1)
        running.wait(40)
    train([*argv, "--resume", run], 1).ok()
    verified = train(["verify-ledger", run], launcher="none").ok()
    assert verified.output.count("1437 samples, each exactly once") == 2
    newest = sorted((run / "ledger").iterdir())[-1]
    os.truncate(newest, newest.stat().st_size - 1)
    finished = train(["verify-ledger", run], launcher="none")
    assert finished.statuses == (1,)
    assert "never taken" in finished.output


def train_and_record(output: Path) -> list[tuple[str, str]]:
    """Train, and return the names of files that were synced or renamed, with their threads."""
    events: list[tuple[str, str]] = []

    def note(name: str) -> None:
        events.append((name, threading.current_thread().name))

    def sync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        note(path.name)
        if path.name == SKIPPED:  # the last step that it names
            note(f"{SKIPPED} {json.loads(path.read_text().splitlines()[-1])['step']}")
        fsync(descriptor)

    class Noting(Disk):
        def rename(self, source: Path, target: Path) -> None:
            note(target.name)
            super().rename(source, target)

    fsync, os.fsync = os.fsync, sync
    store.Disk = Noting  # type: ignore[misc,attr-defined]  # in this process, which ends
    argv = [*map(str, BAD), "--max_steps", "20", "--checkpoint_every_steps", "6"]
    assert main([*argv, "--output_dir", str(output)]) == 0
    return events


@pytest.mark.slow
def test_what_a_checkpoint_covers_is_on_the_disk_before_it(tmp_path: Path) -> None:
    events, other = run_ranks(train_and_record, 2, tmp_path)
    names = [name for name, _ in events]
    commits = [number for number, name in enumerate(names) if name.startswith("step-")]
    assert len(commits) >= 2, "more, if the disk is fast"
    lines = (only_run(tmp_path) / SKIPPED).read_text().splitlines()
    skipped = [json.loads(line)["step"] for line in lines]
    assert any(at < 6 for at in skipped)
    begin = 0
    for commit in commits:
        assert {"0001-rank-0.bin", "0001-rank-1.bin"} <= set(names[begin:commit])
        # WHY all before: a late writer may have had what this checkpoint covers on the disk already
        synced = [int(name.split()[1]) for name in names[:commit] if name.startswith(f"{SKIPPED} ")]
        covered_steps = [at for at in skipped if at < int(names[commit].removeprefix("step-"))]
        assert max(synced) >= max(covered_steps)
        begin = commit + 1
    # In front only behind the last step: the last checkpoint is waited for, after one under way.
    in_front = [(name, at) for at, (name, thread) in enumerate(events) if thread == "MainThread"]
    assert min(at for name, at in in_front if name.endswith("bin")) > commits[-2]
    told = {name for name, _ in in_front if name.startswith(f"{SKIPPED} ")}
    assert told <= {f"{SKIPPED} {max(skipped)}"}
    assert not [name for name, _ in other if name.endswith(("bin", "jsonl"))]

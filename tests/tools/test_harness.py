"""The harness itself: ranks, commands, and the check for leftovers."""

import contextlib
import os
import random
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.harness import processes
from tests.harness.fork_server import is_of_checkout
from tests.harness.leftovers import clear_away, find_leftovers, take_snapshot
from tests.harness.processes import ROOT, read_process
from tests.harness.ranks import (
    RankFailure,
    held_port,
    kill_running,
    release_ports,
    run_command,
    run_program,
    run_ranks,
    start_command,
    start_program,
    start_ranks,
    train,
)

WAITS = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(1000)"]


def describe_rank(word: str) -> tuple[str, ...]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RESTART_COUNT")
    return (word, *(os.environ[name] for name in names))


def fail_on(rank: int) -> None:
    print(f"this is rank {os.environ['RANK']}")
    if int(os.environ["RANK"]) == rank:
        raise ValueError("the odd one")


def die_on(rank: int) -> str:
    if int(os.environ["RANK"]) == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    return "survived"


def hang_on(rank: int) -> None:
    if int(os.environ["RANK"]) == rank:
        threading.Event().wait()


def say_and_hang() -> None:
    print("ready")
    threading.Event().wait()


def give_randomness() -> float:
    return random.random()


def leave_a_child() -> int:
    return subprocess.Popen(WAITS, stdout=subprocess.DEVNULL, start_new_session=True).pid


def count_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_results_come_in_rank_order_with_the_environment_of_torchrun() -> None:
    results = run_ranks(describe_rank, 3, "word", timeout_s=30)
    assert results == [("word", str(rank), str(rank), "3", "127.0.0.1", "0") for rank in range(3)]


def test_a_rank_starts_with_one_thread_and_its_own_randomness() -> None:
    assert run_ranks(count_threads, 1, timeout_s=30) == [1]
    first, second = run_ranks(give_randomness, 2, timeout_s=30)
    assert first != second


def test_a_failure_names_its_rank_with_traceback_and_output() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(fail_on, 2, 1, timeout_s=30)
    text = str(failure.value)
    assert "rank 1 ended with status 1" in text
    assert "ValueError: the odd one" in text
    assert "in fail_on" in text
    assert "this is rank 1" in text
    assert "this is rank 0" not in text
    assert failure.value.finished.statuses == (0, 1)


def test_a_killed_rank_is_named_and_the_other_keeps_its_result() -> None:
    with pytest.raises(RankFailure, match="rank 1 ended with SIGKILL") as failure:
        run_ranks(die_on, 2, 1, timeout_s=30)
    assert failure.value.finished.statuses == (0, -signal.SIGKILL)
    assert failure.value.finished.values == ("survived", None)


def test_the_exit_status_of_a_rank_is_kept() -> None:
    with pytest.raises(RankFailure) as failure:
        run_ranks(sys.exit, 1, 7, timeout_s=30)
    assert failure.value.finished.statuses == (7,)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of less than a second."""
    monkeypatch.setattr(processes, "LEAST_S", 0.0)


@pytest.mark.usefixtures("impatient")
def test_a_hanging_rank_is_killed_and_shows_its_stack() -> None:
    with pytest.raises(RankFailure, match=r"rank 1 did not end in 1\.5 s") as failure:
        run_ranks(hang_on, 2, 1, timeout_s=0.5)
    assert failure.value.finished.statuses == (0, -signal.SIGKILL)
    assert "in hang_on" in str(failure.value)


def test_a_running_rank_is_watched_signalled_and_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with start_ranks(say_and_hang, 2) as running:
        running.wait_for(lambda: "ready" in running.output(1), timeout_s=20, what="rank 1")
        running.kill(1, signal.SIGTERM)
        running.wait_for(lambda: running.living() == [0], timeout_s=20, what="the end of rank 1")
        monkeypatch.setattr(processes, "LEAST_S", 0.0)
        with pytest.raises(RankFailure, match=r"0\.6 s went by without a miracle"):
            running.wait_for(lambda: False, timeout_s=0.2, what="a miracle")
        assert running.wait(5).statuses == (-signal.SIGKILL, -signal.SIGTERM)


def test_ranks_that_a_test_leaves_running_are_killed_and_told() -> None:
    running = start_ranks(say_and_hang, 2)
    assert sorted(kill_running()) == sorted(running.pids)
    assert running.living() == []
    assert kill_running() == []


def test_the_script_runs_in_a_forked_rank_and_its_output_is_kept() -> None:
    finished = train(["--no_such_flag"], timeout_s=30, launcher="none")
    assert finished.statuses == (2,)
    assert "no_such_flag" in finished.output


@pytest.mark.slow
def test_a_forked_torchrun_restarts_ranks_of_its_own_and_ends_with_their_status(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "names = ('RANK', 'WORLD_SIZE', 'TORCHELASTIC_RESTART_COUNT')\n"
        "print('a rank', *(os.environ[name] for name in names), os.getppid(), *sys.argv[1:])\n"
        "sys.exit(os.environ['RANK'] == '1' and int(os.environ[names[2]]) < int(sys.argv[1]))\n"
    )
    for fails, status in ((1, 0), (9, 1)):
        argv = ["torchrun", "--standalone", "--nproc_per_node=2", "--max_restarts=1", script]
        with start_program([*argv, str(fails)]) as launched:
            done = launched.wait(timeout_s=60)
        assert done.status == status, done.output
        assert ("ChildFailedError" in done.output) == bool(status)
        # Of rank 1: the other one may be stopped before it says anything.
        lines = [line for line in done.stdout.splitlines() if line.startswith("a rank 1")]
        assert lines == [f"a rank 1 2 {count} {launched.pid} {fails}" for count in (0, 1)]


def test_a_process_that_a_rank_leaves_is_noticed_and_cleared_away() -> None:
    before = take_snapshot()
    [pid] = run_ranks(leave_a_child, 1, timeout_s=30)
    # WHY not all of them: without grace, one that is just ending may be among them
    assert any(f"process {pid}" in leftover for leftover in find_leftovers(before, grace_s=0.0))
    clear_away(before)
    assert find_leftovers(before) == []


def test_a_process_that_is_just_ending_is_no_leftover() -> None:
    before = take_snapshot()
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert process.stdin is not None
    assert find_leftovers(before, grace_s=0.0)
    process.stdin.close()
    assert find_leftovers(before) == []
    process.wait()


def test_threads_variables_files_handlers_and_shared_memory_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = take_snapshot()
    release = threading.Event()
    thread = threading.Thread(target=release.wait, name="left-thread")
    segment = Path(f"/dev/shm/torch_{os.getpid()}_left")
    handler = signal.getsignal(signal.SIGUSR1)
    with contextlib.ExitStack() as undo:
        thread.start()
        undo.callback(release.set)
        segment.touch()
        undo.callback(segment.unlink)
        undo.callback(signal.signal, signal.SIGUSR1, handler)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        monkeypatch.setenv("LEFT_VARIABLE", "1")
        monkeypatch.chdir(tmp_path)
        text = "\n".join(find_leftovers(before, grace_s=0.0))
    thread.join()
    monkeypatch.undo()
    for name in ("left-thread", "LEFT_VARIABLE", str(tmp_path), "SIGUSR1"):
        assert name in text
    assert str(segment) in text
    assert find_leftovers(before) == []


def test_a_command_sees_no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.setenv(name, "7")
    shown = run_command(["env"], timeout_s=10, env={"EXTRA": "yes"}).ok().stdout.splitlines()
    names = {line.partition("=")[0] for line in shown}
    assert not names & {"RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
    assert "EXTRA=yes" in shown


def test_a_command_at_its_limit_is_killed_with_children_in_other_sessions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    script = (
        "import subprocess, sys, time;"
        f"p = subprocess.Popen({WAITS!r}, start_new_session=True);"
        "print('child', p.pid, flush=True); time.sleep(1000)"
    )
    with start_command([sys.executable, "-c", script]) as command:
        command.wait_for(lambda: "up" in command.stdout, timeout_s=20, what="the child")
        monkeypatch.setattr(processes, "LEAST_S", 0.0)
        with pytest.raises(RankFailure, match=r"did not end in 0\.03 s\n") as failure:
            command.wait(timeout_s=0.01)
    pid = int(str(failure.value).split("child ")[1].split()[0])
    _wait_until_gone(pid)
    child = read_process(pid)
    assert child is None or not child.is_alive


def test_a_command_that_ends_too_early_tells_its_status() -> None:
    with (
        start_command(["sh", "-c", "echo words; exit 3"]) as command,
        pytest.raises(RankFailure, match=r"ended before a miracle\n.*ended with status 3"),
    ):
        command.wait_for(lambda: False, timeout_s=20, what="a miracle")
    completed = run_command(["sh", "-c", "echo words >&2; exit 3"], timeout_s=10)
    assert (completed.status, completed.stderr) == (3, "words\n")
    with pytest.raises(AssertionError, match="words"):
        completed.ok()


def test_a_forked_program_has_its_own_modules_folder_and_output(tmp_path: Path) -> None:
    (tmp_path / "hardened_ddp.py").write_text("")
    (tmp_path / "script.py").write_text(
        "import os, sys, hardened_ddp\n"
        "sys.stdout.reconfigure(errors='strict')\n"  # raises if it is taken for a file
        "print(hardened_ddp.__file__, sys.argv[1], os.getcwd(), 'torch' in sys.modules)\n"
        "sys.exit('its last words')\n"
    )
    argv = ["python", "-u", tmp_path / "script.py", "word"]
    done = run_program(argv, timeout_s=30, cwd=tmp_path)
    assert done.stdout == f"{tmp_path / 'hardened_ddp.py'} word {tmp_path} True\n", done.output
    assert (done.stderr, done.status) == ("its last words\n", 1)


def test_a_library_in_the_virtual_environment_of_a_checkout_is_not_of_the_checkout() -> None:
    prefix = str(ROOT / ".venv")
    assert not is_of_checkout(f"{prefix}/lib/python3.11/site-packages/yaml/nodes.py", prefix)
    assert is_of_checkout(__file__, prefix)


def test_a_held_port_is_for_those_who_are_told_it() -> None:
    port = held_port()
    with socket.socket() as other, pytest.raises(OSError, match="already in use"):
        other.bind(("127.0.0.1", port))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=10)
    for address in ("127.0.0.1", ""):  # again and again, as ranks that restart
        with socket.create_server((address, port)):
            socket.create_connection(("127.0.0.1", port), timeout=10).close()
    release_ports()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=10)


def test_a_test_that_leaves_something_behind_fails_and_the_next_one_starts_clean(
    tmp_path: Path,
) -> None:
    (tmp_path / "test_leaking.py").write_text(
        "import os\n"
        "def test_first(): os.environ['LEFT_VARIABLE'] = '1'\n"
        "def test_second(): assert 'LEFT_VARIABLE' not in os.environ\n"
    )
    argv = ["python", "-m", "pytest", "-p", "tests.harness.leftovers", f"--rootdir={tmp_path}"]
    completed = run_command([*argv, tmp_path], timeout_s=30)
    assert completed.status == 1, completed.output
    assert "2 passed, 1 error" in completed.stdout
    assert "environment variable LEFT_VARIABLE: was None, is '1'" in completed.stdout


@pytest.mark.slow  # it starts a second fork server
def test_the_end_of_pytest_ends_the_server_and_its_ranks() -> None:
    script = (
        "import os, signal; from tests.harness import ranks; from tests.tools import test_harness;"
        "running = ranks.start_ranks(test_harness.hang_on, 1, 0);"
        "print(*ranks.server_pids(), *ranks.keepers(), *running.pids, flush=True);"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    completed = run_command([sys.executable, "-c", script], timeout_s=60)
    pids = [int(word) for word in completed.stdout.split()]
    assert len(pids) == 3, completed.output
    for pid in pids:
        _wait_until_gone(pid)
        process = read_process(pid)
        assert process is None or not process.is_alive


def _wait_until_gone(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        fd = os.pidfd_open(pid)
        select.select([fd], [], [], 10.0)
        os.close(fd)

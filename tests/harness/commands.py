"""Real commands in real processes: what a user types, with a limit and no way to escape it.

Owns: run_command and start_command. A command gets an environment without a launcher's leftovers,
a session of its own, and a mark; at its limit everything with the mark is killed. WHY not only its
process group: torchrun gives each worker a session.
Does not own: ranks without a launcher (ranks.py). Output goes to files: a pipe would stay open as
long as any process that inherited it lives.
"""

import os
import shlex
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from tests.harness.processes import (
    COMMAND_MARK,
    ROOT,
    clean_environment,
    deadline,
    find_marked,
    kill_marked,
    limit_of,
    read_environment,
    read_process,
)

T = TypeVar("T")
POLL_S = 0.02
TAIL_CHARACTERS = 12_000


class CommandFailure(AssertionError):
    """A command did not end in time, or not as the test needs it."""


@dataclass(frozen=True, slots=True)
class Completed:
    """How a command ended."""

    argv: tuple[str, ...]
    status: int
    """Exit status; -N if signal N ended it."""

    stdout: str
    stderr: str
    wall_s: float

    @property
    def output(self) -> str:
        return self.stdout + self.stderr

    def ok(self) -> Self:
        """Return this, or raise CommandFailure with the output if the status is not 0."""
        if self.status != 0:
            raise CommandFailure(
                f"{shlex.join(self.argv)}\nended with status {self.status}\n{tail(self.output)}"
            )
        return self


class Command:
    """A command under way. Use it in a with statement: leaving that kills what is left."""

    def __init__(
        self,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.argv = tuple(map(str, argv))
        self._mark = uuid.uuid4().hex
        self._folder = tempfile.TemporaryDirectory(prefix="command-")
        self._paths = [Path(self._folder.name) / name for name in ("stdout", "stderr")]
        self._started_at = time.monotonic()
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        with self._paths[0].open("wb") as stdout, self._paths[1].open("wb") as stderr:
            self._process = subprocess.Popen(
                # WHY through env: Popen looks for the program on our own PATH, not on the new one
                ["/usr/bin/env", *self.argv],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=clean_environment(
                    # WHY TMPDIR: torchrun leaves folders of logs behind
                    {"PATH": path, "TMPDIR": self._folder.name, COMMAND_MARK: self._mark}
                    | dict(env or {})
                ),
                cwd=cwd or ROOT,
                start_new_session=True,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
            kill_marked(COMMAND_MARK, self._mark)
        self._folder.cleanup()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stdout(self) -> str:
        return self._paths[0].read_text(encoding="utf-8", errors="replace")

    @property
    def stderr(self) -> str:
        return self._paths[1].read_text(encoding="utf-8", errors="replace")

    def pid_of_rank(self, rank: int) -> int | None:
        """Find the worker of a torchrun that has this rank; None if it doesn't live."""
        for pid in find_marked(COMMAND_MARK, self._mark):
            process = read_process(pid)
            # WHY the parent: a rank's own children show the same environment
            is_worker = process is not None and process.parent == self.pid
            if is_worker and read_environment(pid).get("RANK") == str(rank):
                return pid
        return None

    def signal(self, number: int) -> None:
        """Send a signal to the command itself."""
        self._process.send_signal(number)

    def wait_for(self, condition: Callable[[], T | None], *, timeout_s: float, what: str) -> T:
        """Poll until condition gives something true, and return that.

        Raises CommandFailure if the command ends before, or after timeout_s.
        """
        end = deadline(timeout_s)
        while True:
            has_ended = self._process.poll() is not None
            if found := condition():
                return found
            if has_ended:
                self._fail(f"ended with status {self._process.returncode} before {what}")
            if time.monotonic() > end:
                self._fail(f"ran {limit_of(timeout_s):g} s, still without {what}")
            time.sleep(POLL_S)

    def wait(self, *, timeout_s: float) -> Completed:
        """Wait for the end. Raises CommandFailure after timeout_s, when all of it is killed."""
        try:
            status = self._process.wait(limit_of(timeout_s))
        except subprocess.TimeoutExpired:
            self._fail(f"did not end within {limit_of(timeout_s):g} s")
        wall_s = time.monotonic() - self._started_at
        return Completed(self.argv, status, self.stdout, self.stderr, wall_s)

    def _fail(self, reason: str) -> None:
        self._process.kill()
        self._process.wait()
        kill_marked(COMMAND_MARK, self._mark)
        raise CommandFailure(
            f"{shlex.join(self.argv)}\n{reason}\n{tail(self.stdout + self.stderr)}"
        )


def start_command(
    argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None, cwd: Path | None = None
) -> Command:
    """Start a command, by default in the repository root; python and torchrun are our own."""
    return Command(argv, env=env, cwd=cwd)


def run_command(
    argv: Sequence[str | Path],
    *,
    timeout_s: float,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> Completed:
    """Run a command to its end. Raises CommandFailure, with its output, after timeout_s."""
    with start_command(argv, env=env, cwd=cwd) as command:
        return command.wait(timeout_s=timeout_s)


def tail(text: str) -> str:
    """Return the end of a text, and say so if that is not all of it."""
    if len(text) <= TAIL_CHARACTERS:
        return text
    return f"[...]\n{text[-TAIL_CHARACTERS:]}"

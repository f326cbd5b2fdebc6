"""A private Slurm of two nodes on this machine, for tests: real daemons, no systemd, loopback only.

Owns: its configuration, its daemons (munged, slurmctld, two slurmd) and their end. The nodes are
called 127.0.0.1 and 127.0.0.2: addresses of this machine, so that a rank finds the head node by its
name without a name server.
What goes wrong here: Slurm looks at its clock only every 30 seconds, and waits two minutes before
it starts a requeued job: start_now says at once.
"""

import contextlib
import os
import re
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from tests.harness.processes import clean_environment, deadline, limit_of
from tests.harness.ranks import Finished, held_port, run_command

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "srun")
POLL_S, JOB_LIMIT_S = 0.2, 200.0
PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"


def why_not() -> str:
    """Say why no Slurm can be started here; empty if it can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing:
        return f"Slurm is not installed on this machine: no {', '.join(missing)} (see .ci/run)"
    return "" if os.geteuid() == 0 else "only root can start a Slurm of its own"


class SlurmCluster:
    """Two nodes. Use it in a with statement: leaving that ends its daemons and all jobs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []

    @property
    def env(self) -> dict[str, str]:
        """What programs need to find this cluster, and gloo to find an interface."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "GLOO_SOCKET_IFNAME": "lo"}

    def __enter__(self) -> Self:
        for name in ("state", "spool", "log"):
            (self.folder / name).mkdir(parents=True)
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o400)
        (self.folder / "slurm.conf").write_text(_configuration(self.folder), encoding="utf-8")
        try:
            socket_path = self.folder / "munge.sock"
            self._start(
                "munged",
                *("--foreground", "--force", f"--key-file={key}", f"--socket={socket_path}"),
                *(f"--pid-file={self.folder}/munged.pid", f"--seed-file={self.folder}/seed"),
            )
            self.wait_until(socket_path.exists, what="munged")
            self._start("slurmctld", "-D")
            for node in ("127.0.0.1", "127.0.0.2"):
                self._start("slurmd", "-D", "-N", node)
            self.wait_until(lambda: self._idle_nodes() == 2, what="two idle nodes")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        if len(self._daemons) == 4:
            self._run("scancel", "--signal=KILL", "--full", "--state=running", "--user=root")
            self._run("scancel", "--user=root")
            with contextlib.suppress(AssertionError):  # the daemons end in any case
                self.wait_until(
                    lambda: not self._run("squeue", "-h").stdout, what="no jobs", timeout_s=30
                )
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in reversed(self._daemons):
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def submit(
        self, argv: Sequence[str | Path], *, env: Mapping[str, str] | None = None
    ) -> tuple[str, Path]:
        """Submit a batch script; give the job's number, and the file of its output."""
        output = self.folder / f"job-{secrets.token_hex(4)}.log"
        words = ["sbatch", "--parsable", f"--output={output}", *argv]
        return self._run(*map(str, words), env=env).ok().stdout.strip(), output

    def show(self, job: str) -> dict[str, str]:
        """Give what Slurm knows of a job: JobState, ExitCode, Restarts and more."""
        text = self._run("scontrol", "show", "job", job).ok().stdout
        return dict(re.findall(r"(\w+)=(\S*)", text))

    def wait_for_state(self, job: str, *states: str) -> str:
        """Wait until a job is in one of these states, and return which."""
        self.wait_until(
            lambda: self.show(job)["JobState"] in states,
            what=f"job {job} {' or '.join(states)}",
            timeout_s=JOB_LIMIT_S,
        )
        return self.show(job)["JobState"]

    def start_now(self, job: str, *, minutes: int) -> None:
        """Start a requeued job without the usual wait, with another time limit."""
        # WHY both: the nodes still end the last start; and a node refuses to start a job in the
        # second in which it was told that this job has ended.
        self.wait_until(lambda: self._idle_nodes() == 2, what="two idle nodes")
        change = ["StartTime=now+2", f"TimeLimit={minutes}"]
        self._run("scontrol", "update", f"JobId={job}", *change).ok()

    def end_in(self, job: str, *, minutes: int) -> None:
        """Set the time limit of a running job so that it ends within so many minutes."""
        hours, passed, _ = map(int, self.show(job)["RunTime"].split(":"))
        limit = f"TimeLimit={60 * hours + passed + minutes}"
        self._run("scontrol", "update", f"JobId={job}", limit).ok()

    def cancel(self, job: str) -> None:
        self._run("scancel", job).ok()

    def run(self, *argv: str | Path, timeout_s: float) -> Finished:
        """Run a program of this cluster, such as srun."""
        return run_command(argv, timeout_s=timeout_s, env=self.env)

    def _run(self, *argv: str, env: Mapping[str, str] | None = None) -> Finished:
        return run_command(argv, timeout_s=60, env={**self.env, **(env or {})})

    def _start(self, *argv: str) -> None:
        program = shutil.which(argv[0], path=PATH)
        assert program is not None
        with (self.folder / "log" / f"{argv[0]}-{len(self._daemons)}.out").open("wb") as output:
            how = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            env = clean_environment({**self.env, "PATH": PATH})
            argv = (program, *argv[1:])
            self._daemons.append(subprocess.Popen(argv, env=env, start_new_session=True, **how))

    def _idle_nodes(self) -> int:
        found = self._run("sinfo", "-h", "-N", "-o", "%N %t").stdout.splitlines()
        return sum(line.endswith(" idle") for line in found)

    def wait_until(
        self, condition: Callable[[], bool], *, what: str, timeout_s: float = 90
    ) -> None:
        """Wait until something is true. Raises AssertionError with what daemons and jobs said."""
        end = deadline(timeout_s)
        while not condition():
            if time.monotonic() > end:
                paths = [*self.folder.glob("log/*"), *self.folder.glob("job-*.log")]
                logs = [f"{p.name}:\n{p.read_text(errors='replace')[-3000:]}" for p in paths]
                told = "\n".join([f"after {limit_of(timeout_s):g} s still without {what}", *logs])
                raise AssertionError(told)
            time.sleep(POLL_S)


def _configuration(folder: Path) -> str:
    text = Path(__file__).with_name("slurm.conf").read_text(encoding="utf-8")
    ports = {name: held_port() for name in ("controller", "first", "second")}
    return text.format(folder=folder, host=socket.gethostname().partition(".")[0], **ports)

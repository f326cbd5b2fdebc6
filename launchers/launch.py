#!/usr/bin/env python3
"""Run a script on several machines: start the right torchrun on each one over ssh.

    python launchers/launch.py --hosts node0,node1 --nproc_per_node 4 --dry-run
    python launchers/launch.py --hosts node0,node1 --nproc_per_node 4 ddp_training.py --epochs 20

It ends with the status of the run: 75 means "the same command again".

A run on several machines is one torchrun on each of them, which hardened_ddp_command.py starts. All
get the same --nnodes, --nproc_per_node, --master_addr and --master_port; only --node_rank differs:
typing that by hand is where most mistakes happen. Global ranks follow from it: with 4 ranks each,
machine 0 has ranks 0 to 3, machine 1 has 4 to 7. The first host of the list is the master: the
rendezvous is there.

Requirements: ssh to every host without a password; the same folder, with code and Python, at the
same path on all of them (for example on a shared disk). The host localhost is this machine, without
ssh. --dry-run only prints the commands, which can also be typed by hand, one on each machine.
"""

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from hardened_ddp.ranks.launchers_env import COMMAND
from launchers.running import ROOT, SCRIPT, make_parser, read_arguments

POLL_S = 0.05
# How long ranks may take to save when another machine has failed, or the user stops the run.
GRACE_S = 60.0
LOCAL = ("localhost", "127.0.0.1")


def torchrun_command(options: argparse.Namespace, words: Sequence[str], node_rank: int) -> str:
    """Return the command of one machine for a shell; words: the script and its arguments."""
    is_own = Path(words[0]).name == SCRIPT
    command = [
        *(["env", *options.env] if options.env else []),
        options.python,
        "-m",
        # WHY ours: torchrun itself ends with 1 where the ranks end with 75
        "hardened_ddp_command" if is_own else "torch.distributed.run",
        f"--nnodes={len(options.hosts)}",
        f"--node_rank={node_rank}",
        f"--nproc_per_node={options.nproc_per_node}",
        f"--master_addr={options.hosts[0]}",
        f"--master_port={options.port}",
        *([f"--max_restarts={options.max_restarts}"] if options.max_restarts else []),
        *words,
    ]
    # WHY exec: torchrun replaces the shell, so a signal to the shell's pid reaches torchrun.
    return f"cd {shlex.quote(options.folder)} && exec {shlex.join(command)}"


def host_command(host: str, command: str, ssh: Sequence[str]) -> list[str]:
    """Return the argv that runs a shell command on a host."""
    if host in LOCAL:
        return ["bash", "-c", command]
    # WHY -tt: the command there gets a terminal. Through it Ctrl-C reaches it, and SIGHUP when ssh
    # ends here: in both cases it saves and exits.
    return [*ssh, "-tt", host, command]


def run_everywhere(commands: Mapping[str, Sequence[str]]) -> int:
    """Run the command of each host, wait for all, and return the first status that is not 0."""
    machines: dict[str, subprocess.Popen[bytes]] = {}
    end: float | None = None

    def stop_all(number: int, frame: FrameType | None) -> None:
        nonlocal end
        is_first, end = end is None, end or time.monotonic() + GRACE_S
        for process in machines.values():
            if process.poll() is None:
                _stop(process, gently=is_first)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop_all)
    for host, argv in commands.items():
        # WHY its own process group: Ctrl-C reaches only this launcher, which passes it on once.
        stdin = subprocess.DEVNULL if host in LOCAL else subprocess.PIPE
        machines[host] = subprocess.Popen(argv, stdin=stdin, process_group=0)

    while running := [host for host, process in machines.items() if process.poll() is None]:
        if end is None and any(process.returncode for process in machines.values()):
            # The ranks there have ended, so those on the other machines can't continue: they save
            # and exit by themselves.
            end = time.monotonic() + GRACE_S
        if end is not None and time.monotonic() > end:
            print(f"launch.py: killing what still runs on {', '.join(running)}", file=sys.stderr)
            for host in running:
                os.killpg(machines[host].pid, signal.SIGKILL)
                machines[host].wait()
        time.sleep(POLL_S)
    statuses = {host: process.returncode for host, process in machines.items()}
    for host, status in statuses.items():
        if status:
            print(f"launch.py: {host} ended with status {status}", file=sys.stderr)
    failed = [status if status > 0 else 128 - status for status in statuses.values() if status]
    return failed[0] if failed else 0


def _stop(process: subprocess.Popen[bytes], *, gently: bool) -> None:
    """Make the ranks of one machine save and exit.

    gently: ssh stays until they have. WHY Ctrl-C: ssh forwards what is typed, but no signals.
    """
    if process.stdin is None or not gently:
        process.terminate()
        return
    with suppress(OSError):  # the process has just ended
        process.stdin.write(b"\x03")
        process.stdin.flush()


def main(argv: Sequence[str]) -> int:
    parser = make_parser("launch.py", __doc__)
    parser.add_argument(
        "--hosts", required=True, help="names, separated by commas; the first is the master"
    )
    parser.add_argument(
        "--nproc_per_node", type=int, required=True, help="ranks on each host: its GPUs"
    )
    parser.add_argument("--max_restarts", type=int, default=0, help="of the ranks, by torchrun")
    parser.add_argument("--port", type=int, default=29500, help="free port of the first host")
    parser.add_argument("--folder", default=str(ROOT), help="this project's folder on the hosts")
    parser.add_argument("--python", default=sys.executable, help="Python on the hosts")
    parser.add_argument("--env", action="append", default=[], help="NAME=VALUE for the ranks")
    parser.add_argument("--ssh", type=shlex.split, default=["ssh"], help="such as 'ssh -p 2222'")
    parser.add_argument("--dry-run", action="store_true", help="print the commands; start nothing")
    options, words = read_arguments(parser, list(argv))
    options.hosts = hosts = [host.strip() for host in options.hosts.split(",") if host.strip()]
    if len(set(hosts)) != len(hosts) or not hosts:
        parser.error(
            f"--hosts {','.join(hosts)}: name each host once; --nproc_per_node sets the ranks"
        )
    if len(hosts) > 1 and hosts[0] in LOCAL:
        parser.error(
            f"--hosts {','.join(hosts)}: the other hosts can't reach the first one by that name"
        )
    if options.nproc_per_node < 1 or not 0 < options.port < 65536:
        parser.error("--nproc_per_node needs 1 or more, --port 1 to 65535")
    if Path(words[0]).resolve().is_relative_to(ROOT):  # the hosts may have it in another folder
        words[0] = os.path.relpath(words[0], ROOT)
    if not options.dry_run:
        program = "".join(options.ssh[:1])
        if set(hosts) - set(LOCAL) and not shutil.which(program):
            parser.error(f"--ssh: there is no program {program}")
        given = argv[: len(argv) - len(words[1:])]  # up to the script, if it was named
        started = shlex.join([sys.executable, os.path.abspath(__file__), *given])
        options.env.insert(0, f"{COMMAND}={started}")
        if os.getcwd() != options.folder:  # a whole path tells the ranks that the user is elsewhere
            words[0] = os.path.join(options.folder, words[0])
    commands = {
        host: host_command(host, torchrun_command(options, words, node_rank), options.ssh)
        for node_rank, host in enumerate(hosts)
    }
    if options.dry_run:
        for command in commands.values():
            print(shlex.join(command))
        return 0
    return run_everywhere(commands)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The command that started this run: its launcher with the options that were given, and the script.

Owns finding it. Our launchers that a rank can't see name theirs in a variable; torchrun, mpirun and
run_with_python.py are ancestors of this process on this host, and their command lines are taken as
they are. What can't be found is composed from the number of ranks.
Does not own: how it is written for a shell (settings/typed_command.py).
"""

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hardened_ddp.ranks import slurm_env
from hardened_ddp.ranks.place import Launch, command_words, srun_words
from hardened_ddp.settings.typed_command import StartCommand, working_folder

COMMAND = "HARDENED_DDP_LAUNCHER_COMMAND"
"""Set by launchers/launch.py and train.slurm: what the user typed, quoted for a shell."""

_MPI = ("mpirun", "mpiexec", "orterun", "prterun", "prun")
_MAX_ANCESTORS = 20


def find_start_command(env: Mapping[str, str], launch: Launch) -> StartCommand:
    """Find how all ranks of this run are started again. Rank-local."""
    words, note = _find_words(env, launch)
    return StartCommand(tuple(words), working_folder(), note)


def _find_words(env: Mapping[str, str], launch: Launch) -> tuple[Sequence[str], str]:
    if told := env.get(COMMAND):
        return shlex.split(told), ""
    found: Sequence[str] = ()
    if launch.launcher == "mpi":
        found = _words_of_ancestor(lambda words: Path(words[0]).name.startswith(_MPI))
    elif launch.launcher == "spawn" or "TORCHELASTIC_RUN_ID" in env:
        found = _words_of_ancestor(lambda words: True)
    if not found:
        found = command_words(
            launch.launcher, launch.world_size, num_nodes=launch.num_nodes, env=env
        )
    note = ""
    if launch.launcher == "operator":
        note = f"in each of the {launch.num_nodes} pods"
    elif launch.launcher == "torchrun":
        # Where torchrun is configured by variables, its command line does not have all of it.
        by_variable = [f"{name}={value}" for name, value in env.items() if name.startswith("PET_")]
        found = [*(["env", *sorted(by_variable)] if by_variable else []), *found]
        if slurm_env.is_step(env):
            return [*srun_words(env, launch.num_nodes, num_nodes=launch.num_nodes), *found], ""
        if launch.num_nodes > 1:
            note = (
                f"on each of the {launch.num_nodes} nodes, with its own --node_rank if it has one"
            )
    return found, note


def _words_of_ancestor(is_launcher: Callable[[list[str]], bool]) -> list[str]:
    """Give the command line of the nearest such ancestor, without the script's own arguments.

    Empty if there is none, or if these arguments are not what it ends with.
    """
    pid, given = os.getppid(), sys.argv[1:]
    for _ in range(_MAX_ANCESTORS):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
            stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        except OSError:
            break
        words = words[:-1]
        if words and is_launcher(words):
            first = len(words) - len(given)
            if first < 1 or words[first:] != given:
                break
            # WHY: ranks run in the Python of their launcher, which may be typed as any name of it.
            is_python = Path(words[0]).name.startswith("python")
            return [sys.executable if is_python else words[0], *words[1:first]]
        pid = int(stat.rpartition(")")[2].split()[1])
    return []

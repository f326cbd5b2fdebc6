"""The command hardened-ddp: all that `python ddp_training.py` does, and torchrun's launcher.

    hardened-ddp --cpu_only                       one process
    hardened-ddp --nproc_per_node 2 --cpu_only    two ranks; all options of torchrun are taken
    hardened-ddp explain LOG                      and every other command

Owns which words of the command line are torchrun's, starting the ranks, and the status of them all.
Each rank is this command again. In a pod where an operator of Kubernetes configured torchrun by
variables (PET_...), a plain hardened-ddp starts the ranks, too. launchers/launch.py uses it in the
place of torchrun: then the words name the script.
Does not own: what a rank does (ddp_training.py).
"""

import sys
import tempfile
from collections.abc import Mapping, MutableMapping, Sequence
from pathlib import Path

import ddp_training
from hardened_ddp.errors import ConfigError, HardenedError
from hardened_ddp.ranks.launch import environment
from hardened_ddp.ranks.launchers_env import needs_torchrun
from hardened_ddp.reporting.ending import (
    FAILURE,
    RECORD,
    STOPPED,
    TRY_AGAIN,
    read_endings,
    write_termination_log,
)
from hardened_ddp.reporting.sinks import printed
from hardened_ddp.settings.cli import parse
from hardened_ddp.settings.commands import COMMANDS, TRAIN
from hardened_ddp.settings.layers import resolve
from hardened_ddp.settings.typed_command import PROGRAM, SCRIPT, config_file, own_command
from hardened_ddp.settings.wording import TORCHRUN_OPTIONS, TORCHRUN_SWITCHES

WITH_RANKS = (TRAIN, "evaluate")  # what several ranks can do
_SHARED = ("standalone", "nnodes", "rdzv_endpoint", "rdzv_backend", "master_addr", "master_port")
_KINDS = ("auto", "cpu", "gpu", "xpu")


def main() -> None:
    """Run the command line; the exit status says how it ended."""
    env = environment()
    try:
        launcher, own = split_words(sys.argv[1:])
        if launcher and own[:1] and own[0] in COMMANDS and not is_for_ranks(own):
            raise _error(f"{own[0]} is one process: leave out {' '.join(launcher)}")
        if is_for_ranks(own) and (launcher or needs_torchrun(env)):
            sys.exit(start_ranks(launcher, own, env))
    except HardenedError as error:
        print(f"{PROGRAM}: error {error}", file=printed(sys.stderr))
        sys.exit(error.exit_status)
    ddp_training.run_as_program()


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate torchrun's options from our own words. Raises ConfigError."""
    command = next(iter(words), "")
    if command in COMMANDS and command not in WITH_RANKS:  # doctor stands behind the options
        return [], list(words)  # its options may have the same names, as those behind "--"
    launcher: list[str] = []
    own: list[str] = []
    left = list(words)
    while left:
        word = left.pop(0)
        name, has_value, value = word.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if not word.startswith("--") or name not in (*TORCHRUN_OPTIONS, *TORCHRUN_SWITCHES):
            own.append(word)
        elif name in TORCHRUN_SWITCHES:
            launcher.append(f"--{name}")
        elif not has_value and not left:
            raise _error(f"--{name}: has no value")
        else:
            launcher.append(f"--{name}={value if has_value else left.pop(0)}")
    return launcher, own


def start_ranks(launcher: Sequence[str], own: Sequence[str], env: MutableMapping[str, str]) -> int:
    """Start the ranks by torchrun, wait for them, and return the exit status.

    Raises HardenedError for a mistake, before anything is started.
    """
    script = sys.argv[0]
    if own[:1] and Path(own[0]).name == SCRIPT.name:
        script, own = own[0], own[1:]
    elif Path(script).name != PROGRAM:
        script = str(SCRIPT)
    numbers = dict(word.removeprefix("--").split("=", 1) for word in launcher if "=" in word)
    check_numbers(numbers)
    request = parse(own, edited_file=config_file())
    if request.command in WITH_RANKS:
        resolve(request, world_size=_world_size(numbers, env))
    for name in [name for name in env if name.startswith("PET_") and not env[name]]:
        del env[name]  # torchrun can't read PET_STANDALONE="", which operators write
    is_alone = not any(name in numbers or f"PET_{name.upper()}" in env for name in _SHARED)
    alone = ["--standalone"] if is_alone and "--standalone" not in launcher else []
    env.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does, without its warning

    with tempfile.TemporaryDirectory(prefix="hardened-ddp-") as folder:
        record = Path(folder) / "endings.jsonl"
        env[RECORD] = str(record)
        status, told = run_torchrun([*alone, *launcher, script, *own])
        noted, error = read_endings(record)
    if noted is not None:
        status = noted
    elif status in (STOPPED, TRY_AGAIN):
        status = FAILURE  # WHY: no rank noted that: it is a status of the user's own code
    if status not in (0, STOPPED):
        print(f"{PROGRAM}: status {status}: {told}", file=printed(sys.stderr))
        write_termination_log(error or told, env)
    return status


def run_torchrun(words: Sequence[str]) -> tuple[int, str]:
    """Run torchrun's launcher; return a status, as far as it knows one, and what happened.

    Raises ConfigError if it can't use its options.
    """
    import torch.distributed.run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    parser = torchrun.get_args_parser()
    asked = parser.parse_args(words)
    try:
        torchrun.config_from_args(asked)
    except ValueError as error:
        raise _error(f"torchrun: {error}") from error
    try:
        torchrun.run(asked)  # type: ignore[no-untyped-call]  # torch gives it no types
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        how = f"with status {code}" if code >= 0 else f"by {failure.signal_name()}"
        return (code if code > 0 else 128 - code), f"rank {rank} was the first to end: {how}"
    except SignalException as error:
        return 128 + error.sigval, f"stopped by {error.sigval.name}"
    return 0, "all ranks ended"


def check_numbers(numbers: Mapping[str, str]) -> None:
    """Raise ConfigError if a number of torchrun's is none."""
    problems = []
    for name in ("nproc_per_node", "nnodes", "node_rank", "master_port", "max_restarts"):
        value = numbers.get(name, "1")
        is_word = name == "nproc_per_node" and value in _KINDS
        parts = value.split(":") if name == "nnodes" else [value]
        least = int(name in ("nproc_per_node", "nnodes", "master_port"))
        is_number = all(part.isdecimal() and int(part) >= least for part in parts)
        if not (is_word or is_number):
            words = f" or {', '.join(_KINDS)}" if name == "nproc_per_node" else ""
            problems.append(f"--{name}: found {value!r}, needs a whole number from {least}{words}")
    if problems:
        raise _error("\n  ".join(problems))


def _world_size(numbers: Mapping[str, str], env: Mapping[str, str]) -> int:
    """Count the ranks as far as it is known, for the rules between settings."""
    found = (numbers.get(n) or env.get(f"PET_{n.upper()}") for n in ("nnodes", "nproc_per_node"))
    nodes, ranks = (int(text) if text and text.isdecimal() else 1 for text in found)
    return nodes * ranks


def is_for_ranks(own: Sequence[str]) -> bool:
    """Whether several ranks can do what these words ask for."""
    words = own[1:] if own and Path(own[0]).name == SCRIPT.name else own
    command = words[0] if words and not words[0].startswith("-") else TRAIN
    has_ranks = command in WITH_RANKS or (command == "doctor" and "--cluster" in words)
    return has_ranks and not {"--help", "-h", "--version"}.intersection(own)


def _error(problem: str) -> ConfigError:
    return ConfigError(f"the ranks can't be started\n  {problem}", fix=own_command("--help"))


if __name__ == "__main__":
    main()

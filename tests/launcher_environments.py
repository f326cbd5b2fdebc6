"""What each launcher really puts into the environment of its ranks, as recorded from each.

Owns: whole environments, by name in launcher_environments.txt, and how one is changed.
"""

from pathlib import Path

RECORDED: dict[str, dict[str, str]] = {}


def environment_of(words: str) -> dict[str, str]:
    """Put an environment together: NAME is a recorded one, -NAME a variable that is not set.

    environment_of("SRUN SLURM_PROCID=0 -SLURM_NODEID")
    """
    found: dict[str, str] = {}
    for word in words.split():
        name, is_given, value = word.partition("=")
        if is_given:
            found[name] = value
        elif name.startswith("-"):
            del found[name[1:]]
        else:
            found |= RECORDED[name]
    return found


def lines_of(path: Path) -> list[str]:
    """Read a table: a line each, without comments."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [line for line in lines if not line.startswith("#")]


for _line in lines_of(Path(__file__).with_suffix(".txt")):
    _name, _, _words = _line.partition(": ")
    RECORDED[_name] = environment_of(_words)


def by_torchrun(rank: int, world_size: int, port: int) -> dict[str, str]:
    """Return what torchrun puts into the environment of a rank on its one node."""
    # WHY the port: each start is a torchrun of its own
    return environment_of(
        f"RANK={rank} LOCAL_RANK={rank} WORLD_SIZE={world_size} LOCAL_WORLD_SIZE={world_size} "
        f"GROUP_RANK=0 GROUP_WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 MASTER_PORT={port} "
        f"TORCHELASTIC_RESTART_COUNT=0 TORCHELASTIC_MAX_RESTARTS=3 "
        f"TORCHELASTIC_RUN_ID=tests-{port} TORCHELASTIC_USE_AGENT_STORE=False"
    )

"""Settings as tests give them: as a command, as the text of a file, as an earlier run."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from hardened_ddp.errors import ConfigError
from hardened_ddp.settings.cli import parse
from hardened_ddp.settings.layers import Resolved, resolve
from hardened_ddp.settings.record import dump
from hardened_ddp.settings.schema import flatten


def settings_of(command: str, *, world_size: int = 1) -> Resolved:
    return resolve(parse(shlex.split(command)), world_size=world_size)


def values_of(command: str) -> dict[str, Any]:
    return flatten(settings_of(command).config)


def problems_of(command: str, *, world_size: int = 1) -> list[str]:
    """Give the lines of the error, without its head."""
    with pytest.raises(ConfigError) as caught:
        settings_of(command, world_size=world_size)
    return [line.strip() for line in caught.value.message.splitlines()[1:]]


def problem_of(command: str, *, world_size: int = 1) -> str:
    lines = problems_of(command, world_size=world_size)
    assert len(lines) == 1, lines
    return lines[0]


def problems_in(text: str, command: str = "") -> list[str]:
    """Give the problems of a settings file with this text."""
    Path("my.yaml").write_text(text, encoding="utf-8")
    return problems_of(f"--config my.yaml {command}")


def make_run(name: str, *, command: str = "", step: int | None = 10) -> Path:
    """Make a run folder as training leaves it."""
    folder = Path("runs") / name
    (folder / "checkpoints").mkdir(parents=True)
    if step is not None:
        (folder / "checkpoints" / f"step-{step:09d}").mkdir()
    resolved = settings_of(command)
    (folder / "config.yaml").write_text(dump(resolved.config, resolved.sources), encoding="utf-8")
    return folder

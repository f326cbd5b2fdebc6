"""The JSON files of a run folder, which may be half written, cut off, or not readable at all.

Nothing here raises: what can't be read is named in problems, and left out.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hardened_ddp.settings.wording import counted

_MOST_BYTES = 64 * 2**20

Json = dict[str, Any]  # Any: JSON


def is_number(value: object) -> bool:
    """Say whether a value is a finite number; a damaged file may have one larger than any float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= sys.float_info.max


def number_of(entry: Mapping[str, Any], name: str) -> float:
    """Return a number of a file; 0 if it is missing, or is none."""
    return float(entry[name]) if is_number(entry.get(name)) else 0.0


def read_json(path: Path, problems: list[str]) -> Json:
    """Read a file that has one object; empty if there is none."""
    text = read_text(path, problems)
    found = _object_in(text)
    if text and found is None:
        problems.append(f"{path.name}: has no JSON object")
    return found or {}


def read_lines(path: Path, problems: list[str]) -> list[Json]:
    """Read a file of JSON lines; broken lines are left out, and counted in problems."""
    lines = [_object_in(line) for line in read_text(path, problems).splitlines()]
    found = [line for line in lines if line is not None]
    if num_broken := len(lines) - len(found):
        problems.append(f"{path.name}: {counted(num_broken, 'line')} can't be read")
    return found


def _object_in(text: str) -> Json | None:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_text(path: Path, problems: list[str], *, most_bytes: int = _MOST_BYTES) -> str:
    """Read a text; empty if there is no such file. Of a very large one, the end."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - most_bytes))
            text = file.read(most_bytes).decode("utf-8", "replace")
        if not text:
            problems.append(f"{path.name}: is empty")
        return text
    except FileNotFoundError:
        return ""
    except OSError as error:
        problems.append(f"{path.name}: can't be read: {error.strerror}")
        return ""


def files_in(folder: Path, problems: list[str]) -> list[Path]:
    """List what is in a folder; what can't be read is named in problems."""
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(f"{folder.name}: can't be read: {error.strerror}")
        return []

"""Running explain on a text, for tests."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

from ddp_doctor.explain.command import run_explain


def explain(*logs: Path) -> dict[str, Any]:
    """Give what --json writes. Any: JSON."""
    output = StringIO()
    status = run_explain([str(log) for log in logs], wants_json=True, output=output)
    found: dict[str, Any] = json.loads(output.getvalue())
    assert status == (1 if found["verdict"] == "unknown" else 0)
    return found


def explain_text(text: str, folder: Path, name: str = "train.log") -> dict[str, Any]:
    """Explain a text as a file."""
    log = folder / name
    log.write_text(text, encoding="utf-8")
    return explain(log)


def code_of(found: dict[str, Any]) -> str:
    return str(found["cause"]["code"]) if found["cause"] else str(found["verdict"])


def rank_of(found: dict[str, Any]) -> int | None:
    """Return the rank that is named, if it is one."""
    return found["guilty"][0]["rank"] if len(found["guilty"]) == 1 else None

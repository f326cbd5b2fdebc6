"""Cases of tests: which are not slow, and so run without --all too; and those of a text file."""

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

Undisturbed = Callable[..., dict[str, str]]
"""Gives the final tensors of a module's run that nothing happens to, by ranks and flags."""


def slow_after(num_first: int, cases: Iterable[Any]) -> list[Any]:  # Any: pytest's ParameterSet
    """Mark all but the first num_first cases as slow: one of a kind is enough at first."""
    return [
        case if index < num_first else pytest.param(case, marks=pytest.mark.slow)
        for index, case in enumerate(cases)
    ]


def sections(path: Path) -> dict[str, str]:
    """Read a text file of cases: === and the title of each, then its text."""
    text = path.read_text(encoding="utf-8")
    return dict(re.findall(r"^=== (.+)\n((?:(?!=== ).*\n)+)", text, re.MULTILINE))

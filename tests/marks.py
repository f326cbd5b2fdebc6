"""Which cases of a test are not slow: those that run without --all too. And types of fixtures."""

from collections.abc import Callable, Iterable
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

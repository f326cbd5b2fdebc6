"""Which cases of a test run with --quick too."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_after(num_quick: int, cases: Iterable[Any]) -> list[Any]:  # Any: pytest's ParameterSet
    """Mark all but the first num_quick cases as slow: one of a kind is enough for a quick look."""
    return [
        case if index < num_quick else pytest.param(case, marks=pytest.mark.slow)
        for index, case in enumerate(cases)
    ]

"""Every test is checked for what it leaves behind; --quick leaves out the slow ones."""

import pytest

from tests.leftovers import leaves_nothing_behind

__all__ = ["leaves_nothing_behind"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out the tests marked slow")
    parser.addoption("--rounds", type=int, default=20, help="of the chaos test")
    parser.addoption("--plans", type=int, default=3, help="of the test of fault plans")
    parser.addoption("--seed", type=int, default=0, help="of the chaos test's first round")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "chaos_seed" in metafunc.fixturenames:
        first = metafunc.config.getoption("--seed")
        seeds = range(first, first + metafunc.config.getoption("--rounds"))
        metafunc.parametrize("chaos_seed", seeds)
    if "plan_seed" in metafunc.fixturenames:
        metafunc.parametrize("plan_seed", range(metafunc.config.getoption("--plans")))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--quick"):
        return
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="slow, and --quick was given"))

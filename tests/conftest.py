"""Every test is checked for what it leaves behind; --times shows the CPU time of each."""

import os
from collections import Counter
from collections.abc import Generator

import pytest

from tests import ranks
from tests.leftovers import leaves_nothing_behind

__all__ = ["leaves_nothing_behind"]

CPU_BEFORE = pytest.StashKey[float]()
MOST_TESTS_SHOWN = 40


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out the tests marked slow")
    parser.addoption("--rounds", type=int, default=20, help="of the chaos test")
    parser.addoption("--plans", type=int, default=3, help="of the test of fault plans")
    parser.addoption("--seed", type=int, default=0, help="of the chaos test's first round")
    parser.addoption("--times", action="store_true", help="show CPU seconds by test and file")


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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    item.stash[CPU_BEFORE] = _cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    if call.when == "teardown":
        used_s = _cpu_seconds() - item.stash[CPU_BEFORE]
        item.user_properties.append(("cpu_s", round(used_s, 2)))
    return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not terminalreporter.config.getoption("--times"):
        return
    tests: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for report in (report for some in terminalreporter.stats.values() for report in some):
        if getattr(report, "when", "") == "teardown":
            used_s = dict(report.user_properties)["cpu_s"]
            tests[report.nodeid] += used_s
            files[report.nodeid.partition("::")[0]] += used_s
    terminalreporter.section(f"CPU seconds: {tests.total():.0f}")
    for name, used_s in [*files.most_common(), *tests.most_common(MOST_TESTS_SHOWN)]:
        terminalreporter.write_line(f"{used_s:8.1f}  {name}")


def _cpu_seconds() -> float:
    """Add up what pytest, its commands and the ranks that have ended have used."""
    return sum(os.times()[:4]) + ranks.cpu_seconds()

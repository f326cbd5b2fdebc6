"""Every test is checked for what it leaves behind; the longest run first, side by side.

--rounds, --plans and --seed are for random faults, and --shuffle N puts the tests into a random
order.
"""

import gc
import os
import signal
import sys
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.harness import ranks
from tests.hostile import shuffled
from tests.leftovers import leaves_nothing_behind
from tests.marks import Undisturbed, slow_after
from tests.run_folder import last_tensors

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.scheduler import LoadScopeScheduling
    from xdist.workermanage import WorkerController

    from tests.two_hosts import TwoHosts

__all__ = ["leaves_nothing_behind"]

# Files of tests that take long, those with the longest tests or waits first, as the end needs short
# ones. Each of their tests may run in its own process; but where tests share what takes long to
# make (fixtures of the module: a cluster, an environment, undisturbed runs), the file stays whole.
# So do all other files, since several processes would import what only one of them needs.
_LONG = """
slurm drill drills mirror own_loops ddp_training examples explain reproducers recipes command
two_hosts restarts docs programs numbers stuck_device setup survivor_save fault_plans step_path
equal_weights tutorial run_with chaos next_commands effects step_retry steps hangs replica streams
stages gpu_report hub_text trackers own_optimizers ledger data_faults user_exits odd_models
"""
LONG = [f"test_{name}.py" for name in _LONG.split()]
# But of these, which would take minutes one after the other, each function is for itself.
SPLIT = ("test_drills.py", "test_survivor_save.py", "test_fault_plans.py")
SPLIT += ("test_run_with.py", "test_chaos.py")
# And this one looks for ranks that hang: beside each other, its ranks might seem to.
WHOLE = ("test_command.py",)

# WHY: a shell starts what runs in its background with SIGINT ignored, and every child inherits
# that; then no Ctrl-C of a test would reach anybody.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# WHY: without an active environment, as by README's command on a new machine, a shell finds neither
# torchrun nor this python, and messages name both otherwise.
_BIN = str(Path(sys.executable).parent)
if _BIN not in os.environ.get("PATH", "").split(os.pathsep)[:1]:
    os.environ["PATH"] = os.pathsep.join([_BIN, *filter(None, [os.environ.get("PATH")])])

# Until all tests are collected: importing torch and them makes 700,000 objects, and no garbage.
gc.disable()


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator["TwoHosts"]:
    """Two hosts, or why there can be none: looking makes a namespace, so it is no mark."""
    from tests.two_hosts import TwoHosts, why_not

    if reason := why_not():
        pytest.skip(reason)
    with TwoHosts(tmp_path / "etc") as made:
        yield made


@pytest.fixture(scope="module")
def undisturbed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Undisturbed:
    """The final tensors of what run(output, world_size, *flags) of the test's module does."""

    @cache
    def final_tensors(world_size: int, *flags: str) -> dict[str, str]:
        output = tmp_path_factory.mktemp("undisturbed")
        request.module.run(output, world_size, *flags).ok()
        return last_tensors(output)

    return final_tensors


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rounds", type=int, default=4, help="of the chaos test")
    parser.addoption("--plans", type=int, default=1, help="of the test of fault plans")
    parser.addoption("--seed", type=int, default=0, help="of the first round and plan")
    parser.addoption("--shuffle", type=int, help="a random order of the tests: its seed")


def pytest_configure(config: pytest.Config) -> None:
    if shared := getattr(config, "workerinput", {}).get("fork_server"):
        ranks.SERVERS.append(shared)


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's: in the process that shares the tests out
def pytest_configure_node(node: "WorkerController") -> None:
    # WHY: four imports of torch and its friends are 15 s of CPU time
    node.workerinput["fork_server"] = ranks.share_server()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    first = metafunc.config.getoption("--seed")
    for name, option in (("chaos_seed", "--rounds"), ("plan_seed", "--plans")):
        if name in metafunc.fixturenames:
            seeds = range(first, first + metafunc.config.getoption(option))
            metafunc.parametrize(name, slow_after(1, seeds))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (seed := config.getoption("--shuffle")) is not None:
        items[:] = shuffled(items, lambda item: _group_of(item.nodeid), seed=seed)
        return
    order = {name: place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: order.get(item.path.name, len(LONG)))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's: it asks with --numprocesses only
def pytest_xdist_make_scheduler(config: pytest.Config, log: "Producer") -> "LoadScopeScheduling":
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group_of(nodeid)

    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    # WHY: pytest-xdist ends at text that is no UTF-8, as a log line with half of a character
    report.sections = [
        (title, text.encode("utf-8", "backslashreplace").decode())
        for title, text in report.sections
    ]
    return report


def _group_of(nodeid: str) -> str:
    """Name what must stay together: a file; of LONG a test, or those that share fixtures."""
    path, _, _ = nodeid.partition("::")
    name = os.path.basename(path)
    if name not in LONG or name in WHOLE:
        return path
    if not _has_fixtures_of_module(path):
        return nodeid
    function, _, case = nodeid.partition("[")
    if name == "test_drills.py":
        # The last word of a drill is its phase, or where it runs: then it shares that undisturbed
        # run. One after the other, the drills would take longer than all others beside them.
        return f"{function}[{case.rpartition('-')[2]}"
    return function if name in SPLIT else path


@cache
def _has_fixtures_of_module(path: str) -> bool:
    text = (Path(__file__).parent / path).read_text(encoding="utf-8")
    return 'scope="module"' in text or "Undisturbed" in text

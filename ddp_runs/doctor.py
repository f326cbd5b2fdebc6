"""The doctor: finds problems of this machine before a run does.

Owns the order of the checks, the report and the exit status. The checks are in machine.py,
software.py and selftest.py. Nothing here needs torch: if it can't be imported, that is a line of
the report.
"""

import contextlib
import platform
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TextIO

from ddp_runs import machine, selftest, software
from ddp_runs.machine import Check

_NAME_WIDTH = 13


def run_doctor(
    *, output: TextIO, env: Mapping[str, str], checks: Iterable[Callable[[], Check]] | None = None
) -> int:
    """Print a report of this machine to output; return 0 if nothing FAILs, else 1.

    Takes some seconds: two processes form a group over the network. Lines are printed one by one.
    """
    title = f"doctor: {platform.platform()}, host {platform.node()}"
    found = map(guarded, list_checks(env) if checks is None else checks)
    return report(found, output, title=title)


def report(checks: Iterable[Check], output: TextIO, *, title: str) -> int:
    """Print each check when it is done; return 0 if nothing FAILs, else 1."""
    done: list[Check] = []
    say = partial(print, file=output, flush=True)
    # WHY: a reader of only the first lines (doctor | head) closes the pipe; that is not an error.
    with contextlib.suppress(BrokenPipeError):
        say(title)
        for check in checks:
            done.append(check)
            say(f"  {check.status:<4}  {check.name:<{_NAME_WIDTH}}  {check.detail}")
            if check.advice:
                say(f"        {'':<{_NAME_WIDTH}}  do: {check.advice}")
        num_failed = sum(check.status == "FAIL" for check in done)
        num_warned = sum(check.status == "warn" for check in done)
        verdict = "training can't run here as it is" if num_failed else "training can run here"
        say(f"{len(done)} checks: {num_failed} FAIL, {num_warned} warn. So {verdict}.")
    return int(any(check.status == "FAIL" for check in done))


def list_checks(env: Mapping[str, str]) -> list[Callable[[], Check]]:
    """List all checks, quick ones first."""
    return [
        software.check_python,
        software.check_torch,
        software.check_packages,
        software.check_gpus,
        software.check_backends,
        machine.check_memory,
        machine.check_shared_memory,
        lambda: machine.check_disk(Path()),
        lambda: machine.check_writing(Path()),
        lambda: machine.check_threads(env),
        lambda: machine.check_settings(env),
        machine.check_hostname,
        lambda: selftest.check_all_reduce(env),
    ]


def guarded(check: Callable[[], Check]) -> Check:
    """Do a check; one that breaks is a warning."""
    try:
        return check()
    except Exception as error:  # WHY broad: one check that breaks must not hide the others
        name = getattr(check, "__name__", "check").removeprefix("check_")
        return Check(name, "warn", f"could not be checked: {type(error).__name__}: {error}")

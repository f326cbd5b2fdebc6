"""The examples of own loops on forked ranks, with faults at any line of their bodies.

A loop is the text of an example. A fault happens before a line of it, in a step, on a rank.
"""

import ast
import io
import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ddp_runs.ledger_check import check_ledger
from hardened_ddp.guard import stop
from hardened_ddp.own_loop import last_commit
from hardened_ddp.own_loop.last_commit import LastCommit
from tests.harness.processes import ROOT
from tests.harness.ranks import Finished, start_ranks
from tests.marks import sections
from tests.run_folder import find_checkpoints, fingerprints, only_run, step_of

EXAMPLES = ROOT / "examples" / "own_loops"
PROGRAMS = sections(Path(__file__).with_name("programs.txt"))
SMALL = ("epochs(5) -> epochs(2)", "steps(40) -> steps(12)")
EVERY_RANK = -1
_done: list["Fault"] = []


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to one rank."""

    act: str
    """kill, stop (SIGTERM), raise, or hang."""

    rank: int = 1
    step: int = 5
    line: int = 0
    after_s: float = 0.0


def text_of(name: str, *changes: str) -> str:
    """Return an example, made short; changes: what to replace, as OLD -> NEW."""
    text = (EXAMPLES / "protected" / f"{name}.py").read_text(encoding="utf-8")
    for change in (*SMALL, *changes):
        old, new = change.split(" -> ")
        assert old in text or change in SMALL, old
        text = text.replace(old, new)
    return text


def body_of(text: str) -> list[int]:
    """Return where the statements of the body begin, to its commit."""
    loops = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.For)]
    loop = max((node for node in loops if "run." in ast.unparse(node.iter)), key=lambda n: n.lineno)
    inner = (node for node in ast.walk(loop) if isinstance(node, ast.stmt) and node is not loop)
    lines = sorted({node.lineno for node in inner})
    return [line for line in lines if line <= line_of(text, "run.commit()")]


def line_of(text: str, part: str) -> int:
    """Return the number of the first line that holds part."""
    return next(n for n, line in enumerate(text.splitlines(), 1) if part in line)


def run_loop(text: str, fault: Fault | None, before: Callable[[], None] | None) -> None:
    """Be a rank that runs a program."""
    if before is not None:
        before()
    if fault is not None and fault.act == "stop":
        stop.MAX_INTERVAL = 1  # WHY: a loop as short as these ends before ranks look for a stop
    content: dict[str, Any] = {"__name__": "__main__"}  # Any: a module's
    if fault is not None and fault.rank in (int(os.environ["RANK"]), EVERY_RANK):
        lines = text.splitlines()
        line = lines[fault.line - 1]
        lines.insert(fault.line - 1, line[: len(line) - len(line.lstrip())] + "fault(run.step)")
        text, content["fault"] = "\n".join(lines), partial(_act, fault)
    exec(compile(text, "own_loop.py", "exec"), content)


def _act(fault: Fault, step: int) -> None:
    if step != fault.step or _done:
        return
    _done.append(fault)
    if fault.after_s:
        threading.Timer(fault.after_s, _do, (fault.act,)).start()
    else:
        _do(fault.act)


def _do(act: str) -> None:
    if act == "raise":
        raise ValueError("a mistake of the user's own")
    if act == "hang":
        threading.Event().wait()
    os.kill(os.getpid(), signal.SIGTERM if act == "stop" else signal.SIGKILL)


def launch(
    text: str,
    world_size: int = 2,
    *,
    fault: Fault | None = None,
    before: Callable[[], None] | None = None,
) -> Finished:
    """Run a program on ranks in the working folder, to its end. Does not raise if one fails."""
    with start_ranks(run_loop, world_size, text, fault, before) as running:
        return running.wait(60.0)


def run_folder(folder: Path) -> Path:
    return only_run(folder / "runs")


def state_of(folder: Path) -> tuple[Any, ...]:  # Any: JSON
    """Return all of the newest checkpoint: step, place, numbers, tensors."""
    newest = find_checkpoints(folder / "runs")[-1]
    meta = json.loads((newest / "manifest.json").read_text(encoding="utf-8"))["meta"]
    return meta, fingerprints(newest / "state.safetensors")


def checkpoints_of(folder: Path) -> list[int]:
    """List the steps of the checkpoints, oldest first."""
    return [step_of(path) for path in find_checkpoints(folder / "runs")]


def is_exact(folder: Path) -> str:
    """Return what the ledgers say if a sample was not taken exactly once; else nothing."""
    if not (run_folder(folder) / "data").is_dir():
        return ""
    output = io.StringIO()
    return output.getvalue() if check_ledger(run_folder(folder), output=output) else ""


def save_what_is_there() -> None:
    """Have survivors save the tensors as they lie."""
    LastCommit.take = lambda self, *, is_beside: {n: t.detach() for n, t in self._live.items()}


def trust_stamps() -> None:
    """Have no tensor copied and compared: what changes no stamp counts as unwritten."""
    LastCommit.before_forward = lambda self: None  # type: ignore[method-assign]
    last_commit.NUM_FIRST, last_commit.INSPECTED_EVERY = 0, 10**9

#!/usr/bin/env python3
"""Do two checkouts of this project train to the same weights, bit for bit?

    python benchmarks/equal_weights.py CHECKOUT                this one against CHECKOUT
    python benchmarks/equal_weights.py CHECKOUT --only 2r-shared resume
    python benchmarks/equal_weights.py CHECKOUT --keep FILE    CHECKOUT is run the first time only
    python benchmarks/equal_weights.py --list

For a change that should not alter the numbers. The runs of equal/runs.py are done in both, with the
same Python, model and data: each kind of step on the CPU, and runs in which something goes wrong.
Compared are all tensors of the last checkpoint, model and optimizer, by name and bytes, in whatever
order they are in the file; where it stands (step, epoch, cursor); and every loss, accuracy,
learning rate and gradient norm in metrics.jsonl. Two runs at a time.

A run that fails, or in which the fault did not come, is not equal. The exit status is 0 only if all
runs are equal.
"""

import argparse
import hashlib
import importlib.metadata
import json
import queue
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # WHY: started by its path, Python looks beside this file only

from benchmarks.equal.failing_parts import DONE  # noqa: E402
from benchmarks.equal.ranks import Ranks  # noqa: E402
from benchmarks.equal.runs import RUNS, Run  # noqa: E402

AT_A_TIME = 2
RENAMED = {"--step_retry": "--recovery"}
"""A setting's name of today, and what an older checkout calls it."""

_FLAGS = ["--cpu_only", "--epochs", "2", "--log_interval", "7", "--run_name", "run"]
# WHY: when auto saves is a matter of time, and a last checkpoint from before the end of its epoch
# has another position.
_FLAGS += ["--checkpoint_every_steps", "0"]
# WHY: checkouts differ in what auto chooses, and another memory format adds in another order.
_FLAGS += ["--channels_last", "false"]
_METRICS = ("loss/", "accuracy/", "optimizer/")
_TENSORS = ("model.", "optimizer.")
_POSITION = ("step", "epoch", "cursor")
_MOST_NAMED = 4

Facts = dict[str, str]
"""What is compared of a run: names, and a hash or a number as text."""


class RunFailedError(Exception):
    """A run ended otherwise than it should; the message says how."""


@dataclass(frozen=True, slots=True)
class Checkout:
    """A checkout of this project."""

    path: Path
    commit: str
    """With a + if something was changed since."""

    help_text: str
    """Which settings it knows."""

    @classmethod
    def at(cls, path: Path) -> "Checkout":
        """Ask the checkout in this folder."""
        ask = [sys.executable, str(path / "ddp_training.py"), "--help"]
        help_text = subprocess.run(ask, capture_output=True, text=True, check=True).stdout
        describe = ["git", "-C", str(path), "describe", "--always", "--dirty=+", "--abbrev=10"]
        commit = subprocess.run(describe, capture_output=True, text=True, check=False).stdout
        return cls(path.resolve(), commit.strip() or "no commit+", help_text)

    def translate(self, flags: Sequence[str]) -> list[str]:
        """Give the flags by the names that this checkout has for them."""
        return [
            RENAMED[flag] if flag in RENAMED and f"{flag} " not in self.help_text else flag
            for flag in flags
        ]

    def facts_of(self, run: Run, ranks: Ranks) -> Facts:
        """Do a run in a folder of its own. Raises RunFailedError."""
        with tempfile.TemporaryDirectory(prefix=f"equal-{run.name}-") as name:
            folder = Path(name)
            (folder / "log").touch()
            for index, (world_size, flags) in enumerate(run.stages):
                flags = self.translate([*_FLAGS, "--output_dir", "runs", *flags])
                script = self.path / "ddp_training.py"
                statuses = ranks.train(folder, script, flags, world_size)
                if any(statuses) and not (run.may_fail and index < len(run.stages) - 1):
                    log = (folder / "log").read_text(encoding="utf-8")[-3000:]
                    raise RunFailedError(f"{script} {' '.join(flags)}: {statuses}\n{log}")
            if run.has_fault and not (folder / DONE).exists():
                raise RunFailedError(f"{self.path}: the fault did not come")
            return read_facts(folder / "runs" / "run")


class Kept:
    """What a checkout gave, in a file, so that it is run once only."""

    def __init__(self, path: Path | None, commit: str) -> None:
        # WHY not with a +: then the commit does not say what was run
        self._path = None if commit.endswith("+") else path
        torch_version = importlib.metadata.version("torch")
        runs = hashlib.sha256(repr((_FLAGS, RUNS)).encode()).hexdigest()
        self._of = f"commit {commit}, torch {torch_version}, runs {runs}"
        self.facts: dict[str, Facts] = {}
        if self._path is not None and self._path.exists():
            content = json.loads(self._path.read_text(encoding="utf-8"))
            self.facts = content["facts"] if content["of"] == self._of else {}

    def add(self, name: str, facts: Facts) -> None:
        """Take what a run gave."""
        self.facts[name] = facts
        if self._path is not None:
            content = json.dumps({"of": self._of, "facts": self.facts}, indent=1)
            self._path.write_text(content + "\n", encoding="utf-8")


def main() -> int:
    """Do all runs in both checkouts and print a line for each."""
    options = _read_options()
    if options.list:
        print("\n".join(RUNS))
        return 0
    runs = [RUNS[name] for name in options.only or RUNS]
    ours, other = Checkout.at(ROOT), Checkout.at(options.checkout)
    print(f"{ours.commit} against {other.commit}", flush=True)
    kept = Kept(options.keep, other.commit)
    num_equal = 0
    with ExitStack() as stack:
        free: queue.SimpleQueue[Ranks] = queue.SimpleQueue()
        for _ in range(AT_A_TIME):
            free.put(stack.enter_context(Ranks()))
        pool = stack.enter_context(ThreadPoolExecutor(max_workers=AT_A_TIME))

        def do(checkout: Checkout, run: Run) -> Facts:
            ranks = free.get()
            try:
                return checkout.facts_of(run, ranks)
            finally:
                free.put(ranks)

        mine: dict[str, Future[Facts]] = {}
        others: dict[str, Future[Facts]] = {}
        for run in runs:
            mine[run.name] = pool.submit(do, ours, run)
            if run.name not in kept.facts:
                others[run.name] = pool.submit(do, other, run)
        for run in runs:
            try:
                facts = mine[run.name].result()
                if run.name in others:
                    kept.add(run.name, others[run.name].result())
                names = differing(facts, kept.facts[run.name])
                verdict = f"DIFFERENT: {_listed(names)}" if names else "equal"
                num_equal += not names
                num_tensors = sum(name.startswith(_TENSORS) for name in facts)
                counts = f"{num_tensors:3} tensors {len(facts) - num_tensors:4} numbers"
            except RunFailedError as error:
                counts, verdict = "", f"FAILED: {error}"
            print(f"{run.name:28}{counts}  {verdict}", flush=True)
    print(f"{num_equal} of {len(runs)} runs are equal")
    return 0 if num_equal == len(runs) else 1


def read_facts(run: Path) -> Facts:
    """Read what is compared from the folder of a run."""
    checkpoints = sorted((run / "checkpoints").glob("step-*"))
    if not checkpoints:
        raise RunFailedError("there is no checkpoint")
    manifest = json.loads((checkpoints[-1] / "manifest.json").read_text(encoding="utf-8"))
    facts = {name: str(manifest["meta"][name]) for name in _POSITION}
    facts |= hash_tensors(checkpoints[-1] / "state.safetensors")
    for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        numbers = json.loads(line)
        for name, number in numbers.items():
            if name.startswith(_METRICS):  # of a step that was retried the last line holds
                facts[f"{name} of step {numbers['step']}"] = repr(number)
    return facts


def hash_tensors(path: Path) -> Facts:
    """Hash each tensor of a file, by its name.

    The format: https://github.com/huggingface/safetensors#format
    """
    content = path.read_bytes()
    begin = 8 + int.from_bytes(content[:8], "little")
    header: dict[str, Any] = json.loads(content[8:begin])  # Any: JSON
    header.pop("__metadata__", None)
    hashes: Facts = {}
    for name, entry in header.items():
        first, last = entry["data_offsets"]
        digest = hashlib.sha256(content[begin + first : begin + last]).hexdigest()
        hashes[name] = f"{entry['dtype']} {entry['shape']} {digest}"
    return hashes


def differing(ours: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """Name what is not the same in both, the tensors of the model first."""
    names = [name for name in {**ours, **others} if ours.get(name) != others.get(name)]
    return sorted(names, key=lambda name: (not name.startswith("model."), name))


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path, nargs="?", help="the other checkout")
    parser.add_argument("--only", nargs="+", choices=RUNS, metavar="NAME", help="these runs")
    parser.add_argument("--keep", type=Path, help="a file for what the other checkout gives")
    parser.add_argument("--list", action="store_true", help="name the runs and do nothing")
    options = parser.parse_args()
    if options.checkout is None and not options.list:
        parser.error("which checkout? To make one: git worktree add FOLDER COMMIT")
    return options


if __name__ == "__main__":
    sys.exit(main())

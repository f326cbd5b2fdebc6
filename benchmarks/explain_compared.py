#!/usr/bin/env python3
"""What torchrun's own report says of failed jobs, beside what explain says of the same logs.

    python benchmarks/explain_compared.py                 23 jobs, about 5 minutes
    python benchmarks/explain_compared.py NAME ...        some of them

Each job is a reproducer of the tests with two or three ranks (tests/explain/failing_*.py), started
by a real torchrun. Its main function is decorated with @record, as torch's documentation advises,
so that torchrun's last block has all that it can have. explain reads the same output.

What is compared, against what is known of each reproducer:

- rank: is the guilty rank named, where one is to blame? Where the log can't tell, or all ranks
  fail alike, none should be.
- cause: torchrun names none, but its block may hold the text of the exception that is the cause.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.explain import reproducers  # noqa: E402  # WHY: found through the path above

_ROOT_CAUSE = re.compile(r"Root Cause \(first observed failure\):.*?rank\s*: (\d+)", re.DOTALL)
_LIMIT_S = 120


@dataclass(frozen=True, slots=True)
class Answer:
    """What one tool says of one job."""

    rank: int | None
    cause: str

    def judged(self, guilty: int | None) -> str:
        """Say whether the rank is right."""
        if guilty is None:
            return "none" if self.rank is None else f"names rank {self.rank}"
        if self.rank is None:
            return "not named"
        return "right" if self.rank == guilty else f"wrong: rank {self.rank}"


def main() -> int:
    """Run the jobs; print a table in Markdown and the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    cases = {name: case for name, case in reproducers.load().items() if case.num_ranks > 1}
    if options.as_rank:
        be_rank(cases[options.names[0]])
        return 0
    right = {"torchrun": 0, "explain": 0}
    unfounded = dict(right)
    causes = dict(right)
    print("| job | guilty | torchrun: rank | torchrun: text | explain: rank | explain: cause |")
    print("| --- | --- | --- | --- | --- | --- |")
    names = options.names or list(cases)
    for name in names:
        case = cases[name]
        output = run_job(case)
        by_torchrun, by_explain = ask_torchrun(output), ask_explain(output)
        for tool, answer in (("torchrun", by_torchrun), ("explain", by_explain)):
            right[tool] += answer.judged(case.guilty) in ("right", "none")
            unfounded[tool] += answer.judged(case.guilty).startswith(("wrong", "names"))
        causes["torchrun"] += by_torchrun.cause == "the exception"
        causes["explain"] += by_explain.cause == case.code
        guilty = "nobody" if case.guilty is None else f"rank {case.guilty}"
        print(
            f"| {name} | {guilty} | {by_torchrun.judged(case.guilty)} | {by_torchrun.cause} "
            f"| {by_explain.judged(case.guilty)} | {by_explain.cause} |",
            flush=True,
        )
    for tool in right:
        print(
            f"{tool}: rank right or rightly left out {right[tool]}, named without ground "
            f"{unfounded[tool]}, cause told {causes[tool]} of {len(names)}"
        )
    return 0


def be_rank(case: reproducers.Reproducer) -> None:
    """Fail as the reproducer does, on one rank that torchrun has started."""
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def job() -> None:
        rank = int(os.environ["RANK"])
        if case.has_group:
            dist.init_process_group("gloo", timeout=reproducers._TIMEOUT)
        case.run(rank, Path.cwd())

    job()


def run_job(case: reproducers.Reproducer) -> str:
    """Run a job with torchrun and give all that it prints."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc_per_node={case.num_ranks}", str(Path(__file__).resolve())]
    with tempfile.TemporaryDirectory(prefix="job-") as folder:
        done = subprocess.run(
            [*command, "--as-rank", case.name],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    return done.stdout


def ask_torchrun(output: str) -> Answer:
    """Read the block in which torchrun reports what it calls the root cause."""
    found = _ROOT_CAUSE.search(output)
    if found is None:
        return Answer(None, "no report")
    block = output[found.start() :]
    if "Traceback (most recent call last)" in block:
        return Answer(int(found[1]), "the exception")
    signal = re.search(r"traceback : (Signal \d+ \(\w+\))", block)
    return Answer(int(found[1]), signal[1] if signal else "an exit status")


def ask_explain(output: str) -> Answer:
    """Give what explain says of the same text."""
    command = [sys.executable, str(ROOT / "ddp_training.py"), "explain", "--json", "-"]
    done = subprocess.run(command, input=output, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    guilty = report["guilty"]
    cause = report["cause"]["code"] if report["cause"] else report["verdict"]
    return Answer(guilty["rank"] if guilty else None, cause)


if __name__ == "__main__":
    sys.exit(main())

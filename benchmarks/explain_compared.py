#!/usr/bin/env python3
"""What torchrun's own report says of failed jobs, beside what explain says of the same logs.

    python benchmarks/explain_compared.py                 23 jobs, about 5 minutes
    python benchmarks/explain_compared.py NAME ...        some of them
    python benchmarks/explain_compared.py --keep FOLDER   keeps what the jobs print
    python benchmarks/explain_compared.py --logs FOLDER --nvrx PYTHON
                                                          NVRx's restart agent on kept outputs

Each job is a reproducer of the tests with two or three ranks (tests/explain/failing.txt), started
by a real torchrun. Its main function is decorated with @record, as torch's documentation advises,
so that torchrun's last block has all that it can have. explain reads the same output.

What is compared, against what is known of each reproducer:

- rank: is the guilty rank named, where one is to blame? Where the log can't tell, or all ranks
  fail alike, none should be.
- cause: torchrun names none, but its block may hold the text of the exception that is the cause.

--nvrx takes the Python of an environment that has nvidia-resiliency-ext 0.7 or newer. Its restart
agent is asked without a language model (--disable-l1): what remains is its deterministic part.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
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
    parser.add_argument("--keep", type=Path, help="write the output of each job to this folder")
    parser.add_argument("--logs", type=Path, help="a folder of --keep, instead of running the jobs")
    parser.add_argument("--nvrx", help="a Python that has nvidia-resiliency-ext; needs --logs")
    options = parser.parse_args()
    cases = {name: case for name, case in reproducers.load().items() if case.num_ranks > 1}
    if options.as_rank:
        be_rank(cases[options.names[0]])
        return 0
    if options.nvrx:
        return compare_nvrx(options.nvrx, options.logs, cases)
    right = {"torchrun": 0, "explain": 0}
    unfounded = dict(right)
    causes = dict(right)
    print("| job | guilty | torchrun: rank | torchrun: text | explain: rank | explain: cause |")
    print("| --- | --- | --- | --- | --- | --- |")
    names = options.names or list(cases)
    for name in names:
        case = cases[name]
        output = (options.logs / f"{name}.log").read_text() if options.logs else run_job(case)
        if options.keep:
            options.keep.mkdir(parents=True, exist_ok=True)
            (options.keep / f"{name}.log").write_text(output)
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


def compare_nvrx(python: str, logs: Path, cases: Mapping[str, reproducers.Reproducer]) -> int:
    """Ask NVRx's restart agent, and explain, about kept outputs; print a table."""
    print("| job | guilty | NVRx: rank | NVRx: class | NVRx: decision | explain: rank |")
    print("| --- | --- | --- | --- | --- | --- |")
    right = {"NVRx": 0, "explain": 0}
    unfounded = dict(right)
    for name, case in cases.items():
        log = logs / f"{name}.log"
        by_nvrx, decision = ask_nvrx(python, log)
        by_explain = ask_explain(log.read_text())
        for tool, answer in (("NVRx", by_nvrx), ("explain", by_explain)):
            right[tool] += answer.judged(case.guilty) in ("right", "none")
            unfounded[tool] += answer.judged(case.guilty).startswith(("wrong", "names"))
        guilty = "nobody" if case.guilty is None else f"rank {case.guilty}"
        print(
            f"| {name} | {guilty} | {by_nvrx.judged(case.guilty)} | {by_nvrx.cause} | {decision} "
            f"| {by_explain.judged(case.guilty)} |"
        )
    print({"right or rightly left out": right, "named without ground": unfounded})
    return 0


def ask_nvrx(python: str, log: Path) -> tuple[Answer, str]:
    """Give the rank, the class of failure and the decision of NVRx's restart agent."""
    command = [python, "-m", "nvidia_resiliency_ext.attribution.restart_agent.cli"]
    command += ["--disable-l1", str(log)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
    if done.returncode:
        raise SystemExit(f"{log}: NVRx failed\n{done.stderr[-2000:]}")
    answer = json.loads(done.stdout)
    failure = answer.get("primary_failure") or {}
    rank = str(failure.get("rank") or "")
    named = int(rank) if rank.isdigit() else None
    return Answer(named, failure.get("failure_class") or "nothing"), str(answer["decision"])


def be_rank(case: reproducers.Reproducer) -> None:
    """Fail as the reproducer does, on one rank that torchrun has started."""
    import torch.distributed as dist
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def job() -> None:
        if case.has_group:
            dist.init_process_group("gloo", timeout=reproducers._TIMEOUT)
        case.run()

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
    cause = report["cause"]["code"] if report["cause"] else report["verdict"]
    guilty = report["guilty"]
    return Answer(guilty[0]["rank"] if len(guilty) == 1 else None, cause)


if __name__ == "__main__":
    sys.exit(main())

"""One run of one contender, measured from outside.

Owns the contenders' commands, starting one, and the figures of a run. What happens inside comes
from recorder/sitecustomize.py. A run counts only if every rank did exactly the steps of the work
and all ranks ended with the same weights.
Does not own: rounds, repeats and ratios (compare_peers.py, verdict.py).
"""

import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from machine import NOISY_SHARE, ROOT, CpuClock
from workloads import NUM_EPOCHS, NUM_RANKS, Workload, bench_home

OURS = "ddp_training.py"
"""On the peers' own dataset class, which gives one sample at a time: __getitem__ only."""

OURS_BATCHED = "ddp_getitems"
"""The same, on a class that also has __getitems__, which gives a batch at a time."""

BASELINE = "bare"
PEERS = ("accelerate", "fabric", "lightning", "trainer")
CONTENDERS = (BASELINE, OURS, OURS_BATCHED, *PEERS)
# The slowest run on two cores takes under a minute.
_TIMEOUT_S = 150.0
_STOP_S = 40.0
_HUNG = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The figures of one run."""

    contender: str
    steady_samples_per_s: float
    """After the first epoch: over all ranks, with what happens between the epochs."""

    first_step_s: float
    """From the command to the end of the first optimizer step."""

    peak_memory_mib: float
    """Of the rank that had most."""

    wall_s: float
    """The whole command."""

    step_ms: float
    """Median, after the first epoch."""

    epoch_gap_ms: float
    """Mean time from the last step of an epoch to the first of the next."""

    others_share: float
    """Of a core, used by others meanwhile."""

    @property
    def is_noisy(self) -> bool:
        return self.others_share > NOISY_SHARE


@dataclass(frozen=True, slots=True)
class Failed:
    """A run that gives no figures, and why."""

    contender: str
    reason: str


def run_contender(contender: str, workload: Workload) -> Measured | Failed:
    """Run the work once. Never raises for what a contender does."""
    folder = Path(tempfile.mkdtemp(prefix=f"{contender}-", dir=bench_home()))
    try:
        before, started_at = CpuClock.read(), time.monotonic()
        status = _run_to_end(_command(contender, workload, folder), folder)
        after = CpuClock.read()
        if status != 0:
            how = "hung" if status == _HUNG else f"ended with status {status}"
            return Failed(contender, f"{how}; {_keep_log(folder)}")
        paths = [folder / f"rank-{rank}.json" for rank in range(NUM_RANKS)]
        if missing := [path.name for path in paths if not path.exists()]:
            return Failed(contender, f"left no {', '.join(missing)}; {_keep_log(folder)}")
        records = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
        if problem := _find_problem(records, workload):
            return Failed(contender, problem)
        return _measure(
            contender,
            workload,
            records,
            started_at=started_at,
            wall_s=after.at - started_at,
            others_share=after.share_since(before),
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _command(contender: str, workload: Workload, folder: Path) -> list[str]:
    launcher = [
        str(bench_home() / "venv/bin/torchrun"),
        "--standalone",
        f"--nproc_per_node={NUM_RANKS}",
    ]
    if contender in (OURS, OURS_BATCHED):
        work = json.dumps({"work": workload.name})
        samples = json.dumps({"work": workload.name, "batched": contender == OURS_BATCHED})
        # Every protection, logging and checkpoint is at its default, so they are all on.
        flags = {
            "dataset": "benchmarks.peers.work:dataset",
            "dataset_args": samples,
            "model": "benchmarks.peers.work:model",
            "model_args": work,
            "task": "tokens" if workload.data == "text" else "classification",
            "batch_size": workload.batch_size,
            "epochs": NUM_EPOCHS,
            "optimizer": "adamw",
            "learning_rate": 1e-3,
            "weight_decay": 0.01,
            "lr_schedule": "constant",
            "eval_every": 0,
            "output_dir": folder / "runs",
        }
        pairs = [(f"--{name}", str(value)) for name, value in flags.items()]
        return [*launcher, "ddp_training.py", *(word for pair in pairs for word in pair)]
    name = contender if contender == BASELINE else f"with_{contender}"
    module = f"benchmarks.peers.{name}"
    arguments = ["--work", workload.name, "--output_dir", str(folder / "runs")]
    return [*launcher, "--module", module, *arguments]


def _environment(folder: Path) -> dict[str, str]:
    env = {
        **os.environ,
        "BENCH_HOME": str(bench_home()),
        "BENCH_RECORD_DIR": str(folder),
        "PYTHONPATH": str(ROOT / "benchmarks/recorder"),
        # Every contender trains on the CPU, with one thread per rank, and asks no network.
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONWARNINGS": "ignore",
    }
    # WHY: installed packages have their bytecode, and a tree that was run before has it too; where
    # Python may not write it, this project alone would be compiled anew at each start.
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    return env


def _run_to_end(command: list[str], folder: Path) -> int:
    """Run the command with its output in folder/log; a status other than 0 if it hangs."""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=_environment(folder),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            return process.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return _HUNG
        finally:
            if process.poll() is None:
                # WHY first: torchrun passes this on to its ranks, and leaves none behind.
                process.terminate()
                try:
                    process.wait(_STOP_S)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _keep_log(folder: Path) -> str:
    """Keep the log of a run that failed; say where, and how it ends."""
    kept = bench_home() / "failed.log"
    shutil.copy(folder / "log", kept)
    lines = kept.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n    ".join([f"its log is {kept}, and ends:", *lines[-40:]])


def _find_problem(records: list[dict[str, Any]], workload: Workload) -> str:
    """Say what makes the run another work than the one asked for; empty if nothing."""
    for rank, record in enumerate(records):
        if (done := len(record["step_times"])) != workload.num_steps:
            return f"rank {rank} did {done} optimizer steps, the work has {workload.num_steps}"
    if len({round(record["checksum"], 6) for record in records}) != 1:
        return "the ranks ended with different weights"
    return ""


def _measure(
    contender: str,
    workload: Workload,
    records: list[dict[str, Any]],
    *,
    started_at: float,
    wall_s: float,
    others_share: float,
) -> Measured:
    times: list[float] = records[0]["step_times"]
    per_epoch = workload.num_steps // NUM_EPOCHS
    steady_s = times[-1] - times[per_epoch - 1]
    gaps = [
        times[epoch * per_epoch] - times[epoch * per_epoch - 1] for epoch in range(1, NUM_EPOCHS)
    ]
    steps = [later - earlier for earlier, later in pairwise(times[per_epoch:])]
    return Measured(
        contender=contender,
        steady_samples_per_s=workload.samples_per_epoch * (NUM_EPOCHS - 1) / steady_s,
        first_step_s=times[0] - started_at,
        peak_memory_mib=max(record["peak_memory_bytes"] for record in records) / 2**20,
        wall_s=wall_s,
        step_ms=1000 * statistics.median(steps),
        epoch_gap_ms=1000 * statistics.fmean(gaps),
        others_share=others_share,
    )

#!/usr/bin/env python3
"""How much code of ours one optimizer step runs through, and a save, and a resume.

    python benchmarks/step_path.py                      under a minute
    python benchmarks/step_path.py --repo CHECKOUT      another checkout of this project
    python benchmarks/step_path.py --verbose            every file and function

What a reader has to follow, counted and not estimated. Two ranks on the CPU train on the digits,
and a model (step_trace.py) watches from its own forward the code around it, on rank 0, which does a
little more than the others:

- frames: ours, between `fit` in ddp_training.py and the model's forward, both left out.
- files, functions: executed in the thread that trains, from one forward to that of the next step;
  with `fit`, without the model's own file. A lambda or comprehension is part of its function. Of
  40 steps, watched one by one, the one with the fewest counts: a plain good step, without a
  report, a save, an agreement on stopping or a comparison of the replicas. With gradients through
  shared memory, and by DDP's hooks.
- save: files executed in Saver.save in the thread that trains, and in the thread that writes, from
  the second save on: the first one also lays out the file. Those of the plain step are left out,
  except the one that Saver.save is in.
- resume: files executed in open_run, read_checkpoint and restore, where there is a checkpoint.

The exit status is 0 only if no bar is missed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

BARS = {"frames": 5, "files": 15, "functions": 45, "save": 9, "resume": 19}
FORMS = {"shared memory": [], "DDP's hooks": ["--no_shared_memory"]}
_NO_SAVES = ["--checkpoint_every_steps", "0"]
_LIMIT_S = 300

_FLAGS = ["--cpu_only", "--model", "step_trace:build", "--eval_every", "0", "--epochs", "1000"]
_FLAGS += ["--log_interval", "1000", "--digests", "off"]


def main() -> int:
    """Watch a step in both forms, a save and a resume; print what they run through."""
    options = _read_options()
    repo = options.repo.resolve()
    is_missed = []

    def tell(figure: str, found: Collection[str], *, listed: bool = options.verbose) -> None:
        is_missed.append(len(found) > BARS[figure])
        verdict = "MISS" if is_missed[-1] else "PASS"
        print(f"  {figure:10}{len(found):4}   (bar {BARS[figure]})  {verdict}", flush=True)
        for line in found if listed else ():
            print(f"      {line}")

    with tempfile.TemporaryDirectory(prefix="step-path-") as folder:
        plain_files: set[str] = set()
        for form, flags in FORMS.items():
            seen = watch(repo, "step", Path(folder), [*_NO_SAVES, *flags, "--max_steps", "80"])
            functions = min(seen["steps"], key=len)
            print(f"a step, gradients by {form}")
            tell("frames", [f"{file}: {name}" for file, name in seen["stack"]], listed=True)
            tell("files", files_of(functions))
            tell("functions", [f"{file}: {name}" for file, name in functions])
            plain_files |= set(files_of(functions)) if not flags else set()
        flags = ["--run_name", "run", "--checkpoint_every_steps", "20"]
        functions = watch(repo, "save", Path(folder), [*flags, "--max_steps", "60"])["save"]
        own = {file for file, name in functions if name == "Saver.save"}
        print("a checkpoint")
        tell(
            "save", [file for file in files_of(functions) if file in own or file not in plain_files]
        )
        functions = watch(repo, "resume", Path(folder), [*flags, "--max_steps", "80"])["resume"]
        print("a resume")
        tell("resume", files_of(functions))
    return 1 if any(is_missed) else 0


def watch(repo: Path, what: str, folder: Path, flags: Sequence[str]) -> dict[str, Any]:  # JSON
    """Train with the checkout on 2 ranks and give what step_trace.py saw on rank 0."""
    script = [str(repo / "ddp_training.py")]
    if what == "resume":
        script.insert(0, str(ROOT / "benchmarks" / "step_trace.py"))
    seen = folder / f"{what}.json"
    seen.unlink(missing_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += [*script, *_FLAGS, "--output_dir", str(folder / "runs"), *flags]
    env = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT / "benchmarks"),
        "STEP_TRACE": os.pathsep.join([what, str(repo), str(seen)]),
    }
    done = subprocess.run(
        command,
        cwd=folder,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    if done.returncode or not seen.exists():
        print(done.stdout, file=sys.stderr)
        raise SystemExit(f"step_path.py: the run failed, or nothing was seen of a {what}")
    found: dict[str, Any] = json.loads(seen.read_text(encoding="utf-8"))
    return found


def files_of(functions: Iterable[Sequence[str]]) -> list[str]:
    """Name the files of functions, each once."""
    return sorted({file for file, _ in functions})


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repo", type=Path, default=ROOT, help="the checkout; default: this one")
    parser.add_argument("--verbose", action="store_true", help="list every file and function")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

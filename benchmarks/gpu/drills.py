"""Drills with one undisturbed run for all of them: python -m benchmarks.gpu.drills NAME ...

Prints a line for each as soon as it is known, as checks.py does. Digits, what drills train
otherwise, need scikit-learn; without it they train synthetic images.
"""

import argparse
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

from ddp_drills.command import lines_of, prepare, read_work
from ddp_drills.faults import find
from hardened_ddp.ranks.launch import environment
from hardened_ddp.settings.cli import parse

WITHOUT_DIGITS = ["--dataset", "synthetic", "--model", "mlp", "--dataset_args"]
WITHOUT_DIGITS += ["{num_samples: 1000, image_size: 8}"]


def main() -> int:
    """Run the drills, and print a line for each."""
    options = _read_options()
    flags = ["--amp", options.amp, "--ranks", str(options.ranks)]
    flags += ["--cpu_only"] if options.cpu_only else ["--backend", "gloo"]
    flags += [] if find_spec("sklearn") else WITHOUT_DIGITS
    work = read_work(parse(["drill", options.names[0], *flags]), options.ranks)
    folder = Path(tempfile.mkdtemp(prefix="gpu-report-"))
    drills = prepare(work, folder, environment())
    about = f"amp {options.amp}, ranks: {options.ranks}"
    num_missed = 0
    try:
        seconds = drills.reference().wall_s
        print(f"PASS\tan undisturbed run, {about}\t{seconds:.1f} s", flush=True)
        for name in options.names:
            fault = find(name)
            assert fault is not None, name
            verdict = drills.run(fault)
            num_missed += not verdict.passed
            if not verdict.passed:
                print(*lines_of(verdict), drills.output_of(fault), sep="\n")
            word = "PASS" if verdict.passed else "MISS"
            print(f"{word}\tdrill {name}, {about}\t{verdict.ended}", flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if num_missed else 0


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="+")
    parser.add_argument("--amp", default="off")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cpu_only", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

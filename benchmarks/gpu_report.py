#!/usr/bin/env python3
"""What a machine with a GPU has to answer, in parts of at most 8 minutes: docs/GPU.md.

    python benchmarks/gpu_report.py --list                  the parts
    python benchmarks/gpu_report.py                         all of them, one after the other
    python benchmarks/gpu_report.py --part tests            one of them
    python benchmarks/gpu_report.py --limit_s 300           a part takes at most 5 minutes
    python benchmarks/gpu_report.py --dry-run --output F    small, on the CPU: does this work?

A part replaces its own section of the file, with the date, the device, the versions and the command
that made it; so the parts can be run one by one, and again. The section is written after each line,
so that nothing is lost if the machine is taken away. What does not fit into a part's time is
reported as not tried; what raises, as missed, and the rest goes on. It needs no network. The exit
status is 0 only if no bar is missed.
"""

import argparse
import functools
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu import runs, speed
from benchmarks.gpu.row import MISS, ROOT, Row, guarded, run

LIMIT_S = 480.0
PARTS: Mapping[str, tuple[str, Callable[..., Iterator[Row]]]] = {
    "tests": ("What is to be tried first", runs.first_tests),
    "speed-resnet50": (
        "Speed: ResNet-50, 224x224, bf16, channels last",
        functools.partial(speed.measure_work, "resnet50"),
    ),
    "speed-gpt": (
        "Speed: GPT of 124 million parameters, sequence 1,024, bf16",
        functools.partial(speed.measure_work, "gpt"),
    ),
    "speed-mlp": ("Speed: an MLP", functools.partial(speed.measure_work, "mlp")),
    "faults": ("Faults", runs.faults),
    "checkpoints": ("Checkpoints and restarts", runs.checkpoints),
    "life": ("Evaluation, export, resume", runs.life_of_a_run),
}

_HEAD = """# On a GPU

Written by `python benchmarks/gpu_report.py`, part by part; each section says when, where and how it
was made.
"""


def main() -> int:
    """Run the parts, and write their sections."""
    options = _read_options()
    if options.list:
        for name, (title, _) in PARTS.items():
            print(f"{name:16} {title}")
        return 0
    device = describe_device()
    if not options.dry_run and not device["gpu"]:
        print("gpu_report.py: torch sees no GPU here; --dry-run tries the parts on the CPU")
        return 2
    num_missed = 0
    for name in options.part or PARTS:
        title, measure = PARTS[name]
        print(f"{name}: {title}", flush=True)
        started_at = time.monotonic()
        ends_at = started_at + options.limit_s
        rows: list[Row] = []
        part = functools.partial(measure, dry=options.dry_run, ends_at=ends_at)
        for row in guarded(title, part):
            print(f"  {row.verdict or '-':10} {row.what}: {row.found}", flush=True)
            print(row.details, end="\n" if row.details else "", flush=True)
            rows.append(row)
            num_missed += row.verdict == MISS
            about = {**device, "took": f"{time.monotonic() - started_at:.0f} s"}
            text = section(name, title, rows, about, dry=options.dry_run)
            write_section(options.output, name, text)
    return 1 if num_missed else 0


def describe_device() -> dict[str, str]:
    """Say what is measured on: the GPU (empty: none), versions, commit, date."""
    program = (
        "import torch; c = torch.cuda; has = c.is_available(); "
        "print(c.get_device_name(0) if has else '', torch.__version__, torch.version.cuda or '-', "
        "'.'.join(map(str, c.nccl.version())) if has and torch.distributed.is_nccl_available() "
        "else '-', sep='|')"
    )
    done = run(["python", "-c", program], limit_s=120)
    found = re.search(r"^(.*)\|(.+)\|(.+)\|(.+)$", done.output, re.MULTILINE)
    if found is None:
        print(f"gpu_report.py: torch does not start here:\n{done.output}")
        return {"gpu": ""}
    gpu, torch_version, cuda, nccl = found.groups()
    git = run(["git", "describe", "--always", "--dirty=+", "--abbrev=10"], limit_s=30)
    return {
        "gpu": gpu,
        "versions": f"torch {torch_version}, CUDA {cuda}, NCCL {nccl}, "
        f"Python {platform.python_version()}",
        "commit": "unknown" if git.status else git.output.strip(),
        "date": time.strftime("%Y-%m-%d"),
    }


def section(
    name: str, title: str, rows: Sequence[Row], about: Mapping[str, str], *, dry: bool
) -> str:
    """Return the section of one part, as Markdown."""
    where = f"the CPU (dry run: the figures mean nothing), {about['gpu']}" if dry else about["gpu"]
    command = f"python benchmarks/gpu_report.py --part {name}{' --dry-run' if dry else ''}"
    lines = [
        f"## {title}",
        "",
        f"`{command}`, {where.rstrip(', ')}, {about['versions']}, commit {about['commit']}, "
        f"{about['date']}, {about['took']}.",
        "",
        "| | found | verdict |",
        "| --- | --- | --- |",
    ]
    lines += [f"| {_cell(r.what)} | {_cell(r.found)} | {r.verdict} |" for r in rows]
    for row in rows:
        if row.details:
            lines += ["", f"{row.what}:", "", "```text", row.details, "```"]
    return "\n".join(lines)


def write_section(file: Path, name: str, text: str) -> None:
    """Put a section in its place in the file, in the order of PARTS; the others stay."""
    old = file.read_text(encoding="utf-8") if file.exists() else ""
    found = dict(re.findall(r"<!-- part (\S+) -->\n(.*?)\n<!-- end -->", old, re.DOTALL))
    found[name] = text
    parts = [f"<!-- part {key} -->\n{found[key]}\n<!-- end -->" for key in PARTS if key in found]
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n\n".join([_HEAD.rstrip(), *parts]) + "\n", encoding="utf-8")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", nargs="+", choices=PARTS, help="default: all")
    parser.add_argument("--limit_s", type=float, default=LIMIT_S, help="of each part")
    parser.add_argument("--list", action="store_true", help="list the parts")
    parser.add_argument("--dry-run", action="store_true", help="each part small, on the CPU")
    parser.add_argument("--output", type=Path, help="default: docs/GPU.md; needed for --dry-run")
    options = parser.parse_args()
    if options.dry_run and options.output is None and not options.list:
        parser.error("--dry-run needs --output FILE: docs/GPU.md is for figures of a GPU")
    options.output = options.output or ROOT / "docs" / "GPU.md"
    return options


if __name__ == "__main__":
    sys.exit(main())

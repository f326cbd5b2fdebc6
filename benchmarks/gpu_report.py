#!/usr/bin/env python3
"""What a machine with a GPU has to answer, in 30 minutes: docs/GPU.md.

    python benchmarks/gpu_report.py --list                  the parts, and the limit of each
    python benchmarks/gpu_report.py                         all of them; again: what is missing
    python benchmarks/gpu_report.py --part tests            one of them, also if it was done
    python benchmarks/gpu_report.py --limit_s 300           each part takes at most 5 minutes
    python benchmarks/gpu_report.py --dry-run               small, on the CPU: does this work?

It needs torch, numpy, pyyaml and psutil. What needs more says so and is not tried. Each line is
appended to OUTPUT.jsonl as soon as it is known, and OUTPUT, a table of claims and a section for
each part behind its own text, is made of that: so nothing is lost if the machine is taken away, and
the same command then goes on with the part that was cut off. What does not fit into a part's time
is reported as not tried; what raises, as missed, and the rest goes on. It needs no network. The
exit status is 0 only if no bar is missed.
"""

import argparse
import functools
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu import runs, speed
from benchmarks.gpu.row import (
    MARK,
    MISS,
    OPEN,
    PASS,
    ROOT,
    WITHIN_NOISE,
    Row,
    end_leftovers,
    guarded,
    run,
)

TOTAL_S = 1800.0
PARTS: Mapping[str, tuple[str, float, Callable[..., Iterator[Row]]]] = {
    "first": ("Training, kill and resume, memory gone, a hang", 180, runs.first_contact),
    "tests": ("What only a GPU has", 300, runs.first_tests),
    "faults": ("Faults", 200, runs.faults),
    "checkpoints": ("Checkpoints, survivor saves, restarts", 300, runs.checkpoints),
    "life": ("Evaluation, export, resume", 100, runs.life_of_a_run),
    "speed-mlp": ("Speed: an MLP", 160, functools.partial(speed.measure_work, "mlp")),
    "speed-gpt": (
        "Speed: GPT of 124 million parameters, sequence 1,024, bf16",
        270,
        functools.partial(speed.measure_work, "gpt"),
    ),
    "speed-resnet50": (
        "Speed: ResNet-50, 224x224, bf16, channels last",
        290,
        functools.partial(speed.measure_work, "resnet50"),
    ),
}
"""In the order in which they matter: title, limit in seconds, what gives the lines."""

CLAIMS: Mapping[str, tuple[str, str]] = {
    "training on two ranks of one GPU, over gloo": ("first", "an undisturbed run"),
    "a killed rank loses nothing": ("first", "drill kill"),
    "memory gone is answered with smaller micro-batches": ("first", "drill memory"),
    "a rank that hangs is found": ("first", "drill stop"),
    "DDP's hook over NCCL": ("tests", "hook sums over the backend"),
    "a state is copied while the GPU is stuck": ("tests", "full launch queue"),
    "a step does not wait": ("tests", "without a wait"),
    "a device-side assert has a cause, and costs no checkpoint": ("faults", "device-side assert"),
    "memory gone in DDP's hook hangs no rank": ("faults", "communication hook"),
    "NaN in bf16 and fp16": ("faults", "drill nan"),
    "a survivor saves 1 and 10 GB": ("checkpoints", "survivor save"),
    "a resume is bitwise equal, with channels_last": ("life", "bit for bit"),
    "expandable_segments": ("life", "expandable_segments"),
    "evaluation and export": ("life", "^(evaluate|export)"),
    "one wait per step": ("speed-.*", "waits for the device"),
    "the speed of the bare loop": ("speed-.*", "eager: samples/s"),
    "--compile: the speed of the bare loop, compiled": ("speed-.*", "compiled: samples/s"),
    "channels_last": ("speed-resnet50", "samples/s"),
    "the memory of the bare loop": ("speed-.*", "peak memory"),
}
"""What docs/GPU.md expects: the part and the lines, as patterns, that show it."""

_MARKER = "<!-- results -->"
_HEAD = f"""# On a GPU

{_MARKER}
"""
Record = dict[str, str]


def main() -> int:
    """Run the parts that are missing, and write what they find."""
    options = _read_options()
    if options.list:
        for name, (title, limit_s, _) in PARTS.items():
            print(f"{name:16} {limit_s:4.0f} s  {title}")
        return 0
    mark = str(options.output.resolve())
    if num := end_leftovers(mark):
        print(f"killed {num} processes of a report that was cut off")
    os.environ[MARK] = mark
    device = describe_device()
    if not options.dry_run and not device["gpu"]:
        print("gpu_report.py: torch sees no GPU here; --dry-run tries the parts on the CPU")
        return 2
    records = Records(options.output, device, dry=options.dry_run)
    all_end_at = time.monotonic() + options.total_s
    for name in options.part or [name for name in PARTS if not records.is_done(name)]:
        title, limit_s, measure = PARTS[name]
        print(f"{name}: {title}", flush=True)
        records.begin(name)
        ends_at = min(all_end_at, time.monotonic() + min(limit_s, options.limit_s))
        if ends_at - time.monotonic() < 5:
            records.add(name, Row(title, "no time left", OPEN))
            continue
        for row in guarded(title, functools.partial(measure, dry=options.dry_run, ends_at=ends_at)):
            print(f"  {row.verdict or '-':10} {row.what}: {row.found}", flush=True)
            print(row.details, end="\n" if row.details else "", flush=True)
            records.add(name, row)
        records.end(name)
    return 1 if records.num_missed() else 0


class Records:
    """What was found so far, in OUTPUT.jsonl, line by line; and OUTPUT, made of it."""

    def __init__(self, output: Path, device: Mapping[str, str], *, dry: bool) -> None:
        self._output, self._device, self._dry = output, dict(device), dry
        self._file = output.with_name(output.name + ".jsonl")
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._lines: list[Record] = []
        content = self._file.read_text(encoding="utf-8") if self._file.exists() else ""
        for line in content.splitlines():
            try:
                self._lines.append(json.loads(line))
            except ValueError:  # it was cut off while it was written
                continue
        if content and not content.endswith("\n"):
            self._file.write_text(content + "\n", encoding="utf-8")
        self._began_at = 0.0

    def begin(self, part: str) -> None:
        """Begin a part; what an earlier start found in it does not count any more."""
        self._began_at = time.monotonic()
        self._append({"part": part, "event": "begin", **self._device})

    def add(self, part: str, row: Row) -> None:
        """Add a line."""
        took = f"{time.monotonic() - self._began_at:.0f} s"
        self._append({"part": part, "event": "row", "took": took, **asdict(row)})

    def end(self, part: str) -> None:
        """Note that a part is done."""
        self._append({"part": part, "event": "end"})

    def is_done(self, part: str) -> bool:
        """Return whether a part was done on this device, with this commit and these versions."""
        about, _, is_done = self._of(part)
        same = all(about.get(key) == self._device[key] for key in ("gpu", "versions", "commit"))
        return is_done and same

    def num_missed(self) -> int:
        """Return how many lines of all parts are missed."""
        return sum(row.verdict == MISS for part in PARTS for row in self._of(part)[1])

    def claims(self) -> list[Row]:
        """Return each claim with its verdict."""
        found = []
        for claim, (part, what) in CLAIMS.items():
            verdicts = [
                row.verdict
                for name in PARTS
                if re.fullmatch(part, name)
                for row in self._of(name)[1]
                if re.search(what, row.what) and row.verdict
            ]
            worst = [verdict for verdict in (MISS, OPEN, WITHIN_NOISE) if verdict in verdicts]
            found.append(Row(claim, "", worst[0] if worst else PASS if verdicts else OPEN))
        return found

    def _of(self, part: str) -> tuple[Record, list[Row], bool]:
        """Return where a part was begun last, its lines since, and whether it is done."""
        mine = [line for line in self._lines if line["part"] == part]
        starts = [index for index, line in enumerate(mine) if line["event"] == "begin"]
        if not starts:
            return {}, [], False
        mine = mine[starts[-1] :]
        rows = [line for line in mine if line["event"] == "row"]
        about = mine[0] | {"took": rows[-1]["took"] if rows else "0 s"}
        keys = ("what", "found", "verdict", "details")
        found = [Row(**{key: line[key] for key in keys}) for line in rows]
        return about, found, mine[-1]["event"] == "end"

    def _append(self, line: Record) -> None:
        self._lines.append(line)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())
        old = self._output.read_text(encoding="utf-8") if self._output.exists() else _HEAD
        parts = ["## Claims\n\n| | verdict |\n| --- | --- |"]
        parts[0] += "".join(f"\n| {_cell(row.what)} | {row.verdict} |" for row in self.claims())
        for part, (title, _, _) in PARTS.items():
            about, rows, _ = self._of(part)
            if rows:
                parts.append(section(part, title, rows, about, dry=self._dry))
        head = old.partition(_MARKER)[0].rstrip()
        aside = self._output.with_name(self._output.name + ".partial")
        aside.write_text("\n\n".join([head, _MARKER, *parts]) + "\n", encoding="utf-8")
        aside.replace(self._output)


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


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", nargs="+", choices=PARTS, help="default: all that are missing")
    parser.add_argument("--limit_s", type=float, default=TOTAL_S, help="of each part; default: own")
    parser.add_argument("--total_s", type=float, default=TOTAL_S, help="of all; default: 1800")
    parser.add_argument("--list", action="store_true", help="list the parts")
    parser.add_argument("--dry-run", action="store_true", help="each part small, on the CPU")
    parser.add_argument("--output", type=Path, help="default: docs/GPU.md; of --dry-run a new file")
    options = parser.parse_args()
    if options.dry_run and options.output is None and not options.list:
        options.output = Path(tempfile.mkdtemp(prefix="gpu-report-")) / "GPU.md"
        print(f"to {options.output}", flush=True)
    options.output = options.output or ROOT / "docs" / "GPU.md"
    return options


if __name__ == "__main__":
    sys.exit(main())

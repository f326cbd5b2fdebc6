"""What a run left in its folder, read without torch and without the code under test.

Owns: the places of a run folder as its users know them, and fingerprints of saved tensors.
A checkpoint that is being written or removed while this looks is no checkpoint.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any


def only_run(output_dir: Path) -> Path:
    """Return the one run folder under output_dir. Raises AssertionError if there are others."""
    runs = find_runs(output_dir)
    assert len(runs) == 1, f"{output_dir} holds {[run.name for run in runs]}, and not one run"
    return runs[0]


def find_runs(output_dir: Path) -> list[Path]:
    """List the run folders under output_dir; there may be no such folder yet."""
    return sorted(output_dir.glob("[!.]*/")) if output_dir.is_dir() else []


def read_summary(run: Path) -> dict[str, Any]:  # Any: JSON
    """Read how a run ended."""
    return json.loads((run / "summary.json").read_text(encoding="utf-8"))


def find_checkpoints(output_dir: Path) -> list[Path]:
    """List the complete checkpoints of the one run under output_dir, oldest first."""
    return sorted(path.parent for path in output_dir.glob("[!.]*/checkpoints/step-*/manifest.json"))


def step_of(checkpoint: Path) -> int:
    """Return the step that a checkpoint was written after."""
    return int(checkpoint.name.removeprefix("step-"))


def saved_step(output_dir: Path) -> int:
    """Return the step of the newest checkpoint of the one run under output_dir."""
    return step_of(find_checkpoints(output_dir)[-1])


def last_tensors(output_dir: Path) -> dict[str, str]:
    """Fingerprint each tensor, of model and optimizer, in the newest checkpoint of a run."""
    return fingerprints(find_checkpoints(output_dir)[-1] / "state.safetensors")


def fingerprints(path: Path) -> dict[str, str]:
    """Return for each tensor of a safetensors file the sha256 of its type, shape and bytes."""
    raw = path.read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    found = {}
    for name, entry in json.loads(raw[8:start]).items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        content = f"{entry['dtype']}{entry['shape']}".encode() + raw[start + begin : start + end]
        found[name] = hashlib.sha256(content).hexdigest()
    return found


def samples_by_step(run: Path) -> dict[int, list[int]]:
    """Give the samples of each step, sorted, by what the ledger says of the steps that count."""
    found: dict[int, list[int]] = {}
    starts: dict[int, list[Path]] = {}
    for path in sorted((run / "ledger").glob("*.bin")):
        starts.setdefault(int(path.name[:4]), []).append(path)
    for number in sorted(starts):
        new: dict[int, list[int]] = {}
        for path in starts[number]:
            head, _, raw = path.read_bytes().partition(b"\n")
            found = {s: ids for s, ids in found.items() if s < json.loads(head)["step"]}
            for step, ids in _records(raw, width=int(json.loads(head)["dtype"][-1])):
                new.setdefault(step, []).extend(ids)
        found |= new
    return {step: sorted(ids) for step, ids in found.items() if step < read_summary(run)["step"]}


def _records(raw: bytes, *, width: int) -> list[tuple[int, list[int]]]:
    records, position = [], 0
    while position + 16 <= len(raw):
        step = int.from_bytes(raw[position : position + 8], "little")
        count = int.from_bytes(raw[position + 12 : position + 16], "little")
        position += 16
        ids = raw[position : position + width * count]
        position += width * count
        if len(ids) == width * count:
            records.append((step, list(memoryview(ids).cast("I" if width == 4 else "Q"))))
    return records


def last_step(output: Path) -> int:
    """Give the newest step in the metrics of the run under output; 0 before there is any."""
    for path in output.glob("[!.]*/metrics.jsonl"):
        steps = re.findall(r'^{"step": (\d+),', path.read_text(encoding="utf-8"), re.MULTILINE)
        if steps:
            return int(steps[-1])
    return 0


def losses_of(run: Path, name: str = "loss/train") -> dict[int, float]:
    """Give the losses of training in the metrics of a run, or another number, by step."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    return {e["step"]: e[name] for e in entries if name in e}


def is_past(output: Path, step: int) -> bool:
    """Say whether the run under output wrote metrics of a later step."""
    return last_step(output) > step


def ranks_of_newest_start(output: Path) -> int:
    """Count the ranks of the newest start of the run under output, by its ledger."""
    names = [path.name for path in output.glob("[!.]*/ledger/*.bin")]
    newest = max(names, default="")[:4]
    return sum(name[:4] == newest for name in names)

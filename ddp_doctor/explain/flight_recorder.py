"""Flight recorder dumps: the last collectives of each rank, as NCCL's watchdog wrote them.

Owns reading them without running anything: a pickle may hold numbers, texts and containers only.
Does not own: comparing the ranks (collectives.py).
"""

import io
import pickle
import re
from collections.abc import Mapping
from typing import Any

from ddp_doctor.explain.collectives import Collectives, Work
from ddp_doctor.explain.events import Line

_RANK = re.compile(r"(\d+)$")
PICKLE = b"\x80"
MAX_BYTES = 256 * 1024 * 1024
_DONE = "completed"


class _PlainUnpickler(pickle.Unpickler):
    """Refuses every class: a dump has none, and a stranger's file may have bad ones."""

    def find_class(self, module_name: str, global_name: str) -> Any:  # Any: it never returns
        raise pickle.UnpicklingError(f"{module_name}.{global_name} is no plain data")

    def persistent_load(self, pid: object) -> Any:  # Any: it never returns
        raise pickle.UnpicklingError("no plain data")


def read_dump(data: bytes) -> Mapping[str, Any] | None:
    """Read a dump; None if this is something else. Any: whatever the file has."""
    if data[:1] != PICKLE:
        return None
    try:
        dump = _PlainUnpickler(io.BytesIO(data)).load()
    except Exception:  # WHY broad: a broken pickle raises nearly anything
        return None
    return dump if isinstance(dump, dict) and isinstance(dump.get("entries"), list) else None


def take_dump(dump: Mapping[str, Any], name: str, collectives: Collectives) -> Line | None:
    """Add one rank's collectives of the default group; return a line that stands for the dump."""
    rank = rank_of(dump, name)
    entries = [entry for entry in dump["entries"] if isinstance(entry, dict) and _is_default(entry)]
    entries = [entry for entry in entries if isinstance(entry.get("collective_seq_id"), int)]
    if rank is None or not entries:
        return None
    newest = max(entry["collective_seq_id"] for entry in entries)
    waiting = [entry for entry in entries if not _is_done(entry, dump)]
    text = f"flight recorder of rank {rank}: collective {newest} is the newest"
    if waiting:
        first = min(waiting, key=lambda entry: int(entry["collective_seq_id"]))
        op, seq = _op(first), int(first["collective_seq_id"])
        text += f", number {seq} ({op}) is not complete"
    line = Line(file=name, number=1, text=text, raw=text, rank=rank)
    collectives.note_history(
        Work(rank, int(e["collective_seq_id"]), _op(e), _numel(e), line)
        for e in entries
        if not e.get("is_p2p")  # WHY: these have numbers of their own
    )
    if waiting:
        collectives.add(Work(rank, seq, op, _numel(first), line, enqueued=newest))
    else:
        collectives.note_newest(rank, newest)
    return line


def _is_done(entry: Mapping[str, Any], dump: Mapping[str, Any]) -> bool:
    """Whether a collective has completed. WHY not by its state alone: gloo's stays scheduled."""
    if entry.get("state") == "scheduled":
        group = entry.get("process_group") or [""]
        status = (dump.get("pg_status") or {}).get(str(group[0])) or {}
        last = status.get("last_completed_collective", -1)
        return bool(entry.get("retired")) or int(entry["collective_seq_id"]) <= last
    return entry.get("state") == _DONE


def rank_of(dump: Mapping[str, Any], name: str) -> int | None:
    """Give the rank of a dump: the file's name ends with it."""
    match = _RANK.search(name)
    return int(match[1]) if match else dump.get("rank")


def _is_default(entry: Mapping[str, Any]) -> bool:
    group = entry.get("process_group") or (entry.get("pg_name", ""), entry.get("pg_desc", ""))
    words = [str(word) for word in group] if isinstance(group, list | tuple) else [str(group)]
    return "default_pg" in words or words[:1] == ["0"]


def _op(entry: Mapping[str, Any]) -> str:
    return str(entry.get("profiling_name", "?")).rpartition(":")[2].upper()


def _numel(entry: Mapping[str, Any]) -> int:
    total = 0
    for sizes in entry.get("input_sizes") or []:
        count = 1
        for size in sizes if isinstance(sizes, list | tuple) else []:
            count *= int(size) if isinstance(size, int) else 1
        total += count
    return total

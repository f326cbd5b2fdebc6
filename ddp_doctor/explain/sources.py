"""The files that explain reads, and what their names say about the rank.

Owns how a path becomes files: a file, a folder of logs, `-` for standard input, or .gz; and which
files of a folder surely belong to different jobs.
"""

import gzip
import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, cast

from ddp_doctor.explain.collectives import PICKLE
from ddp_doctor.terminal import UnreadableLogError

STDIN = "-"
_LOG_NAMES = re.compile(
    r"(?:\.(?:log|out|err|txt|gz|stderr|stdout|json|jsonl|pickle)|std(?:out|err)(?:\.\d+)?"
    r"|\.[oe]\d+|log\.?\d*|trace_rank_?\d+)$"
)
_NOT_LOGS = re.compile(
    r"(?:^|/)(?:events\.out\.tfevents|requirements|\.|checkpoints?/|step-\d+/|tensorboard/|status/(?!rank-\d+\.json$)|held_rank_\d+\.txt$"
    r"|skipped_samples\.jsonl|config\.json|tokenizer|vocab|merges|README)|(?:manifest|trainer_state|settings)\.json$"
)
_ELASTIC = re.compile(r"attempt_\d+/(?P<local>\d+)/(?:std(?:out|err)\.log|error\.json)$")
_RANK_NAME = re.compile(r"(?:rank|process|proc|worker)[-_.]?(?P<rank>\d+)(?=\D|$)")
_SLURM_TASK = re.compile(r"(?:^|/)(?!slurm)[\w.]*?\d{2,}[-_.](?P<task>\d{1,4})\.(?:out|err|log)$")
_STACK = re.compile(r"rank_\d+(?:_worker_(?P<worker>\d+))?\.txt$")
_MAX_FILES = 4096
_JOB_ID = re.compile(r"(?:^|/)slurm-(?P<slurm>\d+)[^/]*$|\.[oe](?P<id>\d+)$")
_RUN_ID = re.compile(r"(?P<folder>.*/(?P<id>[^/]+?)_[a-z0-9_]{8})/attempt_\d+/")
_PART_OF_JOB = re.compile(
    r"(?i)node|host|master|launch|torchrun|elastic|std(?:out|err)|err(?:or)?\b|out\b|dmesg|kern|sys"
    r"log|journal|nvidia|nccl|ibv|slurm|kube|pod|event|agent|console|trace|gpu|main|crash|dump"
)
"""In names of files that are about one job beside others."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One file to read."""

    name: str
    """As shown: the path, or <stdin>."""

    path: Path | None
    rank: int | None = None
    local: int | None = None
    task: int | None = None
    host: str | None = None
    kind: str = "log"
    """log; or what a run of ours wrote: status of a rank; verdict or stack of a hang."""

    worker: str = ""
    """The worker of the rank whose stack it is."""

    def open(self) -> BinaryIO:
        """Open it for reading bytes, unpacked. Raises OSError."""
        if self.path is None:
            return sys.stdin.buffer
        file = self.path.open("rb")
        if file.peek(2)[:2] != b"\x1f\x8b":
            return file  # WHY not opened again: a pipe can be read once
        file.close()
        return cast(BinaryIO, gzip.open(self.path))


def find_sources(names: Sequence[str]) -> list[Source]:
    """Turn what was given into files. Raises UnreadableLogError if nothing can be read there."""
    sources: list[Source] = []
    for name in names:
        if name == STDIN:
            sources.append(Source(name="<stdin>", path=None))
            continue
        path = Path(name)
        found = _logs_in(path) if path.is_dir() else [path]
        if not found:
            raise UnreadableLogError(
                f"{path} has no logs in it: no .log, .out, .err, .txt, .json or .gz file",
                fix="give the file itself, whatever it is called",
            )
        for file in found:
            try:
                if not file.is_fifo():
                    file.open("rb").close()
            except OSError as error:
                raise UnreadableLogError(
                    f"{file} can't be read: {error.strerror or error}",
                    fix="give a file, a folder of logs, or - for standard input",
                ) from error
            sources.append(_source(file))
    if len({source.task for source in sources} - {None}) == 1:
        # WHY: `job_3.out` alone may be the third job of an array, and then 3 is no rank
        return [replace(source, task=None) for source in sources]
    return sources


def jobs_of(names: Sequence[str]) -> list[list[str]]:
    """Sort what was given by job: for each what to give to find_sources.

    Files that are given one by one, and those that may belong to any, are no job of their own.
    """
    jobs: dict[str, list[str]] = {}
    for name in names:
        is_folder = name != STDIN and Path(name).is_dir()
        for file in map(str, _logs_in(Path(name))) if is_folder else [name]:
            job = _job_of(Path(file), Path(name)) if is_folder else ""
            jobs.setdefault(job, []).append(file)
    found = [[job] if os.path.isdir(job) else files for job, files in jobs.items()]
    num_named = len(jobs) - ("" in jobs)
    return found if num_named > 1 or num_named == len(jobs) == 1 else [list(names)]


def are_alike(names: Sequence[str]) -> bool:
    """Whether no name says that its file is one rank's, or another part of a job."""
    sources = find_sources(names)
    own = (source.path for source in sources if source.rank == source.local == source.task)
    paths = [path for path in own if path is not None and not _PART_OF_JOB.search(path.name)]
    return len(paths) == len(sources) and not any(_RANK_NAME.search(path.name) for path in paths)


def _job_of(path: Path, folder: Path) -> str:
    """Name the job of a file by the folder of its run, or by its id; empty if it is not known."""
    for parent in path.parents:
        if is_run_folder(parent):
            return str(parent)
        if parent == folder:
            break
    if started := _RUN_ID.match(path.as_posix()):
        # WHY: the launchers of several nodes share an id, and none is what --standalone has
        return started["folder"] if started["id"] == "none" else f"id {started['id']}"
    found = _JOB_ID.search(path.as_posix().removesuffix(".gz"))
    return f"id {found['slurm'] or found['id']}" if found else ""


def is_run_folder(path: Path) -> bool:
    """Whether a run of ours wrote this folder."""
    return (path / "attempts.jsonl").is_file() or any(path.glob("status/rank-*.json"))


def _logs_in(folder: Path) -> list[Path]:
    """List the logs of a folder: all levels, sorted, so that two runs read the same."""
    found = []
    # WHY not rglob: Python 3.11.2's fails at a path that can't be asked about
    for path in sorted(Path(base, name) for base, _, names in os.walk(folder) for name in names):
        is_refused = _NOT_LOGS.search(path.relative_to(folder).as_posix())
        if os.path.isfile(path) and not is_refused:
            found += [path] if _LOG_NAMES.search(path.name) or _is_dump(path) else []
    return found[:_MAX_FILES]


def _is_dump(path: Path) -> bool:
    """Whether it may be a flight recorder's dump: a prefix of the user's choice, and the rank."""
    if path.name[-1:].isdigit() and not path.suffix:
        with suppress(OSError), path.open("rb") as file:
            return file.read(1) == PICKLE
    return False


def _source(path: Path) -> Source:
    text = path.as_posix().removesuffix(".gz")
    rank = local = task = None
    if elastic := _ELASTIC.search(text):
        local = int(elastic["local"])
    elif named := _RANK_NAME.search(path.name):
        rank = int(named["rank"]) if named[0].startswith("rank") else None
    elif slurm := _SLURM_TASK.search(text):
        task = int(slurm["task"])
    kind, worker = "log", ""
    if path.parent.name == "status" and path.suffix == ".json":
        kind = "status"
    elif "hangs" in path.absolute().parts:
        stack = _STACK.match(path.name)
        worker = (stack["worker"] or "") if stack else ""
        kind = "stack" if stack else "verdict" if path.name == "verdict.txt" else kind
    of = Source(name=str(path), path=path, kind=kind, worker=worker)
    return replace(of, rank=rank, local=local, task=task)

"""The earlier run that a new one continues: its folder, and the settings saved in it.

Owns: what --resume newest and --resume PATH mean on the disk.
Does not own: which checkpoint is used, and whether it is valid (checkpoint/).
What goes wrong here: a path that does not exist, or that is no run folder.
"""

import re
from pathlib import Path

from hardened_ddp.settings.wording import nearest, shown

SAVED_SETTINGS = "config.yaml"
CHECKPOINTS = "checkpoints"
CHECKPOINT_NAME = re.compile(r"step-[0-9]+")  # one that is being written has another name
# The first four belong to the machine of today, the others say which run this is. WHY seed and
# deterministic are not among them, though of the same section: they belong to the samples' order.
NOT_INHERITED = frozenset(
    {"single_gpu", "cpu_only", "backend", "timeout_s", "resume", "run_name", "output_dir"}
)
WHICH_RUN = ("resume", "run_name", "output_dir")
WORDS = ("auto", "never", "newest")


class NoSuchRun(ValueError):
    """There is no run to continue where the settings say; the text says why."""


def find_run(*, resume: str, run_name: str, output_dir: str) -> Path | None:
    """Give the folder of the run to continue; None: start anew. Rank-local.

    Raises NoSuchRun.
    """
    match resume:
        case "never":
            return None
        case "auto":
            folder = Path(output_dir) / run_name
            return folder if run_name and (folder / SAVED_SETTINGS).is_file() else None
        case "newest":
            return _newest_run(Path(output_dir))
    return _run_at(Path(resume), Path(output_dir))


def _newest_run(output_dir: Path) -> Path:
    """Find the run whose checkpoints changed last: the same that training/run_folder.py takes."""
    found = [
        (checkpoints.stat().st_mtime_ns, checkpoints.parent)
        for checkpoints in output_dir.glob(f"*/{CHECKPOINTS}")
        if not (checkpoints.is_symlink() or checkpoints.parent.is_symlink())
        and any(CHECKPOINT_NAME.fullmatch(child.name) for child in checkpoints.iterdir())
    ]
    if not found:
        raise NoSuchRun(f"there is no run with a checkpoint in {output_dir}; auto starts anew")
    newest = max(found)[1]
    if not _is_run(newest):
        raise NoSuchRun(f"the newest run, {newest}, has no {SAVED_SETTINGS}; give another one")
    return newest


def _run_at(path: Path, output_dir: Path) -> Path:
    """Find the run folder that path is, or is inside of."""
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        raise NoSuchRun(f"{shown(str(path))} {what}; {_hint(path, output_dir)}")
    if _is_run(path):
        return path
    full = path.resolve()  # WHY: "." has no parents
    if full.parent.name == CHECKPOINTS and _is_run(full.parents[1]):
        return full.parents[1]
    raise NoSuchRun(
        f"{shown(str(path))} is neither a run folder, with {SAVED_SETTINGS} and {CHECKPOINTS}/, "
        f"nor a checkpoint folder inside one; {_hint(path, output_dir)}"
    )


def _is_run(folder: Path) -> bool:
    # WHY both: the project's own folder has a config.yaml too
    return (folder / SAVED_SETTINGS).is_file() and (folder / CHECKPOINTS).is_dir()


def _hint(path: Path, output_dir: Path) -> str:
    """Name folders that may be meant: those beside path, and the runs."""
    names: dict[str, str] = {}
    for parent in (output_dir, path.parent):
        try:
            folders = (found for found in parent.iterdir() if found.is_dir() and found != path)
            names |= {found.name: str(found) for found in folders}
        except OSError:
            continue  # a folder that can't be read has nothing to offer
    words = {word: f"--resume {word}" for word in WORDS}
    near = nearest(path.name, [*names, *words])
    if near:
        return f"did you mean {(names | words)[near]}?"
    runs = sorted(found for found in names.values() if _is_run(Path(found)))
    if not runs:
        return f"there is no run in {output_dir}"
    return "there are: " + ", ".join(runs[-5:])

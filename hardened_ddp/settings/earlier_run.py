"""Run folders on the disk, without torch: which one --resume, watch, report and explain mean.

Does not own: which checkpoint is used, and whether it is valid (checkpoint/).
"""

import contextlib
import os
import re
import shlex
from pathlib import Path

from hardened_ddp.errors import RunFolderError
from hardened_ddp.settings.document import Misfit
from hardened_ddp.settings.typed_command import own_command
from hardened_ddp.settings.wording import shown

SAVED_SETTINGS = "config.yaml"
CHECKPOINTS_NAME = "checkpoints"
STATUS_FOLDER = "status"
MIRROR_STATUS = f"{STATUS_FOLDER}/mirror.json"
# The name of a finished checkpoint: one that is being written, or set aside, has another.
STEP_FOLDER = re.compile(r"step-([0-9]{9,15})")

# The first four belong to the machine of today, the others say which run this is. WHY seed and
# deterministic are not among them, though of the same section: they belong to the samples' order.
NOT_INHERITED = frozenset(
    {"single_gpu", "cpu_only", "backend", "timeout_s", "resume", "run_name", "output_dir"}
)
WHICH_RUN = ("resume", "run_name", "output_dir")


def find_run(*, resume: str, run_name: str, output_dir: str) -> Path | None:
    """Give the folder of the run to continue; None: start a new run. Rank-local.

    Raises Misfit if there is none where they say.
    """
    match resume:
        case "never":
            return None
        case "auto":
            folder = Path(output_dir) / run_name
            return folder if run_name and (folder / SAVED_SETTINGS).is_file() else None
        case "newest":
            found = [
                # WHY its time: that of the last rename into it, so of the last checkpoint
                (checkpoints.stat().st_mtime_ns, checkpoints.parent)
                for checkpoints in Path(output_dir).glob(f"*/{CHECKPOINTS_NAME}")
                if not checkpoints.parent.is_symlink() and _has_checkpoint(checkpoints)
            ]
            if not found:
                why = f"there is no run with a checkpoint in {output_dir}; auto starts a new run"
                raise Misfit(why)
            return max(found)[1]
    return _run_at(Path(resume), Path(output_dir))


def find_folder(name: str, output_dir: Path) -> Path:
    """Find a run to look at: a path, a name in output_dir, or without a name the newest run.

    It may have no checkpoint yet. Raises RunFolderError.
    """
    for place in (Path(name), output_dir / name) if name else (output_dir,):
        _check_access(place)
        if name and _has_part_of_run(place):
            return place
    found = sorted(path for path in output_dir.glob("*") if not path.is_symlink())
    runs = [path for path in found if _has_part_of_run(path)]
    if runs and not name:
        return max(runs, key=changed_at)
    fix = f"choose a run of {output_dir}: {', '.join(run.name for run in runs[-5:])}"
    if not runs:
        fix = f"{output_dir} has no run; start one: {own_command()}, or name it by --output_dir"
    told = (
        f"{name}: neither {name} nor {output_dir / name} is a" if name else f"in {output_dir}: no"
    )
    what = f"folder with {CHECKPOINTS_NAME}, {STATUS_FOLDER} or logs"
    raise RunFolderError(f"there is no run {told} {what}", fix=fix)


def _check_access(folder: Path) -> None:
    """Raise RunFolderError if a folder is there and may not be read: it looks as if it had none."""
    try:
        os.listdir(folder)
        (folder / CHECKPOINTS_NAME).stat()
    except PermissionError as error:
        fix = f"its owner can allow it: chmod -R a+rX {shlex.quote(str(folder))}"
        raise RunFolderError(f"{folder} can't be read: {error.strerror}", fix=fix) from error
    except (OSError, ValueError):  # it is no folder, or a run that has no checkpoint yet
        return


def _has_part_of_run(folder: Path) -> bool:
    parts = (CHECKPOINTS_NAME, STATUS_FOLDER, "metrics.jsonl", "attempts.jsonl", "logs")
    return any(os.path.exists(folder / name) for name in parts)


def changed_at(run: Path) -> float:
    """Return when something in a run folder last changed; 0 if it can't be seen."""
    newest = 0.0
    for place in (run, run / STATUS_FOLDER, run / STATUS_FOLDER / "rank-0.json"):
        with contextlib.suppress(OSError):
            newest = max(newest, place.stat().st_mtime)
    return newest


def _has_checkpoint(checkpoints: Path) -> bool:
    is_real_folder = checkpoints.is_dir() and not checkpoints.is_symlink()
    return is_real_folder and any(STEP_FOLDER.fullmatch(p.name) for p in checkpoints.iterdir())


def _run_at(path: Path, output_dir: Path) -> Path:
    """Find the run folder that path is, or is inside of."""
    if _is_run(path):
        return path
    full = path.resolve()  # WHY: "." has no parents
    if path.is_dir() and full.parent.name == CHECKPOINTS_NAME and _is_run(full.parents[1]):
        return full.parents[1]
    runs = sorted(str(found) for found in output_dir.glob("*") if _is_run(found))
    raise Misfit(
        f"{shown(str(path))} is neither a run folder, with {SAVED_SETTINGS} and "
        f"{CHECKPOINTS_NAME}/, nor a checkpoint folder inside one; there are: "
        + (", ".join(runs[-5:]) or "none")
    )


def _is_run(folder: Path) -> bool:
    # WHY both: the project's own folder has a config.yaml too
    is_saved = os.path.isfile(folder / SAVED_SETTINGS)  # Path's raises where it may not look
    return is_saved and os.path.isdir(folder / CHECKPOINTS_NAME)

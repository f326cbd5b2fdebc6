"""Weights & Biases as a tracker: --tracker wandb.

Owns which run of W&B belongs to a run folder: its id is kept in the folder, so a resumed run goes
on in the same curves. Project, key and mode are set as W&B says, by WANDB_PROJECT, WANDB_API_KEY
and WANDB_MODE (offline writes to the run folder only; later: wandb sync).
"""

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hardened_ddp.reporting.sinks import write_text

FOLDER = "wandb"
_ID_FILE = "run-id.txt"


class WandbTracker:
    """Logs to one run of W&B."""

    def __init__(self, *, folder: Path, settings: Mapping[str, Any]) -> None:  # Any: of settings
        """Start or continue the W&B run of a run folder. Raises what wandb raises."""
        import wandb

        self._run = wandb.init(
            dir=folder,
            id=_read_id(folder / FOLDER),
            name=folder.name,
            resume="allow",
            config=dict(settings),
            # WHY no console: it would put itself between this process and its log
            settings=wandb.Settings(console="off", silent=True),
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log values; W&B ignores a step that is before the last one, as after a rollback."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Send or write what is left."""
        self._run.finish()


def _read_id(folder: Path) -> str:
    """Return the id of a run folder; make one the first time."""
    path = folder / _ID_FILE
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_text(path, uuid.uuid4().hex[:16] + "\n")
    return path.read_text(encoding="utf-8").strip()

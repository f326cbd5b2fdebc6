"""Settings of the run folder, checkpoints and reports."""

from dataclasses import dataclass

from hardened_ddp.settings.declare import COUNT, COUNT_OR_ZERO, IMPORT_PATH, Shape, setting

# WHY the first character: a leading dash reads as a flag, a leading dot hides the folder
FOLDER_NAME = Shape(
    pattern=r"([A-Za-z0-9_][A-Za-z0-9._-]{0,127})?",
    words="letters, digits, dots, dashes, underscores; no dot or dash first; 128 at most",
)

TENSORBOARD, WANDB, NO_TRACKER = "tensorboard", "wandb", "none"
_ONE_TRACKER = rf"({TENSORBOARD}|{WANDB}|{IMPORT_PATH.pattern})"
TRACKERS = Shape(
    pattern=rf"{NO_TRACKER}|{_ONE_TRACKER}( *, *{_ONE_TRACKER})*",
    words=f"{TENSORBOARD}, {WANDB}, package.module:Class, separated by commas, or {NO_TRACKER}",
)


def tracker_names(tracker: str) -> list[str]:
    """Split the setting tracker into names, each once."""
    names = [name.strip() for name in tracker.split(",")]
    return [name for name in dict.fromkeys(names) if name != NO_TRACKER]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    output_dir: str = setting(
        "runs", "Folder that holds the run folders.", may_differ=True, is_place=True
    )
    run_name: str = setting(
        "",
        "Name of the run folder. Empty: made from the time, the model and the dataset. The name "
        "of an earlier run continues that run. It can't rename the run that resume names.",
        shape=FOLDER_NAME,
    )
    checkpoint_every_steps: int | None = setting(
        None,
        "Steps between checkpoints. auto: measured, so that checkpoints cost at most 1 % of the "
        "time and write during at most 10 % of it; the first one after 10 minutes at the latest. "
        "0: never. There is always one at the end.",
        bounds=COUNT_OR_ZERO,
    )
    checkpoint_every_epochs: int = setting(
        0, "Write a checkpoint every this many epochs too. 0: no.", bounds=COUNT_OR_ZERO
    )
    keep_last: int = setting(
        3,
        "Number of checkpoints to keep, besides the best one. Older ones are removed.",
        bounds=COUNT,
    )
    resume: str = setting(
        "auto",
        "auto: continue run_name if it has a checkpoint. never: start a new run. newest: continue "
        "the run with the newest checkpoint. PATH: continue that run folder, or from a checkpoint "
        "folder inside one.",
        is_place=True,
    )
    tensorboard: bool = setting(
        True,
        "Write curves for TensorBoard into the run folder, if tracker names it.",
        may_differ=True,
    )
    tracker: str = setting(
        "tensorboard",
        "Where the curves go besides metrics.jsonl, separated by commas: tensorboard, wandb "
        "(Weights & Biases; WANDB_MODE=offline needs no network), or your class with "
        "log(step, values) and close() as package.module:Class. none: nowhere. A tracker that "
        "fails never stops training.",
        shape=TRACKERS,
        may_differ=True,
    )
    progress: bool | None = setting(
        None, "Show a progress bar. auto: if the output is a terminal.", may_differ=True
    )
    ledger: bool = setting(
        False,
        "Record the samples of each step, 4 bytes per sample. verify-ledger then proves that each "
        "epoch used every sample exactly once.",
    )
    profile: bool = setting(
        False,
        "Record a few steps with torch.profiler into the run folder. Those steps are slower.",
    )

"""Settings of the run folder, checkpoints and reports."""

from dataclasses import dataclass

from hardened_ddp.settings.declare import COUNT, COUNT_OR_ZERO, Shape, setting

# WHY the first character: a leading dash reads as a flag, a leading dot hides the folder
FOLDER_NAME = Shape(
    pattern=r"([A-Za-z0-9_][A-Za-z0-9._-]{0,127})?",
    words="letters, digits, dots, dashes, underscores; no dot or dash first; 128 at most",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    output_dir: str = setting("runs", "Folder of the run folders.", may_differ=True)
    run_name: str = setting(
        "",
        "Name of the run folder. Empty: generated from the time. The name of an earlier run "
        "continues it.",
        shape=FOLDER_NAME,
    )
    checkpoint_every_steps: int | None = setting(
        None,
        "Write a checkpoint after every so many steps. auto: as often as costs at most 1 % of the "
        "time, by measurement. 0: never. At the end there is always one.",
        bounds=COUNT_OR_ZERO,
    )
    checkpoint_every_epochs: int = setting(
        0, "Write a checkpoint after every so many epochs too. 0: no.", bounds=COUNT_OR_ZERO
    )
    keep_last: int = setting(
        3, "Checkpoints to keep, the best one aside. Older ones are removed.", bounds=COUNT
    )
    resume: str = setting(
        "auto",
        "auto: continue run_name if it has a checkpoint. never: start anew. newest: the run with "
        "the newest checkpoint. PATH: that run folder, or a checkpoint folder inside one.",
    )
    tensorboard: bool = setting(
        True, "Write curves for TensorBoard into the run folder.", may_differ=True
    )
    progress: bool | None = setting(
        None, "Show a progress line. auto: if the output is a terminal.", may_differ=True
    )
    ledger: bool = setting(
        False,
        "Write down the samples of each step, 4 bytes each; verify-ledger then proves that each "
        "epoch took every sample exactly once.",
    )
    profile: bool = setting(
        False,
        "Record a few steps with torch.profiler into the run folder; those steps are slower.",
    )

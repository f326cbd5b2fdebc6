"""The command verify-ledger: check the ledger up to the run's newest checkpoint."""

from pathlib import Path
from typing import Any, TextIO

from ddp_runs.replay_records import read_digests
from hardened_ddp.checkpoint.folder import find_newest
from hardened_ddp.data.batches.ledger import DIGESTS, Done, verify_ledger
from hardened_ddp.errors import CheckpointError
from hardened_ddp.settings.earlier_run import CHECKPOINTS_NAME


def check_ledger(run: Path, *, output: TextIO) -> int:
    """Print a line for each epoch; return 0 if every sample was taken exactly once, else 1.

    Raises RunFolderError if there is no ledger, CheckpointError if no checkpoint is valid.
    """
    newest, _ = find_newest(run / CHECKPOINTS_NAME)
    if newest is None:
        raise CheckpointError(
            f"{run} has no valid checkpoint, so nothing counts as done yet",
            fix=f"name a run that has some in {CHECKPOINTS_NAME}, or let this one go on",
        )
    meta: dict[str, Any] = dict(newest.manifest.meta)  # Any: JSON
    if "place" in meta:  # a loop of the user's own has a ledger for each loader
        is_exact = True
        for name, at in meta["place"]["streams"].items():
            place = Done(step=newest.step, epoch=at["pass"], cursor=at["cursor"], may_pause=True)
            lines, is_good = verify_ledger(run / "data" / name, place)
            print("\n".join(f"{name}: {line}" for line in lines), file=output)
            is_exact = is_exact and is_good
        return 0 if is_exact else 1
    stream = {"facts": {"taken": ()}, "sizes": ()} | (meta.get("stream") or {})
    done = Done(
        step=newest.step,
        epoch=int(meta["epoch"]),
        cursor=int(meta["cursor"]),
        taken=stream["facts"]["taken"],
        sizes=stream["sizes"],
    )
    lines, is_exact = verify_ledger(run, done)
    if (run / DIGESTS).is_dir():
        digests = read_digests(run, may_be_empty=True)
        number = sum(step < done.step for step in digests.steps)
        lines.append(f"digests: of {number} of {done.step} steps, for replay and diff")
    print("\n".join(lines), file=output)
    return 0 if is_exact else 1

"""The comparison of a run with a fault with the undisturbed run and the expected verdict.

Compared are exit statuses, messages, weights, replicas, ledger, and leftovers.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ddp_drills.digest import digest_of
from ddp_drills.fault import Fault
from ddp_drills.injections import DEPENDS_ON_PARTS, Board
from ddp_runs.ledger_check import check_ledger
from hardened_ddp.checkpoint.disk import LOCK_NAME
from hardened_ddp.checkpoint.folder import find_newest, load_checkpoint
from hardened_ddp.errors import HardenedError
from hardened_ddp.settings.earlier_run import CHECKPOINTS_NAME
from hardened_ddp.training.weights import MODEL_PREFIX

# Of the size of the weights. A few dozen steps make it 1e-7 to 1e-5; one wrong gradient, 1e-2.
_ROUNDING = 1e-3


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of the command."""

    # Of each rank, or of torchrun; None: it did not end and was killed.
    statuses: tuple[int | None, ...]
    is_finished: bool
    wall_s: float


@dataclass(slots=True)
class Record:
    """All starts of one run."""

    folder: Path  # of the run
    board: Board
    num_ranks: int
    attempts: list[Attempt] = field(default_factory=list)
    output: str = ""
    problems: list[str] = field(default_factory=list)  # leftovers, and processes that did not end
    has_fault: bool = False  # the fault has happened in it

    @property
    def wall_s(self) -> float:
        return sum(attempt.wall_s for attempt in self.attempts)

    def weights(self) -> str:
        """Return the hash of the last checkpoint's weights and optimizer state."""
        tensors = self._tensors()
        return digest_of(tensors) if tensors else ""

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the floating point weights of the last checkpoint."""
        weights = {n: t for n, t in self._tensors().items() if n.startswith(MODEL_PREFIX)}
        return {name: tensor for name, tensor in weights.items() if tensor.is_floating_point()}

    def _tensors(self) -> Mapping[str, torch.Tensor]:
        newest, _ = find_newest(self.folder / CHECKPOINTS_NAME)
        return {} if newest is None else load_checkpoint(newest)[0]

    def text(self) -> str:
        logs = sorted((self.folder / "logs").glob("rank-*.log"))
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in logs]
        return "\n".join([self.output, *texts])


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """The result of a drill."""

    fault: Fault
    ended: str
    weights: str
    ledger: str
    message: str  # the message that the user of such a run reads
    lost_s: float  # how much longer it took than the undisturbed run
    problems: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.problems


def judge(fault: Fault, run: Record, reference: Record) -> Verdict:
    """Compare a run with the undisturbed one, and with what is expected of fault."""
    problems = list(run.problems)
    if not run.has_fault:
        problems.append("the fault did not happen: does the run have enough steps?")
    problems += _check_ends(fault, run.attempts)
    text = run.text()
    sample = run.board.read("sample")
    wanted = [word.replace("SAMPLE", str(sample)) for word in (fault.code, *fault.says) if word]
    problems += [f"no rank wrote: {word}" for word in wanted if word not in text]
    if "Traceback" in run.output and not fault.outside.startswith("torchrun"):
        problems.append("a traceback was printed")
    digests = {run.board.read(f"digest-{rank}") for rank in range(run.num_ranks)}
    is_near, difference = distance(fault, run, reference)
    if not is_near:
        problems.append(f"the weights are {difference}")
    are_equal = len(digests) == 1 and None not in digests
    weights = run.weights()
    is_same = bool(weights) and weights == reference.weights()
    if not are_equal:
        problems.append("the replicas of the ranks are not equal")
    if fault.keeps == "same weights" and not is_same:
        problems.append("the weights differ from the undisturbed run")
    ledger, is_exact = _read_ledger(run.folder)
    if not is_exact or (fault.leaves_out and "left out, as reported" not in ledger):
        problems.append(f"the ledger: {ledger}")
    if (run.folder / LOCK_NAME).exists():
        problems.append(f"{LOCK_NAME} was left in the run folder")
    same = "equal to the undisturbed run, bit for bit"
    same = same if is_same else difference or f"not {same}"
    return Verdict(
        fault=fault,
        ended="; the same command again: ".join(map(_describe, run.attempts)),
        weights=f"{same}; replicas {'equal' if are_equal else 'NOT equal'}",
        ledger=ledger,
        message=_find_message(text, wanted),
        lost_s=max(0.0, run.wall_s - reference.wall_s),
        problems=tuple(problems),
    )


def distance(fault: Fault, run: Record, reference: Record) -> tuple[bool, str]:
    """Return whether the weights are as near to the undisturbed ones as expected, and how near.

    WHY not if the model depends on the parts of a batch: dropout draws other numbers for halves,
    and BatchNorm has other means, so that the weights differ by more than rounding.
    """
    if fault.keeps != "near weights" or run.board.has(DEPENDS_ON_PARTS):
        return True, ""
    ours, others = run.parameters(), reference.parameters()
    if not ours or ours.keys() != others.keys():
        return False, "not those of the undisturbed run"
    apart = sum(float((ours[n].double() - others[n].double()).square().sum()) for n in ours)
    size = sum(float(tensor.double().square().sum()) for tensor in others.values())
    share = (apart / size) ** 0.5
    return share <= _ROUNDING, f"{share:.0e} of their size away from the undisturbed run"


def _check_ends(fault: Fault, attempts: Sequence[Attempt]) -> list[str]:
    """Return what is wrong with how the starts ended."""
    first, last = attempts[0], attempts[-1]
    is_any = fault.ends == "several starts"
    problems: list[str] = []
    if not last.is_finished or (any(last.statuses) and not is_any):
        problems.append(f"it did not finish: {_describe(last)}")
    if is_any:
        return problems
    if fault.ends in ("continues", "restarts"):
        if len(attempts) > 1:
            problems.append(f"it did not continue by itself: {_describe(first)}")
    elif first.is_finished:
        problems.append("it finished, but should have stopped")
    elif fault.ends == "saves" and any(first.statuses):
        problems.append(f"it did not exit with status 0: {_describe(first)}")
    elif fault.ends == "stops" and 0 in first.statuses:
        problems.append(f"a rank exited with status 0: {_describe(first)}")
    return problems


def _read_ledger(folder: Path) -> tuple[str, bool]:
    output = io.StringIO()
    try:
        status = check_ledger(folder, output=output)
    except HardenedError as error:
        return error.message, False
    lines = output.getvalue().splitlines()
    if status == 0 and not any("left out" in line for line in lines):
        return "every sample exactly once", True
    return "; ".join(lines), status == 0


def _describe(attempt: Attempt) -> str:
    if attempt.is_finished and not any(attempt.statuses):
        return "finished"
    words = [
        "did not end" if s is None else f"status {s}" if s >= 0 else f"signal {-s}"
        for s in attempt.statuses
    ]
    many = [f"rank {rank}: {word}" for rank, word in enumerate(words)]
    return ", ".join(many if len(many) > 1 else words)


def _find_message(text: str, wanted: Sequence[str]) -> str:
    told = [line.strip() for line in text.splitlines() if any(word in line for word in wanted)]
    return max(told, key=lambda line: sum(word in line for word in wanted), default="")

"""One way to try something before the first step: it changes nothing, and all ranks learn of it.

The model runs without DDP, so what fails on one rank ends in one message on all, not in a hang.
Afterwards mode, random numbers, gradients, and whatever forward moves are as before: attributes as
they were when the Trial was made.
Does not own: what is tried (the other files here).
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.foreign_code import describe, line_of_user
from hardened_ddp.errors import ANY_FAILURE, HardenedError, ModelError
from hardened_ddp.model.effects import Effects, untouched
from hardened_ddp.model.moving_attributes import MovingAttributes
from hardened_ddp.model.precision import Precision
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.seeding import keeping_random_state
from hardened_ddp.task.build import check_score
from hardened_ddp.task.task import Score, Task

log = logging.getLogger(__name__)

T = TypeVar("T")


class Trial:
    """What a trial runs: the model, and what its forward and backward need."""

    def __init__(self, model: nn.Module, task: Task, precision: Precision, group: Group) -> None:
        self.model, self.task, self.precision, self.group = model, task, precision, group
        # Those of model and task that are no tensors, such as a counter of the model's calls.
        self.attributes = MovingAttributes(model, task)

    @property
    def is_compiled(self) -> bool:
        """Whether a part of the model is: torch does not compile it under a DispatchMode."""
        return any(getattr(part, "_compiled_call_impl", None) for part in self.model.modules())

    def score(self, batch: Batch) -> tuple[Any, Score]:
        """Run the forward of a batch; return its output and score, which are checked. Rank-local.

        Raises ModelError. Any: whatever a model returned.
        """
        with self.precision.autocast():
            output = self.task.forward(self.model, batch)
            self.task.check(output, batch)
            return output, check_score(self.task, self.task.score(output, batch))


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """What is raised where a trial fails."""

    what: str
    fix: Callable[[BaseException], str]  # of an error that is none of ours; those have one
    error: type[HardenedError] = ModelError


def try_on_all_ranks(
    trial: Trial,
    items: Iterable[T],
    work: Callable[[T, Effects], Any],
    refusal: Refusal | None = None,
    *,
    evaluates: bool = False,
) -> list[list[Any] | None]:
    """Do work with each item, and undo it; return each rank's outcomes. Collective: all ranks.

    work: with what it has changed so far; returns JSON. Its collectives must be those of all ranks.
    evaluates: in evaluation mode. If it failed on any rank, raises as refusal says on all ranks
    alike; without a refusal that rank's outcome is None.
    """
    mine: dict[str, Any] = {"found": []}
    modes = [(module, module.training) for module in trial.model.modules()]
    try:
        if evaluates:
            trial.model.eval()
        with keeping_random_state():
            for item in items:
                with untouched(trial.model) as effects:
                    mine["found"].append(work(item, effects))
                trial.model.zero_grad(set_to_none=True)
    except HardenedError as error:
        mine = {"error": error.message, "fix": error.fix}
    except ANY_FAILURE as error:  # WHY broad: it is the user's code, and the other ranks wait
        log.debug("a trial failed", exc_info=True)
        fix = "" if refusal is None else refusal.fix(error)
        mine = {"error": f"{describe(error)}{line_of_user(error)}", "fix": fix}
    finally:
        trial.model.zero_grad(set_to_none=True)
        trial.attributes.reset()
        for module, was_training in modes:
            module.training = was_training
    everyone = trial.group.gather_json(mine)  # collective
    failed = [(rank, notes) for rank, notes in enumerate(everyone) if "error" in notes]
    if failed and refusal is not None:
        rank, notes = failed[0]
        raise refusal.error(f"{refusal.what}, rank {rank}: {notes['error']}", fix=notes["fix"])
    return [notes.get("found") for notes in everyone]

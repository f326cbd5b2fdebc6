"""How many optimizer steps a run has, as far as that is known.

WHY an object: the length of a stream may be known only when it was read once.
"""

import sys
from dataclasses import dataclass

UNKNOWN_STEPS = sys.maxsize  # more steps than any run has: its end is not known yet


@dataclass(slots=True)
class RunLength:
    """The steps of a run."""

    total: int  # steps of the whole run; UNKNOWN_STEPS until they are known

    # Steps that the learning rate's schedule is stretched over. Never changes within a run.
    # UNKNOWN_STEPS for a constant rate of a stream.
    schedule: int
    most: int = UNKNOWN_STEPS  # the limit max_steps

    @property
    def is_known(self) -> bool:
        return self.total < UNKNOWN_STEPS

    def learn(self, total: int) -> None:
        self.total = min(total, self.most)

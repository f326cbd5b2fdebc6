"""The phases of a run: what the main thread of a rank is doing."""

from enum import IntEnum


class Phase(IntEnum):
    """What the main thread does. From ALL_REDUCE on it only waits for other ranks."""

    START_UP = 0
    DATA = 1
    FORWARD = 2
    BACKWARD = 3
    OPTIMIZER = 4
    REPORT = 5
    CHECKPOINT = 6
    EVALUATION = 7
    ALL_REDUCE = 8
    BROADCAST = 9
    GATHER = 10
    AGREEMENT = 11

    @property
    def label(self) -> str:
        """Its name in messages and reports."""
        return _LABELS.get(self) or self.name.lower().replace("_", "-")


_LABELS = {Phase.AGREEMENT: "agreement on a stop"}
FIRST_WAIT = Phase.ALL_REDUCE
NUM_PHASES = len(Phase)

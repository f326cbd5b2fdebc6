"""How a loss was scaled before backward: read from its autograd graph, not from the source.

The nodes between the loss and its reduction (mean or sum) are multiplications and divisions by
plain numbers; their product is the factor. Whatever else stands there makes the answer unknown.
"""

from ddp_doctor.audit.injected.recorder import Foreign

MAX_NODES = 40
MEAN, SUM, UNKNOWN = "mean", "sum", "unknown"
_PASSES_ON = tuple(
    f"{name}Backward"
    for name in ("Clone", "View", "Alias", "ToCopy", "Squeeze", "Unsqueeze", "Expand", "Detach")
)
_REDUCES = ("LossBackward", "CrossEntropyWithLogits", "BinaryCrossEntropy", "KlDiv")


def loss_factor(loss: Foreign) -> tuple[float, str]:
    """Give the factor of a loss, and what it scales: MEAN, SUM or UNKNOWN."""
    return _read(getattr(loss, "grad_fn", None), MAX_NODES)


def _read(node: Foreign, left: int) -> tuple[float, str]:
    if node is None or left <= 0:
        return 1.0, UNKNOWN
    name = node.name().split("::")[-1]
    parents = [parent for parent, _ in node.next_functions if parent is not None]
    if name.startswith("MeanBackward"):
        return 1.0, MEAN
    if any(word in name for word in _REDUCES):
        reduction: Foreign = getattr(node, "_saved_reduction", None)
        return 1.0, {1: MEAN, 2: SUM}.get(reduction, UNKNOWN)
    if name.startswith("SumBackward"):
        return 1.0, SUM
    if name.startswith("AddBackward") and parents:
        # Of a sum of losses the part with the largest factor is the main one.
        return max((_read(parent, left - 1) for parent in parents), key=lambda read: abs(read[0]))
    if len(parents) != 1:
        return 1.0, UNKNOWN
    if name.startswith(_PASSES_ON):
        return _read(parents[0], left - 1)
    if name.startswith(("MulBackward", "DivBackward")):
        number = _number_of(getattr(node, "_saved_other", None))
        if number:
            factor, kind = _read(parents[0], left - 1)
            return factor * (number if name.startswith("Mul") else 1 / number), kind
    return 1.0, UNKNOWN


def _number_of(value: Foreign) -> float | None:
    """Give a saved scalar as a float; None if it is no plain number."""
    if isinstance(value, int | float):
        return float(value)
    if value is not None and hasattr(value, "numel") and value.numel() == 1:
        return float(value.detach())
    return None

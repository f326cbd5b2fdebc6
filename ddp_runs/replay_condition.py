"""The conditions of the command bisect: loss > 3, grad_norm > 100, nan in weights, norm(fc) > 9.

Owns how they are written, and whether one holds, given the numbers of a step. No torch: the caller
gives the weights.
"""

import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hardened_ddp.errors import ConfigError

STEP_NUMBERS = ("loss", "grad_norm", "lr")
"""What is known of each step; other names are those of metrics.jsonl."""

_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_COMPARED = re.compile(
    r"(norm\((?P<layer>[^)]+)\)|(?P<name>[\w./-]+))\s*(?P<op>[<>]=?)\s*(?P<x>\S+)"
)
_NAN = re.compile(r"nan\s+in\s+(weights|loss|grad_norm)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Condition:
    """A condition on a step."""

    text: str
    name: str
    """loss, grad_norm, lr, a metric; or weights, layer: asked of the weights after the step."""

    layer: str = ""
    op: str = ""
    """Empty: whether it is NaN or infinite."""

    limit: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Condition":
        """Read a condition. Raises ConfigError."""
        text = text.strip()
        if match := _NAN.fullmatch(text):
            return cls(text=text, name=match[1])
        if match := _COMPARED.fullmatch(text):
            try:
                limit = float(match["x"])
            except ValueError:
                limit = math.nan
            if not math.isnan(limit):
                name, layer = match["name"] or "layer", match["layer"] or ""
                return cls(text=text, name=name, layer=layer, op=match["op"], limit=limit)
        raise ConfigError(
            f"--when: found {text!r}, which is no condition",
            fix="one of: loss > 3, grad_norm > 100, lr < 1e-5, accuracy/test < 0.5, nan in loss, "
            "nan in weights, norm(LAYER) > 9 (of its weights)",
        )

    def fits(self, value: float) -> bool:
        """Return whether it holds for a value. NaN holds every one that asks for large numbers."""
        if not self.op:
            return not math.isfinite(value)
        if math.isnan(value):
            return self.op in (">", ">=")
        return _OPERATORS[self.op](value, self.limit)

    def holds(self, step: Mapping[str, Any]) -> bool:  # Any: JSON
        """Return whether it holds after a step, given its numbers. An error counts as NaN."""
        if self.name in step:
            return self.fits(float(step[self.name])) or (bool(step.get("error")) and not self.op)
        return False

    def worst(self, steps: Sequence[Mapping[str, Any]]) -> float:  # Any: JSON
        """Return how far it went towards this condition in some steps; NaN counts as infinite."""
        values = [float(step[self.name]) for step in steps if self.name in step]
        sign = -1.0 if self.op.startswith("<") else 1.0
        found = [sign * value if math.isfinite(value) else math.inf for value in values]
        return max(found, default=0.0) if self.op or math.inf in found else 0.0

    def measure(self, norms: Callable[[str], float]) -> dict[str, float]:
        """Return what it asks of the weights. norms: the norm of a layer; of all for ''."""
        return {self.name: norms(self.layer)} if self.name in ("weights", "layer") else {}


def weights_of(module: Any) -> Callable[[str], float]:  # Any: an nn.Module, without torch here
    """Return what gives the norm of the weights of a layer, or of a parameter, by its name."""

    def measure(layer: str) -> float:
        squares, seen = 0.0, False
        for name, parameter in module.named_parameters():
            if not layer or name == layer or name.startswith(f"{layer}."):
                squares += float(parameter.detach().double().pow(2).sum())
                seen = True
        if not seen:
            names = ", ".join(name for name, _ in list(module.named_parameters())[:6])
            raise ConfigError(f"norm({layer}): the model has no such layer", fix=f"it has {names}")
        return math.sqrt(squares) if math.isfinite(squares) else math.nan

    return measure

"""Mixed precision: autocast to 16 bits, and the gradient scaler of fp16.

Owns both, and the order unscale -> clip -> step -> update.
bf16 has the range of fp32 and needs no scaler; fp16 does. The scaler skips a step whose gradients
overflowed: all ranks see the same sums, so all ranks skip it without communication.
"""

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal

import torch

from hardened_ddp.reporting.log import ON_EVERY_RANK
from hardened_ddp.settings.config import Amp

log = logging.getLogger(__name__)

PrecisionName = Literal["off", "bf16", "fp16"]
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """How one run computes: fp32, bf16 or fp16 with a scaler."""

    def __init__(self, amp: Amp, device: torch.device) -> None:
        self.name = _choose(amp, device)
        # Gives the context for forward and loss, in which matrix work runs in 16 bits.
        self.autocast: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
        if self.name != "off":
            self.autocast = partial(torch.autocast, device.type, dtype=_DTYPES[self.name])
        self.scaler = torch.amp.GradScaler(device.type) if self.name == "fp16" else None
        if self.scaler is not None:
            # WHY: creates its scale now, not lazily
            self.scaler.scale(torch.zeros((), device=device))

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Undo the loss scale in the gradients. WHY before clipping: it compares their norm."""
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)

    def leave_out(self, optimizer: torch.optim.Optimizer, flag: torch.Tensor | None) -> None:
        """Make the next step change nothing if flag is 1.0. Call it before unscale.

        flag: on the device, of shape (), 1.0 or 0.0; the host does not wait for it. Needs a fused
        optimizer. None: the step is done.
        """
        if self.scaler is None:
            optimizer.found_inf = flag  # type: ignore[attr-defined]  # as GradScaler sets it
        elif flag is not None:
            # The scaler looks at the gradients themselves: NaN in one element is enough.
            gradient = next((p.grad for p in _weights(optimizer) if p.grad is not None), None)
            if gradient is None:  # this rank failed before its backward, maybe out of memory
                least = min(_weights(optimizer), key=torch.Tensor.numel)
                least.grad = gradient = torch.zeros_like(least)
            gradient[(0,) * gradient.dim()].masked_fill_(flag.bool(), math.nan)

    def mark(self) -> Any:  # Any: for go_back only
        """Copy the scaler's scale and growth tracker, on the device, without a wait for it."""
        if self.scaler is None:
            return ()
        return [number.clone() for number in self._numbers()] or self.state()

    def go_back(self, mark: Any) -> None:  # Any: from mark
        if isinstance(mark, dict):
            self.restore(mark)
            return
        for number, copy in zip(self._numbers(), mark, strict=True):
            number.copy_(copy)

    def has_backed_off(self, mark: Any) -> torch.Tensor:  # Any: from mark
        """Return on the device whether the scaler skipped the update since mark."""
        numbers = self._numbers()
        now, before = (numbers, mark) if numbers else ([self.state()["scale"]], [mark["scale"]])
        return torch.as_tensor(now[0]) < torch.as_tensor(before[0])

    def _numbers(self) -> list[torch.Tensor]:
        """Return scale and growth tracker. WHY private attributes: state_dict waits."""
        scaler: Any = self.scaler
        if hasattr(scaler, "_scale") and hasattr(scaler, "_growth_tracker"):
            return [scaler._scale, scaler._growth_tracker]
        return []

    def state(self) -> dict[str, Any]:  # Any: JSON numbers
        return {} if self.scaler is None else dict(self.scaler.state_dict())

    def restore(self, state: dict[str, Any]) -> None:
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


def _weights(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """Yield the parameters that are not empty. WHY lazily: usually the first is enough."""
    for group in optimizer.param_groups:
        yield from (parameter for parameter in group["params"] if parameter.numel())


def clip(parameters: Iterable[torch.nn.Parameter], *, max_norm: float) -> torch.Tensor:
    """Clip the gradient to max_norm; return its norm before: sqrt of the sum of squares.

    max_norm: 0 changes nothing. WHY not inf for that: the norm of large numbers may overflow to inf
    too, and torch multiplies the gradient by inf / inf.
    """
    parameters = list(parameters)
    if max_norm > 0:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    gradients = [p.grad for p in parameters if p.grad is not None]
    return torch.nn.utils.get_total_norm(gradients)


def _choose(amp: Amp, device: torch.device) -> PrecisionName:
    """Choose the precision; if the device can't do what was asked, warn and take another."""
    if device.type == "cpu":
        if amp == "fp16":
            log.warning("amp: asked for fp16, which needs a GPU; running fp32", extra=ON_EVERY_RANK)
        return "bf16" if amp == "bf16" else "off"
    has_bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
    if amp == "auto":
        return "bf16" if has_bf16 else "fp16"
    if amp == "bf16" and not has_bf16:
        log.warning("amp: asked for bf16, this GPU can't do it; running fp16 with a scaler")
        return "fp16"
    return amp

"""This rank's own gradients: which are missing, whether they are finite, and their scale."""

import math

import torch
from torch import nn


class LocalGradients:
    """The gradients of the trained parameters on this rank."""

    def __init__(self, module: nn.Module) -> None:
        self.by_name = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.parameters: list[torch.Tensor] = list(self.by_name.values())
        self._has_complex = any(parameter.is_complex() for parameter in self.parameters)

    def missing(self) -> list[str]:
        """Name the parameters without a gradient after the last backward."""
        return [name for name, parameter in self.by_name.items() if parameter.grad is None]

    def are_finite(self) -> bool:
        """Return whether all gradients are finite. Waits for the device.

        WHY sums: NaN and inf persist in them, and a sum is the fastest check that torch has
        (isfinite takes five times as long). A sum of large numbers may overflow too, so if it is
        not finite, each gradient is checked.
        """
        gradients = self.real()
        if all(gradient.device.type == "cpu" for gradient in gradients[:1]):
            sums = [gradient.sum().item() for gradient in gradients]
        else:  # one wait for all of them
            sums = torch.stack([g.sum().double() for g in gradients]).tolist()
        return math.isfinite(sum(sums)) or all(bool(g.isfinite().all()) for g in gradients)

    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiply all gradients by factor; on a GPU by one kernel."""
        gradients = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if isinstance(factor, float) and factor == 1.0:
            return
        if gradients and hasattr(torch, "_foreach_mul_"):
            if isinstance(factor, torch.Tensor) and len({g.dtype for g in gradients}) == 1:
                # WHY: with a factor of another dtype, CUDA launches a kernel for each gradient
                factor = factor.to(gradients[0].dtype)
            torch._foreach_mul_(gradients, factor)
            return
        for gradient in gradients:
            gradient.mul_(factor)

    def real(self) -> list[torch.Tensor]:
        """Return the gradients that there are, of complex parameters as pairs of real numbers."""
        found = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        return [real(gradient) for gradient in found] if self._has_complex else found


def real(gradient: torch.Tensor) -> torch.Tensor:
    """Return complex numbers as pairs of real ones, in the same memory; others as they are."""
    return torch.view_as_real(gradient) if gradient.is_complex() else gradient

"""Sums over training samples, kept on the device so that adding to them never waits for it.

WHY a list first: four little operations per micro-batch are 4 % of a tiny model's step; done for
many micro-batches at once they are nothing.
"""

import torch

from hardened_ddp.model.objective import Scored
from hardened_ddp.ranks.group import Group

_FOLD_EVERY = 64
"""So many micro-batches are kept before they are summed: it bounds the memory."""


class Totals:
    """Loss, correct predictions and samples since the last reading."""

    def __init__(self, device: torch.device) -> None:
        self.loss_sum = torch.zeros((), device=device)
        self.num_correct = torch.zeros((), dtype=torch.int64, device=device)
        self.num_samples = 0
        self._pending: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def add(self, scored: Scored, targets: torch.Tensor) -> None:
        """Add one forward, scored against targets of shape (num_samples,)."""
        predictions = scored.logits.detach().argmax(dim=1)
        self._pending.append((scored.loss_sum.detach(), predictions, targets))
        self.num_samples += targets.shape[0]
        if len(self._pending) >= _FOLD_EVERY:
            self._fold()

    def copy(self) -> "Totals":
        """Remember this moment, to go back to it or to compare."""
        self._fold()
        other = Totals.__new__(Totals)
        other.loss_sum, other.num_correct = self.loss_sum, self.num_correct
        other.num_samples = self.num_samples
        other._pending = []
        return other

    def loss(self) -> float:
        """Give the sum of the losses. Waits for the device."""
        self._fold()
        return float(self.loss_sum)

    def loss_since(self, before: "Totals") -> float:
        """Give the loss added since before. Waits for the device."""
        return self.loss() - before.loss()

    def read(self, group: Group) -> dict[str, float]:
        """Give mean loss, accuracy and the number of samples over all ranks. Collective."""
        self._fold()
        sums = torch.stack(
            [
                self.loss_sum.double(),
                self.num_correct.double(),
                torch.tensor(float(self.num_samples), dtype=torch.float64).to(self.loss_sum.device),
            ]
        )
        loss, correct, samples = group.sum_(sums).tolist()  # collective
        count = max(1.0, samples)
        return {"loss": loss / count, "accuracy": correct / count, "samples": samples}

    def _fold(self) -> None:
        """Add up what is pending."""
        if not self._pending:
            return
        losses, predictions, targets = zip(*self._pending, strict=True)
        # WHY not in place: copy() shares the old tensors.
        self.loss_sum = self.loss_sum + torch.stack(losses).sum()
        self.num_correct = self.num_correct + torch.cat(predictions).eq(torch.cat(targets)).sum()
        self._pending = []

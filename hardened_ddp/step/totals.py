"""Sums over training samples, kept on the device so that adding to them never waits for it.

WHY in place, at once: small tensors that outlive a step lie between the large ones that it frees,
so the next step's large ones no longer fit there: memory grew by 200 MiB for a 2 MiB model.
"""

import torch

from hardened_ddp.ranks.group import Group
from hardened_ddp.task.classification import Scored

Mark = tuple[torch.Tensor | float, torch.Tensor | int, int]


class Totals:
    """Loss, correct predictions and samples since the last reading."""

    def __init__(self, device: torch.device) -> None:
        self.loss_sum = torch.zeros((), device=device)
        self.num_correct = torch.zeros((), dtype=torch.int64, device=device)
        self.num_samples = 0

    def add(self, scored: Scored, targets: torch.Tensor) -> None:
        """Add one forward, scored against targets of shape (num_samples,)."""
        self.loss_sum += scored.loss_sum.detach()
        self.num_correct += scored.logits.detach().argmax(dim=1).eq(targets).sum()
        self.num_samples += targets.shape[0]

    def mark(self) -> Mark:
        """Remember this moment, to go back to it or to compare. On the CPU without new tensors."""
        if self.loss_sum.is_cpu:
            return float(self.loss_sum), int(self.num_correct), self.num_samples
        return self.loss_sum.clone(), self.num_correct.clone(), self.num_samples

    def go_back(self, mark: Mark) -> None:
        """Forget what was added since mark."""
        loss_sum, num_correct, self.num_samples = mark
        if isinstance(loss_sum, torch.Tensor):
            self.loss_sum.copy_(loss_sum)
            self.num_correct.copy_(num_correct)  # type: ignore[arg-type]  # a tensor too
        else:
            self.loss_sum.fill_(loss_sum)
            self.num_correct.fill_(num_correct)

    def loss(self) -> float:
        """Give the sum of the losses. Waits for the device."""
        return float(self.loss_sum)

    def loss_since(self, mark: Mark) -> float:
        """Give the loss added since mark. Waits for the device."""
        return self.loss() - float(mark[0])

    def read(self, group: Group) -> dict[str, float]:
        """Give mean loss, accuracy and the number of samples over all ranks. Collective."""
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

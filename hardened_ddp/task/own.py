"""A model that returns its own loss: nothing else is known of it.

Its loss is a mean, by convention. It is a mean over what the output names as count; or over the
labels that are not -100, if there are several integers for each sample; or over samples.
"""

from collections.abc import Mapping
from typing import Any

import torch

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.errors import ModelError
from hardened_ddp.task.output import described, refuse_several_losses, split_output
from hardened_ddp.task.task import Score, Task
from hardened_ddp.task.tokens import IGNORED, find_shift


class Own(Task):
    """The loss that the model returns: a scalar, or {"loss": scalar, "count": number}."""

    learns = ("shift",)

    def __init__(self, *, ignore_index: int = IGNORED, shift: int | None = None) -> None:
        """shift: 1 if the model's loss leaves out the first label of each sequence."""
        self.ignore_index = ignore_index
        self.shift = shift

    def score(self, output: Any, batch: Batch) -> Score:
        _, loss = split_output(output)
        if loss is None:
            raise _no_loss(output)
        count = self._count(output, batch, loss.device)
        if isinstance(count, int):
            return Score(loss * count, count)
        # WHY where: the mean over no token is NaN.
        return Score(torch.where(count > 0, loss * count, torch.zeros_like(loss)), count)

    def check(self, output: Any, batch: Batch) -> None:
        """Raise ModelError if the output has no scalar loss; find out how it shifts labels."""
        refuse_several_losses(output)
        logits, loss = split_output(output)
        if loss is None:
            raise _no_loss(output)
        if loss.dim() != 0 or not loss.is_floating_point():
            raise ModelError(
                f"--task own: the model's loss is {described(loss)}, not a scalar",
                fix="return the mean over the samples: loss.mean()",
            )
        labels = batch.targets
        if logits is None or self.shift is not None or not _are_many(labels):
            return
        if logits.dim() == 3 and logits.shape[:2] == labels.shape:
            found = find_shift(logits, labels, loss.detach(), ignore_index=self.ignore_index)
            if found is not None:
                self.shift = found[0]

    def _count(self, output: Any, batch: Batch, device: torch.device) -> int | torch.Tensor:
        """Return what the loss is a mean over: the samples, or a number on device."""
        is_mapping = isinstance(output, Mapping)
        named = output.get("count") if is_mapping else getattr(output, "count", None)
        if isinstance(named, torch.Tensor) and named.device == device:
            return named.detach().sum()
        if isinstance(named, torch.Tensor | int | float):
            number = named.sum().item() if isinstance(named, torch.Tensor) else named
            # WHY full: a number of the host would be copied to the device, which waits for it
            return torch.full((), number, device=device)
        if _are_many(batch.targets):
            labels: torch.Tensor = batch.targets[:, self.shift or 0 :]
            return labels.ne(self.ignore_index).sum()
        return batch.num_samples


def _are_many(labels: Any) -> bool:  # Any: a dataset's labels
    """Return whether each sample has several labels that are integers."""
    return isinstance(labels, torch.Tensor) and labels.dim() > 1 and labels.dtype == torch.int64


def _no_loss(output: Any) -> ModelError:  # Any: whatever a model returned
    return ModelError(
        f"--task own: the model returned {described(output)}, without a loss",
        fix="return the mean loss, or a mapping with 'loss'; or choose the --task that computes it "
        "from logits and labels",
    )

"""Segmentation: each pixel or voxel has a label, the index of a class, or one that does not count.

The loss is the mean over the pixels that count, over the whole step. Mean IoU: of each class the
pixels that are both predicted and labelled, divided by those that are either; then the mean over
the classes that occur.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.errors import ModelError
from hardened_ddp.task.output import check_range, described_labels, logits_of
from hardened_ddp.task.task import Figures, Metric, Score, Task, name_of, widened
from hardened_ddp.task.tokens import IGNORED

_NEED = "(num_samples, num_classes, height, width)"
# Dimensions of the labels: of images, and of volumes (num_samples, depth, height, width).
_SIZES = (3, 4)


class Segmentation(Task):
    """Cross-entropy of logits (N, C, H, W) and labels (N, H, W) int64; or both with a depth."""

    metrics = (Metric("mean_iou", form=".2%"), Metric("pixel_accuracy", form=".2%"))

    learns = ("num_classes",)

    def __init__(
        self, *, num_classes: int, class_names: Sequence[str] = (), ignore_index: int = IGNORED
    ) -> None:
        self.num_classes = num_classes
        self.class_names = class_names
        self.ignore_index = ignore_index

    @property
    def sums(self) -> Mapping[str, torch.Tensor]:
        size = self.num_classes
        return {"confusion": torch.zeros(size, size, dtype=torch.int64)}

    def score(self, output: Any, batch: Batch) -> Score:
        """Compare the logits of each pixel that counts with its label."""
        logits, labels = logits_of(output, need=_NEED), batch.targets.long()
        loss_sum = cross_entropy(
            widened(logits, softmax=True), labels, reduction="sum", ignore_index=self.ignore_index
        )
        counts, size = labels.ne(self.ignore_index), self.num_classes
        predictions = logits.detach()[:, :size].argmax(dim=1)
        # Pixels by label (rows) and prediction (columns).
        # WHY a last place for those that don't count: picking the others would wait for the device.
        places = torch.where(counts, labels * size + predictions, size * size).flatten()
        confusion = torch.zeros(size * size + 1, dtype=torch.int64, device=labels.device)
        confusion.scatter_add_(0, places, torch.ones_like(places))
        return Score(loss_sum, counts.sum(), {"confusion": confusion[:-1].view(size, size)})

    def check(self, output: Any, batch: Batch) -> None:
        """Raise ModelError if logits and labels differ in size, or a label is no class."""
        targets = batch.targets
        logits = logits_of(output, need=_NEED)
        shape = tuple(logits.shape)
        is_labelled = isinstance(targets, torch.Tensor) and not targets.is_floating_point()
        is_map = is_labelled and targets.dim() in _SIZES and logits.dim() == targets.dim() + 1
        if not is_map or (shape[0], *shape[2:]) != tuple(targets.shape):
            raise ModelError(
                f"the model gives logits of shape {shape} for labels of "
                f"{described_labels(targets)}; segmentation needs {_NEED} for labels (num_samples, "
                "height, width) of integers, or both with a depth before the height",
                fix="give one output channel for each class, at the size of the labels",
            )
        self.num_classes = self.num_classes or shape[1]
        check_range(
            targets[targets != self.ignore_index],
            min(self.num_classes, shape[1]),
            what="classes",
            fix="if one of them marks pixels that don't count: --task_args '{ignore_index: NUMBER}'"
            "; else give the model more classes",
        )

    def figures(self, sums: Mapping[str, Any], count: float) -> Figures:
        """Return the mean IoU of the classes that occur, and the share of right pixels."""
        shares = [share for share in self._class_shares(sums["confusion"]) if share is not None]
        correct = sum(row[index] for index, row in enumerate(sums["confusion"]))
        return {
            "mean_iou": sum(shares) / len(shares) if shares else 0.0,
            "pixel_accuracy": correct / count,
        }

    def report(self, sums: Mapping[str, Any], count: float) -> dict[str, Any]:
        """Return a row for each class."""
        confusion = sums["confusion"]
        shares = self._class_shares(confusion)
        rows = [
            {"name": name_of(index, self.class_names), "pixels": int(sum(row)), "iou": share}
            for index, (row, share) in enumerate(zip(confusion, shares, strict=True))
        ]
        return {"rows": rows}

    def _class_shares(self, confusion: Sequence[Sequence[float]]) -> list[float | None]:
        """Return the IoU of each class; None for one that is neither labelled nor predicted."""
        matrix = torch.tensor(confusion, dtype=torch.float64)
        hits = matrix.diag()
        either = matrix.sum(0) + matrix.sum(1) - hits
        pairs = zip(hits.tolist(), either.tolist(), strict=True)
        return [hit / count if count else None for hit, count in pairs]

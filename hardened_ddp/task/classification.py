"""Classification: each sample has one label, the index of a class.

Owns the meaning of the model's output: logits that are compared with the labels, or a loss that the
model computes itself; and the loss as a sum over samples.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.errors import ModelError
from hardened_ddp.task.output import check_range, described_labels, logits_of, split_output
from hardened_ddp.task.task import Figures, Metric, Score, Task, name_of, shares_of, widened

ACCURACY = Metric("accuracy", form=".2%")
TOP5 = Metric("top5_accuracy", form=".2%")
FEW_CLASSES = 10
"""With at most so many, top-5 accuracy says little: it is measured from one more on."""
_NEED = "(num_samples, num_classes)"
_FIX = (
    "return one number from 0 for each sample: classes.index(name) of names, int(label.argmax()) "
    "of one-hot labels; or choose the task that fits: --task multilabel | regression | tokens "
    "| segmentation | own"
)


class Classification(Task):
    """Cross-entropy of logits (num_samples, num_classes) and labels (num_samples,) int64."""

    metrics: Sequence[Metric] = (ACCURACY, TOP5)  # of an instance: what its classes have
    counts_samples = True
    learns = ("num_classes",)

    def __init__(
        self, *, num_classes: int, class_names: Sequence[str] = (), label_smoothing: float = 0.0
    ) -> None:
        self.class_names = class_names
        self.label_smoothing = label_smoothing
        self._know(num_classes)

    def _know(self, num_classes: int) -> None:
        """Learn the number of classes, and what is measured with so many. 0: not known yet."""
        self.num_classes = num_classes
        top5 = (TOP5,) if num_classes > FEW_CLASSES else ()
        self.metrics = (ACCURACY, *top5)

    @property
    def sums(self) -> Mapping[str, torch.Tensor]:
        found = {"correct": torch.zeros((), dtype=torch.int64)}
        if TOP5 in self.metrics:
            found["in_top5"] = torch.zeros((), dtype=torch.int64)
        if self.in_detail:
            # The last column is for outputs beyond the classes: a model may have more of them.
            shape = (self.num_classes, self.num_classes + 1)
            found["confusion"] = torch.zeros(shape, dtype=torch.int64)
        return found

    def score(self, output: Any, batch: Batch) -> Score:
        """Compare the logits in output with the labels. Raises ModelError if there are none."""
        targets = batch.targets.long()  # of any integer type; int64 as it is
        logits, mean_loss = output, None
        if not isinstance(output, torch.Tensor):
            logits, mean_loss = logits_of(output, need=_NEED), split_output(output)[1]
        num_samples = targets.shape[0]
        if mean_loss is None:
            loss_sum = cross_entropy(
                widened(logits, softmax=True),
                targets,
                reduction="sum",
                label_smoothing=self.label_smoothing,
            )
        else:  # a model's own loss is a mean, by convention
            loss_sum = mean_loss.float() * num_samples
        predictions = logits.detach().argmax(dim=1)
        sums = {"correct": predictions.eq(targets).sum()}
        if TOP5 in self.metrics:
            # WHY no topk: to compare and count is cheaper than to sort.
            own = logits.detach().gather(1, targets.unsqueeze(1))
            num_above = (logits.detach() > own).sum(dim=1)
            sums["in_top5"] = ((num_above < 5) & own.squeeze(1).isfinite()).sum()
        if self.in_detail:
            width = self.num_classes + 1
            places = targets * width + predictions.clamp(max=self.num_classes)
            counts = torch.bincount(places, minlength=self.num_classes * width)
            sums["confusion"] = counts.view(self.num_classes, width)
        return Score(loss_sum, num_samples, sums)

    def check(self, output: Any, batch: Batch) -> None:
        """Raise ModelError if logits or labels do not fit the number of classes."""
        targets = batch.targets
        logits = logits_of(output, need=_NEED)
        shape = tuple(logits.shape)
        is_number = isinstance(targets, torch.Tensor) and not targets.is_floating_point()
        if not is_number or targets.dim() != 1:
            raise ModelError(
                "classification needs one whole number for each sample, that of its class, and the "
                f"labels of a batch are {described_labels(targets)}",
                fix=_FIX,
            )
        if len(shape) != 2 or shape[0] != targets.shape[0] or shape[1] < self.num_classes:
            raise ModelError(
                f"the model gives logits of shape {shape} for {targets.shape[0]} samples and "
                f"{self.num_classes} classes; need ({targets.shape[0]}, {self.num_classes})",
                fix="give the model's last layer one output for each class",
            )
        self._know(self.num_classes or shape[1])
        check_range(
            targets,
            shape[1],
            what="classes",
            fix="number the classes from 0, or give the model more outputs",
        )

    def take_over(self, learned: Mapping[str, Any]) -> None:
        self._know(learned.get("num_classes", self.num_classes))

    def figures(self, sums: Mapping[str, Any], count: float) -> Figures:
        """Return the accuracy: the share of samples whose largest logit is that of their label.

        And with many classes the share of those whose label is among the five largest logits.
        """
        found = {"accuracy": sums["correct"] / count}
        return found | ({TOP5.name: sums["in_top5"] / count} if "in_top5" in sums else {})

    def report(self, sums: Mapping[str, Any], count: float) -> dict[str, Any]:
        """Return the figures of each class, and the confusion matrix."""
        rows = [[int(number) for number in row] for row in sums["confusion"]]
        predicted = [sum(column) for column in zip(*rows, strict=True)]
        classes = [
            {
                "name": name_of(index, self.class_names),
                "samples": sum(row),
                "predicted": predicted[index],
                **shares_of(row[index], predicted=predicted[index], labelled=sum(row)),
            }
            for index, row in enumerate(rows)
        ]
        return {
            "classes": classes,
            "confusion": [row[:-1] for row in rows],
            "predicted_no_class": predicted[-1],
        }

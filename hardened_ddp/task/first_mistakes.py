"""The first test pictures that the model got wrong, found without a wait for the device.

Owns keeping them on the device while the evaluation runs. WHY: looking for wrong samples in each
batch (nonzero) would wait for the device in each, and a good model makes few mistakes.
Does not own: what is wrong, and how a mistake is shown (Task.is_wrong, Task.mistakes).
"""

import torch

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.task.task import Mistake, Score, Task

MAX_PICTURES = 16


class FirstMistakes:
    """Collects them: call add with each batch, then copy, wait for the device, then read."""

    def __init__(self, task: Task, *, most: int = MAX_PICTURES) -> None:
        self._task = task
        self._most = most
        self._columns: list[torch.Tensor] = []
        """1 for each sample that is wrong, inputs, labels, predictions: at most `most` rows."""

        self._shows = type(task).mistakes is not Task.mistakes

    def add(self, batch: Batch, score: Score) -> None:
        """Look at one batch. The host does not wait for the device."""
        inputs, targets, predictions = batch.inputs, batch.targets, score.predictions
        columns = [inputs, targets, predictions]
        if not self._shows or not all(isinstance(column, torch.Tensor) for column in columns):
            return
        if inputs.dim() != 4 or len(targets) != len(inputs) or len(predictions) != len(inputs):
            return  # not a picture for each sample
        wrong = self._task.is_wrong(score, batch).to(torch.uint8)
        new = self._first([wrong, *columns])
        if self._columns:
            if any(a.shape[1:] != b.shape[1:] for a, b in zip(self._columns, new, strict=True)):
                return  # pictures of another size
            pairs = zip(self._columns, new, strict=True)
            new = self._first([torch.cat(pair) for pair in pairs])
        self._columns = new

    def copy(self) -> None:
        """Start the copy to the host. It is there once the host has waited for the device."""
        self._columns = [column.to("cpu", non_blocking=True) for column in self._columns]

    def read(self) -> list[Mistake]:
        """Return the mistakes, in the order of the samples. After copy, and a wait."""
        if not self._columns:
            return []
        wrong, inputs, targets, predictions = self._columns
        batch = Batch(inputs, targets, torch.arange(len(inputs)))
        score = Score(torch.zeros(()), int(wrong.sum()), predictions=predictions)
        return self._task.mistakes(score, batch, most=self._most)

    def _first(self, columns: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the first rows that are wrong, and if these are too few, others behind them."""
        # WHY stable: it keeps the order of the samples
        order = columns[0].argsort(descending=True, stable=True)[: self._most]
        return [column.index_select(0, order) for column in columns]

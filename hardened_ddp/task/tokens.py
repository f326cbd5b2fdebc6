"""Tokens: each position of a sequence has a label, the index of a token or class, or -100.

For language models (causal or masked) and token classification. The loss is the mean over the
labels that are not -100, over the whole step: a rank with long sequences weighs more than one with
padding. Hugging Face's causal models and others compute their loss with labels shifted by one
position (the token after is predicted); the first batch shows which, and the labels are counted as
the model uses them.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.errors import ANY_FAILURE, ModelError
from hardened_ddp.ranks.seeding import keeping_random_state
from hardened_ddp.task.output import check_range, described_labels, logits_of, split_output
from hardened_ddp.task.own_metrics import OwnMetrics
from hardened_ddp.task.task import Figures, Metric, Score, Task, widened

IGNORED = -100  # marks a position without a label, in torch's cross-entropy and in Hugging Face

_NEED = "(num_samples, length, vocabulary)"
_MOST_DISTANCE = 1e-3  # between two computations of one loss, relative
_MOST_EXPONENT = 700.0  # exp of more overflows a float


class Tokens(Task):
    """Cross-entropy of logits (N, T, vocabulary) and labels (N, T) int64; -100: none."""

    metrics = (
        Metric("perplexity", form=".4g", is_higher_better=False),
        Metric("token_accuracy", form=".2%"),
    )

    learns = ("vocabulary", "shift", "uses_model_loss", "needs_labels")

    def __init__(self, *, ignore_index: int = IGNORED, shift: int | None = None) -> None:
        """shift: 1 if the label of a position belongs to the logits of the one before it.

        None: as the model's own loss says; none if it computes no loss.
        """
        self.ignore_index = ignore_index
        self.shift = shift
        self.vocabulary = 0  # the logits of one position; 0: not known yet

        # The model's own loss is not this cross-entropy: it is used as it is.
        self.uses_model_loss: bool | None = None
        self.needs_labels: bool | None = None  # the model gets the labels, too
        self._model: nn.Module | None = None
        self._parameter = ""  # of its forward, for the labels

    def attach(self, model: nn.Module, name: str = "", own: OwnMetrics | None = None) -> None:
        """Learn how model is called; it is called once more when the first batch is checked."""
        super().attach(model, name, own)
        self._model, self._parameter = model, self.labels_name

    @property
    def sums(self) -> Mapping[str, torch.Tensor]:
        # WHY measured: the labels in reported steps only, where the loss has those of all steps
        return {name: torch.zeros((), dtype=torch.int64) for name in ("correct", "measured")}

    def score(self, output: Any, batch: Batch) -> Score:
        """Compare the logits at each position that counts with its label."""
        targets = batch.targets.long()  # of any integer type; int64 as it is
        own_loss = split_output(output)[1]
        logits, labels = aligned(logits_of(output, need=_NEED), targets, self.shift or 0)
        counts = labels.ne(self.ignore_index)
        count = counts.sum()
        if self.uses_model_loss and own_loss is not None:
            # WHY where: the mean over no token is NaN.
            loss_sum = torch.where(count > 0, own_loss.float() * count, torch.zeros_like(own_loss))
        else:
            loss_sum = cross_entropy(
                widened(logits, softmax=True).flatten(0, 1),
                labels.flatten(),
                reduction="sum",
                ignore_index=self.ignore_index,
            )
        if not batch.is_measured:  # WHY: it saves a pass over num_samples * length * vocabulary
            return Score(loss_sum, count)
        are_correct = logits.detach().argmax(dim=-1).eq(labels) & counts
        return Score(loss_sum, count, {"correct": are_correct.sum(), "measured": count})

    def check(self, output: Any, batch: Batch) -> None:
        """Raise ModelError if logits and labels do not fit; find out how the model shifts them."""
        targets = batch.targets
        logits = logits_of(output, need=_NEED)
        is_labelled = isinstance(targets, torch.Tensor) and not targets.is_floating_point()
        if not is_labelled or logits.dim() != 3 or logits.shape[:2] != targets.shape:
            raise ModelError(
                f"the model gives logits of shape {tuple(logits.shape)} for labels of "
                f"{described_labels(targets)}; --task tokens needs {_NEED} for labels "
                "(num_samples, length)",
                fix="return logits for every position, and give each an integer label "
                f"({self.ignore_index}: none)",
            )
        check_range(
            targets[targets != self.ignore_index],
            logits.shape[-1],
            what="tokens",
            fix=f"mark what has no label with {self.ignore_index}, or name its number: "
            "--task_args '{ignore_index: NUMBER}'",
        )
        self.vocabulary = logits.shape[-1]
        own_loss = split_output(output)[1]
        if own_loss is not None and self.shift is None:
            loss, wanted = own_loss.detach(), targets.long()
            found = find_shift(logits, wanted, loss, ignore_index=self.ignore_index)
            if found is not None:
                shift, is_ours = found
                is_extra = is_ours and self._is_same_without_labels(batch)
                needs_labels = bool(self.labels_name) and not is_extra
                learned = {"shift": shift, "uses_model_loss": not is_ours}
                self.take_over({**learned, "needs_labels": needs_labels})

    def take_over(self, learned: Mapping[str, Any]) -> None:
        super().take_over(learned)
        if self.needs_labels is not None:
            self.labels_name = self._parameter if self.needs_labels else ""

    def figures(self, sums: Mapping[str, Any], count: float) -> Figures:
        """Return the perplexity, exp of the mean loss, and the share of tokens that are right.

        Without the share, if none of them was measured.
        """
        found = {"perplexity": math.exp(min(sums["loss"] / count, _MOST_EXPONENT))}
        if sums["measured"] or not sums["count"]:
            found["token_accuracy"] = sums["correct"] / max(1, sums["measured"])
        return found

    def _is_same_without_labels(self, batch: Batch) -> bool:
        """Return whether the model gives the same logits if it gets no labels.

        Then it gets none: its loss, the same as ours, would be computed for nothing, which costs
        time and memory with a large vocabulary.
        """
        model, given = self._model, self.labels_name
        if model is None or not given:
            return False
        was_training = model.training
        model.eval()  # WHY: dropout would make any two forwards differ
        try:
            with torch.no_grad(), keeping_random_state():
                wanted = split_output(self.forward(model, batch))[0]
                self.labels_name = ""
                found = split_output(self.forward(model, batch))[0]
        except ANY_FAILURE:  # WHY broad: the user's model, which then needs the labels
            return False
        finally:
            self.labels_name = given
            model.train(was_training)
        return wanted is not None and found is not None and torch.equal(wanted, found)


def aligned(
    logits: torch.Tensor, labels: torch.Tensor, shift: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits (N, T - shift, V) and labels (N, T - shift) that belong together."""
    return (logits[:, :-shift], labels[:, shift:]) if shift else (logits, labels)


def find_shift(
    logits: torch.Tensor, labels: torch.Tensor, own_loss: torch.Tensor, *, ignore_index: int
) -> tuple[int, bool] | None:
    """Find which labels a model's own loss is the mean over: return the shift, 0 or 1.

    And whether the loss is the cross-entropy of logits and labels so shifted. None: the batch does
    not show it, because no label in it counts. Waits for the device.
    """
    distances = {}
    for shift in (0, 1):
        outputs, wanted = aligned(logits.detach().float(), labels, shift)
        if bool((wanted != ignore_index).any()):
            expected = float(
                cross_entropy(outputs.flatten(0, 1), wanted.flatten(), ignore_index=ignore_index)
            )
            distances[shift] = abs(expected - float(own_loss)) / max(abs(expected), 1e-6)
    if not distances or not math.isfinite(float(own_loss)):
        return None
    nearest = min(distances, key=lambda shift: distances[shift])
    return nearest, distances[nearest] <= _MOST_DISTANCE

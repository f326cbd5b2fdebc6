"""Tokenised texts of the datasets library: rows with lists of token ids.

Owns which columns are used, and the batch: rows of several lengths are padded at their end, so that
no position of padding counts in the loss or is attended to.
What goes wrong here: no column of labels; a padding token that the model must know.
Does not own: opening the set (huggingface.py); sets that are read as a stream (hub_stream.py).
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from hardened_ddp.data.foreign_code import import_extra
from hardened_ddp.errors import DataError

IDS, MASK, LABELS = "input_ids", "attention_mask", "labels"
NO_LABEL = -100  # as in torch's cross-entropy
_USUAL = (IDS, MASK, "token_type_ids")

Sample = dict[str, torch.Tensor]


class HubTokens(Dataset[Sample]):
    """One part of a tokenised set. Any: rows of the datasets library."""

    uses_randomness = False
    in_memory = False

    def __init__(
        self, rows: Any, *, label: str, columns: Sequence[str], pad: int | None, num_classes: int
    ) -> None:
        """columns: of the inputs; none: the usual ones. pad: the token at the end of short rows."""
        self.label = label
        inputs = [name for name in columns or _USUAL if name in rows.features]
        self.rows = rows.with_format("torch", columns=list(dict.fromkeys([*inputs, label])))
        self.inputs = inputs
        pc = import_extra("pyarrow.compute", what="a tokenised set")
        lengths = pc.min_max(pc.list_value_length(rows.data.column(IDS))).as_py()
        differ = lengths["min"] != lengths["max"]
        self.makes_mask = differ and MASK not in inputs and MASK in (columns or _USUAL)
        feature = rows.features[label]
        values = getattr(feature, "feature", None)  # of a list
        if values is None:
            self.targets = torch.as_tensor(rows.with_format("torch")[label][:])
            if differ and pad is None:
                raise DataError(
                    f"texts of {lengths['min']} to {lengths['max']} tokens have one label each "
                    f"(column {label}): some models look for the padding, to find the last token",
                    fix="--dataset_args '{pad: NUMBER}': pad_token_id of the model's tokenizer",
                )
        self.pad = pad or 0
        if names := getattr(values or feature, "names", None):
            self.classes = list(names)
        elif num_classes:
            self.num_classes = num_classes

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        return self._sample_of(self.rows[int(index)])

    def __getitems__(self, indices: Sequence[int]) -> list[Sample]:
        return [self._sample_of(row) for row in self.rows.__getitems__([int(i) for i in indices])]

    def collate_fn(self, samples: Sequence[Sample]) -> Sample:
        """Pad the rows to the longest of them."""
        fills = {IDS: self.pad, LABELS: NO_LABEL}
        batch = {}
        for name, first in samples[0].items():
            parts = [sample[name] for sample in samples]
            batch[name] = (
                pad_sequence(parts, batch_first=True, padding_value=fills.get(name, 0))
                if first.dim()
                else torch.stack(parts)
            )
        return batch

    def _sample_of(self, row: Mapping[str, torch.Tensor]) -> Sample:
        sample = {name: row[name] for name in self.inputs}
        labels = row[self.label]
        if self.makes_mask:
            sample[MASK] = torch.ones_like(row[IDS])
        if self.label == IDS and MASK in sample:  # WHY: the set may have padding of its own
            labels = labels.masked_fill(sample[MASK] == 0, NO_LABEL)
        return {**sample, LABELS: labels}

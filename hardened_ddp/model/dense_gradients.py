"""Sparse gradients, which embeddings give if they are asked to: made dense.

WHY: the gradient is summed over the ranks in flat buffers, and checked there for NaN. It is the
same gradient, with zeros for the rows that no sample uses.
"""

import logging

from torch import nn

log = logging.getLogger(__name__)


def make_dense(model: nn.Module) -> None:
    """Have the embeddings of model give dense gradients; name those that gave sparse ones."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            module.sparse = False
            found.append(name)
    if found:
        log.info(
            "sparse gradients are made dense, to be summed over the ranks: %s", ", ".join(found)
        )

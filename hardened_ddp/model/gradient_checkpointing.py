"""Gradient checkpointing: activations are recomputed in backward, block by block, and not kept."""

import logging
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

log = logging.getLogger(__name__)


def checkpoint_blocks(model: nn.Module, name: str) -> None:
    """Recompute each block's activations in backward instead of keeping them."""
    enable = getattr(model, "gradient_checkpointing_enable", None)
    if callable(enable):  # models of transformers define their own blocks
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return
    blocks = [
        block
        for parent in model.modules()
        if isinstance(parent, nn.Sequential | nn.ModuleList)
        for block in parent
        if len(list(block.children())) > 0 and any(True for _ in block.parameters())
    ] or [child for child in model.children() if any(True for _ in child.parameters())]
    outermost = [
        b for b in blocks if not any(b in other.modules() for other in blocks if other is not b)
    ]
    for block in outermost:
        block.forward = _recomputing(block.forward)
    log.info(
        "gradient checkpointing: %d blocks of %s are recomputed in backward", len(outermost), name
    )


def _recomputing(forward: Callable[..., Any]) -> Callable[..., Any]:
    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return recomputed

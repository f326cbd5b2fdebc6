"""Tensors that a forward changes, but a checkpoint can't bring back.

Owns refusing buffers that a forward makes or resizes, and naming attributes that are not saved.
Does not own: finding what a forward changes (model/effects.py).
"""

import logging
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from hardened_ddp.errors import ModelError
from hardened_ddp.reporting.log import ON_EVERY_RANK

log = logging.getLogger(__name__)

Shapes = Mapping[str, tuple[int, ...]]


def saved_shapes(module: nn.Module) -> Shapes:
    """Return the shape of each tensor that a checkpoint saves."""
    state = module.state_dict().items()
    return {name: tuple(part.shape) for name, part in state if isinstance(part, torch.Tensor)}


def refuse_late_buffers(module: nn.Module, before: Shapes) -> None:
    """Raise ModelError if a forward made a saved buffer, or changed its shape. Rank-local.

    before: the shapes before it. WHY: it would not be made equal on the ranks, and the model as it
    is built again, to resume or evaluate, could not take what was saved.
    """
    after = saved_shapes(module).items()
    if found := [name for name, shape in after if before.get(name) != shape]:
        raise ModelError(
            f"a forward made or resized what a checkpoint saves: {', '.join(found[:8])}",
            fix="give buffers their final shape in the constructor, or run one batch through the "
            "model there, as the observers of quantization need; persistent=False for a cache",
        )


def warn_of_unsaved(own: Sequence[str]) -> None:
    """Name the tensors that forward makes and reads again. Rank-local: the same on all ranks."""
    if own:
        log.warning(
            "forward makes tensors, or changes their shape, that it reads in the next one: %s. No "
            "checkpoint saves them, and each rank has its own: after a resume the model begins "
            "without them. In their final shape from the constructor on, they are saved",
            ", ".join(own[:8]),
            extra=ON_EVERY_RANK,
        )

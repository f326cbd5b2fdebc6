"""The layers behind ddp_training.py, lowest first: errors, settings, ranks, reporting,
data/batches, streams, data, task, model, gradients, checkpoint, guard, step, preflight, training,
export, own_loop. A layer imports only from layers before it in that list. For a training loop of
your own: from hardened_ddp import protect (docs/OWN_LOOPS.md)."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hardened_ddp.own_loop.protect import Stopped, protect

__all__ = ["Stopped", "protect"]


def __getattr__(name: str) -> Any:  # Any: what the module has
    """Import protect when it is asked for. WHY: it imports torch, which --help does not need."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from hardened_ddp.own_loop import protect as module

    return getattr(module, name)

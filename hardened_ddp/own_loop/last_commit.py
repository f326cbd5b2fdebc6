"""The state of the last commit: what a survivor saves.

Owns the copy of all that is registered, which each commit makes. WHY of all: a rank learns in the
middle of a body that another one died, in SAM's second backward, or G's after D's update. By then
the body has written; where, can't be known: p.data.add_(), a numpy view and fused optimizers change
no version of a tensor.

On a GPU the host runs ahead: a commit waits until the device has done the body. Else a device that
is stuck in it would never come to the copy, and the one before would be gone.
"""

import logging
import threading
from functools import partial
from hashlib import sha256
from typing import Any

import torch

from hardened_ddp.model.effects import has_same_bits
from hardened_ddp.model.state_tree import Tree
from hardened_ddp.own_loop.registry import Registry, Tensors
from hardened_ddp.ranks.threads import call_within
from hardened_ddp.reporting.run_json import Json
from hardened_ddp.step.async_device import Event, copy_beside
from hardened_ddp.training.survivor_save import COPY_LIMIT_S, LOCK_LIMIT_S

log = logging.getLogger(__name__)


class LastCommit:
    """The state at the last commit. One lock keeps a thread that saves apart from the loop."""

    def __init__(self, registry: Registry, device: torch.device) -> None:
        self.registry = registry
        self.step = 0
        self.place: Json = {}
        self.tree: Tree = None
        self._device = device
        # Held while a commit is noted, and by a thread that saves it: then for good.
        self._lock = threading.Lock()
        self._is_whole = False
        self._live: Tensors = {}
        self._copies: Tensors = {}

    @torch.no_grad()
    def note(self, step: int, place: Json) -> None:
        """Note the state of now as that of a commit. Rank-local."""
        if self._device.type == "cuda":
            Event().wait()
        with self._lock:
            self._is_whole = False
            self.step, self.place = step, place
            self.tree, self._live = self.registry.pack()
            old, self._copies = self._copies, {}
            for name, tensor in self._live.items():
                copy = old.get(name)  # WHY in place: new memory takes the CPU longer than the copy
                if copy is None or _kind(copy) != _kind(tensor):
                    copy = torch.empty_like(tensor)
                self._copies[name] = copy.copy_(tensor)
            self._is_whole = True

    def written(self) -> str:
        """Name a tensor that is not as at the commit. Rank-local."""
        return min(self._differing(self._live), default="")

    def altered(self) -> str:
        """Name an object, number or tensor that is not as at the commit. Rank-local."""
        tree, tensors = self.registry.pack()
        names = {n for n in tree if repr(tree[n]) != repr(self.tree[n])}  # WHY text: NaN
        return min(names | self._differing(tensors), default="")

    def _differing(self, now: Tensors) -> set[str]:
        buffers = self.registry.buffers()  # WHY not: a forward of an evaluation may move them
        return {
            name
            for name, copy in self._copies.items()
            if name in now and id(now[name]) not in buffers and not has_same_bits(copy, now[name])
        }

    def spoiled(self, tensors: Tensors | None = None) -> str:
        """Name a trained parameter that is NaN. It waits for the device.

        tensors: the copies, in another place. WHY not what is infinite: a mask may be.
        """
        for name, value in (self._copies if tensors is None else tensors).items():
            # of one byte: torch can't tell
            is_known = self._live[name].requires_grad and value.element_size() > 1
            if is_known and value.isnan().any():
                return name
        return ""

    def digest(self) -> int:
        """Return a number of what must be alike on all ranks: step, place, numbers, names."""
        facts = f"{self.step} {self.place} {self.tree} {list(self._live)}"
        return int(sha256(facts.encode()).hexdigest()[:15], 16)

    def take(self, *, is_beside: bool) -> Tensors | None:
        """Return the tensors of the last commit; None: one is under way, which the log tells.

        is_beside: the main thread is stuck, and perhaps its device. The process ends after it, so
        the lock is not released.
        """
        has_lock = not is_beside or self._lock.acquire(timeout=LOCK_LIMIT_S)
        if not (has_lock and self._is_whole):
            log.warning("a commit is under way: nothing is saved, the last checkpoint stays")
            return None
        if is_beside:
            return call_within(partial(copy_beside, self._copies, self._device), COPY_LIMIT_S)
        return self.tensors()

    # What the saver asks (training/state.py: Contents)

    def tensors(self) -> Tensors:
        """Name the tensors of the last commit; nothing is copied."""
        return dict(self._copies)

    def meta(self, progress: Any) -> dict[str, Any]:  # Any: it is this commit; JSON
        """Give all that is not a tensor."""
        return {"step": self.step, "place": self.place, "tree": self.tree}


def _kind(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.layout

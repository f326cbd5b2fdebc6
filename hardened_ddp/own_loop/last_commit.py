"""The state of the last commit: what a survivor saves, or nothing.

Owns the rule. At each commit numbers, generators, arrays and buffers are kept by value; of other
tensors a stamp, pointer and version. A rank learns that another one died in an all-reduce, which
follows a forward. So before each forward it is noted what was written since the commit, and that is
copied at later commits (the undo copy): of a GAN the discriminator, of SAM the weights, of a plain
loop nothing. A survivor takes the copy, else the live tensor if it was not written, else it saves
nothing. WHY not stamps alone: p.data.add_() and a numpy view change none, and fused optimizers
change no version: those are seen by a hook, and in some bodies all is copied and compared.

On a GPU the host runs ahead: a commit waits until the device has done the body, and so does the
hook before an update, else a death would be seen when the weights are queued to be written.
"""

import logging
import threading
from functools import partial
from hashlib import sha256
from typing import Any

import torch
from torch.optim import Optimizer

from hardened_ddp.errors import OwnLoopError
from hardened_ddp.model.effects import has_same_bits
from hardened_ddp.model.reach import version_of
from hardened_ddp.model.state_tree import Tree
from hardened_ddp.own_loop.registry import Registry, Tensors
from hardened_ddp.ranks.threads import call_within
from hardened_ddp.reporting.run_json import Json
from hardened_ddp.step.async_device import Event, copy_beside
from hardened_ddp.training.survivor_save import COPY_LIMIT_S, LOCK_LIMIT_S

log = logging.getLogger(__name__)

# Bodies in which all is copied and compared: the first ones after each start, then one of some.
NUM_FIRST, INSPECTED_EVERY = 2, 64


class LastCommit:
    """The state at the last commit. One lock keeps a thread that saves apart from the loop."""

    def __init__(self, registry: Registry, device: torch.device) -> None:
        self.registry = registry
        self.step = 0
        self.place: Json = {}
        self.tree: Tree = None
        self.num_bodies = 0  # in this start
        self._device = device
        # Held while the state of a commit is noted, and by a thread that saves it: then for good.
        self._lock = threading.Lock()
        self._live: Tensors = {}
        self._copies: Tensors = {}
        self._stamps: dict[str, tuple[int, int]] = {}
        self._buffers: set[str] = set()
        self._needed: set[str] = set()  # bodies write them before a forward: they are copied
        # Written by an optimizer since the commit, which a fused one does without a version.
        self._updated: set[str] = set()
        self._is_whole = self.is_inspected = False

    @torch.no_grad()
    def note(self, step: int, place: Json) -> None:
        """Note the state of now as that of a commit. Rank-local."""
        self._await_device()
        with self._lock:
            self._is_whole = False
            self._needed |= self._unseen()
            self.step, self.place = step, place
            self.tree, self._live = self.registry.pack()
            # WHY always: BatchNorm changes its averages without changing their version
            buffers = self.registry.buffers()
            self._buffers = {name for name, t in self._live.items() if id(t) in buffers}
            count, self.num_bodies = self.num_bodies, self.num_bodies + 1
            self.is_inspected = count < NUM_FIRST or count % INSPECTED_EVERY == 0
            names = self._live.keys() if self.is_inspected else self._needed | self._buffers
            self._copies.clear()  # WHY first: its memory serves again
            self._copies = {name: t.clone() for name, t in self._live.items() if name in names}
            self._stamps = {name: _stamp(tensor) for name, tensor in self._live.items()}
            self._updated = set()
            self._is_whole = True

    def _await_device(self) -> None:
        if self._device.type == "cuda":
            Event().wait()

    def written(self) -> set[str]:
        """Name what was written since the commit, as far as that is seen. Rank-local."""
        changed = {n for n, tensor in self._live.items() if _stamp(tensor) != self._stamps[n]}
        return (changed | self._updated) - self._buffers

    def changed(self) -> set[str]:
        """Name what was written and, where a copy tells, is not as it was. Rank-local."""
        copies = self._copies  # WHY compared: DDP writes what it wraps, as it is
        return {
            n
            for n in self.written()
            if n not in copies or not has_same_bits(copies[n], self._live[n])
        }

    def altered(self) -> str:
        """Name an object that is not as at the commit, in a body that is inspected. Rank-local."""
        if not self.is_inspected:
            return ""
        tree, tensors = self.registry.pack()
        names = {n for n in tree if repr(tree[n]) != repr(self.tree[n])}  # WHY text: NaN
        copies = {n: t for n, t in self._copies.items() if n not in self._buffers}
        names |= {n for n in copies if n in tensors and not has_same_bits(copies[n], tensors[n])}
        return min(names, default="")

    def spoiled(self, tensors: Tensors | None = None) -> str:
        """Name a trained parameter that is NaN, of these tensors or now. It waits for the device.

        WHY not what is infinite: a mask may be.
        """
        for name, live in self._live.items():
            value = live if tensors is None else tensors[name]
            # of one byte: torch can't tell
            if live.requires_grad and value.element_size() > 1 and value.isnan().any():
                return name
        return ""

    def before_forward(self) -> None:
        """Learn what has to be copied at commits: the next all-reduce may lose a rank."""
        self._needed |= self.written() | self._unseen()

    def _unseen(self) -> set[str]:
        """Name what was written since the commit without a stamp, in a body that is inspected."""
        if not self.is_inspected:
            return set()
        names = self._copies.keys() - self.written() - self._buffers - self._needed
        return {n for n in names if not has_same_bits(self._copies[n], self._live[n])}

    def before_update(self, optimizer: Optimizer) -> None:
        """Note that an optimizer writes its tensors now. Raises OwnLoopError if it is unknown."""
        if not self._updated:  # forward may have written, too, before backward lost a rank
            self.before_forward()
        self._await_device()
        with self._lock:  # WHY: a thread that saves holds it until the process ends
            params = {id(p) for group in optimizer.param_groups for p in group["params"]}
            found = {n for n, tensor in self._live.items() if id(tensor) in params}
            own = [f"{n}." for n, each in self.registry.optimizers.items() if each is optimizer]
            self._updated |= found | {n for n in self._live if n.startswith(tuple(own))}
        if found and not own:
            raise OwnLoopError(
                f"{type(optimizer).__name__} updates a registered model and is not registered "
                "itself: give it to protect by a name, also if it is inside of another optimizer"
            )

    def digest(self) -> int:
        """Return a number of what must be alike on all ranks: step, place, numbers, names."""
        facts = f"{self.step} {self.place} {self.tree} {list(self._live)}"
        return int(sha256(facts.encode()).hexdigest()[:15], 16)

    def take(self, *, is_beside: bool) -> Tensors | None:
        """Return the tensors of the last commit; None: what it names in the log is lost.

        is_beside: the main thread may still write to them: they are copied, while it is stuck. The
        process ends after it, so the lock is not released.
        """
        has_lock = not is_beside or self._lock.acquire(timeout=LOCK_LIMIT_S)
        if not (has_lock and self._is_whole):
            log.warning("a commit is under way: nothing is saved, the last checkpoint stays")
            return None
        lost = self.written() - self._copies.keys()
        tensors = {n: self._copies.get(n, self._live[n]).detach() for n in self._live}
        if not lost and is_beside:
            tensors = call_within(partial(copy_beside, tensors, self._device), COPY_LIMIT_S)
            lost = self.written() - self._copies.keys()
        if not lost:
            return tensors
        log.warning(
            "%s was written since commit %d, and nobody has it as it was: nothing is saved, the "
            "last checkpoint stays",
            ", ".join(sorted(lost)[:8]),
            self.step,
        )
        return None

    # What the saver asks (training/state.py: Contents)

    def tensors(self) -> Tensors:
        """Name the tensors, right after a commit; nothing is copied."""
        return {name: tensor.detach() for name, tensor in self._live.items()}

    def meta(self, progress: Any) -> dict[str, Any]:  # Any: it is this commit; JSON
        """Give all that is not a tensor."""
        return {"step": self.step, "place": self.place, "tree": self.tree}


def _stamp(tensor: torch.Tensor) -> tuple[int, int]:
    return tensor.data_ptr(), version_of(tensor)

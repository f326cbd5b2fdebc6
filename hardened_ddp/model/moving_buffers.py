"""Buffers that change in forward, such as the statistics of a BatchNorm: copied, and made equal.

Also parameters that forward changes, such as those of a teacher that follows the model as a moving
average (BYOL, MoCo, a mean teacher), and tensors that only an attribute holds: "buffer" means all
of them here.
Owns the list of them, and the arithmetic on all of them at once: a ResNet-50 has 159, and a kernel
for each would take longer than the optimizer's update.
What goes wrong here: a buffer that begins to move later (an average that begins after a warm-up, a
target network that is copied now and then). Its version tells in that step; if it has none, its
bits tell before a retry (changed_bits).
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import torch
from torch import nn

from hardened_ddp.model.checksum import checksums
from hardened_ddp.model.reach import Place, Reach

_PIECE_BITS = 16
_NUM_PIECES = 64 // _PIECE_BITS
_PIECE_MASK = (1 << _PIECE_BITS) - 1


class MovingBuffers:
    """The moving tensors of one module, by name."""

    def __init__(
        self,
        module: nn.Module,
        names: Sequence[str],
        *,
        own: Collection[str] = (),
        outputs: Collection[str] = (),
    ) -> None:
        """names: those that move. own: those that each rank has for itself, and nobody saves.

        outputs: attributes that forward replaces, and never reads. All are the same on all ranks.
        """
        self._module = module
        reach = Reach(module)
        self._places = reach.places
        self._saved = set(module.state_dict())
        self._own, self._outputs = set(own), set(outputs)
        self.names = [name for name in names if name in self._places]
        """What is made equal on all ranks, in an order that is the same on all."""

        self.known = [*self.names, *own]
        """What is copied before a step, in the order of its copies; may differ between ranks."""

        self.may_move = frozenset(reach.may_move())
        """What a forward may change: not the trained weights, nor a large frozen base."""

        self._bits: dict[str, list[int]] = {}
        self.watched: list[torch.Tensor] = []
        """What is believed still, and has a version; the trained weights too."""

        self._watch()

    @property
    def tensors(self) -> list[torch.Tensor]:
        """Those of names, as they are now."""
        return [self._now(name) for name in self.names]

    def still(self) -> dict[str, torch.Tensor]:
        """Return what may move, and is not known to do so on all ranks. The same names on all."""
        known = {*self.names, *self._own, *self._outputs}
        return {n: self._now(n) for n in self._places if n in self.may_move and n not in known}

    def add(self, names: Iterable[str]) -> None:
        """Take up what began to move. Rank-local: all ranks call it with the same names."""
        new = [name for name in names if name in self._places and name not in self.names]
        self.names += new
        self._take_up(new)

    def take_up_written(self, tensors: Iterable[torch.Tensor]) -> list[str]:
        """Take up these tensors, which forward has written; name them. Rank-local.

        With the other buffers of its module: a BatchNorm counts its batches in one that has a
        version, and writes its statistics without.
        """
        written = {id(tensor) for tensor in tensors}
        places = self._places.items()
        owners = {id(p.owner) for _, p in places if p.owner and id(p.home) in written}
        found = [
            name
            for name, place in places
            if id(place.home) in written
            or (id(place.owner) in owners and not isinstance(place.home, nn.Parameter))
        ]
        new = [name for name in found if name not in self.known]
        self._take_up(new)
        return new

    @torch.no_grad()
    def note_bits(self) -> None:
        """Note the values of what is believed still, for changed_bits. Rank-local."""
        self._bits = _bits_of(self._unmoved())

    @torch.no_grad()
    def changed_bits(self) -> list[str]:
        """Take up what was believed still, and has other values than noted; name it. Rank-local."""
        unmoved = {n: t for n, t in self._unmoved().items() if n in self._bits}
        found = _bits_of(unmoved)
        changed = [name for name in found if found[name] != self._bits[name]]
        self._take_up(changed)
        return changed

    def are_saved(self, names: Iterable[str]) -> bool:
        """Return whether every checkpoint has these, also if they were not known to move."""
        return self._saved.issuperset(names)

    def to_save(self, copies: Sequence[torch.Tensor | None]) -> dict[str, torch.Tensor]:
        """Return what moves: of those that there are the copies, else the live tensors."""
        live = [self._place(name) for name in self.known[len(copies) :]]
        found = [*copies, *(None if place is None else place.get() for place in live)]
        named = zip(self.known, found, strict=True)
        return {n: t.detach() for n, t in named if t is not None and n not in self._own}

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take what to_save has returned, in this process or another. Rank-local."""
        for name, tensor in tensors.items():
            if (place := self._place(name)) is not None:
                _set(place, tensor.to(place.home.device))
        self.add(tensors)

    @torch.no_grad()
    def copies(self) -> list[torch.Tensor | None]:
        """Copy what moves, into one tensor for each dtype; return a view for each."""
        found = [None if (p := self._place(name)) is None else p.get() for name in self.known]
        copies: list[torch.Tensor | None] = [None] * len(found)
        there = [place for place, tensor in enumerate(found) if tensor is not None]
        tensors = [tensor for tensor in found if tensor is not None]
        for group in _by_dtype(tensors):
            flat = torch.cat([tensors[index].reshape(-1) for index in group])
            parts = torch.split(flat, [tensors[index].numel() for index in group])
            for index, part in zip(group, parts, strict=True):
                copies[there[index]] = part.view(tensors[index].shape)
        return copies

    @torch.no_grad()
    def put_back(self, copies: Sequence[torch.Tensor | None]) -> None:
        """Restore them from copies; those that were added since keep their values."""
        targets, sources = [], []
        for name, copy in zip(self.known, copies, strict=False):
            place = self._place(name)
            if place is None:
                continue
            if copy is not None and place.get() is place.home and place.home.shape == copy.shape:
                targets.append(place.home)
                sources.append(copy)
            else:
                _set(place, copy)
        copy_each(targets, sources)

    @torch.no_grad()
    def equalize(
        self, sum_: Callable[[torch.Tensor], torch.Tensor], *, world_size: int, is_main: bool
    ) -> None:
        """Average floats over the ranks, take integers of rank 0. Collective: all ranks.

        Of parameters too rank 0's are taken: as a rule all are equal, and a mean would round them.
        sum_: adds up a tensor over the ranks, in place. Rank 0 has the largest share of each step,
        so its counters are never behind.
        """
        self._take_parameters(sum_, is_main=is_main)  # collective
        tensors = [tensor for tensor in self.tensors if not isinstance(tensor, nn.Parameter)]
        floats = [_real(buffer) for buffer in tensors if not _is_whole(buffer)]
        doubles = [buffer for buffer in floats if buffer.dtype == torch.float64]
        singles = [buffer for buffer in floats if buffer.dtype != torch.float64]
        counters = [buffer for buffer in tensors if _is_whole(buffer)]
        # WHY one device: a model on a GPU may keep a count on the host
        device = next((t.device for t in tensors if not t.is_cpu), torch.device("cpu"))
        parts = [buffer.reshape(-1).float().to(device) for buffer in singles]
        if counters:
            counts = [counter.to(device) for counter in counters]
            parts.append(_to_pieces(counts, is_main=is_main))
        if parts:
            flat = sum_(torch.cat(parts))  # collective
            num_singles = sum(buffer.numel() for buffer in singles)
            if counters:
                copy_each(counters, _from_pieces(flat[num_singles:], counters))
            _spread(flat[:num_singles].mul_(1 / world_size), singles)
        if doubles:
            flat = torch.cat([buffer.reshape(-1).to(device) for buffer in doubles])
            _spread(sum_(flat).mul_(1 / world_size), doubles)  # collective

    def _place(self, name: str) -> Place | None:
        """Return the place of a tensor; None: forward has not made it yet."""
        if name not in self._places:
            self._places = Reach(self._module).places | self._places
        return self._places.get(name)

    def _now(self, name: str) -> torch.Tensor:
        place = self._places[name]
        now = place.get()
        return place.home if now is None else now

    def _take_up(self, names: Iterable[str]) -> None:
        self.known += [name for name in names if name not in self.known]
        self._watch()

    def _watch(self) -> None:
        passed = {*self.known, *self._outputs}
        self.watched = [
            place.home
            for name, place in self._places.items()
            if name not in passed and not place.home.is_inference() and not place.is_relocated
        ]

    def _unmoved(self) -> dict[str, torch.Tensor]:
        passed = {*self.known, *self._outputs}
        found = Reach(self._module).may_move().items()
        return {name: place.home for name, place in found if name not in passed}

    def _take_parameters(
        self, sum_: Callable[[torch.Tensor], torch.Tensor], *, is_main: bool
    ) -> None:
        """Take rank 0's parameters. Collective: all ranks."""
        found = [_real(t.detach()) for t in self.tensors if isinstance(t, nn.Parameter)]
        for places in _by_dtype(found):
            parts = [found[place] for place in places]
            flat = torch.cat([part.reshape(-1) for part in parts])
            wide = flat if flat.dtype == torch.float64 else flat.float()
            sums = sum_(wide if is_main else torch.zeros_like(wide))  # collective
            _spread(sums, parts)


def _set(place: Place, copy: torch.Tensor | None) -> None:
    """Let a place hold the values of copy, in the tensor that it holds now where that can be.

    WHY not always in it: an attribute that forward replaces may now be an input, or have a graph.
    """
    if copy is not None and place.get() is place.home and place.home.shape == copy.shape:
        place.home.copy_(copy)
    elif not isinstance(place.home, nn.Parameter):
        place.put(None if copy is None else copy.clone())


def _bits_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[int]]:
    dense = {n: t for n, t in tensors.items() if t.layout == torch.strided and not t.is_quantized}
    return dict(zip(dense, checksums(dense).tolist(), strict=True)) if dense else {}


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source to its target, with few kernels where torch can."""
    if not targets:
        return
    if hasattr(torch, "_foreach_copy_"):
        torch._foreach_copy_(list(targets), list(sources))
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


def _spread(flat: torch.Tensor, targets: Sequence[torch.Tensor]) -> None:
    """Copy the values of flat to targets, one after the other."""
    parts = torch.split(flat, [target.numel() for target in targets])
    copy_each(targets, [p.view(t.shape) for p, t in zip(parts, targets, strict=True)])


def _to_pieces(counters: Sequence[torch.Tensor], *, is_main: bool) -> torch.Tensor:
    """Write whole numbers as pieces of 16 bits, which float32 adds up exactly; 0 but on rank 0."""
    whole = torch.cat([counter.reshape(-1).long() for counter in counters])
    pieces = (whole[:, None] >> _shifts(whole.device)) & _PIECE_MASK
    return pieces.float().mul_(float(is_main)).view(-1)


def _from_pieces(pieces: torch.Tensor, counters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    whole = (pieces.view(-1, _NUM_PIECES).long() << _shifts(pieces.device)).sum(dim=1)
    parts = torch.split(whole, [counter.numel() for counter in counters])
    return [p.view(c.shape).to(c.dtype) for p, c in zip(parts, counters, strict=True)]


def _shifts(device: torch.device) -> torch.Tensor:
    # WHY arange: a tensor made of a list would be copied to the device, which waits for it
    return torch.arange(0, 64, _PIECE_BITS, device=device)


def _by_dtype(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    places: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault((tensor.dtype, tensor.device), []).append(place)
    return list(places.values())


def _is_whole(buffer: torch.Tensor) -> bool:
    return not buffer.is_floating_point() and not buffer.is_complex()


def _real(buffer: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer

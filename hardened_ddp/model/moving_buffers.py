"""Buffers that change in forward, such as the statistics of a BatchNorm: copied, and made equal.

Also parameters that forward changes, such as those of a teacher that follows the model as a moving
average (BYOL, MoCo), and tensors that only an attribute holds: "buffer" means all of them here.
Owns the list of them, and the arithmetic on all of them at once: a ResNet-50 has 159, and a kernel
for each would take longer than the optimizer's update.
What goes wrong here: a buffer that begins to move later (an average that begins after a warm-up, a
target network that is copied now and then). Its version tells in that step; if it has none, its
bits tell before a retry (changed_bits).
"""

import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property

import torch
from torch import nn

from hardened_ddp.errors import ModelError
from hardened_ddp.model.checksum import checksums
from hardened_ddp.model.reach import Place, Reach
from hardened_ddp.ranks.group import Group


class Copies:
    """Copies of tensors at one moment: one tensor for each dtype."""

    def __init__(
        self, tensors: Sequence[torch.Tensor | None], kinds: Sequence[Sequence[int]]
    ) -> None:
        """kinds: the places of the tensors that can be one."""
        self._num = len(tensors)
        self._parts = []
        for places in kinds:
            found = [tensor for place in places if (tensor := tensors[place]) is not None]
            self._parts.append((places, _flat(found), [tensor.shape for tensor in found]))

    def __len__(self) -> int:
        return self._num

    @cached_property
    def each(self) -> list[torch.Tensor | None]:
        """The copy of each. WHY only when it is wanted: a view takes the host a microsecond."""
        found: list[torch.Tensor | None] = [None] * self._num
        for places, flat, shapes in self._parts:
            for place, part in zip(places, _split(flat, shapes), strict=True):
                found[place] = part
        return found


NO_COPIES = Copies((), ())


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
        self._own, self._outputs = set(own), set(outputs)
        # What is made equal on all ranks, in an order that is the same on all.
        self.names = [name for name in names if name in self._places]

        # What is copied before a step, in the order of its copies; may differ between ranks.
        self.known: list[str] = []

        # What a forward may change: not the trained weights, nor a large frozen base.
        self.may_move = frozenset(reach.may_move())
        self._bits: dict[str, list[int]] = {}
        # What is believed still, and has a version: first what may move, then the trained weights.
        self.watched: list[torch.Tensor] = []
        self.num_free = 0  # of the first

        # WHY kept: to ask each tensor what it is takes the host a microsecond.
        self._homes: list[torch.Tensor | None] = []
        self._kinds: list[list[int]] = []  # of _homes, which are as a rule what is known
        self._forms: list[torch.dtype] = []  # of names
        self._groups: dict[tuple[torch.dtype, bool, bool], list[int]] = {}  # places in names
        self._take_up([*self.names, *own])

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

    def note_bits(self) -> None:
        """Note the values of what is believed still, for changed_bits. Rank-local."""
        self._bits = self._bits_now()

    def changed_bits(self) -> list[str]:
        """Take up what was believed still, and has other values than noted; name it. Rank-local."""
        now = self._bits_now().items()
        changed = [name for name, bits in now if self._bits.get(name, bits) != bits]
        self._take_up(changed)
        return changed

    def to_save(self, copies: Copies = NO_COPIES) -> dict[str, torch.Tensor]:
        """Return what moves: of those that there are the copies, else the live tensors."""
        live = self._live(self.known[len(copies) :])
        named = zip(self.known, [*copies.each, *live], strict=True)
        return {n: t.detach() for n, t in named if t is not None and n not in self._own}

    def load(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take what to_save has returned, in this process or another. Rank-local."""
        self._set(tensors.items())
        self.add(tensors)

    @torch.no_grad()
    def copies(self) -> Copies:
        live = self._live(self.known)
        are_home = len(live) == len(self._homes) and all(map(operator.is_, live, self._homes))
        return Copies(live, self._kinds if are_home else _by_dtype(live))

    def put_back(self, copies: Copies) -> None:
        """Restore them from copies; those that were added since keep their values."""
        self._set(zip(self.known, copies.each, strict=False))

    @torch.no_grad()
    def equalize(self, group: Group) -> None:
        """Average floats over the ranks, take integers of rank 0. Collective: all ranks.

        Of parameters too rank 0's are taken: as a rule all are equal, and a mean would round them.
        Rank 0 has the largest share of each step, so its counters are never behind. Raises
        ModelError on all ranks if one is quantized.
        """
        if group.world_size == 1:
            return
        live = list(map(self._now, self.names))
        forms = [now.dtype for now in live]
        if forms != self._forms:  # WHY kept: to put each in its place takes the host a microsecond
            self._forms, self._groups = forms, {}
            for place, (name, now) in enumerate(zip(self.names, live, strict=True)):
                if now.is_quantized:
                    raise ModelError(
                        f"the buffer {name} is quantized and changes in forward: it has no sum",
                        fix="keep its values and their scale in buffers of plain numbers",
                    )
                kind = now.dtype, now.is_cpu, isinstance(self._places[name].home, nn.Parameter)
                self._groups.setdefault(kind, []).append(place)
        kinds = {key: [live[place] for place in places] for key, places in self._groups.items()}
        # WHY one device: a model on a GPU may keep a count on the host
        device = next((kinds[key][0].device for key in kinds if not key[1]), torch.device("cpu"))
        sums = []
        for (dtype, _, is_weight), found in kinds.items():
            parts = list(map(torch.view_as_real, found)) if dtype.is_complex else found
            flat, is_number = _flat(parts), dtype.is_floating_point or dtype.is_complex
            # WHY bytes of integers: float32 adds them up exactly, and one sum is enough for all
            flat = flat if is_number else flat.view(torch.uint8)
            flat = flat.to(device, torch.float64 if flat.dtype == torch.float64 else torch.float32)
            is_taken = is_weight or not is_number
            sums.append((parts, flat.zero_() if is_taken and not group.is_main else flat, is_taken))
        for dtype in {flat.dtype: None for _, flat, _ in sums if flat.numel()}:
            group.sum_each_([flat for _, flat, _ in sums if flat.dtype == dtype])  # collective
        for parts, flat, is_taken in sums:
            dtype, home = parts[0].dtype, parts[0].device
            if not is_taken:
                flat.mul_(1 / group.world_size)
            elif not dtype.is_floating_point:
                flat = flat.to(home, torch.uint8).view(dtype)
            copy_each(parts, _split(flat, [part.shape for part in parts]))

    @torch.no_grad()
    def _set(self, copies: Iterable[tuple[str, torch.Tensor | None]]) -> None:
        """Let places hold the values of copies: where that can be, in the tensors they hold now.

        WHY not always in them: an attribute that forward replaces may be an input, or have a graph.
        """
        targets, sources = [], []
        for name, copy in copies:
            if (place := self._place(name)) is None:
                continue
            home = place.home
            if copy is not None and place.get() is home and home.shape == copy.shape:
                targets.append(home)
                sources.append(copy)
            elif not isinstance(home, nn.Parameter):
                place.put(None if copy is None else copy.to(home.device, copy=True))
        copy_each(targets, sources)

    def _place(self, name: str) -> Place | None:
        """Return the place of a tensor; None: forward has not made it yet."""
        if name not in self._places:
            self._places = Reach(self._module).places | self._places
        return self._places.get(name)

    def _live(self, names: Iterable[str]) -> list[torch.Tensor | None]:
        return [None if place is None else place.get() for place in map(self._place, names)]

    def _now(self, name: str) -> torch.Tensor:
        place = self._places[name]
        now = place.get()
        return place.home if now is None else now

    def _take_up(self, names: Iterable[str]) -> None:
        self.known += [name for name in names if name not in self.known]
        found = map(self._places.get, self.known)
        self._homes = [None if place is None else place.home for place in found]
        self._kinds = _by_dtype(self._homes)
        self._forms = []  # equalize finds them
        free, trained = list[torch.Tensor](), list[torch.Tensor]()
        for name, place in self._believed_still(self._places).items():
            if not place.home.is_inference() and not place.is_relocated:
                (free if name in self.may_move else trained).append(place.home)
        self.watched, self.num_free = [*free, *trained], len(free)

    def _believed_still(self, places: Mapping[str, Place]) -> dict[str, Place]:
        known = {*self.known, *self._outputs}
        return {name: place for name, place in places.items() if name not in known}

    def _bits_now(self) -> dict[str, list[int]]:
        places = self._believed_still(Reach(self._module).may_move()).items()
        strided = {n: place.home for n, place in places if place.home.layout == torch.strided}
        dense = {name: tensor for name, tensor in strided.items() if not tensor.is_quantized}
        return dict(zip(dense, checksums(dense).tolist(), strict=True)) if dense else {}


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source to its target, with few kernels."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def _split(flat: torch.Tensor, shapes: Sequence[torch.Size]) -> Sequence[torch.Tensor]:
    """Return views of flat, one after the other, of these shapes."""
    if not any(shapes):
        return flat.unbind()  # WHY: a view of each takes the host 6 us
    parts = torch.split(flat, [shape.numel() for shape in shapes])
    pairs = zip(parts, shapes, strict=True)
    return [part if len(shape) == 1 else part.view(shape) for part, shape in pairs]


def _flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the values of tensors of one device and dtype, one after the other."""
    # WHY not a view of each: it takes the host a microsecond
    if not any([tensor.dim() for tensor in tensors]):
        return torch.stack(list(tensors))
    return torch.cat([tensor if tensor.dim() == 1 else tensor.reshape(-1) for tensor in tensors])


def _by_dtype(tensors: Sequence[torch.Tensor | None]) -> list[list[int]]:
    """Group the tensors that can be one: their places."""
    groups: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for place, tensor in enumerate(tensors):
        if tensor is not None:
            groups.setdefault((tensor.dtype, tensor.device), []).append(place)
    return list(groups.values())

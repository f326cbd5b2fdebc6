"""Buffers that change in forward, such as the statistics of a BatchNorm: copied, and made equal.

Also parameters without a gradient that forward changes, such as those of a teacher that follows the
model as a moving average (BYOL, MoCo, a mean teacher): "buffer" means both here.
Owns the list of them, and the arithmetic on all of them at once: a ResNet-50 has 159, and a kernel
for each would take longer than the optimizer's update.
What goes wrong here: a buffer that begins to move later (an average that begins after a warm-up,
the observer of a quantised layer). It is found where replicas are compared (training/rollback.py).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

_MOST_FROZEN = 2.0
"""With more bytes of frozen parameters for each byte of trained ones, they don't move: a teacher is
as large as its student. WHY not more: a trial would copy a frozen base of billions."""

_PIECE_BITS = 16
_NUM_PIECES = 64 // _PIECE_BITS
_PIECE_MASK = (1 << _PIECE_BITS) - 1


class MovingBuffers:
    """The moving buffers of one module, in a fixed order that is the same on all ranks."""

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self._all: Mapping[str, torch.Tensor] = may_move(module)
        self.names = list(names)
        self.tensors = [self._all[name] for name in names]

    def still(self) -> dict[str, torch.Tensor]:
        """Return the buffers that are not known to move."""
        return {name: buffer for name, buffer in self._all.items() if name not in set(self.names)}

    def add(self, names: Iterable[str]) -> None:
        """Take up buffers that began to move. Rank-local: all ranks call it with the same names."""
        for name in names:
            self.names.append(name)
            self.tensors.append(self._all[name])

    @torch.no_grad()
    def copies(self) -> list[torch.Tensor]:
        """Copy them, into one tensor for each dtype; return a view for each."""
        found: list[torch.Tensor] = [torch.empty(0)] * len(self.tensors)
        for places in _by_dtype(self.tensors):
            flat = torch.cat([self.tensors[place].reshape(-1) for place in places])
            parts = torch.split(flat, [self.tensors[place].numel() for place in places])
            for place, part in zip(places, parts, strict=True):
                found[place] = part.view(self.tensors[place].shape)
        return found

    @torch.no_grad()
    def put_back(self, copies: Sequence[torch.Tensor]) -> None:
        """Restore them from copies; those that were added since keep their values."""
        copy_each(self.tensors[: len(copies)], copies)

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
        parts = [buffer.reshape(-1).float() for buffer in singles]
        if counters:
            parts.append(_to_pieces(counters, is_main=is_main))
        if parts:
            flat = sum_(torch.cat(parts))  # collective
            sums = list(torch.split(flat, [part.numel() for part in parts]))
            if counters:
                copy_each(counters, _from_pieces(sums.pop(), counters))
            if singles:
                # the pieces of counters were taken: so one kernel divides everything
                flat.mul_(1 / world_size)
                copy_each(singles, [s.view(b.shape) for s, b in zip(sums, singles, strict=True)])
        if doubles:
            flat = sum_(torch.cat([buffer.reshape(-1) for buffer in doubles]))  # collective
            means = torch.split(flat.mul_(1 / world_size), [buffer.numel() for buffer in doubles])
            copy_each(doubles, [m.view(b.shape) for m, b in zip(means, doubles, strict=True)])

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
            values = torch.split(sums, [part.numel() for part in parts])
            copy_each(parts, [v.view(p.shape) for v, p in zip(values, parts, strict=True)])


def may_move(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return what forward may change: buffers, and frozen parameters if they are few."""
    parameters = list(module.named_parameters())
    frozen = {name: parameter for name, parameter in parameters if not parameter.requires_grad}
    num_frozen = sum(parameter.nbytes for parameter in frozen.values())
    num_trained = sum(parameter.nbytes for _, parameter in parameters) - num_frozen
    is_small = num_frozen <= _MOST_FROZEN * num_trained
    return dict(module.named_buffers()) | (frozen if is_small else {})


def copies_of_trained(module: nn.Module) -> set[str]:
    """Return the names of the buffers that are equal to a trained parameter."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    return {
        name
        for name, buffer in module.named_buffers()
        if any(p.dtype == buffer.dtype and torch.equal(p, buffer) for p in trained)
    }


def copy_each(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy each source to its target, with few kernels where torch can."""
    if not targets:
        return
    if hasattr(torch, "_foreach_copy_"):
        torch._foreach_copy_(list(targets), list(sources))
        return
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


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

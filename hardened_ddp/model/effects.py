"""What a forward and backward change besides gradients: found by what is written, and undone.

Owns the trials of that. A value that stays as it was may have been written: an average of zeros
over zeros. So no single sign is enough: the version counter of a tensor misses .data and numpy, the
operators' schemas (Writes) miss what a custom operator does inside, the address misses all that is
written in place, the bits miss equal values.
Does not own: what moves only later (moving_buffers.py).
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hardened_ddp.data.batches.batch import Batch
from hardened_ddp.data.batches.nesting import dense_parts, tensors_of
from hardened_ddp.model.reach import Place, Reach, version_of

Span = tuple[int, int]
# torch's way to see all operators that run inside; where torch has none, nothing is seen.
DispatchMode: Any = getattr(
    getattr(torch.utils, "_python_dispatch", None), "TorchDispatchMode", contextlib.nullcontext
)


class Operators(DispatchMode):  # type: ignore[misc]  # Any: torch may not have it
    """Calls note with each operator that runs inside, its arguments, and those given by name."""

    supports_higher_order_operators = True

    def __init__(self, note: Callable[[Any, Sequence[Any], Mapping[str, Any]], None]) -> None:
        super().__init__()
        self._note = note

    def __torch_dispatch__(
        self,
        func: Any,  # Any: as torch declares it
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self._note(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


class Effects:
    """What happens to the tensors that a module reaches."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        reach = Reach(module)
        self._before = reach.places
        homes = {name: place.home for name, place in self._before.items()}
        self._marks = {name: (version_of(home), span_of(home)) for name, home in homes.items()}
        self._copies = {name: p.home.detach().clone() for name, p in reach.may_move().items()}
        self._holders = [(holder, holder.copy()) for holder in reach.holders()]
        self._written: set[str] = set()
        self._read: set[str] | None = None  # None: not known

    def run(self, work: Callable[[], object], inputs: "InputEffects", batch: Batch) -> None:
        """Run work, which trains on batch, under a mode that sees what operators write.

        Raises what work raises: some models can't run under such a mode, though all is well.
        """
        places = Reach(self._module).places
        homes = {name: span_of(place.home) for name, place in places.items()}
        attributes = {name: span for name, span in homes.items() if places[name].owner is None}
        tensors = enumerate(tensors_of((batch.inputs, batch.targets)))
        data = {f"batch {i}": span_of(tensor) for i, tensor in tensors}
        spans = homes | data
        written: set[str] = set()
        read: set[str] = set()

        def note(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
            declared = getattr(getattr(func, "_schema", None), "arguments", ())
            given = dict(zip([argument.name for argument in declared], args, strict=False))
            given |= kwargs
            for argument in declared:
                # WHY by name: batch norm writes its statistics, and its schema does not say so
                is_hidden = argument.name.startswith("running_") and given.get("training", True)
                alias, value = argument.alias_info, given.get(argument.name)
                if (alias is not None and alias.is_write) or is_hidden:
                    written.update(_hits(value, spans))
                elif attributes:
                    read.update(_hits(value, attributes))

        with Operators(note):
            work()
        self._written |= written & set(self._before)
        inputs.are_written |= not written.isdisjoint(data)
        self._read = read | (self._read or set())

    def moving(self) -> set[str]:
        """Name what was written, or replaced by another tensor of its form."""
        changed = {name for name, place in self._before.items() if self._is_changed(name, place)}
        return (changed | self._written) - self.outputs() - self.remade()

    def remade(self) -> set[str]:
        """Name attributes that are read, and that forward makes or gives another form."""
        return {name for name in self._made() if self._is_read(name)}

    def outputs(self) -> set[str]:
        """Name attributes that forward replaces, and never reads: they are no state."""
        known = self._before.items()
        replaced = {n for n, p in known if p.owner is None and p.get() is not p.home}
        return {name for name in replaced | self._made() if not self._is_read(name)}

    def undo(self) -> None:
        """Put all back, except trained weights and a large frozen base."""
        for holder, before in self._holders:
            if isinstance(holder, list):
                if any(isinstance(part, torch.Tensor) for part in (*holder, *before)):
                    holder[:] = before
                continue
            for key in [*before, *(key for key in holder if key not in before)]:
                old, new = before.get(key), holder.get(key)
                if old is not new and isinstance(old if new is None else new, torch.Tensor):
                    holder[key] = old
                    if key not in before:
                        del holder[key]
        with torch.no_grad():
            for name, copy in self._copies.items():
                home = self._before[name].home
                # a forward that changes the shape of what is saved is refused
                if home.shape == copy.shape and not has_same_bits(home, copy):
                    home.copy_(copy)

    def _is_changed(self, name: str, place: Place) -> bool:
        home, (version, span) = place.home, self._marks[name]
        if place.is_relocated:
            return False
        if place.get() is not home or version != version_of(home) or span != span_of(home):
            return True
        return name in self._copies and not has_same_bits(home, self._copies[name])

    def _is_read(self, name: str) -> bool:
        return self._read is None or name in self._read

    def _made(self) -> set[str]:
        """Name attributes with a tensor that were empty before, or held one of another form."""

        def form_of(place: Place | None) -> object:
            return place and (place.home.shape, place.home.dtype)

        now = Reach(self._module).places.items()
        attributes = {name: place for name, place in now if place.owner is None}
        return {n for n, p in attributes.items() if form_of(p) != form_of(self._before.get(n))}


class InputEffects:
    """What happens to a batch in a forward and backward."""

    def __init__(self, batch: Batch) -> None:
        self.batch, self.original = batch, batch.copied()
        self.are_written = False
        self._before = self._mark()

    def are_changed(self) -> bool:
        """Return whether a tensor in it was written, or its containers hold others."""
        if self.are_written or self._mark() != self._before:
            return True
        now, before = (
            [part for tensor in tensors_of((b.inputs, b.targets)) for part in dense_parts(tensor)]
            for b in (self.batch, self.original)
        )
        return not all(map(has_same_bits, now, before))  # written by numpy

    def _mark(self) -> list[tuple[int, int]]:
        return [(id(t), version_of(t)) for t in tensors_of((self.batch.inputs, self.batch.targets))]


@contextlib.contextmanager
def untouched(module: nn.Module) -> Iterator[Effects]:
    """Undo at the end what forwards of module have changed; note what they did."""
    effects = Effects(module)
    try:
        yield effects
    finally:
        effects.undo()


def span_of(tensor: torch.Tensor) -> Span:
    """Return the addresses of a tensor, from and to; (0, 0) if it has none, as sparse ones."""
    try:
        begin = tensor.data_ptr() if tensor.numel() else 0
        pairs = zip(tensor.shape, tensor.stride(), strict=True)
    except (RuntimeError, ValueError, NotImplementedError):
        return 0, 0
    size = 1 + sum((number - 1) * step for number, step in pairs)
    return (begin, begin + size * tensor.element_size()) if begin else (0, 0)


def has_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are equal, bit for bit: NaN equals NaN."""
    if one.shape != other.shape:
        return False
    if one.layout != torch.strided or one.is_quantized:
        return torch.equal(one, other)
    first, second = (t.detach().contiguous().view(-1).view(torch.uint8) for t in (one, other))
    return torch.equal(first, second)


def _hits(value: Any, spans: Mapping[str, Span]) -> set[str]:  # Any: an operator's argument
    """Name the spans that tensors in value overlap."""
    own = [span_of(part) for part in tensors_of(value)]
    return {n for n, (low, high) in spans.items() for b, e in own if b < high and low < e}

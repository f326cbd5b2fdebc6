"""Observes DataLoaders: which samples come in which pass, and how long the program waits for them.

A pass is one iteration over a loader. All of it is seen in the main process: the n-th list of
indices belongs to the n-th batch, with and without workers. Contents are hashed, so that equal
samples are known also where indices say nothing (parts per rank, iterable datasets).
"""

import sys
from collections.abc import Callable

from ddp_doctor.audit.injected.fingerprints import leaves, sample_hashes, text_hashes
from ddp_doctor.audit.injected.recorder import Foreign, Recorder, is_library, user_frames, user_line

MAX_PASSES, MAX_BATCHES, MAX_LEAVES, MAX_LINES = 4, 400, 4, 5
"""Of a loader, of a pass, of a batch, of a stack: more is counted, and not recorded."""

MAX_HASHED, ENOUGH_HASHED = 32, 256
"""Batches, and samples, of a pass whose contents are hashed although their indices are known."""

_ATTRIBUTE = "_hardened_ddp_audit"


class Loaders:
    """The DataLoaders of one process."""

    def __init__(
        self,
        recorder: Recorder,
        listener: Callable[[Foreign, Foreign, Foreign], None] | None = None,
    ) -> None:
        self._recorder, self._listener = recorder, listener
        self._made_at: dict[int, str] = {}
        self._known: dict[tuple[int, str], int] = {}
        self._passes: dict[int, int] = {}
        self.current: tuple[int, int] | None = None
        """Loader and pass of the newest batch."""

        self.states: list[Foreign] = []
        """Of torch's generators, when a sampled step's newest batch came, or its forward began."""

    def patch(self, module: Foreign) -> None:
        wrap = self._recorder.wrap
        wrap(module.DataLoader, "__init__", after=self._note_made)
        wrap(module.DataLoader, "__iter__", before=self._forget_batches, after=self._note_pass)
        if hasattr(module, "_BaseDataLoaderIter"):
            wrap(module._BaseDataLoaderIter, "_next_index", after=self._note_indices)
            self._patch_next(module._BaseDataLoaderIter)

    def _patch_next(self, base: Foreign) -> None:
        fetch, recorder = base.__next__, self._recorder
        note_end = recorder.guarded(self._note_end)
        note_batch = recorder.guarded(self._note_batch)

        def __next__(iterator: Foreign) -> Foreign:
            began = recorder.clock()
            try:
                batch = fetch(iterator)
            except StopIteration:
                note_end(iterator)
                raise
            came = recorder.clock()
            recorder.window.times["wait_s"] += came - began
            note_batch(iterator, batch)
            recorder.window.times["own_s"] += recorder.clock() - came
            return batch

        base.__next__ = __next__

    def _note_made(self, token: Foreign, result: Foreign, loader: Foreign) -> None:
        self._made_at[id(loader)] = user_line()

    def _forget_batches(self, loader: Foreign) -> None:
        iterator = getattr(loader, "_iterator", None)
        if iterator is not None:  # persistent workers: the same iterator again
            iterator.__dict__[_ATTRIBUTE] = {"indices": []}

    def _note_pass(self, token: Foreign, iterator: Foreign, loader: Foreign) -> None:
        self._recorder.is_rank = True
        frames = list(user_frames())
        line, dataset, sampler = frames[0][0], loader.dataset, loader.sampler
        made = self._made_at.get(id(loader), line)
        is_part = hasattr(dataset, "indices") and hasattr(dataset, "dataset")  # such as a Subset
        key = (id(dataset), made)
        number = self._known.setdefault(key, len(self._known))
        self._passes[number] = self._passes.get(number, -1) + 1
        notes = iterator.__dict__.setdefault(_ATTRIBUTE, {"indices": []})
        notes.update(of=(number, self._passes[number]), num_batches=0)
        batch_sampler = getattr(loader, "batch_sampler", None)
        own = batch_sampler if hasattr(batch_sampler, "epoch") else sampler
        inner = getattr(batch_sampler, "sampler", own)
        replicas = getattr(inner, "num_replicas", getattr(batch_sampler, "num_processes", None))
        sharded: Foreign = getattr(getattr(batch_sampler, "batch_sampler", None), "sampler", None)
        is_split_twice = bool(replicas) and hasattr(sharded, "num_replicas")  # by Accelerate, too
        if is_split_twice:
            replicas *= sharded.num_replicas
        self._recorder.emit(
            "pass",
            loader=number,
            number=self._passes[number],
            size=len(dataset) if hasattr(type(dataset), "__len__") else None,
            dataset=type(dataset).__name__,
            base="part" if is_part else "whole",
            sampler=type(inner).__name__,
            shuffles=_shuffles(inner),
            has_set_epoch=any(hasattr(s, "set_epoch") for s in (inner, sampler, dataset)),
            drop_last=bool(getattr(inner, "drop_last", False)),
            replicas=replicas,
            is_split_twice=is_split_twice,
            workers=loader.num_workers,
            chooser=place_of(type(inner), "__iter__") or place_of(type(batch_sampler), "__iter__"),
            reader=place_of(type(dataset), "__getitem__") or place_of(type(dataset), "__iter__"),
            by_user=frames[0][2] == "__iter__",
            line=line,
            lines=[place for place, _, _ in frames[:MAX_LINES]],
            made=made,
        )

    def _note_indices(self, token: Foreign, indices: Foreign, iterator: Foreign) -> None:
        notes = iterator.__dict__.setdefault(_ATTRIBUTE, {"indices": []})
        notes["indices"].append(indices)

    def _note_end(self, iterator: Foreign) -> None:
        notes = iterator.__dict__.get(_ATTRIBUTE, {})
        if "of" in notes:
            loader, number = notes["of"]
            self._recorder.emit("end", loader=loader, number=number, batches=notes["num_batches"])

    def _note_batch(self, iterator: Foreign, batch: Foreign) -> None:
        notes = iterator.__dict__.get(_ATTRIBUTE, {})
        if "of" not in notes:
            return
        indices: Foreign = notes["indices"].pop(0) if notes["indices"] else None
        indices = [indices] if isinstance(indices, int) else indices
        if self._listener is not None:
            self._listener(iterator, indices, batch)
            return
        self.current, self._recorder.progress = notes["of"], self._recorder.progress + 1
        notes["num_batches"] += 1
        loader, number = notes["of"]
        self._recorder.window.batches[loader] += 1
        self.states = generator_states() if self._recorder.window.is_sampled else []
        if number >= MAX_PASSES or notes["num_batches"] > MAX_BATCHES:
            return
        parts = leaves(batch, [])
        if isinstance(indices, list | tuple) and indices and indices[0] is not None:
            size, is_plain = len(indices), all(type(i) is int for i in indices)
        else:
            size = next((len(p) for p in parts if getattr(p, "ndim", 1) > 0), 1)
            is_plain = False
        is_few = (notes["num_batches"] - 1) * size < ENOUGH_HASHED
        is_hashed = not is_plain or (is_few and notes["num_batches"] <= MAX_HASHED)
        self._recorder.emit(
            "batch",
            loader=loader,
            number=number,
            size=size,
            indices=list(indices) if is_plain else None,
            hashes=_hashes(parts[:MAX_LEAVES], size) if is_hashed else [],
        )

    def forget(self) -> None:
        self._passes, self.current = {}, None


def _hashes(parts: list[Foreign], size: int) -> list[str]:
    found = []
    for part in parts:
        if hasattr(part, "ndim"):
            if part.ndim > 0 and len(part) == size and part.device.type == "cpu" and part.numel():
                found.append(sample_hashes(part, size))
        elif len(part) == size:
            found.append(text_hashes(part))
    return found


def place_of(owner: Foreign, name: str) -> str:
    """Give FILE:LINE of a function of the user's; empty if it is a library's, or is none."""
    code: Foreign = getattr(getattr(owner, name, None), "__code__", None)
    is_own = code is not None and not is_library(code.co_filename)
    return f"{code.co_filename}:{code.co_firstlineno}" if is_own else ""


def generator_states() -> list[Foreign]:
    """Give the states of torch's own generators: on the CPU, and on the current GPU."""
    torch = sys.modules["torch"]
    on_gpu = [torch.cuda.get_rng_state()] if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *on_gpu]


def _shuffles(sampler: Foreign) -> bool | None:
    """Whether a sampler gives another order each time; None: nobody can tell."""
    if hasattr(sampler, "shuffle"):
        return bool(sampler.shuffle)
    known = {"SequentialSampler": False, "RandomSampler": True}
    return known.get(type(sampler).__name__, True if hasattr(sampler, "epoch") else None)

"""Replicas that are no longer equal: found by a checksum, named by rank and tensor.

DDP keeps replicas equal by giving all of them the same gradients; it never compares them. A flipped
bit in the memory of one rank stays there, and the gradients that it computes with the wrong weights
go into the weights of all ranks. The comparison costs one pass over the tensors, one small
all-reduce and one wait for the device; checksums of all tensors are exchanged only if it fails.
When it is made and what is done about it: training/rollback.py.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from hardened_ddp.model.checksum import checksums, combine
from hardened_ddp.ranks.group import Group
from hardened_ddp.ranks.phase import Phase
from hardened_ddp.settings.wording import listed

_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Divergence:
    """Which ranks differ. The same on all ranks."""

    odd: list[int]  # the ranks that differ from the majority; all of them if there is no majority
    source: int | None  # the lowest rank with the state of the majority; None: there is no majority
    text: str


def compare_replicas(group: Group, tensors: Mapping[str, torch.Tensor]) -> Divergence | None:
    """Compare tensors over the ranks; None: they are equal, bit for bit. Collective: all ranks."""
    everyone = _gather_if_different(group, tensors)  # collective
    return judge(everyone) if everyone else None


def differing_on_many(group: Group, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """Name the tensors that differ between ranks in more than one rank's memory. Collective.

    If one of at least three ranks differs, and all others are equal, that is a case for
    compare_replicas: a tensor that is meant to change does so on more than one rank.
    """
    everyone = _gather_if_different(group, tensors)  # collective
    found = []
    for name in tensors if everyone else ():
        counts = Counter(own[name] for own in everyone)
        is_one_odd = len(everyone) >= 3 and sorted(counts.values()) == [1, len(everyone) - 1]
        if len(counts) > 1 and not is_one_odd:
            found.append(name)
    return found


def _gather_if_different(group: Group, tensors: Mapping[str, torch.Tensor]) -> list[dict[str, str]]:
    """Return each rank's checksums of its tensors; nothing if all ranks are equal. Collective."""
    if group.world_size == 1 or not tensors:
        return []
    pairs = checksums(tensors)
    # WHY an all-reduce: the fastest collective of a group. Each rank fills its own row.
    table = torch.zeros(group.world_size, 2, dtype=torch.int64, device=pairs.device)
    table[group.launch.rank] = combine(pairs)
    with group.tracker.within(Phase.ALL_REDUCE):  # WHY here: on a GPU tolist is what waits
        rows = group.sum_(table).tolist()  # collective
    if all(row == rows[0] for row in rows):
        return []
    mine = {name: str(pair) for name, pair in zip(tensors, pairs.tolist(), strict=True)}
    return group.gather_json(mine)  # collective


def judge(everyone: list[dict[str, str]]) -> Divergence:
    """Find the ranks in the minority. everyone: for each rank the checksums of its tensors."""
    whole = [tuple(sorted(mine.items())) for mine in everyone]
    [(most, count)] = Counter(whole).most_common(1)
    source = whole.index(most) if 2 * count > len(everyone) else None
    expected = everyone[source or 0]
    odd = [rank for rank, own in enumerate(whole) if source is None or own != most]
    texts = []
    for rank in odd:
        own = everyone[rank]
        names = [name for name in expected if own.get(name) != expected[name]]
        names += [name for name in own if name not in expected]
        if names:
            some = listed(names, _SHOWN)
            texts.append(f"rank {rank} differs from rank {source or 0} in {some}")
    return Divergence(odd, source, "; ".join(texts))

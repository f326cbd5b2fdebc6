"""A keyed permutation of any range of numbers, computed for those positions that are asked for.

Does not own: what the numbers mean, or which are asked for (sampler.py).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hardened_ddp.data.batches.hashing import Words, hash_word, hash_words
from hardened_ddp.ranks.seeding import mix

_ROUNDS = 6
# So few values are walked one by one: 5 us for each round trip, where the operations on an array,
# however short, take 35 us.
_FEW = 8


def permute(
    positions: Words, *, num_samples: int, keys: Sequence[int], lengths: Sequence[int] = ()
) -> Words:
    """Map each position to its sample: a bijection of range(num_samples), chosen by its key.

    lengths: how many of the positions have the first key, the second, and so on.

    A balanced Feistel network on the smallest even number of bits that holds num_samples is a
    bijection of a power of four (Luby, Rackoff, SIAM J. Comput. 17(2), 1988; with 6 rounds it is
    hard to distinguish from a random one: Patarin, CRYPTO 2004). Cycle walking makes it a bijection
    of range(num_samples): a value outside is mapped again until it is inside (Black, Rogaway,
    "Ciphers with Arbitrary Finite Domains", CT-RSA 2002). On average that takes fewer than 4
    rounds, because the power of four is less than 4 x num_samples.
    """
    half_bits = max(1, -(-(num_samples - 1).bit_length() // 2))
    round_keys = [
        np.array([mix(key, round_index) for key in keys], dtype=np.uint64)
        for round_index in range(_ROUNDS)
    ]
    if len(keys) > 1:  # else the one key is broadcast
        round_keys = [np.repeat(of_round, lengths) for of_round in round_keys]
    values = _feistel(positions, half_bits=half_bits, round_keys=round_keys)
    outside = np.flatnonzero(values >= num_samples)
    while outside.size > _FEW:
        walked = _feistel(values[outside], half_bits=half_bits, round_keys=_of(round_keys, outside))
        values[outside] = walked
        outside = outside[walked >= num_samples]
    for index in outside.tolist():
        value, of_one = int(values[index]), [int(k.item()) for k in _of(round_keys, [index])]
        while value >= num_samples:
            value = _feistel_of_one(value, half_bits=half_bits, round_keys=of_one)
        values[index] = value
    return values


def _of(round_keys: list[Words], indices: npt.NDArray[np.int64] | list[int]) -> list[Words]:
    """Return the keys of some positions; the one key of all of them as it is."""
    return [of_round if len(of_round) == 1 else of_round[indices] for of_round in round_keys]


def _feistel(values: Words, *, half_bits: int, round_keys: list[Words]) -> Words:
    shift = np.array(half_bits, dtype=np.uint64)  # arrays: see hashing.py
    mask = np.array((1 << half_bits) - 1, dtype=np.uint64)
    left, right = values >> shift, values & mask
    for round_key in round_keys:
        left, right = right, left ^ (hash_words(right, key=round_key) & mask)
    joined: Words = (left << shift) | right
    return joined


def _feistel_of_one(value: int, *, half_bits: int, round_keys: list[int]) -> int:
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for round_key in round_keys:
        left, right = right, left ^ (hash_word(right, key=round_key) & mask)
    return (left << half_bits) | right

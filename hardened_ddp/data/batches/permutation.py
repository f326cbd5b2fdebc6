"""A keyed permutation of any range of numbers, and the hash it is made of: both stateless.

Owns the array form of SplitMix64 (ranks/seeding.py has the form for single numbers). WHY a hash and
not a generator: number i is computed without the numbers before it, so a sample's numbers depend
neither on its batch nor on workers, ranks or restarts; and an update of a library can't change them
under a resumed run.
Does not own: what the numbers mean, or which are asked for (sampler.py).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hardened_ddp.ranks.seeding import mix

Words = npt.NDArray[np.uint64]

# The constants of SplitMix64: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number
# Generators", OOPSLA 2014, figure 17 (gamma is the golden ratio; the others are Stafford's mix 13).
# WHY arrays of no dimension: with one, an operation on a few hundred words takes 0.3 us; with
# np.uint64(30), built for the call, it takes 1.6 us (numpy 2.4).
_GAMMA, _FIRST, _SECOND, _30, _27, _31 = (
    np.array(value, dtype=np.uint64)
    for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 30, 27, 31)
)


def hash_words(words: Words, *, key: int | Words) -> Words:
    """Hash each word under key to 64 bits; different words always give different hashes.

    key: one for all words, or one for each of them.

    This is output number `word` of the SplitMix64 generator that starts from key. Each of its
    operations can be undone, which is why no two words collide.
    """
    hashed = words * _GAMMA  # WHY no overflow check: arithmetic is modulo 2**64 by design
    hashed += np.asarray(key, dtype=np.uint64)
    hashed ^= hashed >> _30
    hashed *= _FIRST
    hashed ^= hashed >> _27
    hashed *= _SECOND
    hashed ^= hashed >> _31
    return hashed


_ROUNDS = 6


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
    while outside.size:
        own_keys = [of_all if len(of_all) == 1 else of_all[outside] for of_all in round_keys]
        walked = _feistel(values[outside], half_bits=half_bits, round_keys=own_keys)
        values[outside] = walked
        outside = outside[walked >= num_samples]
    return values


def _feistel(values: Words, *, half_bits: int, round_keys: list[Words]) -> Words:
    shift = np.array(half_bits, dtype=np.uint64)  # WHY arrays: see above
    mask = np.array((1 << half_bits) - 1, dtype=np.uint64)
    left, right = values >> shift, values & mask
    for round_key in round_keys:
        left, right = right, left ^ (hash_words(right, key=round_key) & mask)
    joined: Words = (left << shift) | right
    return joined

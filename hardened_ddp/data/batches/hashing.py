"""A hash of integer arrays: stateless random numbers, computed from their index.

Owns the array form of SplitMix64 (ranks/seeding.py has the form for single numbers). WHY a hash and
not a generator: number i is computed without the numbers before it, so a sample's numbers depend
neither on its batch nor on workers, ranks or restarts; and an update of a library can't change them
under a resumed run.

Does not own: what the numbers are used for (sampler.py).
"""

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]

# The constants of SplitMix64: Steele, Lea, Flood, "Fast Splittable Pseudorandom Number
# Generators", OOPSLA 2014, figure 17 (gamma is the golden ratio; the others are Stafford's mix 13).
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = (1 << 64) - 1

# The same for arrays. WHY arrays of no dimension: with one, an operation on a few hundred words
# takes 0.3 us; with np.uint64(30), built for the call, it takes 1.6 us (numpy 2.4).
_GAMMA_WORD, _FIRST_WORD, _SECOND_WORD, _30, _27, _31 = (
    np.array(value, dtype=np.uint64) for value in (_GAMMA, _FIRST, _SECOND, 30, 27, 31)
)


def hash_words(words: Words, *, key: int | Words) -> Words:
    """Hash each word under key to 64 bits; different words always give different hashes.

    key: one for all words, or one for each of them.

    This is output number `word` of the SplitMix64 generator that starts from key. Each of its
    operations can be undone, which is why no two words collide.
    """
    hashed = words * _GAMMA_WORD  # WHY no overflow check: arithmetic is modulo 2**64 by design
    hashed += np.asarray(key, dtype=np.uint64)
    hashed ^= hashed >> _30
    hashed *= _FIRST_WORD
    hashed ^= hashed >> _27
    hashed *= _SECOND_WORD
    hashed ^= hashed >> _31
    return hashed


def hash_word(word: int, *, key: int) -> int:
    """Hash one word as hash_words does."""
    hashed = (word * _GAMMA + key) & _MASK
    hashed = ((hashed ^ (hashed >> 30)) * _FIRST) & _MASK
    hashed = ((hashed ^ (hashed >> 27)) * _SECOND) & _MASK
    return hashed ^ (hashed >> 31)

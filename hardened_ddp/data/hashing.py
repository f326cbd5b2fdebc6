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
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


def hash_words(words: Words, *, key: int) -> Words:
    """Hash each word under key to 64 bits; different words always give different hashes.

    This is output number `word` of the SplitMix64 generator that starts from key. Each of its
    operations can be undone, which is why no two words collide.
    """
    hashed = words * _GAMMA  # WHY no overflow check: arithmetic is modulo 2**64 by design
    hashed += np.uint64(key)
    hashed ^= hashed >> np.uint64(30)
    hashed *= _FIRST
    hashed ^= hashed >> np.uint64(27)
    hashed *= _SECOND
    hashed ^= hashed >> np.uint64(31)
    return hashed

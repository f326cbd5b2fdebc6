"""Seeds: every random number is a pure function of where it is used.

Model randomness (dropout) is a function of (seed, step, rank), sample randomness (augmentation) of
(seed, epoch, sample index). WHY: no random state has to be saved, a retried step draws the same
numbers, and neither workers nor restarts shift a sequence.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

_MASK = (1 << 64) - 1


def mix(*values: int) -> int:
    """Hash whole numbers to one in [0, 2**63).

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
    Generators, OOPSLA 2014), applied after each value is added.
    """
    state = 0x9E3779B97F4A7C15
    for value in values:
        state = (state + value + 0x9E3779B97F4A7C15) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return state >> 1


def seed_run(seed: int, *, deterministic: bool = False) -> None:
    """Seed all generators, so that every rank builds the same model. Rank-local."""
    random.seed(seed)
    np.random.seed(mix(seed) & 0xFFFFFFFF)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.benchmark = False


def seed_step(seed: int, *, step: int, rank: int, device_type: str) -> None:
    """Seed the generators of a forward, for dropout for example. Rank-local.

    WHY not torch.manual_seed: it queries every backend, which is too slow for each step.
    """
    value = mix(seed, step, rank)
    torch.default_generator.manual_seed(value)
    if device_type == "cuda":
        torch.cuda.manual_seed(value)


def seed_update(seed: int, *, step: int, device_type: str) -> None:
    """Seed all generators for an optimizer that draws numbers: alike on all ranks. Rank-local.

    WHY: forward draws other numbers on each rank, and weights must stay equal on all.
    """
    seed_all(mix(seed, step), device_type)


@contextmanager
def keeping_random_state() -> Iterator[None]:
    """Have torch's, numpy's and Python's generators after the work inside as before. Rank-local."""
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        np.random.set_state(states[1])
        random.setstate(states[2])


def seed_sample(seed: int, epoch: int, index: int) -> None:
    """Seed the generators of one sample's augmentation: torch, random, numpy. Rank-local."""
    seed_all(mix(seed, epoch, index))


def seed_all(value: int, device_type: str = "cpu") -> None:
    """Seed torch, random and numpy. Rank-local."""
    torch.default_generator.manual_seed(value)
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    if device_type == "cuda":
        torch.cuda.manual_seed(value)

"""The random numbers of the cost tables.

A stream has a name: its purpose (`RandomStream`), the user's seed, and the step and virtual stage that it depends on.
It never depends on the method, the jitter level or the number of microbatches: the same name gives the same numbers,
and the number of microbatch m does not change with M.
"""

import enum

import numpy as np

from rrfp.costs.table import Matrix

#: Decimals of an exponential. `exp` may differ in its last bit between processors; after rounding it does not.
_EXP_DECIMALS = 9


class RandomStream(enum.IntEnum):
    """The purpose of a stream of random numbers. The values are part of every digest: never reuse one."""

    PROFILE = 0
    JITTER = 1
    WIRE_FORWARD = 2
    WIRE_BACKWARD = 3
    SPIKE_FORWARD = 4
    SPIKE_BACKWARD = 5
    RANK = 6
    MULTIMODAL = 7


def generator(stream: RandomStream, seed: int, *key: int) -> np.random.Generator:
    """Open that stream; ``key`` is the step, then the virtual stage."""
    sequence = np.random.SeedSequence(entropy=seed, spawn_key=(int(stream), *key))
    return np.random.Generator(np.random.PCG64(sequence))


def exp(exponents: Matrix) -> Matrix:
    """The exponentials to 9 decimals, the same on every processor."""
    return np.asarray(np.round(np.exp(exponents), _EXP_DECIMALS), dtype=np.float64)

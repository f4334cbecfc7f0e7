"""Where every random number of the cost tables comes from.

A stream is named by what it decides (`Stream`), the user's seed, and the things it may depend on (step, virtual stage).
It never depends on the method, the jitter level or the number of microbatches: whoever asks for the same name gets the
same numbers, and microbatch m's number does not change when more microbatches follow it.
"""

from __future__ import annotations

import enum
import operator
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rrfp.errors import ConfigError

#: Rows are virtual stages (or the edges between them), columns microbatches.
Matrix: TypeAlias = npt.NDArray[np.float64]

#: Decimals kept of an exponential. `exp` may differ in its last bit between processors; rounded, the tables do not.
_EXP_DECIMALS = 9


class Stream(enum.IntEnum):
    """What a stream of random numbers decides. The values are part of every digest: never reuse one."""

    PROFILE = 0
    JITTER = 1
    WIRE_FORWARD = 2
    WIRE_BACKWARD = 3
    SPIKE_FORWARD = 4
    SPIKE_BACKWARD = 5
    RANK = 6


def generator(stream: Stream, seed: int, *key: int) -> np.random.Generator:
    """Open the stream of that name at its beginning.

    Args:
        stream: what the numbers decide.
        seed: the user's seed, >= 0.
        *key: what else they depend on, each >= 0 (the step, then the virtual stage).
    """
    sequence = np.random.SeedSequence(entropy=seed, spawn_key=(int(stream), *key))
    return np.random.Generator(np.random.PCG64(sequence))


def exp(exponents: Matrix) -> Matrix:
    """The exponentials of the given numbers, to 9 decimals, the same on every processor."""
    return np.asarray(np.round(np.exp(exponents), _EXP_DECIMALS), dtype=np.float64)


def whole(field: str, value: object, least: int) -> int:
    """Check a whole number that came from outside.

    Args:
        field: its name in the error.
        value: what was given; booleans and floats are refused.
        least: the smallest value allowed.

    Raises:
        ConfigError: `value` is no whole number or is below `least`.
    """
    try:
        number = None if isinstance(value, bool) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or number < least:
        raise ConfigError(f"{field} is {value!r}, must be a whole number >= {least}")
    return number

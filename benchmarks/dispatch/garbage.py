"""How long a full collection of Python's garbage collector stops all threads, before `gc.freeze` and after it."""

from __future__ import annotations

import gc
import time
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, slots=True)
class CollectionTimes:
    """Seconds of a full collection of what this process has imported, and of one after `gc.freeze`."""

    plain: float
    frozen: float


def time_collections(repeats: int) -> CollectionTimes:
    """Medians of so many collections."""

    def collected() -> float:
        started = time.perf_counter()
        gc.collect()
        return time.perf_counter() - started

    plain = median(collected() for _ in range(repeats))
    gc.freeze()
    frozen = median(collected() for _ in range(repeats))
    gc.unfreeze()
    return CollectionTimes(plain, frozen)

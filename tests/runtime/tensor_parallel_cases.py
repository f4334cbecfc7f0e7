"""What is run on which mesh, with sharded models: hints, schedules, limits, chunks and ways of sharding."""

from __future__ import annotations

import os
import random
from typing import Any

import rrfp


class RandomHint(rrfp.Hint):
    """Any ready task, and on every rank another one."""

    def __init__(self) -> None:
        self._draws = random.Random(int(os.environ["RANK"]))

    def choose(self, ready: rrfp.ReadySet, view: rrfp.View) -> rrfp.Task | None:
        return self._draws.choice(list(ready))


LOOPED: dict[str, Any] = {"chunks": 2}
V: dict[str, Any] = {"chunks": 2, "placement": "v"}

#: pp, dp, tp: what is run on it.
CASES: dict[tuple[int, int, int], list[dict[str, Any]]] = {
    (2, 1, 2): [
        {"hint": "bf", "evaluate": True},
        {"hint": "bfw", "split": True, "limit": "1f1b", "tokens": True},
        {"hint": "bfw", "split": True, "deterministic": True},
        {"hint": "slot-aware", "split": True, "limit": rrfp.Limit(bytes=12_000)},
        {"hint": RandomHint, "split": True, "limit": "1f1b", "depth": 3},
        {"strict": "1f1b"},
        {"hint": "bf", "coordination": "agreement"},
        {**LOOPED, "hint": RandomHint, "limit": "n", "evaluate": True},
        {**LOOPED, "strict": "interleaved-1f1b"},
        {**V, "hint": "bfw", "split": True, "limit": "n"},
        {**V, "hint": "slot-aware", "split": True, "tokens": True},
        {"model": "sharded loss", "hint": "bfw", "split": True, "evaluate": True},
        {"model": "bare", "hint": "bfw", "split": True, "evaluate": True},
        {"model": "sequence", "hint": "bfw", "split": True, "evaluate": True},
    ],
    (1, 2, 2): [
        {"hint": "bf", "tokens": True, "evaluate": True},
        {**LOOPED, "hint": RandomHint, "split": True},
        {"hint": "bf", "fully_shard": True},
    ],
    (2, 2, 1): [
        {"hint": "bf", "limit": "1f1b", "tokens": True, "evaluate": True},
        {"strict": "1f1b", "reduction": "sum"},
        {**LOOPED, "hint": RandomHint, "deterministic": True},
        {"hint": "bfw", "split": True, "fully_shard": True},
    ],
    (2, 2, 2): [
        {"hint": "bf", "tokens": True, "evaluate": True},
        {"hint": RandomHint, "limit": "1f1b", "reduction": "sum"},
        {**V, "hint": "bfw", "split": True, "deterministic": True, "tokens": True},
    ],
}

#: The same, as few as show each way to combine dims.
FEW: dict[tuple[int, int, int], list[dict[str, Any]]] = {
    (2, 1, 2): [{**V, "hint": RandomHint, "split": True, "limit": "n"}, {"hint": "bf", "coordination": "agreement"}],
    (1, 2, 2): [{"hint": "bf", "tokens": True, "evaluate": True}],
    (2, 2, 1): [{"hint": "bfw", "split": True, "fully_shard": True}],
}

#: For the device double. Why not fully_shard? Gloo scatters sums by memory of its own threads, which it then frees.
ON_DOUBLE: dict[tuple[int, int, int], list[dict[str, Any]]] = {
    **FEW,
    (2, 2, 1): [{**LOOPED, "hint": RandomHint, "limit": "n", "tokens": True, "evaluate": True}],
}

#: Of these one with groups and replicas.
ONE_ON_DOUBLE = {(1, 2, 2): ON_DOUBLE[1, 2, 2]}

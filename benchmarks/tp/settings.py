"""What the benchmark of coordination and its workers share."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from functools import lru_cache

import numpy as np

from benchmarks.shared.tables import Form, make_table
from rrfp.costs.table import CostTable
from rrfp.memory.admission import Limit
from rrfp.runtime.context import Coordination

#: Methods by name: how the ranks of a group agree on an order, and how far ahead.
METHODS: dict[str, tuple[Coordination, int]] = {
    "leader, depth 2": ("leader", 2),
    "leader, depth 1": ("leader", 1),
    "agreement": ("agreement", 1),
}

#: Tasks take this, give or take `JITTER`, in seconds; messages of each rank up to `MOST_DELAY_S` more than they take.
TASK_S = 0.010
JITTER = 0.3
MOST_DELAY_S = 0.004


@dataclass(frozen=True, slots=True)
class Settings:
    """One run.

    Attributes:
        tp: ranks in a group.
        stages: N.
        microbatches: M.
        rounds: measured steps of each method; one more warms up.
        profile: the workload whose tasks take the times of `make_table`; "": they take `TASK_S`.
        jitter: its level.
    """

    tp: int
    stages: int = 2
    microbatches: int = 16
    rounds: int = 6
    profile: str = ""
    jitter: str = "J0"

    def to_json(self) -> str:
        """For a worker's command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Read `to_json`'s text."""
        return cls(**json.loads(text))

    def limit(self) -> Limit:
        """Microbatches that a stage may hold."""
        return Limit(2 * self.stages)

    def costs(self, number: int) -> CostTable:
        """The tasks of round ``number``: the same on all ranks and for all methods."""
        if self.profile:
            return _profile_costs(self.profile, self.jitter, self.stages, self.microbatches, number)
        return _costs(self.stages, self.microbatches, number)

    def delay_s(self, number: int, rank: int, task: str) -> float:
        """By how much ``rank`` sends the output of ``task`` later in round ``number``."""
        return random.Random(f"{number}/{rank}/{task}").uniform(0, MOST_DELAY_S)


@lru_cache(maxsize=4)
def _costs(stages: int, microbatches: int, number: int) -> CostTable:
    draw = np.random.default_rng(number)

    def rows(count: int, middle: float) -> np.ndarray:
        return middle * draw.uniform(1 - JITTER, 1 + JITTER, (count, microbatches))

    nothing = np.zeros((stages - 1, microbatches))
    return CostTable(
        stages, 1, "looped", microbatches, rows(stages, TASK_S), rows(stages, TASK_S), None, nothing, nothing
    )


@lru_cache(maxsize=4)
def _profile_costs(profile: str, jitter: str, stages: int, microbatches: int, number: int) -> CostTable:
    return make_table(Form.WHOLE, profile, stages, microbatches, seed=1, step=number, jitter=jitter)

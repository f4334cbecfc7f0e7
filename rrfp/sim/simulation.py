"""`rrfp simulate` as a function: one method on one cost table, beside the lower bound."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rrfp.core.admission import Limit
from rrfp.core.progress import Peaks
from rrfp.costs.table import CostTable
from rrfp.errors import ConfigError
from rrfp.hints.registry import HintSpec, create_hint, create_strict
from rrfp.schedules.registry import make_schedule
from rrfp.sim.bound import lower_bound
from rrfp.sim.engine import EngineResult, graph_of, run

#: The limit of a simulated hint where none is given.
DEFAULT_LIMIT = "2n"

#: A run below its bound by no more than this, relatively, is at it: the two add the same numbers in another order, and
#: each addition may lose the last bit. The first is for all of a small table, the second for each number of a large
#: one.
_ROUNDING, _ROUNDING_EACH = 1e-12, 4 * 2.0**-53


@dataclass(frozen=True, slots=True)
class Simulation:
    """One method on one cost table.

    Attributes:
        costs: the table.
        result: what happened.
        limits: K of each stage, None for a strict schedule.
        lower_bound: no method that holds as much can be faster; in seconds.
    """

    costs: CostTable
    result: EngineResult
    limits: tuple[int, ...] | None
    lower_bound: float

    @property
    def makespan(self) -> float:
        """Seconds from the start to the end of the last task."""
        return self.result.makespan

    @property
    def ratio(self) -> float:
        """Makespan over lower bound; 1 when both are zero."""
        return self.makespan / self.lower_bound if self.lower_bound else 1.0

    @property
    def peaks(self) -> tuple[Peaks, ...]:
        """The most that each stage held."""
        return self.result.peaks

    def to_json(self) -> Mapping[str, Any]:
        """The stable interface of ``rrfp simulate --json``."""
        spans = self.result.spans
        return {
            "makespan": self.makespan,
            "lower_bound": self.lower_bound,
            "ratio": self.ratio,
            "busy": list(self.result.busy),
            "peak": [peak.held for peak in self.peaks],
            "received_peak": [peak.received for peak in self.peaks],
            "limit": None if self.limits is None else list(self.limits),
            "order": [[str(span.task) for span in stage] for stage in spans],
            "start": [[span.start for span in stage] for stage in spans],
        }


def simulate(
    costs: CostTable,
    *,
    hint: HintSpec | None = None,
    strict: str | None = None,
    limit: Limit | int | str | None = None,
) -> Simulation:
    """Simulate one training step with a hint, or with a schedule consumed strictly.

    Args:
        costs: what tasks and messages take.
        hint: a hint's name, class or instance.
        strict: a schedule's name; its stages wait for their next task.
        limit: with a hint, how many microbatches a stage may hold (default ``2n``); a strict schedule takes none, and
            its bound uses the memory that the schedule itself needs.

    Raises:
        ConfigError: unless exactly one of ``hint`` and ``strict`` is given, for an unknown name, for a limit on bytes,
            or for times whose sum is no float.
        DeadlockError: if the run deadlocks.
    """
    if (hint is None) == (strict is None):
        raise ConfigError("exactly one of hint and strict is needed")
    if not math.isfinite(sum(_times(costs))):
        raise ConfigError("the sum of all times is too large for a float")
    stages = range(costs.stages)
    if strict is not None:
        if limit is not None:
            raise ConfigError("limit goes with a hint; a strict schedule holds what its order holds")
        hints = [create_strict(strict) for _ in stages]
        schedule = make_schedule(strict, graph_of(costs), costs.microbatches)
        # The bound counts microbatches, as a limit does; peaks are in chunk tasks.
        needed = [-(-schedule.peak_held(stage, graph_of(costs)) // costs.chunks) for stage in stages]
        result = run(costs, hints, [Limit()] * costs.stages)
        return _with_bound(costs, result, None, needed)
    resolved = [Limit.resolve(DEFAULT_LIMIT if limit is None else limit, stage, costs.stages) for stage in stages]
    if any(one.num_bytes is not None for one in resolved):
        raise ConfigError("limit: num_bytes must be None, a cost table has no sizes")
    assert hint is not None
    result = run(costs, [create_hint(hint) for _ in stages], resolved)
    counts = tuple(one.microbatches if one.microbatches is not None else costs.microbatches for one in resolved)
    return _with_bound(costs, result, counts, counts)


def _times(costs: CostTable) -> list[float]:
    """Everything in the table. No step takes longer than their sum."""
    matrices = (costs.forward, costs.backward, costs.weight, costs.latency_forward, costs.latency_backward)
    return [time for matrix in matrices if matrix is not None for time in matrix.ravel().tolist()]


def _with_bound(
    costs: CostTable, result: EngineResult, limits: tuple[int, ...] | None, needed: Sequence[int]
) -> Simulation:
    bound = lower_bound(costs, needed)
    slack = max(_ROUNDING, _ROUNDING_EACH * len(_times(costs)))
    if result.makespan < bound <= result.makespan * (1 + slack):
        bound = result.makespan
    assert bound <= result.makespan, f"a run of {result.makespan} s is below its lower bound of {bound} s"
    return Simulation(costs, result, limits, bound)

"""`rrfp simulate --tp` as a function: one method on one cost table for groups of T ranks, beside the lower bound.

The bound is that of a single rank with the slowest rank's messages: no coordination can start a task before its inputs
are on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, get_args

from rrfp.core.admission import Limit
from rrfp.core.usage import Peaks
from rrfp.costs.rank_latency import SHUFFLED, rank_latencies
from rrfp.costs.table import CostTable
from rrfp.errors import ConfigError
from rrfp.hints.registry import HintSpec, create_hint, create_strict
from rrfp.schedules.registry import ScheduleSpec
from rrfp.sim.bound import lower_bound
from rrfp.sim.cluster.result import TensorParallelResult
from rrfp.sim.cluster.tensor_parallel import Agreement, Coordination, Independent, Leader, run_tensor_parallel
from rrfp.sim.engine import EngineResult
from rrfp.sim.simulation import DEFAULT_LIMIT, Simulation

#: The ways in which a group agrees on an order, by name, each with its default times.
CoordinationName = Literal["leader", "agreement"]
COORDINATIONS: tuple[str, ...] = get_args(CoordinationName)
_DEFAULTS: Mapping[str, Callable[[], Coordination]] = {"leader": Leader, "agreement": Agreement}


@dataclass(frozen=True, slots=True)
class TensorParallelSimulation:
    """One method on one cost table, for groups of T ranks.

    Attributes:
        simulation: the groups as single ranks: what tables, timelines and traces of a step show. Its costs have the
            slowest rank's latencies, and its peaks are the largest of any rank of the stage.
        result: what happened, with what coordination cost.
        coordination: how the ranks of a group came to one order.
    """

    simulation: Simulation
    result: TensorParallelResult
    coordination: Coordination

    def to_json(self) -> Mapping[str, Any]:
        """What ``rrfp simulate --json`` prints, and ``tp``."""
        result = self.result
        fields = {
            "ranks": result.ranks,
            "coordination": type(self.coordination).__name__.lower(),
            "coordination_seconds": list(result.coordination),
            "blocked_seconds": list(result.blocked),
            "coordination_share": result.coordination_share,
            "rounds_per_task": result.rounds_per_task,
            "failed_rounds_per_task": result.failed_rounds_per_task,
            "disputed_rounds_per_task": result.disputed_rounds_per_task,
            "messages_per_task": result.messages_per_task,
        }
        return {**self.simulation.to_json(), "tp": fields}


def simulate_tensor_parallel(
    costs: CostTable,
    tp: int,
    *,
    coordination: Coordination | CoordinationName | None = None,
    hint: HintSpec | None = None,
    strict: ScheduleSpec | None = None,
    limit: Limit | int | str | None = None,
    latency: str = SHUFFLED,
    seed: int = 0,
    sizes: Sequence[float] | None = None,
) -> TensorParallelSimulation:
    """Simulate one training step of N stages of ``tp`` ranks, with a hint or with a schedule consumed strictly.

    Args:
        costs: what tasks take, and what the messages of rank 0 take.
        tp: T >= 1.
        coordination: with a hint, ``"leader"`` (the default) or ``"agreement"`` with their default times, or either
            with its own. A strict schedule takes none: it is the same on every rank, so there is nothing to agree on.
        hint: a hint's name, class or instance.
        strict: a schedule's name, or a schedule file's text; its stages wait for their next task.
        limit: with a hint, how many microbatches a stage may hold (default ``2n``); a strict schedule takes none.
        latency: how the messages of ranks 1..T-1 draw their times; see `rrfp.costs.rank_latency.rank_latencies`.
        seed: of those draws.
        sizes: how large each microbatch is, for hints that ask; None: untold.

    Raises:
        ConfigError: unless exactly one of ``hint`` and ``strict`` is given, for an unknown name, for a limit or a
            coordination beside ``strict``, for a limit on bytes.
        DeadlockError: if the run deadlocks, as agreement does with a hint that is not a pure function of the ready set.
    """
    if (hint is None) == (strict is None):
        raise ConfigError("exactly one of hint and strict is needed")
    latencies = rank_latencies(costs, latency, tp, seed=seed)
    if hint is None:
        if limit is not None or coordination is not None:
            what = "limit" if limit is not None else "coordination"
            raise ConfigError(f"{what} goes with a hint; a strict schedule is one order on every rank")
        assert strict is not None
        way: Coordination = Independent()
        make, limits = partial(create_strict, strict), [Limit()] * costs.stages
    else:
        way = _resolve(coordination)
        spec = DEFAULT_LIMIT if limit is None else limit
        make, limits = partial(create_hint, hint), [Limit.resolve(spec, s, costs.stages) for s in range(costs.stages)]
    if any(stage_limit.bytes is not None for stage_limit in limits):
        raise ConfigError("limit: bytes must be None, a cost table has no sizes")
    result = run_tensor_parallel(costs, latencies, make, limits, way, sizes=sizes)
    counts = None if hint is None else tuple(stage_limit.microbatches or costs.microbatches for stage_limit in limits)
    return TensorParallelSimulation(_as_single_ranks(latencies.slowest(costs), result, counts), result, way)


def _resolve(coordination: Coordination | str | None) -> Coordination:
    if coordination is None:
        return Leader()
    if not isinstance(coordination, str):
        return coordination
    if coordination not in COORDINATIONS:
        raise ConfigError(f"coordination is {coordination!r}, must be one of: {', '.join(COORDINATIONS)}")
    return _DEFAULTS[coordination]()


def _as_single_ranks(slowest: CostTable, result: TensorParallelResult, limits: tuple[int, ...] | None) -> Simulation:
    """A group as one rank that held the most that any of its ranks held."""
    peaks = tuple(
        Peaks(max(p.held for p in ranks), max(p.num_bytes for p in ranks), max(p.received for p in ranks))
        for ranks in result.peaks
    )
    # A strict schedule's bound uses what it held itself; under the paper's rule D may pass the limit by C.
    held = [-(-peak.held // slowest.chunks) for peak in peaks]
    needed = held if limits is None else list(map(max, zip(limits, held, strict=True)))
    bound = lower_bound(slowest, needed)
    if math.isclose(bound, result.makespan, rel_tol=1e-9):  # the same numbers, added in another order
        bound = min(bound, result.makespan)
    assert bound <= result.makespan, f"a run of {result.makespan} s is below its lower bound of {bound} s"
    return Simulation(
        slowest,
        EngineResult(
            makespan=result.makespan,
            spans=result.spans,
            waits=result.waits,
            messages=result.messages,
            peaks=peaks,
        ),
        limits,
        bound,
    )

"""`rrfp simulate --tp` as a function: one method on one cost table for groups of T ranks, beside the lower bound.

The bound is that of a single rank with the slowest rank's messages: no coordination can start a task before its inputs
are on all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rrfp.core.admission import Limit
from rrfp.costs.rank_latency import SHUFFLED, rank_latencies
from rrfp.costs.table import CostTable
from rrfp.errors import ConfigError
from rrfp.hints.registry import HintSpec, create_hint, create_strict
from rrfp.schedules.registry import ScheduleSpec
from rrfp.sim.cluster.coordination import Coordination, CoordinationName, Independent, resolve_coordination
from rrfp.sim.cluster.result import TensorParallelResult
from rrfp.sim.cluster.tensor_parallel import run_tensor_parallel
from rrfp.sim.simulation import Simulation, beside_bound, resolve_limits


@dataclass(frozen=True, slots=True)
class TensorParallelSimulation:
    """One method on one cost table, for groups of T ranks.

    Attributes:
        simulation: the groups as single ranks: what tables, timelines and traces of a step show. Its costs have the
            slowest rank's latencies.
        result: the result of the simulation, with what coordination cost.
        coordination: how the ranks of a group agreed on the same order.
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
            coordination beside ``strict``, for a limit on bytes, for the costs of a graph.
        DeadlockError: if the run deadlocks, as agreement does with a hint that is not a pure function of the ready set.
    """
    if (hint is None) == (strict is None):
        raise ConfigError("exactly one of hint and strict is needed")
    if costs.graph is not None:
        raise ConfigError("tp must be None on a graph: groups of ranks are simulated on chains only")
    latencies = rank_latencies(costs, latency, tp, seed=seed)
    if hint is None:
        if limit is not None or coordination is not None:
            what = "limit" if limit is not None else "coordination"
            raise ConfigError(f"{what} goes with a hint; a strict schedule is the same order on every rank")
        assert strict is not None
        way: Coordination = Independent()
        make, limits, counts = partial(create_strict, strict), [Limit()] * costs.stages, None
    else:
        way = resolve_coordination(coordination)
        make, limits = partial(create_hint, hint), resolve_limits(costs, limit)
        if any(stage_limit.bytes is not None for stage_limit in limits):
            raise ConfigError("limit: bytes must be None, simulated groups count microbatches")
        counts = tuple(stage_limit.microbatches or costs.microbatches for stage_limit in limits)
    result = run_tensor_parallel(costs, latencies, make, limits, way, sizes=sizes)
    # A strict schedule's bound uses what it held itself; under the paper's rule D may pass the limit by C.
    held = [-(-peak.held // costs.chunks) for peak in result.peaks]
    needed = held if counts is None else list(map(max, zip(counts, held, strict=True)))
    simulation = beside_bound(latencies.slowest(costs), result, counts, needed)
    return TensorParallelSimulation(simulation, result, way)

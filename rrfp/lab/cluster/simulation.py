"""`rrfp simulate --tp` as a function: one method on one cost table for groups of T ranks, beside the lower bound.

The bound is that of a single rank with the slowest rank's messages: no coordination can start a task before its inputs
are on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from rrfp.core.hint import Hint
from rrfp.core.ready_set import ForcedOrder, MicrobatchOrder, forced_by
from rrfp.costs.table import CostTable
from rrfp.engine.engine import graph_of
from rrfp.errors import ConfigError
from rrfp.hints.registry import HintSpec, check_order, create_hint, create_strict
from rrfp.lab.cluster.coordination import Coordination, CoordinationName, Independent, resolve_coordination
from rrfp.lab.cluster.group_run import GroupRun
from rrfp.lab.cluster.result import TensorParallelResult
from rrfp.lab.generators.rank_latency import SHUFFLED, Cube, RankLatencies, rank_latencies
from rrfp.lab.simulation import Simulation, beside_bound, resolve_limits, shown_correlation
from rrfp.memory.admission import Limit
from rrfp.model.tasks import Kind
from rrfp.schedules.registry import ScheduleSpec


def run_tensor_parallel(
    costs: CostTable,
    latencies: RankLatencies,
    hint: Callable[[], Hint],
    limits: Sequence[Limit],
    coordination: Coordination,
    *,
    delays: Mapping[Kind, Cube] | None = None,
    sizes: Sequence[float] | None = None,
    size_correlation: float | None = None,
    in_order: Collection[ForcedOrder] = (),
) -> TensorParallelResult:
    """Simulate one training step.

    Args:
        costs: what tasks take; its latencies are not used.
        latencies: what the messages of each rank take; says how many ranks a group has.
        hint: makes a fresh hint, one for each core that decides.
        limits: one a stage; all its ranks have it.
        coordination: how the ranks of a group agree on an order.
        delays: seconds by which each rank lengthens its part of a task, V x M x T by kind; the task takes what its
            slowest rank takes. None: nothing.
        sizes: how large each microbatch is, for hints that ask; None: unknown.
        size_correlation: as a step before would have shown it, see `rrfp.hints.View`; None: there was none.
        in_order: (kind, virtual stage) pairs that run in microbatch order.
    """
    latencies.check_fits(costs)
    if len(limits) != costs.stages:
        raise ConfigError(f"limits has {len(limits)} entries, must have {costs.stages} (one a stage)")
    costs = slowest_durations(costs, delays or {}, latencies.ranks)
    return GroupRun(costs, latencies, hint, limits, coordination, sizes, size_correlation, in_order).run()


def slowest_durations(costs: CostTable, delays: Mapping[Kind, Cube], tp: int) -> CostTable:
    """The table of a group of ``tp`` ranks with ``delays``: every task takes what its slowest rank takes."""
    fields = {Kind.F: "forward", Kind.B: "backward", Kind.W: "weight"}
    durations = {}
    for kind, cube in delays.items():
        before = getattr(costs, fields[kind])
        if before is None:
            raise ConfigError(f"delays has {kind}, must be of F and B only: the costs are not split")
        added = np.asarray(cube, dtype=np.float64)
        if added.shape != (*before.shape, tp):
            raise ConfigError(f"delays[{kind}] has shape {added.shape}, must be {(*before.shape, tp)}")
        if not (np.isfinite(added) & (added >= 0)).all():
            raise ConfigError(f"delays[{kind}] must hold finite numbers >= 0 only")
        durations[fields[kind]] = before + added.max(axis=2)
    return replace(costs, **durations)


@dataclass(frozen=True, slots=True)
class TensorParallelSimulation:
    """One method on one cost table, for groups of T ranks."""

    #: The groups as single ranks: what tables, timelines and traces of a step show. Its costs have the slowest rank's
    #: latencies.
    simulation: Simulation
    #: The result of the simulation, with what coordination cost.
    result: TensorParallelResult
    #: How the ranks of a group agreed on the same order.
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
    order: MicrobatchOrder = "free",
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
        latency: how the messages of ranks 1..T-1 draw their times; see `rank_latencies`.
        seed: of those draws.
        sizes: how large each microbatch is, for hints that ask; None: as the table says, if it does.
        order: with a hint; see `rrfp.lab.simulation.simulate`.
    """
    if (hint is None) == (strict is None):
        raise ConfigError("exactly one of hint and strict is needed")
    if costs.graph is not None:
        raise ConfigError("tp: groups of ranks are simulated on chains only, and these costs are of a graph")
    costs = costs if sizes is None else replace(costs, sizes=tuple(sizes))
    latencies = rank_latencies(costs, latency, tp, seed=seed)
    if hint is None:
        if limit is not None or coordination is not None or order != "free":
            what = "limit" if limit is not None else "coordination" if coordination is not None else "order"
            raise ConfigError(f"{what} goes with a hint; a strict schedule is the same order on every rank")
        assert strict is not None
        way: Coordination = Independent()
        make, limits, counts = partial(create_strict, strict), [Limit()] * costs.stages, None
    else:
        check_order(hint, order)
        way = resolve_coordination(coordination)
        make, limits = partial(create_hint, hint), resolve_limits(costs, limit)
        if any(stage_limit.bytes is not None for stage_limit in limits):
            raise ConfigError("limit: bytes must be None, simulated groups count microbatches")
        counts = tuple(stage_limit.microbatches or costs.microbatches for stage_limit in limits)
    known: Mapping[str, Any] = {"sizes": costs.sizes, "size_correlation": shown_correlation(costs)}
    in_order = forced_by(order, graph_of(costs))
    result = run_tensor_parallel(costs, latencies, make, limits, way, in_order=in_order, **known)
    # A strict schedule's bound uses what it held itself; under the paper's rule D may pass the limit by C.
    held = [-(-peak.held // costs.chunks) for peak in result.peaks]
    needed = held if counts is None else list(map(max, zip(counts, held, strict=True)))
    simulation = beside_bound(latencies.slowest(costs), result, counts, needed)
    return TensorParallelSimulation(simulation, result, way)

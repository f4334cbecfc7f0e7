"""Pipeline x tensor parallelism under the virtual clock: N stages of T ranks, one real core a rank.

Messages arrive at different times on different ranks, but collectives inside tasks need one order for all ranks of a
stage, its *group*; `rrfp.sim.cluster.coordination` has the ways to agree on it.

At depth 1, with reports and orders that take no time, a group runs exactly as a single rank whose messages have the
latencies of the slowest rank: `RankLatencies.slowest` is that rank's table, and the engine of `rrfp.sim.engine` gives
it the same starts to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace

import numpy as np

from rrfp.core.admission import Limit
from rrfp.core.hint import Hint
from rrfp.core.readiness import ForcedOrder
from rrfp.core.tasks import Kind
from rrfp.costs.rank_latency import Cube, RankLatencies
from rrfp.costs.table import CostTable
from rrfp.errors import ConfigError
from rrfp.sim.cluster.coordination import Coordination
from rrfp.sim.cluster.group_run import GroupRun
from rrfp.sim.cluster.result import TensorParallelResult


def run_tensor_parallel(
    costs: CostTable,
    latencies: RankLatencies,
    hint: Callable[[], Hint],
    limits: Sequence[Limit],
    coordination: Coordination,
    *,
    delays: Mapping[Kind, Cube] | None = None,
    sizes: Sequence[float] | None = None,
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
        in_order: (kind, virtual stage) pairs that run in microbatch order.

    Raises:
        ConfigError: if latencies or delays are not of the table's shape, or there is not one limit a stage.
        DeadlockError: if tasks remain and nothing will ever happen; the message says what each group waits for.
        HintError: if a hint breaks its contract.
        ProtocolError: if independent ranks of a group run different tasks: their collectives would not match.
    """
    latencies.check_fits(costs)
    if len(limits) != costs.stages:
        raise ConfigError(f"limits has {len(limits)} entries, must have {costs.stages} (one a stage)")
    costs = slowest_durations(costs, delays or {}, latencies.ranks)
    return GroupRun(costs, latencies, hint, limits, coordination, sizes, in_order).run()


def slowest_durations(costs: CostTable, delays: Mapping[Kind, Cube], tp: int) -> CostTable:
    """The table of a group of ``tp`` ranks with ``delays``: every task takes what its slowest rank takes.

    Raises:
        ConfigError: if a kind does not occur in these costs, or a shape or an entry is wrong.
    """
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

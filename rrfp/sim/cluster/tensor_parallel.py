"""Pipeline x tensor parallelism under the virtual clock: N stages of T ranks, one real core a rank.

Messages arrive at different times on different ranks, but collectives inside tasks need one order for all ranks of a
stage, its *group*. `Leader`, this package's way, and `Agreement`, the paper's, establish such an order. A strict
schedule is one already (`Independent`). `docs/simulator-tp.md` has the cost of each.

At depth 1, with reports and orders that take no time, a group runs exactly as a single rank whose messages have the
latencies of the slowest rank: `RankLatencies.slowest` is that rank's table, and the engine of `rrfp.sim.engine` gives
it the same starts to the last bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from rrfp.core.admission import Limit
from rrfp.core.hint import Hint, View
from rrfp.core.order_log import Group
from rrfp.core.readiness import ForcedOrder
from rrfp.core.ready_set import ReadySet
from rrfp.core.stage_core import StageCore
from rrfp.core.tasks import Kind, Task
from rrfp.costs.rank_latency import Cube, RankLatencies
from rrfp.costs.streams import whole
from rrfp.costs.table import CostTable
from rrfp.errors import ConfigError
from rrfp.sim.cluster.group_run import GroupRun
from rrfp.sim.cluster.node import Node
from rrfp.sim.cluster.ranks import Rank, ranks_of
from rrfp.sim.cluster.result import TensorParallelResult
from rrfp.sim.engine import graph_of

#: Seconds of a scalar all-gather. The paper's Table 3 gives 156 us of coordination a task at TP 2 and 234 us at TP 4;
#: at the 1.4 and 2.0 rounds a task that the simulation counts there, a round takes about this.
GATHER_SECONDS = 120e-6
#: Seconds that a report or an order travels: one way, where an all-gather is there and back.
CONTROL_SECONDS = GATHER_SECONDS / 2


@dataclass(frozen=True, slots=True)
class Leader:
    """Rank 0 decides over what is ready on all ranks; every rank runs its log.

    Attributes:
        depth: tasks that a rank has enqueued and not completed, at most. 1: the leader decides when a task ends, with
            all that is known then, and the order travels while lanes are idle. 2: it decides one task ahead: the order
            travels behind compute, and the decision knows less.
        control_seconds: how long a report or an order travels.

    Raises:
        ConfigError: if a value is out of range.
    """

    depth: int = 1
    control_seconds: float = CONTROL_SECONDS

    def __post_init__(self) -> None:
        whole("depth", self.depth, 1)
        _check_seconds("control_seconds", self.control_seconds)


@dataclass(frozen=True, slots=True)
class Agreement:
    """Every rank proposes its own pick in an all-gather before each task: see `rrfp.sim.cluster.all_gather`.

    Attributes:
        gather_seconds: how long an all-gather takes.

    Raises:
        ConfigError: if it is out of range.
    """

    gather_seconds: float = GATHER_SECONDS

    def __post_init__(self) -> None:
        _check_seconds("gather_seconds", self.gather_seconds)


@dataclass(frozen=True, slots=True)
class Independent:
    """Every rank runs what its own core says, unasked. For strict schedules only, which are one order on all ranks."""


Coordination = Leader | Agreement | Independent


class NeverAsked(Hint):
    """A follower's hint: its core runs the log."""

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        """Never called.

        Raises:
            AssertionError: if it is.
        """
        raise AssertionError(f"a follower of stage {view.stage} was asked to choose")


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
    graph = graph_of(costs)

    def core(stage: int, its_hint: Hint, group: Group | None = None) -> StageCore:
        return StageCore(graph, stage, its_hint, limits[stage], group=group, in_order=in_order)

    nodes, all_knowing, members = [], [], latencies.ranks
    ranks = ranks_of(costs.stages, members=members)
    for stage in range(costs.stages):
        group = ranks[stage * members : (stage + 1) * members]
        nodes += _nodes(group, core, hint, is_led=isinstance(coordination, Leader))
        all_knowing.append(core(stage, hint()))
    its_sizes = None if sizes is None else tuple(sizes)
    run = partial(GroupRun, costs, graph, latencies, nodes, all_knowing, sizes=its_sizes)
    match coordination:
        case Leader(depth, control_seconds):
            return run(coordination="leader", depth=depth, control_seconds=control_seconds).run()
        case Agreement(gather_seconds):
            return run(gather_seconds=gather_seconds).run()
        case Independent():
            return run().run()


def _nodes(
    group: Sequence[Rank], core: Callable[..., StageCore], hint: Callable[[], Hint], *, is_led: bool
) -> list[Node]:
    """The ranks of one group; each has a hint of its own, but for the followers of a leader."""
    if not is_led:
        return [Node(rank, core(rank.stage, hint())) for rank in group]
    return [
        Node(rank, core(rank.stage, NeverAsked() if rank.member else hint(), Group(rank.member, len(group))))
        for rank in group
    ]


def slowest_durations(costs: CostTable, delays: Mapping[Kind, Cube], tp: int) -> CostTable:
    """The table of a group: every task takes what its slowest rank takes.

    Args:
        costs: what tasks take without delays.
        delays: seconds by which each rank lengthens its part of a task, V x M x T by kind.
        tp: T.

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


def _check_seconds(field: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{field} is {value}, must be a finite number >= 0")

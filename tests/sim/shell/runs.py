"""The real shell on a cost table in virtual time: pipeline, runners, arbiters, messages and lanes, not an imitation.

It builds a `PipelineHandle` whose ranks are the usual ones, over transport `simulated` and `TimerLane`s, and runs it on
a `VirtualClockLoop`. What it tells is what `rrfp.engine.engine.run` tells for the same arguments, to the last bit: so
each of the two checks the other. The engine is several times as fast.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Coroutine, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from rrfp import Hint, StepResult, Topology
from rrfp.core.ready_set import ForcedOrder
from rrfp.core.stage_core import StageCore
from rrfp.core.usage import WaitCause
from rrfp.costs import CostTable
from rrfp.engine.engine import graph_of
from rrfp.engine.record import EngineResult
from rrfp.errors import ConfigError, PipelineAborted, RrfpError
from rrfp.lab.emulated import EmulatedStage, table_durations
from rrfp.lab.simulated_transport import SimulatedTransport, table_latency
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Mode
from rrfp.model.visits import Skipped, Visits
from rrfp.pipeline.faces import PipelineHandle
from rrfp.pipeline.local_ranks import LocalRanks
from rrfp.pipeline.options import complete
from rrfp.runtime.context import RankSettings
from rrfp.runtime.control_tree import peers
from rrfp.runtime.stage_runner import StageRunner
from rrfp.runtime.steps.plan import StepPlan, StepPlanner, StepRequest
from rrfp.testing.clock import TimerLane, run_virtual
from rrfp.trace.spans import WaitSpan
from rrfp.transports.base import TransportContext
from rrfp.transports.rendezvous import LocalRendezvous

T = TypeVar("T")


def run_shell(
    costs: CostTable,
    hints: Sequence[Hint],
    limits: Sequence[Limit],
    *,
    sizes: Sequence[float] | None = None,
    in_order: Collection[ForcedOrder] = (),
    stall_after: float | None = None,
    takes_offers: bool = False,
) -> EngineResult:
    """Run one training step through the real shell. Not to be called where a loop runs.

    Args:
        costs: what tasks and messages take.
        hints: one fresh hint a stage.
        limits: one a stage.
        sizes: how large each microbatch is, for hints that ask; None: untold.
        in_order: (kind, virtual stage) pairs that run in microbatch order.
        stall_after: virtual seconds of idleness after which a rank asks why; by default more than the step can take.
        takes_offers: whether lanes take offered tasks.

    Raises:
        DeadlockError: if tasks remain and nothing will ever happen, as the ranks' own watchdog reports it.
        HintError: if a hint breaks its contract.
    """
    (result,) = run_shell_steps(
        costs,
        hints,
        limits,
        [Mode.TRAIN],
        sizes=sizes,
        in_order=in_order,
        stall_after=stall_after,
        takes_offers=takes_offers,
    )
    return result


def run_shell_steps(
    costs: CostTable,
    hints: Sequence[Hint],
    limits: Sequence[Limit],
    modes: Sequence[Mode],
    *,
    sizes: Sequence[float] | None = None,
    sizes_of_steps: Sequence[Sequence[float] | None] | None = None,
    in_order: Collection[ForcedOrder] = (),
    stall_after: float | None = None,
    takes_offers: bool = False,
    output_bytes: int = 0,
) -> tuple[EngineResult, ...]:
    """Run several steps of one pipeline; arguments and errors as in `run_shell`.

    Args:
        modes: of each step, training or forward only. All take the same table.
        sizes_of_steps: instead of ``sizes``, those of each step.
        output_bytes: of every message, beside what the table says that microbatches hold.

    Returns:
        One result a step. Times of a later step count from its beginning, so they are differences and rounded as such.
    """
    stall_after = patience(costs) if stall_after is None else stall_after
    shell = _Shell(costs, hints, limits, in_order, stall_after, takes_offers, output_bytes)
    return run_ranks(shell.run(modes, [sizes] * len(modes) if sizes_of_steps is None else sizes_of_steps))


def run_ranks(job: Coroutine[Any, Any, T]) -> T:
    """Run all ranks of a job in virtual time; a failure is raised as what caused it."""
    try:
        return run_virtual(job)
    except PipelineAborted as aborted:
        cause = aborted.__cause__
        if isinstance(cause, RrfpError):
            raise cause from None
        raise


@dataclass(frozen=True)
class _Planner(StepPlanner):
    """Plans steps that skip what the table says: a graph without parts has no ``visits`` to say it with."""

    skipped: tuple[Skipped, ...] = ()

    def plan(self, request: StepRequest, *numbers: Any, **further: Any) -> StepPlan:
        """As a caller's step with these visits would be planned."""
        planned = super().plan(request, *numbers, **further)
        return replace(planned, visits=Visits(planned.step.microbatches, self.skipped))


class _Shell:
    """All ranks of one pipeline.

    Args:
        costs: what tasks and messages take.
        hints: one a stage.
        limits: one a stage.
        in_order: (kind, virtual stage) pairs that run in microbatch order.
        stall_after: seconds.
        takes_offers: whether lanes take offered tasks.
        output_bytes: of every message.
    """

    def __init__(
        self,
        costs: CostTable,
        hints: Sequence[Hint],
        limits: Sequence[Limit],
        in_order: Collection[ForcedOrder],
        stall_after: float,
        takes_offers: bool,
        output_bytes: int,
    ) -> None:
        self._costs = costs
        self._graph = graph_of(costs)
        self._transport = partial(SimulatedTransport, latency=table_latency(costs))
        self._stall_after = stall_after
        self._cores = [
            StageCore(self._graph, stage, hint, limit, in_order=in_order)
            for stage, (hint, limit) in enumerate(zip(hints, limits, strict=True))
        ]
        self._lanes = [TimerLane(takes_offers=takes_offers) for _ in self._cores]
        durations = table_durations(costs)
        held = None if costs.held is None else costs.held_bytes
        self._programs = [
            EmulatedStage(self._graph, durations, output_bytes, spend=lane.spend, held=held) for lane in self._lanes
        ]

    async def run(
        self, modes: Sequence[Mode], sizes_of_steps: Sequence[Sequence[float] | None]
    ) -> tuple[EngineResult, ...]:
        """Run steps, and leave."""
        results = []
        ranks = LocalRanks(
            self._programs,
            complete({}),
            self._build,
            planner=_Planner(skipped=self._costs.skipped),
            virtual_stages=self._costs.num_virtual_stages,
        )
        async with PipelineHandle(ranks, "caller", "rrfp") as pipe:
            for mode, sizes in zip(modes, sizes_of_steps, strict=True):
                call = pipe.step if mode is Mode.TRAIN else pipe.evaluate
                results.append(
                    _as_simulated(await call(sizes=sizes, microbatches=self._costs.microbatches), self._graph)
                )
        return tuple(results)

    async def _build(self, _: int) -> Sequence[StageRunner]:
        met = LocalRendezvous()
        return [self._runner(stage, met) for stage in range(len(self._cores))]

    def _runner(self, stage: int, met: LocalRendezvous) -> StageRunner:
        # Queues without bound: a cost file knows of none, and the engine's messages wait for nobody.
        context = TransportContext(
            stage, peers(self._graph, Topology(stage, len(self._cores))), "virtual", met, queue_bytes=sys.maxsize
        )
        return StageRunner(
            self._cores[stage],
            self._programs[stage],
            self._lanes[stage],
            self._transport(context),
            RankSettings(stall_after=self._stall_after),
        )


def patience(costs: CostTable) -> float:
    """More than any step takes, in seconds: all that it consists of, one after the other."""
    matrices = (costs.forward, costs.backward, costs.weight, costs.latency_forward, costs.latency_backward)
    return 1.0 + sum(float(matrix.sum()) for matrix in matrices if matrix is not None)


def _as_simulated(result: StepResult, graph: TaskGraph) -> EngineResult:
    """A step of the shell as the engine tells it."""
    trace = result.trace
    if trace.dropped:
        raise ConfigError(
            f"microbatches is {result.microbatches}: {trace.dropped} spans did not fit into the ranks' traces"
        )
    origin = trace.start
    spans = tuple(
        tuple(replace(s, start=s.start - origin, end=s.end - origin) for s in trace.tasks if s.stage == stage)
        for stage in range(graph.placement.stages)
    )
    makespan = max((stage[-1].end for stage in spans if stage), default=0.0)
    waits = [replace(w, start=w.start - origin, end=w.end - origin) for w in trace.waits]
    # A rank's own trace ends with its last task; to the engine it is drained until the last task of all.
    waits = [wait for wait in waits if wait.cause is not WaitCause.DRAINED]
    waits += [
        WaitSpan(stage, WaitCause.DRAINED, end, makespan)
        for stage, end in enumerate(own[-1].end if own else 0.0 for own in spans)
        if end < makespan
    ]
    messages = []
    for message in trace.messages:
        assert message.sent is not None, "one process has both ends of every message"
        assert message.arrived is not None, "one process has both ends of every message"
        messages.append(replace(message, sent=message.sent - origin, arrived=message.arrived - origin))
    return EngineResult(
        makespan,
        spans,
        tuple(sorted(waits, key=lambda wait: (wait.start, wait.stage))),
        tuple(messages),
        result.peaks,
    )

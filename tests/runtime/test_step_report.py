"""What ranks tell each other about a step: replicas must agree on whether gradients are summed."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from runtime.contexts import context_of, core_of

from rrfp import Topology
from rrfp.errors import ProtocolError
from rrfp.model.graph import TaskGraph
from rrfp.model.mesh import Mesh
from rrfp.model.tasks import Mode
from rrfp.runtime.all_gather import TreeAllGather
from rrfp.runtime.steps.plan import StepPlan, StepPlanner, StepRequest
from rrfp.runtime.steps.step_report import StepReporter

MESH = Mesh((("pp", 1), ("dp", 2)))


async def share(plans: list[StepPlan]) -> list[BaseException | float]:
    """What sharing weights ends with on each of two replicas."""
    parts: list[TreeAllGather] = []

    def poster(sender: int) -> object:
        return lambda peer, message: parts[peer].on_message(replace(message, sender=sender))

    parts += [TreeAllGather(rank, 2, poster(rank)) for rank in range(2)]  # type: ignore[arg-type]
    contexts = [context_of(Topology.at(rank, MESH), TaskGraph.chain(1)) for rank in range(2)]
    reporters = [
        StepReporter(context, core_of(context.topology, context.graph), part)
        for context, part in zip(contexts, parts, strict=True)
    ]
    shares = (reporter.share_weights(plan) for reporter, plan in zip(reporters, plans, strict=True))
    return list(await asyncio.gather(*shares, return_exceptions=True))


def plan(weights: list[float], *, reduces: bool = True) -> StepPlan:
    request = StepRequest(Mode.TRAIN, microbatches=len(weights), weights=weights, reduce_gradients=reduces)
    made = StepPlanner(is_shared=True).plan(request)
    assert made.total_weight == sum(weights)
    return made


async def test_replicas_that_agree_share_their_weights() -> None:
    assert await share([plan([1.0, 2.0]), plan([3.0])]) == [6.0, 6.0]


async def test_one_that_sums_gradients_and_one_that_does_not_are_both_named_on_both() -> None:
    first, second = await share([plan([1.0]), plan([1.0], reduces=False)])
    assert isinstance(first, ProtocolError)
    assert isinstance(second, ProtocolError)
    for error in (first, second):
        assert "reduce_gradients is True on " in str(error)
        assert " and False on " in str(error)

"""A pipeline shows its stages, method and state."""

from __future__ import annotations

import asyncio

import pytest
import torch
from torch import Tensor, nn

import rrfp
from rrfp.hints.priorities import BackwardForward
from rrfp.model.mesh import Mesh


class Watched(nn.Linear):
    """Keeps the repr that a pipeline has while it runs a task."""

    pipe: object = None
    seen = ""

    def forward(self, x: Tensor) -> Tensor:
        self.seen = repr(self.pipe)
        return super().forward(x)


def test_one_process_shows_its_stages_and_each_state() -> None:
    module = Watched(2, 2)
    pipeline = rrfp.local([module, nn.Linear(2, 2)])
    method = "2 stages, hint slot-aware-pyramid, limit 2n"
    assert repr(pipeline) == f"<LocalPipeline: {method}, not entered>"
    blocking = pipeline.blocking()
    with blocking as pipe:
        module.pipe = pipe
        assert repr(pipe) == f"<BlockingPipeline: {method}, running>"
        pipe.evaluate([torch.zeros(1, 2)])
    assert module.seen == f"<BlockingPipeline: {method}, running (in a step)>"
    assert repr(blocking) == f"<BlockingPipeline: {method}, left>"
    assert repr(pipeline) == f"<LocalPipeline: {method}, left>"


def test_an_aborted_pipeline_says_so_before_and_after_it_was_left() -> None:
    async def main() -> None:
        pipeline = rrfp.local([nn.Linear(2, 2), nn.Linear(3, 3)], strict="1f1b", loss_fn=lambda out, _: out.sum())
        async with pipeline as pipe:
            with pytest.raises(rrfp.PipelineAborted):
                await pipe.step([torch.zeros(1, 2)], [None])
            assert repr(pipe) == "<LocalPipeline: 2 stages, strict 1f1b, aborted>"
        assert repr(pipeline) == "<LocalPipeline: 2 stages, strict 1f1b, aborted>"

    asyncio.run(main())


def test_one_rank_of_several_shows_its_stage_and_where_stages_have_several_ranks_its_rank() -> None:
    def shown(topology: rrfp.Topology) -> str:
        return repr(rrfp.Pipeline(nn.Linear(2, 2), topology=topology, hint=BackwardForward, limit=3))

    method = "hint rrfp.hints.priorities.BackwardForward, limit 3"
    assert shown(rrfp.Topology(1, 4)) == f"<Pipeline: stage 1 of 4, {method}, not entered>"
    grouped = rrfp.Topology(1, 2, member=1, mesh=Mesh((("pp", 2), ("tp", 2)), coordinate=("tp",)))
    assert shown(grouped) == f"<Pipeline: rank 3 of 4 (stage 1 of 2), {method}, not entered>"

"""What a pipeline passes to its lanes: a fence before each step, and every tensor that changes hands."""

from __future__ import annotations

import asyncio
import threading
from contextlib import suppress
from typing import Any, Literal

import pytest
import torch
from runtime.recording_lane import Lanes
from runtime.tied_models import tied, words
from torch import Tensor, nn

import rrfp
from rrfp.model.graph import TaskGraph
from rrfp.pipeline.faces import PipelineHandle
from rrfp.transports.base import Message, MessageKind
from rrfp.transports.inproc import InprocTransport

WIDTH = 4


class Checked(rrfp.StageProgram):
    """Computes ones, and checks what its lane has done before each call."""

    def __init__(self, lanes: Lanes, stage: int, graph: TaskGraph) -> None:
        self.lanes, self.stage, self.graph = lanes, stage, graph
        #: Fences of the lane when each step was opened.
        self.fences: list[int] = []
        self.foreign = self.local = 0

    def open(self, step: Any, batch: rrfp.Batch) -> None:
        lane = self.lanes.by_stage[self.stage]
        self.fences.append(len(lane.fences))

    def forward(self, task: rrfp.Task, inputs: tuple[rrfp.Payload, ...]) -> rrfp.Payload:
        self.check(inputs, self.graph.predecessors[task.virtual_stage])
        return rrfp.Payload.pack(torch.ones(1))

    def backward(self, task: rrfp.Task, grads: tuple[rrfp.Payload, ...]) -> tuple[rrfp.Payload, ...]:
        self.check(grads, self.graph.successors[task.virtual_stage])
        return tuple(rrfp.Payload((torch.ones(1),)) for _ in self.graph.predecessors[task.virtual_stage])

    def weight(self, task: rrfp.Task) -> None: ...

    def check(self, payloads: tuple[rrfp.Payload, ...], sources: tuple[int, ...]) -> None:
        lane = self.lanes.by_stage[self.stage]
        for payload, source in zip(payloads, sources, strict=True):
            is_local = self.graph.stage_of[source] == self.stage
            for tensor in payload.tensors:
                assert tensor is not None
                assert lane.has_adopted(tensor) is not is_local, (source, self.stage)
                self.local += is_local
                self.foreign += not is_local


def checked(lanes: Lanes, stages: int, chunks: int, *, split: bool = False) -> list[Checked]:
    graph = TaskGraph.chain(stages, chunks=chunks, layout="v" if chunks > 1 else "looped", split=split)
    return [Checked(lanes, stage, graph) for stage in range(stages)]


@pytest.mark.parametrize("split", [False, True])
def test_a_task_has_adopted_all_that_came_from_other_stages_and_nothing_else(split: bool) -> None:
    lanes = Lanes()
    programs = checked(lanes, 2, 2, split=split)
    options: dict[str, Any] = {"chunks": 2, "placement": "v", "split": split}
    with rrfp.local(programs, lane=lanes, **options).blocking() as pipe:
        pipe.step(microbatches=3)
        pipe.evaluate(microbatches=2)
    # V: stage 0 has the virtual stages 0 and 3, stage 1 has 1 and 2, which pass tensors to each other.
    assert [(each.foreign, each.local) for each in programs] == [(3 + 3 + 2, 0), (3 + 3 + 2, 3 + 3 + 2)]


STYLES: list[tuple[str, Literal["own", "caller"]]] = [("blocking", "own"), ("async", "own"), ("async", "caller")]


def train_and_evaluate(pipeline: PipelineHandle, style: str, **arguments: Any) -> rrfp.StepResult:
    """A step where there is a microbatch count, then an evaluation, on this thread; returns the last result."""
    count = arguments.get("microbatches")

    async def main() -> rrfp.StepResult:
        async with pipeline as pipe:
            if count is not None:
                await pipe.step(microbatches=count)
            return await pipe.evaluate(**arguments)

    if style == "async":
        return asyncio.run(main())
    with pipeline.blocking() as pipe:
        if count is not None:
            pipe.step(microbatches=count)
        return pipe.evaluate(**arguments)


@pytest.mark.parametrize(("style", "loop"), STYLES)
def test_each_lane_is_fenced_once_a_step_on_the_callers_thread_after_the_programs_are_open(
    style: str, loop: Literal["own", "caller"]
) -> None:
    lanes = Lanes()
    programs = checked(lanes, 2, 1)
    train_and_evaluate(rrfp.local(programs, lane=lanes, loop=loop), style, microbatches=2)
    here = threading.get_ident()
    for program, lane in zip(programs, lanes.by_stage.values(), strict=True):
        assert [thread for thread, _ in lane.fences] == [here, here]
        assert program.fences == [0, 1], "a program is opened before its lane's fence"
        assert lane.fences[0][1] == 0
        assert lane.fences[1][1] >= 2 * 2, "the second fence comes after the first step"


def test_a_refused_step_does_not_fence() -> None:
    lanes = Lanes()
    pipeline = rrfp.local([nn.Linear(WIDTH, WIDTH)], lane=lanes).blocking()
    with pipeline as pipe, suppress(rrfp.ConfigError):  # loss_fn is missing
        pipe.step([torch.ones(1, WIDTH)], [torch.ones(1, WIDTH)])
    assert lanes.by_stage[0].fences == []


class Nested(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Any]:
        return {"all": x, "parts": [x * 2, (x * 3, "plain")]}


@pytest.mark.parametrize(("style", "loop"), STYLES)
def test_outputs_of_an_evaluation_are_handed_over_on_the_callers_thread_by_the_lane_that_made_them(
    style: str, loop: Literal["own", "caller"]
) -> None:
    lanes = Lanes()
    modules = [nn.Linear(WIDTH, WIDTH), Nested()]
    inputs = [torch.ones(2, WIDTH) for _ in range(3)]
    outputs = train_and_evaluate(rrfp.local(modules, lane=lanes, loop=loop), style, inputs=inputs).outputs
    expected = [t for each in outputs.values() for t in (each["all"], each["parts"][0], each["parts"][1][0])]
    given = lanes.by_stage[1].handed_over
    assert [id(tensor) for tensor, _ in given] == [id(tensor) for tensor in expected]
    assert len(given) == 3 * 3
    assert {thread for _, thread in given} == {threading.get_ident()}
    assert lanes.by_stage[0].handed_over == []


class Listening(InprocTransport):
    """Keeps the tensors of all ties that arrive, by rank."""

    heard: dict[int, list[Tensor]]

    async def receive(self) -> Message:
        message = await super().receive()
        if message.kind is MessageKind.TIE:
            self.heard.setdefault(self.context.rank, []).extend(t for t in message.tensors if t is not None)
        return message


def test_gradients_of_ties_are_adopted_where_they_are_added_and_where_the_sum_is_written() -> None:
    lanes = Lanes()
    modules, weights = tied(2)
    heard: dict[int, list[Tensor]] = {}
    transport = type("Hearing", (Listening,), {"heard": heard})
    options: dict[str, Any] = {"lane": lanes, "transport": transport, "ties": {"embedding": weights}}
    with rrfp.local(modules, loss_fn=nn.functional.mse_loss, **options).blocking() as pipe:
        pipe.step(*words(3))
    assert {rank: len(tensors) for rank, tensors in heard.items()} == {0: 1, 1: 1}
    for rank, tensors in heard.items():
        assert all(map(lanes.by_stage[rank].has_adopted, tensors)), rank

"""A step returns with the loss, before all ranks have exchanged their reports, and the next call waits for those."""

from __future__ import annotations

import asyncio
import copy
import logging
import pickle
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import pytest

from rrfp import StepResult, Topology
from rrfp.core.stage_core import StageCore
from rrfp.errors import PipelineAborted, RrfpError
from rrfp.hints import create_hint
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Kind, Mode, Task
from rrfp.runtime.context import RankSettings
from rrfp.runtime.control_tree import peers
from rrfp.runtime.stage_runner import StageRunner
from rrfp.runtime.steps.plan import StepPlanner, StepRequest
from rrfp.testing.clock import EmulatedStage, SimulatedTransport, TimerLane, run_virtual
from rrfp.transports.base import Message, MessageKind, TransportContext
from rrfp.transports.rendezvous import LocalRendezvous

#: The last task of the middle stage is long: the other two have done their part long before it.
LONG = Task(Kind.W, 0, 1)
LONG_S = 50.0

#: A message over the control tree. Others take no time.
HOP_S = 0.125

#: When all ranks call ``step`` for the first time.
BEGIN_S = 1.0

#: When the ranks have done their part: F0@0 .. F0@2, then B0@2 .. B0@0 of 1 s, and a W each.
DONE_S = (7.0, 5.0 + LONG_S, 5.0)


class Job:
    """Three stages, each with a caller of its own.

    Args:
        stall_after: of every rank.
        fails: whether the long task raises at its end.
    """

    def __init__(self, stall_after: float = 1000.0, *, fails: bool = False) -> None:
        self._graph = TaskGraph.chain(3, split=True)
        self._met = LocalRendezvous()
        self._fails = fails
        #: Messages of all-gathers, by topic.
        self.sent: Counter[object] = Counter()
        self._programs: list[EmulatedStage] = []
        self._stall_after = stall_after
        self.runners: list[StageRunner] = []

    def _runner(self, stage: int) -> StageRunner:
        lane = TimerLane()
        self._programs.append(EmulatedStage(self._graph, self._seconds, spend=partial(self._spend, lane)))
        context = TransportContext(
            stage, peers(self._graph, Topology(stage, 3)), "virtual", self._met, queue_bytes=sys.maxsize
        )
        core = StageCore(self._graph, stage, create_hint("bfw"))
        return StageRunner(
            core,
            self._programs[stage],
            lane,
            SimulatedTransport(context, self._latency),
            RankSettings(stall_after=self._stall_after),
        )

    def _seconds(self, task: Task) -> float:
        return LONG_S if task == LONG else 1.0

    def _spend(self, lane: TimerLane, seconds: float) -> None:
        lane.spend(seconds)
        if self._fails and seconds == LONG_S:
            raise ValueError("broken")

    def _latency(self, rank: int, peer: int, message: Message) -> float:
        if message.kind not in (MessageKind.REPORT, MessageKind.RESULT):
            return 0.0
        self.sent[message.body["topic"]] += 1
        return HOP_S

    async def step(self, stage: int, number: int = 0) -> StepResult:
        plan = StepPlanner().plan(StepRequest(Mode.TRAIN, microbatches=1), number)
        self._programs[stage].open(plan.step, plan.batch)
        return await self.runners[stage].step(plan)

    def run(self, caller: Callable[[int], Awaitable[Any]]) -> list[Any]:
        """What ``caller`` returns, or raises, on each rank, once all have started; every rank then leaves."""

        async def rank(stage: int) -> Any:
            await self.runners[stage].start()
            await asyncio.sleep(BEGIN_S - now())
            try:
                return await caller(stage)
            finally:
                await self.runners[stage].close()

        async def all_ranks() -> list[Any]:
            self.runners += map(self._runner, range(3))
            return await asyncio.gather(*map(rank, range(3)), return_exceptions=True)

        return run_virtual(all_ranks())


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_step_returns_with_the_loss_and_the_next_one_begins_when_all_ranks_have_ended_it() -> None:
    job = Job()

    async def caller(stage: int) -> tuple[float, StepResult, StepResult]:
        first = await job.step(stage)
        returned = now() - BEGIN_S
        second = await job.step(stage, 1)
        await job.runners[stage].settle()
        return returned, first, second

    ends = job.run(caller)
    # In virtual time losses are read at the end of a step: those of stage 2 go up to rank 0, and down again.
    assert [end[0] for end in ends] == [DONE_S[0], DONE_S[1], DONE_S[2] + 2 * HOP_S]
    assert {end[1].loss for end in ends} == {0.0}
    first_task = ends[0][2].trace.tasks[0]
    assert first_task.start == BEGIN_S + DONE_S[1] + HOP_S, "rank 0 has the last report after one hop"
    assert len({end[1].seconds for end in ends}) == 1
    assert ends[0][1].seconds == DONE_S[1]


def test_the_messages_of_a_step_beside_its_tensors_are_counted() -> None:
    job = Job()

    async def caller(stage: int) -> None:
        await job.step(stage)
        await job.runners[stage].settle()
        before = +job.sent if stage == 0 else None  # all ranks have exchanged all: stage 0 is the root
        if before is not None:
            counts.append(before)

    counts: list[Counter[object]] = []
    assert job.run(caller) == [None] * 3
    assert counts == [Counter({"start": 4, "losses": 4, "step": 4})], "up and down for every rank but the root"


def no_report(result: StepResult) -> None:
    assert result.pending is not None
    assert "loss=0.0" in repr(result)
    assert "seconds" not in repr(result)


def test_a_result_that_nobody_read_shows_the_reports_once_they_are_here() -> None:
    job = Job()

    async def caller(stage: int) -> str:
        result = await job.step(stage)
        no_report(result)
        await job.runners[stage].settle()
        assert result.pending is not None
        return repr(result)

    assert all(f"seconds={DONE_S[1]}" in shown for shown in job.run(caller))


def test_what_the_reports_fill_cannot_be_waited_for_on_their_own_loop_and_is_there_after_complete() -> None:
    job = Job()

    async def caller(stage: int) -> StepResult:
        result = await job.step(stage)
        if stage == 0:
            no_report(result)
            for read in (lambda: result.breakdown, lambda: result.peak_held, lambda: pickle.dumps(result)):
                with pytest.raises(RrfpError, match=r"on the event loop of the pipeline.* await result\.complete"):
                    read()
            with pytest.raises(AttributeError, match="no attribute 'breakdowns'"):
                result.breakdowns  # type: ignore[attr-defined]  # noqa: B018
            with pytest.raises(TimeoutError):  # a caller that gives up takes nothing from the others
                await asyncio.wait_for(result.complete(), 1.0)
        assert await result.complete() is result
        assert result.pending is None
        await job.runners[stage].settle()
        return result

    results = job.run(caller)
    assert [result.seconds for result in results] == [DONE_S[1]] * 3
    assert [part.compute for part in results[0].breakdown] == [3.0, 2.0 + LONG_S, 3.0]
    assert f"seconds={DONE_S[1]}" in repr(results[0])
    for same in (copy.copy(results[0]), copy.deepcopy(results[0]), pickle.loads(pickle.dumps(results[0]))):
        assert same == results[0]
        assert same.pending is None
    assert asdict(results[0])["seconds"] == DONE_S[1]
    assert replace(results[0], loss=1.0).peaks == results[0].peaks


Call = Callable[[Job, int, StepResult], Awaitable[Any]]


async def step_again(job: Job, stage: int, result: StepResult) -> Any:
    return await job.step(stage, 1)


async def gather(job: Job, stage: int, result: StepResult) -> Any:
    return await job.runners[stage].gather("clip_grad_norm_", b"")


async def read(job: Job, stage: int, result: StepResult) -> Any:
    return result.seconds


async def complete(job: Job, stage: int, result: StepResult) -> Any:
    return await result.complete()


async def leave(job: Job, stage: int, result: StepResult) -> Any:
    await job.runners[stage].settle()
    return await job.runners[stage].close()


@pytest.mark.parametrize(
    ("call", "waits_s"),
    [(call, waits_s) for call in (step_again, gather, complete, leave) for waits_s in (0.0, 2 * LONG_S)]
    + [(read, 2 * LONG_S)],
)
def test_a_failure_after_the_return_is_raised_by_the_next_call_or_by_leaving(call: Call, waits_s: float) -> None:
    """It comes while the caller waits in that call, or before."""
    job = Job(fails=True)

    async def caller(stage: int) -> str:
        result = await job.step(stage)
        await asyncio.sleep(waits_s)
        with pytest.raises(PipelineAborted) as caught:
            await call(job, stage, result)
        await job.runners[stage].close()  # which does not raise it again
        return str(caught.value)

    first, second, third = job.run(caller)
    assert isinstance(second, PipelineAborted), "the rank that failed never returned from its step"
    assert first == third == str(second) == "aborted by stage 1, task W0@1: ValueError: broken"


@pytest.mark.parametrize("waits_by", ["nothing", "settle", "complete", "step"])
def test_a_rank_is_idle_only_while_its_caller_waits(waits_by: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    job = Job(stall_after=20.0)

    async def caller(stage: int) -> None:
        result = await job.step(stage)
        if stage == 0 and waits_by != "nothing":
            await asyncio.sleep(10.0)  # no line counts these
            waits: dict[str, Callable[[], Awaitable[Any]]] = {
                "settle": job.runners[0].settle,
                "complete": result.complete,
                "step": partial(job.step, 0, 1),
            }
            await waits[waits_by]()
        else:
            await asyncio.sleep(2 * LONG_S)
            if waits_by == "step":
                await job.step(stage, 1)
        await job.runners[stage].settle()

    assert job.run(caller) == [None] * 3
    lines = [line for line in caplog.messages if "has been idle" in line]
    if waits_by == "nothing":
        assert lines == []
    else:
        assert lines[0].startswith("stage 0 has been idle for 20 s: stage 1 has been running W0@1 for 32.0 s")

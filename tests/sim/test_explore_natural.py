"""Natural order on links that overtake: every order in which messages can arrive and tasks can run.

The explorer of `rrfp.lab.explore` delivers at once, and a stage that it does not choose is one whose messages are late.
Here messages are on their way as such, each may overtake any other, and the cores live through it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
from batches import long

from rrfp.core import events as ev
from rrfp.core.ready_set import natural_order
from rrfp.core.stage_core import StageCore
from rrfp.hints import create_hint
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import TablePlacement
from rrfp.model.tasks import Kind, Mode, StepId, Task
from rrfp.model.visits import Skipped, Visits

Message = tuple[int, ev.Arrived | ev.Consumed]


class State:
    """All cores of a pipeline in their step, what has run, and the messages on their way."""

    def __init__(
        self, graph: TaskGraph, microbatches: int, limit: int, mode: Mode, skipped: tuple[Skipped, ...], *, forced: bool
    ) -> None:
        self.step = StepId(0, mode, microbatches)
        self.graph = graph
        in_order = natural_order(graph) if forced else ()
        stages = range(graph.placement.stages)
        self.cores = [StageCore(graph, stage, create_hint("bf"), Limit(limit), in_order=in_order) for stage in stages]
        self.ran: frozenset[Task] = frozenset()
        self.mail: frozenset[Message] = frozenset()
        #: The highest microbatch that has run of each kind on each virtual stage; whether one ran behind a higher one.
        self.highest: dict[tuple[Kind, int], int] = {}
        self.is_natural = True
        for core in self.cores:
            core.apply(ev.StepOpened(0, mode, microbatches, visits=Visits(microbatches, skipped)))

    def key(self) -> object:
        """What decides all that can follow, and whether the order was natural."""
        return self.ran, self.mail, self.is_natural

    @property
    def is_done(self) -> bool:
        """Whether every stage has ended its step."""
        return all(core.step is not None and core.step.finished for core in self.cores)

    def moves(self) -> Iterator[tuple[int, ev.Arrived | ev.Consumed | ev.Enqueued]]:
        """All that can happen next."""
        yield from self.mail
        for stage, core in enumerate(self.cores):
            yield from ((stage, ev.Enqueued(task)) for task in core.ready)

    def after(self, stage: int, event: ev.Arrived | ev.Consumed | ev.Enqueued) -> State:
        """The state behind a move."""
        following = copy.copy(self)
        following.cores, following.highest = self.cores.copy(), self.highest.copy()
        following.cores[stage] = copy.deepcopy(self.cores[stage], {id(self.graph): self.graph})
        if isinstance(event, ev.Enqueued):
            following.run(stage, event)
        else:
            following.mail = self.mail - {(stage, event)}
            following.apply(stage, event)
        return following

    def run(self, stage: int, event: ev.Enqueued) -> None:
        """A task runs at one go."""
        kind, microbatch, virtual_stage = task = event.task
        self.ran |= {task}
        self.is_natural &= microbatch > self.highest.get((kind, virtual_stage), -1)
        self.highest[kind, virtual_stage] = microbatch
        self.apply(stage, event)
        self.apply(stage, ev.Completed(task))

    def apply(self, stage: int, event: ev.Event) -> None:
        """``event`` happens on ``stage``; what it asks for is sent or done."""
        for instruction in self.cores[stage].apply(event):
            match instruction:
                case ev.Send(task, peer, consumed):
                    self.mail |= {(peer, ev.Arrived(self.step, task, consumed=consumed))}
                    self.apply(stage, ev.SendReleased(task, peer))
                case ev.Credit(peer, task):
                    self.mail |= {(peer, ev.Consumed(self.step, stage, task))}
                case ev.ReduceChunk(virtual_stage):
                    self.apply(stage, ev.ChunkReduced(virtual_stage))


def explore(start: State) -> tuple[int, int]:
    """How many states can follow, and in how many of them the order is not natural; none of them is stuck."""
    seen, queue, unnatural = {start.key()}, [start], 0
    while queue:
        state = queue.pop()
        moves = list(state.moves())
        unnatural += not state.is_natural
        assert moves or state.is_done, sorted(map(str, state.ran))
        for move in moves:
            following = state.after(*move)
            if (key := following.key()) not in seen:
                seen.add(key)
                queue.append(following)
    return len(seen), unnatural


#: Two branches that join, all on two stages.
JOIN = TaskGraph(TablePlacement((0, 1, 0)), ((0, 2), (1, 2)))
CASES = [
    (TaskGraph.chain(2), 3, 1, Mode.TRAIN, ()),
    (TaskGraph.chain(2), 3, 2, Mode.TRAIN, ()),
    long(TaskGraph.chain(3), 3, 2, Mode.TRAIN, ()),
    (TaskGraph.chain(3), 2, 2, Mode.TRAIN, ()),
    (TaskGraph.chain(2, split=True), 2, 1, Mode.TRAIN, ()),
    long(TaskGraph.chain(2, split=True), 3, 2, Mode.TRAIN, ()),
    (TaskGraph.chain(2, chunks=2), 2, 1, Mode.TRAIN, ()),
    (TaskGraph.chain(2, chunks=2, layout="v"), 2, 2, Mode.TRAIN, ()),
    long(TaskGraph.chain(2, chunks=2, layout="v"), 3, 2, Mode.TRAIN, ()),
    (TaskGraph.chain(3), 3, 1, Mode.FORWARD, ()),
    (JOIN, 2, 1, Mode.TRAIN, ()),
    (JOIN, 3, 1, Mode.TRAIN, (frozenset({0}), frozenset(), frozenset({1}))),
]


@pytest.mark.parametrize(("graph", "microbatches", "limit", "mode", "skipped"), CASES)
def test_messages_that_overtake_neither_change_the_order_nor_stop_the_pipeline(
    graph: TaskGraph, microbatches: int, limit: int, mode: Mode, skipped: tuple[Skipped, ...]
) -> None:
    states, unnatural = explore(State(graph, microbatches, limit, mode, skipped, forced=True))
    assert states > 10
    assert unnatural == 0


def test_without_natural_order_they_do_change_it() -> None:
    assert explore(State(TaskGraph.chain(2), 2, 2, Mode.TRAIN, (), forced=False))[1] > 0

"""A whole pipeline of real cores joined by queues, without time: a seeded generator picks what happens next.

Anything may happen in any order that the contracts allow: messages overtake each other, stages idle although something
is ready, memory of sends is released late, a stage opens its next step while others are in the last one. What every run
must satisfy is checked on the way, by counting anew rather than by asking the cores. Failures raise `AssertionError`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from typing import Literal

from rrfp.core import events as ev
from rrfp.core.admission import Limit
from rrfp.core.graph import Graph
from rrfp.core.hint import Hint
from rrfp.core.readiness import ForcedOrder
from rrfp.core.stage_core import StageCore
from rrfp.core.tasks import Kind, Mode, StepId, Task

#: Which pending message is delivered: any, the oldest, or the newest.
Delivery = Literal["any", "oldest", "newest"]


class CoreNetwork:
    """One pipeline, run to its end with `run`.

    Args:
        graph: the dependency graph.
        hints: one fresh hint a stage.
        limits: one limit a stage.
        seed: decides every order.
        depth: tasks enqueued and not complete, at most, a stage.
        in_order: (kind, virtual stage) pairs that run in microbatch order.
        num_bytes: what a microbatch holds after a task.
        delivery: which pending message is delivered.
    """

    def __init__(
        self,
        graph: Graph,
        hints: Sequence[Hint],
        limits: Sequence[Limit],
        *,
        seed: int = 0,
        depth: int = 1,
        in_order: Collection[ForcedOrder] = (),
        num_bytes: Callable[[Task], int] = lambda task: 0,
        delivery: Delivery = "any",
    ) -> None:
        #: For each stage and step, the tasks in the order in which they were enqueued.
        self.orders: list[list[list[Task]]] = [[] for _ in hints]
        self._graph = graph
        self._cores = [
            StageCore(graph, stage, hint, limit, in_order=in_order)
            for stage, (hint, limit) in enumerate(zip(hints, limits, strict=True))
        ]
        self._random = random.Random(seed)
        self._depth = depth
        self._num_bytes = num_bytes
        self._delivery = delivery
        self._steps: list[StepId] = []
        #: What was not told to a stage yet.
        self._pending: list[tuple[int, ev.Event]] = []
        #: Stages that have nothing to decide until something happens to them.
        self._idle: set[int] = set()
        self._num_finished = [0] * len(hints)
        self._enqueued: set[tuple[int, Task]] = set()
        self._completed: set[tuple[int, Task]] = set()
        self._held = [0] * len(hints)

    def run(self, steps: Sequence[tuple[Mode, int]]) -> None:
        """Run one step for each (mode, M), and check that every stage does every task of each.

        Raises:
            AssertionError: with what went wrong, or what each stage waits for if nothing can happen any longer.
        """
        self._steps = [StepId(number, mode, count) for number, (mode, count) in enumerate(steps)]
        for stage in range(len(self._cores)):
            self._open_next(stage)
        while self._act():
            pass
        for stage, core in enumerate(self._cores):
            if self._num_finished[stage] < len(steps):
                waiting = "; ".join(f"{task} for {' '.join(map(str, absent))}" for task, absent in core.awaited(4))
                cause = core.wait_cause()
                raise AssertionError(f"nothing can happen any longer: stage {stage} waits ({cause}): {waiting}")

    def _act(self) -> bool:
        """Let one thing happen; False if nothing can."""
        stages = range(len(self._cores))
        lanes = [stage for stage in stages if self._cores[stage].in_flight]
        deciding = [s for s in stages if s not in self._idle and len(self._cores[s].in_flight) < self._depth]
        count = len(lanes) + len(deciding) + len(self._pending)
        if not count:
            return False
        choice = self._random.randrange(count)
        if choice < len(lanes):
            self._complete(lanes[choice])
        elif choice < len(lanes) + len(deciding):
            self._decide(deciding[choice - len(lanes)])
        else:
            last = len(self._pending) - 1
            place = {"any": choice - len(lanes) - len(deciding), "oldest": 0, "newest": last}[self._delivery]
            self._tell(*self._pending.pop(place))
        return True

    def _decide(self, stage: int) -> None:
        core = self._cores[stage]
        run = core.decide()
        if run is None:
            self._idle.add(stage)
            return
        step, task = self._step_of(stage), run.task
        if (step.number, task) in self._enqueued:
            raise AssertionError(f"stage {stage} runs {task} twice in {step}")
        for source in self._graph.inputs(task):
            is_local = self._graph.placement.stage_of(source.virtual_stage) == stage
            if (step.number, source) not in (self._enqueued if is_local else self._completed):
                raise AssertionError(f"stage {stage} runs {task} in {step} before {source}")
        self._enqueued.add((step.number, task))
        self.orders[stage][-1].append(task)
        self._held[stage] += task.kind is Kind.F and step.mode is Mode.TRAIN
        self._tell(stage, ev.Enqueued(task))
        held, most = max(self._held[stage], core.view.held), self._most_held(stage, step)
        if most is not None and held > most:
            raise AssertionError(f"stage {stage} holds {held} in {step}, the limit is {most}")

    def _most_held(self, stage: int, step: StepId) -> int | None:
        """The bound on D; a stage that serves under the paper's rule may pass its slots."""
        core, chunks = self._cores[stage], self._graph.placement.chunks
        slots = core.view.slots
        if slots is None or core.limit.rule != "paper" or chunks == 1 or step.mode is Mode.FORWARD:
            return slots
        return slots + max(chunks, self._depth)

    def _complete(self, stage: int) -> None:
        step, task = self._step_of(stage), self._cores[stage].in_flight[0]
        self._completed.add((step.number, task))
        if step.mode is Mode.TRAIN and task.kind is self._graph.last_kind(task.virtual_stage, Mode.TRAIN):
            self._held[stage] -= 1
        self._tell(stage, ev.Completed(task, held=self._num_bytes(task)))

    def _tell(self, stage: int, event: ev.Event) -> None:
        self._idle.discard(stage)
        step = self._step_of(stage)
        for instruction in self._cores[stage].apply(event):
            self._follow(stage, step, instruction)

    def _follow(self, stage: int, step: StepId, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.Send(task, peer, consumed):
                self._pending.append((peer, ev.Arrived(step, task, self._num_bytes(task), consumed)))
                self._pending.append((stage, ev.SendReleased(task, peer)))
            case ev.Credit(peer, task):
                self._pending.append((peer, ev.Consumed(step, stage, task)))
            case ev.ReduceChunk(virtual_stage):
                self._pending.append((stage, ev.ChunkReduced(virtual_stage)))
            case ev.FinishStep(finished):
                self._finish(stage, step, finished)
            case ev.Release():
                pass
            case _:
                raise AssertionError(f"stage {stage} gave {instruction}, which has no place here")

    def _finish(self, stage: int, step: StepId, finished: StepId) -> None:
        expected = sorted(self._graph.tasks(stage, step.microbatches, step.mode))
        if finished != step or sorted(self.orders[stage][-1]) != expected:
            ran = " ".join(map(str, self.orders[stage][-1]))
            raise AssertionError(f"stage {stage} finished {finished} in {step} after {ran}")
        self._num_finished[stage] += 1
        if self._num_finished[stage] < len(self._steps):
            self._open_next(stage)

    def _open_next(self, stage: int) -> None:
        self.orders[stage].append([])
        step = self._step_of(stage)
        self._pending.append((stage, ev.StepOpened(step.number, step.mode, step.microbatches)))

    def _step_of(self, stage: int) -> StepId:
        """The step that ``stage`` is in or about to open."""
        return self._steps[min(self._num_finished[stage], len(self._steps) - 1)]

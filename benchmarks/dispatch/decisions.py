"""Costs of the pure core: one decision with many ready tasks, and a whole simulated step."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from rrfp.core import events as ev
from rrfp.core.stage_core import StageCore
from rrfp.costs import make_costs
from rrfp.engine.engine import run
from rrfp.hints.registry import create_hint
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Kind, Mode, StepId, Task

#: Stages of the pipeline whose stage 1 decides.
_STAGES = 4
_STAGE = 1


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """How fast the engine drives real cores.

    Attributes:
        stages: N.
        microbatches: M.
        tasks_per_s: tasks of the step over the best time that a run took.
    """

    stages: int
    microbatches: int
    tasks_per_s: float


class _Feeder:
    """A core with a constant number of ready tasks, half forwards and half backwards."""

    def __init__(self, hint: str, ready: int, decisions: int) -> None:
        self.core = StageCore(TaskGraph.chain(_STAGES), _STAGE, create_hint(hint), Limit())
        self._step = StepId(0, Mode.TRAIN, ready + 2 * decisions + 2)
        self._next_forward = 0
        self._forwarded: deque[int] = deque()  # microbatches whose B may arrive
        self._waiting: deque[int] = deque()  # microbatches whose F is ready
        self.core.apply(ev.StepOpened(*self._step))
        for _ in range(ready - ready // 2):
            self._supply_forward()
        for _ in range(ready // 2):
            self._supply_backward()

    def replace(self, task: Task) -> None:
        """``task`` was enqueued: complete it, and make another task of its kind ready."""
        self._complete(task)
        if task.kind is Kind.F:
            self._waiting.remove(task.microbatch)
            self._forwarded.append(task.microbatch)
            self._supply_forward()
        else:
            self._supply_backward()

    def _complete(self, task: Task) -> None:
        for instruction in self.core.apply(ev.Completed(task)):
            if isinstance(instruction, ev.Send):
                self.core.apply(ev.SendReleased(task, instruction.peer))

    def _supply_forward(self) -> None:
        m, self._next_forward = self._next_forward, self._next_forward + 1
        self.core.apply(ev.Arrived(self._step, Task(Kind.F, m, _STAGE - 1)))
        self._waiting.append(m)

    def _supply_backward(self) -> None:
        if not self._forwarded:
            forward = Task(Kind.F, self._waiting[0], _STAGE)
            self.core.apply(ev.Enqueued(forward))
            self.replace(forward)
        self.core.apply(ev.Arrived(self._step, Task(Kind.B, self._forwarded.popleft(), _STAGE + 1)))


def time_decisions(hint: str, ready: int, decisions: int) -> list[float]:
    """Seconds of each of ``decisions`` decisions with ``ready`` ready tasks: ``decide`` and ``apply(Enqueued)``."""
    feeder = _Feeder(hint, ready, decisions)
    core, clock = feeder.core, time.perf_counter
    samples = []
    for _ in range(decisions):
        started = clock()
        choice = core.decide()
        assert choice is not None
        core.apply(ev.Enqueued(choice.task))
        samples.append(clock() - started)
        feeder.replace(choice.task)
    return samples


def time_engine(stages: int, microbatches: int, repeats: int) -> EngineSpeed:
    """Simulate one bf step of the mllm profile with J2 several times."""
    costs = make_costs("mllm", stages, microbatches, jitter="J2", latency="wire")
    limits = [Limit.resolve("2n", stage, stages) for stage in range(stages)]
    best = min(_time_run(lambda: run(costs, [create_hint("bf") for _ in limits], limits)) for _ in range(repeats))
    return EngineSpeed(stages, microbatches, 2 * stages * microbatches / best)


def _time_run(call: object) -> float:
    assert callable(call)
    started = time.perf_counter()
    call()
    return time.perf_counter() - started

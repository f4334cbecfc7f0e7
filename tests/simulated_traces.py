"""Realistic traces for tests, without the runtime: a small list scheduler over a cost table, one chunk a stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rrfp.core.progress import WaitCause
from rrfp.core.tasks import Kind, Task
from rrfp.costs import CostTable
from rrfp.trace.spans import MessageSpan, StepTrace, TaskSpan, WaitSpan


@dataclass
class Stage:
    """Where one stage has got to."""

    index: int
    free: float = 0.0
    held: int = 0
    #: When the inputs of each task arrive that has not run.
    inputs: dict[Task, float] = field(default_factory=dict)
    done: list[Task] = field(default_factory=list)


#: Of what a stage could run at an instant, the task it takes; None to wait for another one.
Policy = Callable[[Stage, list[Task]], Task | None]


def strict(costs: CostTable) -> Policy:
    """1F1B in its fixed order."""

    def choose(stage: Stage, ready: list[Task]) -> Task | None:
        forwards = sum(task.kind is Kind.F for task in stage.done)
        backwards = len(stage.done) - forwards
        warm = min(costs.microbatches, costs.stages - stage.index)
        due_forward = forwards < costs.microbatches and forwards - backwards < warm
        due = Task(Kind.F, forwards, stage.index) if due_forward else Task(Kind.B, backwards, stage.index)
        return due if due in ready else None

    return choose


def readiness(stage: Stage, ready: list[Task]) -> Task | None:
    """Whatever is ready, a kind in turn."""
    last = stage.done[-1].kind if stage.done else Kind.F
    return min(ready, key=lambda task: (task.kind is last, task.microbatch), default=None)


def trace_of(costs: CostTable, policy: Policy, *, limit: int, step: int = 0) -> StepTrace:
    """A merged trace of one step."""
    stages = [Stage(i) for i in range(costs.stages)]
    stages[0].inputs = {Task(Kind.F, m, 0): 0.0 for m in range(costs.microbatches)}
    tasks: list[TaskSpan] = []
    waits: list[WaitSpan] = []
    messages: list[MessageSpan] = []
    while stage_and_time := _next_decision(stages, policy, limit):
        stage, start, task, cause = stage_and_time
        if start > stage.free:
            waits.append(WaitSpan(stage.index, cause, stage.free, start))
        end = start + costs.duration(task.kind.value, task.virtual_stage, task.microbatch)
        tasks.append(TaskSpan(stage.index, task, start, end))
        stage.free = end
        stage.held += 1 if task.kind is Kind.F else -1
        del stage.inputs[task]
        stage.done.append(task)
        messages.extend(_deliver(costs, stages, task, end))
    end = max(span.end for span in tasks)
    return StepTrace(step, 0.0, end, tuple(tasks), tuple(waits), tuple(messages))


def _next_decision(stages: list[Stage], policy: Policy, limit: int) -> tuple[Stage, float, Task, WaitCause] | None:
    """The earliest start of any stage: in this order no later arrival can change a choice made before."""
    best: tuple[float, int, Task, WaitCause] | None = None
    for stage in stages:
        admissible = {t: at for t, at in stage.inputs.items() if t.kind is Kind.B or stage.held < limit}
        for moment in sorted({max(at, stage.free) for at in admissible.values()}):
            task = policy(stage, [t for t, at in admissible.items() if at <= moment])
            if task is not None:
                blocked = len(admissible) < len(stage.inputs)
                cause = WaitCause.MEMORY if blocked else WaitCause.INPUT
                candidate = (moment, stage.index, task, cause)
                best = candidate if best is None or candidate[:2] < best[:2] else best
                break
    return best and (stages[best[1]], best[0], best[2], best[3])


def _deliver(costs: CostTable, stages: list[Stage], task: Task, end: float) -> list[MessageSpan]:
    kind, m, v = task
    last = costs.stages - 1
    if kind is Kind.F and v == last:
        stages[v].inputs[Task(Kind.B, m, v)] = end
        return []
    if kind is Kind.B and v == 0:
        return []
    target = v + 1 if kind is Kind.F else v - 1
    latency = costs.latency_forward[v, m] if kind is Kind.F else costs.latency_backward[target, m]
    arrival = end + float(latency)
    stages[target].inputs[Task(kind, m, target)] = arrival
    return [MessageSpan(v, target, task, sent=end, arrived=arrival, num_bytes=1 << 18)]

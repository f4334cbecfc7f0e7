"""The story of a task in a recorded step: the core of its stage is fed with what the trace has.

A trace has no limit, group or hint: the core gets tasks as they began and messages as they arrived.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rrfp.core import events as ev
from rrfp.core.event_history import EventHistory
from rrfp.core.stage_core import StageCore
from rrfp.core.waiting import story, tell
from rrfp.errors import ConfigError, ProtocolError
from rrfp.lab.traces.measured_costs import TracedStep, is_training, traced_step
from rrfp.lab.unused_hint import UnusedHint
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Kind, Mode, StepId, Task
from rrfp.model.topology import Topology
from rrfp.trace.spans import StepTrace


def task_story(trace: StepTrace, num_stages: int, graph: TaskGraph | None, task: Task) -> list[tuple[float, str]]:
    """What happened to ``task``, and when, in seconds from the start of the step; see `rrfp.core.waiting.tell`."""
    if not is_training(trace):
        raise ConfigError(f"step {trace.step} is an evaluation, must be a training step")
    step = traced_step(trace, num_stages, graph)
    whole = step.shape.to_graph()
    whole = replace(whole, split=tuple(Task(Kind.W, 0, v) in step.tasks for v in range(len(whole.stage_of))))
    if task not in step.tasks:
        raise ConfigError(f"task is {task}, which did not run in step {trace.step}")
    stage = step.tasks[task].stage
    core = StageCore(whole, stage, UnusedHint(), history=EventHistory())
    opened = StepId(0, Mode.TRAIN, step.microbatches)
    core.apply(ev.StepOpened(*opened, visits=step.visits))
    times = {}
    for time, _, event in sorted(_events(trace, step, core, opened), key=lambda each: each[:2]):
        times[id(event)] = time
        try:
            core.apply(event)
        except ProtocolError as error:
            raise ConfigError(f"step {trace.step} cannot have run so: {error}") from None
    moments = story(core, task).moments or ()
    texts = tell(core, Topology(stage, whole.placement.stages), task)
    return [(times[id(moment.event)] - trace.start, text) for moment, text in zip(moments, texts, strict=False)]


def _events(
    trace: StepTrace, step: TracedStep, core: StageCore, opened: StepId
) -> Iterator[tuple[float, int, ev.Arrived | ev.Enqueued | ev.Completed]]:
    """What happened on the stage of ``core``: when, and in which order at one instant."""
    stage, graph = core.stage, core.graph
    assert core.step is not None
    arrivals = {(each.task, each.target): each.arrived for each in trace.messages if each.arrived is not None}
    for task, span in step.tasks.items():
        if span.stage == stage:
            yield span.start, 2, ev.Enqueued(task)
            yield span.end, 1 if span.end > span.start else 3, ev.Completed(task, seconds=span.end - span.start)
        elif core.step.states.reads(task):
            consumers = graph.consumers(task.kind, task.virtual_stage, Mode.TRAIN)
            readers = [Task(kind, task.microbatch, v) for kind, v in consumers if graph.stage_of[v] == stage]
            # Not recorded in a file of single ranks; and times of two hosts may be apart.
            first = min(step.tasks[reader].start for reader in readers if reader in step.tasks)
            yield min(arrivals.get((task, stage), span.end), first), 0, ev.Arrived(opened, task)

"""One recorded training step, checked to be whole: every task of every microbatch, on the stage that has it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from rrfp.core.placement import Layout, Placement
from rrfp.core.tasks import Kind, Task
from rrfp.costs.table import PLACEMENTS
from rrfp.errors import ConfigError
from rrfp.trace.spans import StepTrace, TaskSpan


@dataclass(frozen=True, slots=True)
class Shape:
    """What steps must have in common to be averaged, beside M.

    Attributes:
        stages: N.
        chunks: C.
        placement: which stage holds which virtual stage.
        split: whether weight gradients are tasks of their own, on any virtual stage.
    """

    stages: int
    chunks: int
    placement: Layout
    split: bool

    def __str__(self) -> str:
        chunks = "" if self.chunks == 1 else f" x {self.chunks} chunks ({self.placement})"
        return f"{self.stages} stages{chunks}, {'split' if self.split else 'whole'} backward"


@dataclass(frozen=True, slots=True)
class TracedStep:
    """A whole step.

    Attributes:
        number: the step's.
        shape: of the pipeline.
        microbatches: M.
        seconds: from its start to its end.
        tasks: the span of every task; a virtual stage that is not split has no W.
        latencies: for each message between stages whose arrival is known, by the task that made it: seconds from the
            end of that task to the arrival.
    """

    number: int
    shape: Shape
    microbatches: int
    seconds: float
    tasks: Mapping[Task, TaskSpan]
    latencies: Mapping[Task, float]


def is_training(trace: StepTrace) -> bool:
    """Whether ``trace`` is of a training step: an evaluation has no backward."""
    return any(span.task.kind is Kind.B for span in trace.tasks)


def traced_step(trace: StepTrace, num_stages: int) -> TracedStep:
    """Check a recorded training step.

    Args:
        trace: merged, of all stages.
        num_stages: N.

    Raises:
        ConfigError: if a task is missing, ran twice, on two stages or for a negative time, or no placement puts the
            virtual stages where they ran.
    """
    tasks: dict[Task, TaskSpan] = {}
    for span in trace.tasks:
        if span.task in tasks:
            raise ConfigError(f"{span.task} ran twice, must run once in a step")
        if span.end < span.start:
            raise ConfigError(f"{span.task} ends {span.start - span.end:g} s before it starts")
        tasks[span.task] = span
    microbatches = 1 + max(task.microbatch for task in tasks)
    stage_of = _stages_of(tasks.values())
    weighted = {task.virtual_stage for task in tasks if task.kind is Kind.W}
    if (missing := _missing(tasks, range(len(stage_of)), microbatches, weighted)) is not None:
        raise ConfigError(f"{missing} is missing: the file lacks a rank, or the rank's trace was cut")
    shape = Shape(num_stages, *_placement(stage_of, num_stages), bool(weighted))
    latencies = _latencies(trace, tasks, stage_of)
    return TracedStep(trace.step, shape, microbatches, trace.end - trace.start, tasks, latencies)


def _missing(
    tasks: Collection[Task], virtual_stages: Iterable[int], microbatches: int, weighted: Collection[int]
) -> Task | None:
    """The first task that every step has and this one lacks."""
    # Not by itertools.product, which makes a list of all microbatches: their number is one that a file names.
    for v in virtual_stages:
        kinds = [kind for kind in Kind if kind is not Kind.W or v in weighted]
        for m in range(microbatches):
            for kind in kinds:
                if (task := Task(kind, m, v)) not in tasks:
                    return task
    return None


def _stages_of(spans: Iterable[TaskSpan]) -> list[int]:
    """The stage of each virtual stage."""
    stages: dict[int, int] = {}
    for span in spans:
        v = span.task.virtual_stage
        if stages.setdefault(v, span.stage) != span.stage:
            raise ConfigError(f"virtual stage {v} ran on stages {stages[v]} and {span.stage}, must run on one")
    missing = next((v for v in range(1 + max(stages)) if v not in stages), None)
    if missing is not None:
        raise ConfigError(f"virtual stage {missing} is missing: the file lacks a rank, or the rank's trace was cut")
    return [stages[v] for v in range(len(stages))]


def _placement(stage_of: list[int], num_stages: int) -> tuple[int, Layout]:
    """The chunks of a stage, and where they are."""
    chunks, rest = divmod(len(stage_of), num_stages)
    layouts: tuple[Layout, ...] = PLACEMENTS  # type: ignore[assignment]
    for layout in layouts if chunks and not rest else ():
        if [Placement(num_stages, chunks, layout).stage_of(v) for v in range(len(stage_of))] == stage_of:
            return chunks, layout
    ran = ", ".join(f"{v} on {stage}" for v, stage in enumerate(stage_of))
    raise ConfigError(f"virtual stages ran on stages ({ran}), must be placed as one of: {', '.join(PLACEMENTS)}")


def _latencies(trace: StepTrace, tasks: Mapping[Task, TaskSpan], stage_of: list[int]) -> dict[Task, float]:
    latencies: dict[Task, float] = {}
    for message in trace.messages:
        task, arrived = message.task, message.arrived
        reader = task.virtual_stage + (1 if task.kind is Kind.F else -1)
        if task not in tasks or arrived is None or not 0 <= reader < len(stage_of):
            continue
        if (message.source, message.target) == (tasks[task].stage, stage_of[reader]):
            latencies[task] = max(0.0, arrived - tasks[task].end)  # clocks of two hosts may differ by a little
    return latencies

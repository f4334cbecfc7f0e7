"""One recorded training step, checked to be whole: every task of every microbatch, on the stage that has it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from rrfp.core.graph import Graph
from rrfp.core.placement import Layout, Placement
from rrfp.core.tasks import Kind, Task
from rrfp.core.visits import Skipped
from rrfp.costs.graph_names import edge_names
from rrfp.costs.table import PLACEMENTS
from rrfp.errors import ConfigError
from rrfp.trace.spans import Skip, StepTrace, TaskSpan


@dataclass(frozen=True, slots=True)
class Shape:
    """What steps must have in common to be averaged, beside M.

    Attributes:
        stages: N.
        chunks: C.
        placement: which stage holds which virtual stage.
        split: whether weight gradients are tasks of their own, on any virtual stage.
        graph: of virtual stages with names; then ``chunks`` is that of the stage with most.
    """

    stages: int
    chunks: int
    placement: Layout | Literal["table"]
    split: bool
    graph: Graph | None = None

    def to_graph(self) -> Graph:
        """The graph: of a chain too."""
        if self.placement != "table":
            return Graph.chain(self.stages, chunks=self.chunks, layout=self.placement)
        assert self.graph is not None
        return self.graph

    def __str__(self) -> str:
        if self.graph is not None:
            edges = ", ".join(edge_names(self.graph))
            return f"{self.stages} stages ({edges}), {'split' if self.split else 'whole'} backward"
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
        latencies: for each message between stages whose arrival is known, by the task that made it and the stage that
            it went to: seconds from the end of that task to the arrival.
        skipped: of a graph, by microbatch the virtual stages that have no tasks; empty: all have.
    """

    number: int
    shape: Shape
    microbatches: int
    seconds: float
    tasks: Mapping[Task, TaskSpan]
    latencies: Mapping[tuple[Task, int], float]
    skipped: tuple[Skipped, ...] = ()


def is_training(trace: StepTrace) -> bool:
    """Whether ``trace`` is of a training step: an evaluation has no backward."""
    return any(span.task.kind is Kind.B for span in trace.tasks)


def traced_step(trace: StepTrace, num_stages: int, graph: Graph | None = None) -> TracedStep:
    """Check a recorded training step.

    Args:
        trace: merged, of all stages.
        num_stages: N.
        graph: of virtual stages with names; None: a chain.

    Raises:
        ConfigError: if a task is missing, ran twice, on two stages or for a negative time, or no placement puts the
            virtual stages where they ran.
    """
    tasks = _tasks(trace)
    microbatches = 1 + max(task.microbatch for task in tasks)
    weighted = {task.virtual_stage for task in tasks if task.kind is Kind.W}
    if graph is None:
        stage_of = _stages_of(tasks.values())
        _check_whole(tasks, range(len(stage_of)), microbatches, weighted)
        shape = Shape(num_stages, *_placement(stage_of, num_stages), bool(weighted))
    else:
        _check_placed(tasks.values(), graph)
        _check_whole(tasks, range(len(graph.stage_of)), microbatches, weighted, frozenset(trace.skipped))
        chunks = max(map(graph.placement.chunks_of, range(graph.placement.stages)))
        shape = Shape(num_stages, chunks, "table", bool(weighted), graph)
    latencies = _latencies(trace, tasks, shape.to_graph())
    seconds = trace.end - trace.start
    skipped = _by_microbatch(trace.skipped, microbatches)
    return TracedStep(trace.step, shape, microbatches, seconds, tasks, latencies, skipped)


def _tasks(trace: StepTrace) -> dict[Task, TaskSpan]:
    """The spans by task, each of which ran once."""
    tasks: dict[Task, TaskSpan] = {}
    for span in trace.tasks:
        if span.task in tasks:
            raise ConfigError(f"{span.task} ran twice, must run once in a step")
        if span.end < span.start:
            raise ConfigError(f"{span.task} ends {span.start - span.end:g} s before it starts")
        tasks[span.task] = span
    return tasks


def _check_whole(
    tasks: Collection[Task],
    virtual_stages: Iterable[int],
    microbatches: int,
    weighted: Collection[int],
    skipped: Collection[Skip] = (),
) -> None:
    """Refuse a step that lacks a task, or has one that it skipped."""
    if wrong := next((task for task in tasks if (task.microbatch, task.virtual_stage) in skipped), None):
        raise ConfigError(f"{wrong} ran, and its microbatch skips that virtual stage")
    if (missing := _missing(tasks, virtual_stages, microbatches, weighted, skipped)) is not None:
        raise ConfigError(f"{missing} is missing: the file lacks a rank, or the rank's trace was cut")


def _missing(
    tasks: Collection[Task],
    virtual_stages: Iterable[int],
    microbatches: int,
    weighted: Collection[int],
    skipped: Collection[Skip],
) -> Task | None:
    """The first task that the step must have and lacks."""
    # Not by itertools.product, which makes a list of all microbatches: their number is one that a file names.
    for v in virtual_stages:
        kinds = [kind for kind in Kind if kind is not Kind.W or v in weighted]
        for m in range(microbatches):
            for kind in kinds:
                if (task := Task(kind, m, v)) not in tasks and (m, v) not in skipped:
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


def _check_placed(spans: Iterable[TaskSpan], graph: Graph) -> None:
    """Refuse a task that ran elsewhere than the graph says."""
    for span in spans:
        v = span.task.virtual_stage
        if v >= len(graph.stage_of) or graph.stage_of[v] != span.stage:
            placed = f"on stage {graph.stage_of[v]}" if v < len(graph.stage_of) else "nowhere"
            raise ConfigError(f"{span.task} ran on stage {span.stage}, and the graph has that virtual stage {placed}")


def _by_microbatch(skips: Iterable[Skip], microbatches: int) -> tuple[Skipped, ...]:
    by_microbatch: list[set[int]] = [set() for _ in range(microbatches)]
    for microbatch, v in skips:
        if microbatch >= microbatches:
            raise ConfigError(f"microbatch {microbatch} skips a virtual stage, and has no task at all")
        by_microbatch[microbatch].add(v)
    return tuple(map(frozenset, by_microbatch)) if any(by_microbatch) else ()


def _placement(stage_of: list[int], num_stages: int) -> tuple[int, Layout]:
    """The chunks of a stage, and where they are."""
    chunks, rest = divmod(len(stage_of), num_stages)
    layouts: tuple[Layout, ...] = PLACEMENTS  # type: ignore[assignment]
    for layout in layouts if chunks and not rest else ():
        if [Placement(num_stages, chunks, layout).stage_of(v) for v in range(len(stage_of))] == stage_of:
            return chunks, layout
    ran = ", ".join(f"{v} on {stage}" for v, stage in enumerate(stage_of))
    raise ConfigError(f"virtual stages ran on stages ({ran}), must be placed as one of: {', '.join(PLACEMENTS)}")


def _latencies(trace: StepTrace, tasks: Mapping[Task, TaskSpan], graph: Graph) -> dict[tuple[Task, int], float]:
    latencies: dict[tuple[Task, int], float] = {}
    for message in trace.messages:
        task, arrived = message.task, message.arrived
        if task not in tasks or arrived is None:
            continue
        readers = (graph.successors if task.kind is Kind.F else graph.predecessors)[task.virtual_stage]
        targets = {graph.stage_of[reader] for reader in readers}
        if message.source == tasks[task].stage and message.target in targets - {message.source}:
            latencies[task, message.target] = max(
                0.0, arrived - tasks[task].end
            )  # clocks of two hosts may differ by a little
    return latencies

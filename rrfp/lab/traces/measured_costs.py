"""A cost table from recorded steps, so that the simulator compares hints and limits on a real job."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np

from rrfp.costs.table import PLACEMENTS, Bits, CostTable, Matrix
from rrfp.errors import ConfigError, Faults
from rrfp.lab.generators.latency import LATENCY_MODELS, parse_latency, with_latency
from rrfp.lab.traces.chrome_reader import TracedRun
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Layout, Placement, TablePlacement
from rrfp.model.plain_graph import edge_names
from rrfp.model.tasks import KINDS, SENT_TO, F, Kind, Mode, Side, Task
from rrfp.model.visits import Visits
from rrfp.trace.spans import Skip, StepTrace, TaskSpan


@dataclass(frozen=True, slots=True)
class Shape:
    """What steps must have in common to be averaged, beside M."""

    stages: int
    chunks: int
    #: Which stage holds which virtual stage.
    placement: Layout | Literal["table"]
    #: Of tasks, on any virtual stage: W where weight gradients are tasks of their own.
    kinds: tuple[Kind, ...]
    #: Of virtual stages with names; then ``chunks`` is that of the stage with most.
    graph: TaskGraph | None = None

    @property
    def split(self) -> bool:
        return Kind.W in self.kinds

    def to_graph(self) -> TaskGraph:
        if self.placement != "table":
            return TaskGraph.chain(self.stages, chunks=self.chunks, layout=self.placement)
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
    """A whole step."""

    number: int
    shape: Shape
    microbatches: int
    seconds: float
    #: The span of every task; a virtual stage that is not split has no W.
    tasks: Mapping[Task, TaskSpan]
    #: For each message between stages whose arrival is known, by the task that made it and the stage that it went to:
    #: seconds from the end of that task to the arrival.
    latencies: Mapping[tuple[Task, int], float]
    #: Which virtual stages of a graph have tasks of each microbatch.
    visits: Visits
    #: Of its microbatches, where they were recorded.
    sizes: tuple[float, ...] | None = None


def is_training(trace: StepTrace) -> bool:
    """Whether ``trace`` is of a training step: an evaluation has no backward."""
    return any(span.task.kind is Kind.B for span in trace.tasks)


def traced_step(trace: StepTrace, num_stages: int, graph: TaskGraph | None = None) -> TracedStep:
    tasks = _tasks(trace)
    microbatches = 1 + max(task.microbatch for task in tasks)
    ran = {task.kind for task in tasks}
    kinds = tuple(kind for kind in Kind if kind in ran)
    if graph is None:
        stage_of = _stages_of(tasks.values())
        _check_whole(tasks, range(len(stage_of)), microbatches)
        shape = _shape_of_chain(stage_of, num_stages, kinds)
    else:
        _check_placed(tasks.values(), graph)
        _check_whole(tasks, range(len(graph.stage_of)), microbatches, frozenset(trace.skipped))
        chunks = max(map(graph.placement.chunks_of, range(graph.placement.stages)))
        shape = Shape(num_stages, chunks, "table", kinds, graph)
    latencies = _traced_latencies(trace, tasks, shape.to_graph())
    seconds = trace.end - trace.start
    visits = _visits(trace.skipped, microbatches)
    if trace.sizes is not None and len(trace.sizes) != microbatches:
        raise ConfigError(f"sizes has {len(trace.sizes)} entries, must have {microbatches}, one a microbatch")
    return TracedStep(trace.step, shape, microbatches, seconds, tasks, latencies, visits, trace.sizes)


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
    tasks: Collection[Task], virtual_stages: Iterable[int], microbatches: int, skipped: Collection[Skip] = ()
) -> None:
    """Refuse a step that lacks a task, or ran a skipped one."""
    if wrong := next((task for task in tasks if (task.microbatch, task.virtual_stage) in skipped), None):
        raise ConfigError(f"{wrong} ran, and its microbatch skips that virtual stage")
    # Not by itertools.product, which makes a list of all microbatches: their number is one that a file names.
    ran = {(task.kind, task.virtual_stage) for task in tasks}
    for v in virtual_stages:
        kinds = [kind for kind, row in KINDS.items() if row.option is None or (kind, v) in ran]
        for m in range(microbatches):
            for kind in kinds:
                if (task := Task(kind, m, v)) not in tasks and (m, v) not in skipped:
                    raise ConfigError(f"{task} is missing: the file lacks a rank, or the rank's trace was cut")


def _stages_of(spans: Iterable[TaskSpan]) -> list[int]:
    stages: dict[int, int] = {}
    for span in spans:
        v = span.task.virtual_stage
        if stages.setdefault(v, span.stage) != span.stage:
            raise ConfigError(f"virtual stage {v} ran on stages {stages[v]} and {span.stage}, must run on one")
    missing = next((v for v in range(1 + max(stages)) if v not in stages), None)
    if missing is not None:
        raise ConfigError(f"virtual stage {missing} is missing: the file lacks a rank, or the rank's trace was cut")
    return [stages[v] for v in range(len(stages))]


def _check_placed(spans: Iterable[TaskSpan], graph: TaskGraph) -> None:
    for span in spans:
        v = span.task.virtual_stage
        if v >= len(graph.stage_of) or graph.stage_of[v] != span.stage:
            placed = f"on stage {graph.stage_of[v]}" if v < len(graph.stage_of) else "nowhere"
            raise ConfigError(f"{span.task} ran on stage {span.stage}, and the graph has that virtual stage {placed}")


def _visits(skips: Iterable[Skip], microbatches: int) -> Visits:
    by_microbatch: list[set[int]] = [set() for _ in range(microbatches)]
    for microbatch, v in skips:
        if microbatch >= microbatches:
            raise ConfigError(f"microbatch {microbatch} skips a virtual stage, and has no task at all")
        by_microbatch[microbatch].add(v)
    return Visits(microbatches, tuple(map(frozenset, by_microbatch)))


def _shape_of_chain(stage_of: list[int], num_stages: int, kinds: tuple[Kind, ...]) -> Shape:
    """The placement by its name; by a table if it has none."""
    chunks, rest = divmod(len(stage_of), num_stages)
    layouts: tuple[Layout, ...] = PLACEMENTS  # type: ignore[assignment]
    for layout in layouts if chunks and not rest else ():
        if [Placement(num_stages, chunks, layout).stage_of(v) for v in range(len(stage_of))] == stage_of:
            return Shape(num_stages, chunks, layout, kinds)
    if {*stage_of} != {*range(num_stages)}:
        ran = ", ".join(f"{v} on {stage}" for v, stage in enumerate(stage_of))
        raise ConfigError(f"virtual stages ran on stages ({ran}), must be on each of the {num_stages} stages")
    graph = TaskGraph(TablePlacement(tuple(stage_of)), names=tuple(map(str, range(len(stage_of)))))
    return Shape(num_stages, max(Counter(stage_of).values()), "table", kinds, graph)


def _traced_latencies(
    trace: StepTrace, tasks: Mapping[Task, TaskSpan], graph: TaskGraph
) -> dict[tuple[Task, int], float]:
    latencies: dict[tuple[Task, int], float] = {}
    for message in trace.messages:
        task, arrived = message.task, message.arrived
        if task not in tasks or arrived is None:
            continue
        readers = graph.consumers(task.kind, task.virtual_stage, Mode.TRAIN)
        targets = {graph.stage_of[reader] for _, reader in readers}
        if message.source == tasks[task].stage and message.target in targets - {message.source}:
            latencies[task, message.target] = max(
                0.0, arrived - tasks[task].end
            )  # clocks of two hosts may differ by a little
    return latencies


#: Which costs: of the recorded step whose time is the median of all, or of each task over all steps.
Choice = Literal["typical", "median", "mean"]

#: Makes one time of several.
Middle = Callable[[Sequence[float]], float]

#: Training steps that are left out at the beginning of a run: they import libraries and fill caches.
WARM_UP_STEPS = 2


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """The costs of a recorded step, or of several."""

    #: The costs. Of several steps it has sizes of microbatches only where these have the same.
    table: CostTable
    #: The number of the step whose costs these are; None for those of several.
    step: int | None
    #: Recorded steps that were considered.
    steps: int
    #: The steps that were not, one line a reason.
    left_out: tuple[str, ...]
    #: What the step took; of several, the median.
    seconds: float
    #: Messages between stages of one step whose time is measured.
    measured: int
    #: Those for which a typical one of the others stands.
    filled: int
    #: The most seconds by which a message's time is wrong because clocks of hosts differ.
    clock_error: float
    #: Whether sizes of microbatches are recorded in a step that counts; the table has them unless they differ between
    #: the steps.
    has_sizes: bool


def check_choices(step: object, latency: str | None) -> None:
    """Refuse what `measured_costs` would, without a trace."""
    with Faults() as faults:
        if type(step) is not int and step not in get_args(Choice):
            with faults.kept():
                raise ConfigError(f"step is {step!r}, must be a step's number or one of: {', '.join(get_args(Choice))}")
        with faults.kept():
            if latency is not None:
                parse_latency(latency)


def measured_costs(
    runs: Sequence[tuple[str, TracedRun]],
    *,
    skip_first: int = WARM_UP_STEPS,
    # ``"typical"``, the step whose time is the median; ``"median"`` or ``"mean"`` of each task and
    # message over the steps; or a number: the step of that number, also at the beginning.
    step: int | Choice = "typical",
    latency: str | None = None,
) -> MeasuredCosts:
    """The costs of the training steps of one or several runs of a job.

    The typical step keeps how microbatches differ, which is what hints are about. Averages over steps with other data
    in each make microbatches alike, and the simulated step too short.
    """
    check_choices(step, latency)
    left_out: Counter[str] = Counter()
    named = [pair for name, run in runs for pair in _chosen(name, run, skip_first, step, left_out)]
    if not named:
        raise ConfigError(_nothing_left(runs, skip_first, step))
    for name, other in named:
        if other.shape != named[0][1].shape:
            raise ConfigError(f"{name} has {other.shape}, {named[0][0]} has {named[0][1].shape}: must be one job's")
    [(microbatches, _)] = Counter(each.microbatches for _, each in named).most_common(1)
    steps = [each for _, each in named if each.microbatches == microbatches]
    left_out.update(f"of {each.microbatches} microbatches" for _, each in named if each.microbatches != microbatches)
    chosen = steps
    if step in ("median", "mean") and len({each.visits for each in steps}) > 1:
        raise ConfigError(
            f"step is {step!r}, and microbatches skip other parts in one step than in another: must be 'typical' or "
            "the number of a step"
        )
    if step == "typical":
        chosen = [sorted(steps, key=lambda each: each.seconds)[(len(steps) - 1) // 2]]
    table, measured, filled = table_of(chosen, np.mean if step == "mean" else np.median, latency)
    return MeasuredCosts(
        table,
        None if step in ("median", "mean") else chosen[0].number,
        len(steps),
        tuple(f"{count} {reason}" for reason, count in left_out.items()),
        float(np.median([each.seconds for each in chosen])),
        measured,
        filled,
        0.0 if latency is not None else max(run.clock_error for _, run in runs),
        any(each.sizes is not None for each in chosen),
    )


def _chosen(
    name: str, run: TracedRun, skip_first: int, step: int | Choice, left_out: Counter[str]
) -> list[tuple[str, TracedStep]]:
    training = [trace for trace in run.steps if is_training(trace)]
    left_out["evaluation(s)"] += len(run.steps) - len(training)
    is_number = type(step) is int
    chosen = [trace for trace in training if trace.step == step] if is_number else training[skip_first:]
    left_out["other step(s)" if is_number else "at the beginning"] += len(training) - len(chosen)
    for reason in [reason for reason, count in left_out.items() if not count]:
        del left_out[reason]
    return [(f"{name}, step {trace.step}", named_step(name, run, trace)) for trace in chosen]


def named_step(name: str, run: TracedRun, trace: StepTrace) -> TracedStep:
    """A training step of a run; errors begin with the name of the run and the step."""
    try:
        return traced_step(trace, run.num_stages, run.graph)
    except ConfigError as error:
        raise ConfigError(f"{name}, step {trace.step}: {error}") from None


def _nothing_left(runs: Sequence[tuple[str, TracedRun]], skip_first: int, step: int | Choice) -> str:
    name, run = runs[0]
    numbers = [trace.step for trace in run.steps if is_training(trace)]
    if not numbers:
        return f"{name} has no training step, must have one (evaluations have no backward)"
    if type(step) is int:
        return f"step is {step}, must be one of: {', '.join(map(str, numbers))}"
    return f"{name} has {len(numbers)} training step(s), and skip-first is {skip_first}, must be less"


def table_of(
    steps: Sequence[TracedStep], middle: Middle = np.median, latency: str | None = None
) -> tuple[CostTable, int, int]:
    """The table, and how many latencies are measured and filled in."""
    shape, microbatches, visits = steps[0].shape, steps[0].microbatches, steps[0].visits
    sizes = steps[0].sizes if len({step.sizes for step in steps}) == 1 else None
    graph = shape.to_graph()
    forward, backward = (_latencies(steps, graph, kind, middle) for kind in SENT_TO)
    sent = [_sent(graph, visits, kind) for kind in SENT_TO]
    filled = sum(int(np.isnan(rows[mask]).sum()) for rows, mask in zip((forward, backward), sent, strict=True))
    messages = int(sum(mask.sum() for mask in sent))
    if latency is None and messages and filled == messages:
        raise ConfigError(f"no time of a message is recorded: give latency, one of: {', '.join(LATENCY_MODELS)}")
    there, back = _filled(forward, backward, _crosses(graph))
    others: dict[str, Any] = {
        **{
            row.name: _durations(steps, graph, kind, middle) if kind in shape.kinds else None
            for kind, row in KINDS.items()
        },
        "held": _held(steps, graph, middle),
        "latency_forward": there,
        "latency_backward": back,
        "sizes": sizes,
    }
    if shape.graph is not None:
        table = CostTable.of_graph(shape.graph, microbatches, skipped=visits.skipped, **others)
    else:
        table = CostTable(shape.stages, shape.chunks, shape.placement, microbatches, **others)
    if latency is not None:
        return with_latency(table, latency), 0, 0
    return table, messages - filled, filled


def _edges(graph: TaskGraph) -> tuple[tuple[int, int], ...]:
    return graph.edges or ()


def _crosses(graph: TaskGraph) -> list[bool]:
    return [graph.stage_of[u] != graph.stage_of[v] for u, v in _edges(graph)]


def _sent(graph: TaskGraph, visits: Visits, kind: Kind) -> Bits:
    """By edge and microbatch, whether there is a message."""
    # One for all edges from a virtual stage to one other stage.
    sent = np.zeros((len(_edges(graph)), visits.microbatches), dtype=bool)
    known: set[tuple[int, int, int]] = set()
    for e, m in np.ndindex(sent.shape):
        u, v = _edges(graph)[e]
        message = (m, u, graph.stage_of[v]) if SENT_TO[kind] is Side.AFTER else (m, v, graph.stage_of[u])
        exists = not {u, v} & visits.skipped_by(m) and graph.stage_of[u] != graph.stage_of[v]
        if exists and message not in known:
            known.add(message)
            sent[e, m] = True
    return sent


def _durations(steps: Sequence[TracedStep], graph: TaskGraph, kind: Kind, middle: Middle) -> Matrix:
    """By virtual stage and microbatch; 0 where there are no such tasks."""
    rows = np.zeros((len(graph.stage_of), steps[0].microbatches))
    for v, m in np.ndindex(rows.shape):
        task = Task(kind, m, v)
        spans = [step.tasks[task] for step in steps if task in step.tasks]
        rows[v, m] = middle([span.end - span.start for span in spans]) if spans else 0.0
    return rows


def _held(steps: Sequence[TracedStep], graph: TaskGraph, middle: Middle) -> Matrix | None:
    """By virtual stage and microbatch, the bytes that a forward leaves; None where none is recorded."""
    rows = np.zeros((len(graph.stage_of), steps[0].microbatches))
    for v, m in np.ndindex(rows.shape):
        left = [span.num_bytes for step in steps if (span := step.tasks.get(Task(F, m, v))) is not None]
        rows[v, m] = middle(left) if left else 0.0
    return rows if rows.any() else None


def _latencies(steps: Sequence[TracedStep], graph: TaskGraph, kind: Kind, middle: Middle) -> Matrix:
    rows = np.full((len(_edges(graph)), steps[0].microbatches), np.nan)
    for e, m in np.ndindex(rows.shape):
        u, v = _edges(graph)[e]
        source, target = (u, v) if SENT_TO[kind] is Side.AFTER else (v, u)
        message = (Task(kind, m, source), graph.stage_of[target])
        known = [step.latencies[message] for step in steps if message in step.latencies]
        rows[e, m] = middle(known) if known else np.nan
    return rows


def _filled(forward: Matrix, backward: Matrix, crosses: Sequence[bool]) -> list[Matrix]:
    """The same latencies, medians for unknown ones, 0 inside a stage."""
    known = np.concatenate([forward[crosses].ravel(), backward[crosses].ravel()])
    typical = float(np.nanmedian(known)) if np.isfinite(known).any() else 0.0
    matrices = []
    for rows in (forward, backward):
        rows = rows.copy()
        for v, row in enumerate(rows):
            usual = float(np.nanmedian(row)) if np.isfinite(row).any() else typical
            rows[v] = np.where(np.isnan(row), usual, row) if crosses[v] else 0.0
        matrices.append(rows)
    return matrices

"""Data flow in numbers: what each task computes from what it reads, so that a wrong gradient cannot go unnoticed.

A task's value is a hash of its identity, its step and the values that it read. A gradient is the sum of the values of
the tasks that add to it, as in training: commutative, whatever the order. A run that read a wrong, stale or missing
input anywhere therefore differs from `reference`, which knows no schedule and no message.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import KINDS, F, Mode, StepId, Task
from rrfp.model.visits import Visits

_CODES = {kind: code for code, kind in enumerate(KINDS, 1)}


class MissingInputError(Exception):
    """A task ran and something that it reads was not there."""


def value_of(step: int, task: Task, read: tuple[int, ...], salt: int = 0) -> int:
    # Microbatches have salts: replicas have other data, members of a group other shards.
    # A hash of a tuple of integers is the same in every process; only hashes of text are not.
    return hash((_CODES[task.kind], step, task.microbatch, task.virtual_stage, salt, *read))


def adds_to_gradient(graph: TaskGraph, task: Task) -> bool:
    """Whether ``task`` forms weight gradients: W, or an unsplit B."""
    return task.kind is graph.last_kind(task.virtual_stage, Mode.TRAIN)


class Reference:
    """The value of every task of a step, straight from the graph; ``salts`` are by microbatch."""

    def __init__(self, graph: TaskGraph, step: StepId, salts: Sequence[int] = (), visits: Visits | None = None) -> None:
        salts = salts or (0,) * step.microbatches
        exists = (Visits(step.microbatches) if visits is None else visits).exists
        self.values: dict[Task, int] = {}
        #: By virtual stage: the sum over its microbatches.
        self.gradients: dict[int, int] = {}
        upward = range(graph.placement.num_virtual_stages)
        order = [(F, v) for v in upward]
        if step.mode is Mode.TRAIN:
            order += [(kind, v) for v in reversed(upward) for kind in graph.kinds(v, step.mode)[1:]]
            self.gradients = dict.fromkeys(upward, 0)
        values = self.values
        for kind, v in order:
            for m in range(step.microbatches):
                task = Task(kind, m, v)
                if not exists(task):
                    continue
                read = tuple([values[source] for source in graph.inputs(task) if exists(source)])
                values[task] = value_of(step.number, task, read, salts[m])
                if adds_to_gradient(graph, task):
                    self.gradients[v] += values[task]


class StageValues:
    """The values of one rank, as mailbox and activations would hold them."""

    def __init__(self, graph: TaskGraph) -> None:
        self._graph = graph
        #: By microbatch, the salt of what a caller passed for it; None where that is still to come, for the first
        #: virtual stage.
        self.given: list[int | None] = []
        self._salts: Sequence[int] = ()
        #: Outputs, of this rank and received; the core says when they are dropped.
        self._outputs: dict[Task, int] = {}
        #: Activations and input gradients that later tasks of the same virtual stage read.
        self._kept: dict[Task, int] = {}
        #: Arrived for the step that is not open yet.
        self._early: list[tuple[Task, int]] = []
        self._gradients: dict[int, int] = {}
        self._visits = Visits(0)

    @property
    def gradients(self) -> Mapping[int, int]:
        """By virtual stage: the sum so far."""
        return self._gradients

    def open_step(self, visits: Visits, salts: Sequence[int], absent: Collection[int] = ()) -> None:
        """Nothing of the last step is left, and what came early counts; ``absent``: what is still to be given."""
        self._visits = visits
        self._salts = salts
        self.given = [None if m in absent else salt for m, salt in enumerate(salts)]
        self._outputs = dict(self._early)
        self._early = []
        self._kept = {}
        self._gradients = {}

    def file(self, task: Task, value: int, *, is_early: bool) -> None:
        """The output of ``task`` arrived, for this step or the next."""
        if is_early:
            self._early.append((task, value))
        else:
            self._outputs[task] = value

    def output(self, task: Task) -> int:
        if task not in self._outputs:
            raise MissingInputError(f"{task} is to be sent, and its output was dropped")
        return self._outputs[task]

    def compute(self, step: int, task: Task) -> int:
        read = []
        for source in filter(self._visits.exists, self._graph.inputs(task)):
            held = self._kept if source.virtual_stage == task.virtual_stage else self._outputs
            if source not in held:
                raise MissingInputError(f"{task} ran without {source}")
            read.append(held[source])
        if (salt := (self._salts if task.virtual_stage else self.given)[task.microbatch]) is None:
            raise MissingInputError(f"{task} ran without what the caller passed for it")
        return value_of(step, task, tuple(read), salt)

    def keep(self, task: Task, value: int) -> None:
        """``task`` is done: keep its output, and add to its gradient."""
        self._outputs[task] = value
        self._kept[task] = value
        if adds_to_gradient(self._graph, task):
            self._gradients[task.virtual_stage] = self._gradients.get(task.virtual_stage, 0) + value

    def drop(self, task: Task) -> None:
        self._outputs.pop(task, None)

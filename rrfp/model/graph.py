"""The dependency graph of one step: which task needs whose output.

Edges between virtual stages are data. The default is the chain v -> v + 1; nothing else in the package assumes it. The
graph knows neither time nor arrival: it answers who feeds whom, and where a task runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from rrfp.errors import ConfigError
from rrfp.model.placement import Layout, Placement, TablePlacement
from rrfp.model.tasks import Kind, Mode, Task


@dataclass(frozen=True)
class TaskGraph:
    """Tasks and their inputs for one model split into virtual stages.

    Attributes:
        placement: which stage holds which virtual stage.
        edges: pairs (u, v), u < v: the forward of v reads the forward of u. None: the chain.
        split: for each virtual stage, whether its backward is split into B and W. Some modules cannot be split.
        names: of the virtual stages, for people; empty: they have numbers only.

    Raises:
        ConfigError: if an edge does not go upward inside 0..V-1 or occurs twice, or ``split`` or ``names`` has not V
            entries.
    """

    placement: Placement | TablePlacement
    edges: tuple[tuple[int, int], ...] | None = None
    split: tuple[bool, ...] = ()
    names: tuple[str, ...] = ()
    #: predecessors[v]: virtual stages whose forward feeds v.
    predecessors: tuple[tuple[int, ...], ...] = field(init=False, repr=False)
    #: successors[v]: virtual stages that v's forward feeds.
    successors: tuple[tuple[int, ...], ...] = field(init=False, repr=False)
    #: stage_of[v]: the stage that holds v.
    stage_of: tuple[int, ...] = field(init=False, repr=False)
    #: Whether each virtual stage reads the one before it, and perhaps earlier ones too: a chain, skip edges or not.
    is_chain: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        count = self.placement.num_virtual_stages
        if self.edges is None:
            object.__setattr__(self, "edges", tuple((v, v + 1) for v in range(count - 1)))
        if not self.split:
            object.__setattr__(self, "split", (False,) * count)
        if len(self.split) != count:
            raise ConfigError(f"split has {len(self.split)} entries, must have {count}, one for each virtual stage")
        if self.names and len(self.names) != count:
            raise ConfigError(f"names has {len(self.names)} entries, must have {count}, one for each virtual stage")
        assert self.edges is not None
        before: list[list[int]] = [[] for _ in range(count)]
        after: list[list[int]] = [[] for _ in range(count)]
        for u, v in self.edges:
            if not 0 <= u < v < count:
                raise ConfigError(f"edge ({u}, {v}) must go upward between virtual stages 0..{count - 1}")
            if u in before[v]:
                raise ConfigError(f"edge ({u}, {v}) occurs twice")
            before[v].append(u)
            after[u].append(v)
        object.__setattr__(self, "predecessors", tuple(map(tuple, before)))
        object.__setattr__(self, "successors", tuple(map(tuple, after)))
        object.__setattr__(self, "stage_of", tuple(map(self.placement.stage_of, range(count))))
        object.__setattr__(self, "is_chain", all(v - 1 in before[v] for v in range(1, count)))

    @classmethod
    def chain(cls, stages: int, *, chunks: int = 1, layout: Layout = "looped", split: bool = False) -> TaskGraph:
        """The usual pipeline: virtual stage v feeds v + 1, all virtual stages split or none.

        Args:
            stages: N, at least 1.
            chunks: C, chunks a stage, at least 1.
            layout: ``"looped"`` or ``"v"``; see `Placement`.
            split: whether backward is split into B and W.

        Raises:
            ConfigError: as `Placement`.
        """
        placement = Placement(stages, chunks, layout)
        return cls(placement, split=(split,) * placement.num_virtual_stages)

    def kinds(self, virtual_stage: int, mode: Mode) -> tuple[Kind, ...]:
        """The kinds of task that each microbatch runs on a virtual stage, in dependency order.

        Args:
            virtual_stage: 0..V-1.
            mode: training or forward only.
        """
        if mode is Mode.FORWARD:
            return (Kind.F,)
        return (Kind.F, Kind.B, Kind.W) if self.split[virtual_stage] else (Kind.F, Kind.B)

    def tasks(self, stage: int, microbatches: int, mode: Mode = Mode.TRAIN) -> Iterator[Task]:
        """Every task of a stage in a step.

        Args:
            stage: 0..N-1.
            microbatches: M.
            mode: training or forward only.
        """
        for v in self.placement.virtual_stages(stage):
            for kind in self.kinds(v, mode):
                for m in range(microbatches):
                    yield Task(kind, m, v)

    def inputs(self, task: Task) -> tuple[Task, ...]:
        """The tasks whose outputs ``task`` reads.

        F reads the forwards before it; B its own forward and the backwards after it; W its own backward.

        Args:
            task: any task of the graph.
        """
        kind, m, v = task
        if kind is Kind.F:
            return tuple(Task(Kind.F, m, u) for u in self.predecessors[v])
        if kind is Kind.B:
            return (Task(Kind.F, m, v), *(Task(Kind.B, m, w) for w in self.successors[v]))
        return (Task(Kind.B, m, v),)

    def consumers(self, kind: Kind, virtual_stage: int, mode: Mode) -> tuple[tuple[Kind, int], ...]:
        """The (kind, virtual stage) pairs that read an output.

        Args:
            kind: the kind of its task.
            virtual_stage: where that runs.
            mode: training or forward only.
        """
        if kind is Kind.F:
            onward = tuple((Kind.F, w) for w in self.successors[virtual_stage])
            return onward if mode is Mode.FORWARD else (*onward, (Kind.B, virtual_stage))
        if kind is Kind.B:
            back = tuple((Kind.B, u) for u in self.predecessors[virtual_stage])
            return (*back, (Kind.W, virtual_stage)) if self.split[virtual_stage] else back
        return ()

    def last_kind(self, virtual_stage: int, mode: Mode) -> Kind:
        """The kind after which a virtual stage is done with a microbatch.

        Args:
            virtual_stage: 0..V-1.
            mode: training or forward only.
        """
        return self.kinds(virtual_stage, mode)[-1]

    def neighbours(self, stage: int) -> Sequence[int]:
        """The other stages that exchange tensors with a stage, ascending.

        Args:
            stage: 0..N-1.
        """
        assert self.edges is not None
        pairs = [(self.stage_of[u], self.stage_of[v]) for u, v in self.edges]
        return sorted({b if a == stage else a for a, b in pairs if stage in (a, b)} - {stage})

    def text_of(self, task: Task) -> str:
        """``task`` for people: with the name of its virtual stage where it has one, such as ``F3@2 (audio)``.

        Args:
            task: any task of the graph.
        """
        return f"{task} ({self.names[task.virtual_stage]})" if self.names else str(task)

    def distance_to_sink(self, stage: int) -> int:
        """How many stages first meet a microbatch between this one and the end: N - stage on a chain.

        It is the longest path from the stage's first virtual stage to a sink, on which a virtual stage counts if it is
        the first one of its stage. 1F1B holds as many microbatches, so that no stage behind runs dry.

        Args:
            stage: 0..N-1.

        Returns:
            At least 1: the stage counts as well.
        """
        return self._distances[self.placement.virtual_stages(stage)[0]]

    @cached_property
    def _distances(self) -> Sequence[int]:
        """By virtual stage, what `distance_to_sink` counts from there on."""
        distances = [0] * len(self.stage_of)
        for v in reversed(range(len(distances))):
            is_first = v == self.placement.virtual_stages(self.stage_of[v])[0]
            distances[v] = is_first + max((distances[w] for w in self.successors[v]), default=0)
        return distances

    def dependants_here(self, virtual_stage: int) -> tuple[int, ...]:
        """The virtual stages of the same stage that depend on ``virtual_stage``, directly or not, ascending.

        Args:
            virtual_stage: 0..V-1.
        """
        dependants, pending = set[int](), [virtual_stage]
        while pending:
            new = set(self.successors[pending.pop()]) - dependants
            dependants |= new
            pending += new
        stage = self.stage_of[virtual_stage]
        return tuple(v for v in self.placement.virtual_stages(stage) if v in dependants)

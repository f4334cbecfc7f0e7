"""The dependency graph of one step: which task needs whose output.

Edges between virtual stages are data. The default is the chain v -> v + 1; nothing else in the package assumes it. The
graph knows neither time nor arrival: it answers who feeds whom, and where a task runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

from rrfp.errors import ConfigError
from rrfp.model.placement import Layout, Placement, TablePlacement
from rrfp.model.tasks import KINDS, OPPOSITE, Kind, Mode, Side, Task


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
        for option in filter(None, (row.option for row in KINDS.values())):
            runs = getattr(self, option) or (False,) * count
            object.__setattr__(self, option, runs)
            if len(runs) != count:
                raise ConfigError(f"{option} has {len(runs)} entries, must have {count}, one for each virtual stage")
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
        return self._kinds[mode][virtual_stage]

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
        """The tasks whose outputs ``task`` reads: by kind as `KINDS` has them, then as the virtual stages are numbered.

        F reads the forwards before it; B its own forward and the backwards after it; W its own backward.

        Args:
            task: any task of the graph.
        """
        kind, m, v = task
        return tuple([Task(producer, m, u) for producer, u in self._reads[kind][v]])

    def consumers(self, kind: Kind, virtual_stage: int, mode: Mode) -> tuple[tuple[Kind, int], ...]:
        """The (kind, virtual stage) pairs that read an output.

        Args:
            kind: the kind of its task.
            virtual_stage: where that runs.
            mode: training or forward only.
        """
        return self._readers[mode][kind][virtual_stage]

    @cached_property
    def _kinds(self) -> Mapping[Mode, Sequence[tuple[Kind, ...]]]:
        """By mode and virtual stage, the kinds of its tasks."""
        runs = {kind: None if row.option is None else getattr(self, row.option) for kind, row in KINDS.items()}
        every = range(len(self.stage_of))
        train = [tuple(kind for kind, on in runs.items() if on is None or on[v]) for v in every]
        forward = [tuple(kind for kind in kinds if KINDS[kind].in_evaluation) for kinds in train]
        return {Mode.TRAIN: train, Mode.FORWARD: forward}

    @cached_property
    def _around(self) -> Mapping[Side, Sequence[tuple[int, ...]]]:
        here = [(v,) for v in range(len(self.stage_of))]
        return {Side.BEFORE: self.predecessors, Side.HERE: here, Side.AFTER: self.successors}

    @cached_property
    def _reads(self) -> Mapping[Kind, Sequence[tuple[tuple[Kind, int], ...]]]:
        """By kind and virtual stage, what a task reads."""
        kinds, around = self._kinds[Mode.TRAIN], self._around
        return {
            kind: [
                tuple((read, u) for read, side in row.reads for u in around[side][v] if read in kinds[u])
                for v in range(len(kinds))
            ]
            for kind, row in KINDS.items()
        }

    @cached_property
    def _readers(self) -> Mapping[Mode, Mapping[Kind, Sequence[tuple[tuple[Kind, int], ...]]]]:
        """By mode, kind and virtual stage, what reads an output."""
        around, every = self._around, range(len(self.stage_of))
        readers: dict[Mode, dict[Kind, list[tuple[tuple[Kind, int], ...]]]] = {}
        for mode, kinds in self._kinds.items():
            own = readers[mode] = {}
            for kind in KINDS:
                sides = [
                    (reader, OPPOSITE[s]) for reader, row in KINDS.items() for read, s in row.reads if read is kind
                ]
                own[kind] = [
                    tuple((reader, w) for reader, side in sides for w in around[side][v] if reader in kinds[w])
                    for v in every
                ]
        return readers

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


#: The text for a virtual stage.
TextOf = Callable[[int], str]


def numbered(virtual_stage: int) -> str:
    """Such as ``virtual stage 3``: the text in a pipeline without parts."""
    return f"virtual stage {virtual_stage}"


def named(names: Sequence[str]) -> TextOf:
    """The texts for the virtual stages with ``names``, as a graph of parts has them; `numbered` where there are none.

    Such as ``part 'audio'``, or ``module 1 of part 'lm'`` for ``lm.1``: a part with several modules.
    """
    return partial(_named, names) if names else numbered


def _named(names: Sequence[str], virtual_stage: int) -> str:
    part, has_several, number = names[virtual_stage].partition(".")
    return f"module {number} of part {part!r}" if has_several else f"part {part!r}"

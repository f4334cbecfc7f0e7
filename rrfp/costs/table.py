"""The costs of one step: the durations of tasks and the latencies of messages.

`CostTable` is the cost file in memory (the names in brackets are the file's). It knows durations and the placement, and
nothing of schedules, hints, limits or randomness. Every table is complete and valid: the constructor checks all fields.

A table that is not of a chain has the graph itself, and a row of latencies for each of its edges.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from rrfp.errors import ConfigError
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Layout, Placement, TablePlacement
from rrfp.model.plain_graph import names_of
from rrfp.model.tasks import KINDS, SENT_TO, Kind, Side
from rrfp.model.visits import Skipped, Visits
from rrfp.plain import number, one_of, whole

#: Rows are virtual stages (or the edges between them), columns microbatches.
Matrix: TypeAlias = npt.NDArray[np.float64]
#: Of the same shape: whether something is there.
Bits: TypeAlias = npt.NDArray[np.bool_]


def _length(value: object) -> int | None:
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes)
    is_array = isinstance(value, np.ndarray) and value.ndim > 0
    return len(value) if is_list or is_array else None  # type: ignore[arg-type]


def checked_matrix(
    # Of the field in the file, for errors.
    name: str,
    rows: Matrix,
    num_rows: int,
    num_columns: int,
    # Of the number of rows, for errors.
    meaning: str,
) -> Matrix:
    """A checked, read-only float64 copy of `rows`; a ConfigError names the entry."""
    length = _length(rows)
    if length is None:
        raise ConfigError(f"{name} must be a list of {num_rows} rows ({meaning})")
    if length != num_rows:
        raise ConfigError(f"{name} has {length} rows, must have {num_rows} ({meaning})")
    for index, row in enumerate(rows):
        entries = _length(row)
        if entries is None:
            raise ConfigError(f"{name}[{index}] must be a list of {num_columns} numbers (one a microbatch)")
        if entries != num_columns:
            raise ConfigError(f"{name}[{index}] has {entries} entries, must have {num_columns} (one a microbatch)")
    try:
        matrix = np.array(rows, dtype=np.float64, order="C") if num_rows else np.empty((0, num_columns))
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"{name} must hold finite numbers >= 0 only ({error})") from None
    if matrix.shape != (num_rows, num_columns):
        raise ConfigError(f"{name} must hold numbers only, {num_rows} rows of {num_columns}")
    wrong = ~(np.isfinite(matrix) & (matrix >= 0))
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise ConfigError(f"{name}[{row}][{column}] is {matrix[row, column]}, must be a finite number >= 0")
    return read_only(matrix + 0.0)  # -0.0 becomes 0.0: equal tables must have equal bytes


def checked_sizes(sizes: Sequence[float], num_microbatches: int) -> tuple[float, ...]:
    """The sizes of microbatches as floats, in any unit; a ConfigError names the entry."""
    length = _length(sizes)
    if length is None:
        raise ConfigError(f"sizes must be a list of {num_microbatches} numbers, one a microbatch")
    if length != num_microbatches:
        raise ConfigError(f"sizes has {length} entries, must have {num_microbatches}, one a microbatch")
    return tuple(number(f"sizes[{index}]", size, 0) + 0.0 for index, size in enumerate(sizes))


def read_only(matrix: Matrix) -> Matrix:
    """``matrix`` itself, read-only from now on."""
    matrix.setflags(write=False)
    return matrix


PLACEMENTS: tuple[str, ...] = get_args(Layout)
#: The matrices: name in the file -> attribute, in the order of writing.
MATRICES = {
    **{kind.value: row.name for kind, row in KINDS.items()},
    **{f"latency_{kind}": f"latency_{KINDS[kind].name}" for kind in SENT_TO},
    "bytes": "held",
}
#: Those that a table may lack.
OPTIONAL_MATRICES = frozenset({"bytes", *(kind.value for kind, row in KINDS.items() if row.option is not None)})

#: numpy's sizes are numbers of 64 bits. The product of two counts fits into a line of an error.
_MOST_COUNT = 2**63 - 1


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CostTable:
    """Durations and latencies of one step, in seconds; V = stages x chunks virtual stages, M microbatches.

    A matrix may be any nested sequence of the right shape; it is copied, checked and made read-only. `of_graph` makes
    the table of a graph that is no chain: there V are the graph's virtual stages, and E its edges.

    Attributes:
        stages: number of stages N >= 1 ("stages").
        chunks: chunks a stage C >= 1 ("chunks"); of a graph, those of the stage with most.
        placement: which stage holds which virtual stage: "looped" or "v" ("placement"); "table" of a graph.
        microbatches: number of microbatches M >= 1 ("microbatches").
        forward: V x M: forward durations ("F").
        backward: V x M: backward durations, of the input gradient only when `weight` is given ("B").
        weight: V x M: weight-gradient durations, or None if backward is not split ("W").
        latency_forward: V-1 x M: row v is from the end of F on v to its arrival at v + 1 ("latency_F"). Of a graph, E x
            M, in the order of its edges. An output that several virtual stages of one stage read travels there once,
            and takes the longest of these times.
        latency_backward: V-1 x M: row v is from the end of B on v + 1 to its arrival at v ("latency_B"); of a graph, E
            x M in the same way.
        held: V x M: bytes that a microbatch holds on a virtual stage from the end of its F to the end of its last task
            ("bytes"), or None if the table has no sizes. Fractions are cut off.
        graph: virtual stages with names, where they are and what each reads ("virtual_stages", "placement", "edges").
            None: the chain on that placement.
        skipped: for each microbatch the virtual stages that it does not visit ("skipped"); empty: each visits all. What
            the table has for a skipped task or its messages is 0.
        sizes: M numbers: how large each microbatch is, in any unit, as a trainer knows it before the step ("sizes");
            None: not known. Hints may order microbatches by them; no time depends on them.

    Raises:
        ConfigError: if a size, shape or entry is wrong; the message names the field as the cost file does.
    """

    stages: int
    chunks: int
    placement: Layout | Literal["table"]
    microbatches: int
    forward: Matrix
    backward: Matrix
    weight: Matrix | None
    latency_forward: Matrix
    latency_backward: Matrix
    held: Matrix | None = None
    graph: TaskGraph | None = None
    skipped: tuple[Skipped, ...] = ()
    sizes: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for field in ("stages", "chunks", "microbatches"):
            count = whole(field, getattr(self, field), 1)
            if count > _MOST_COUNT:
                raise ConfigError(f"{field} is a number of {count.bit_length()} bits, must be at most {_MOST_COUNT}")
            object.__setattr__(self, field, count)
        if self.graph is not None:
            self._check_graph(self.graph)
        else:
            one_of(PLACEMENTS, "placement", self.placement)
            if self.skipped:
                raise ConfigError("skipped must be empty without graph: a chain has no way round a virtual stage")
        nodes = "stages x chunks" if self.graph is None else "one a virtual stage"
        edges = "one fewer than stages x chunks" if self.graph is None else "one an edge"
        for name, field in MATRICES.items():
            if name in OPTIONAL_MATRICES and getattr(self, field) is None:
                continue
            is_of_edges = name.startswith("latency_")
            rows, meaning = (self.num_edges, edges) if is_of_edges else (self.num_virtual_stages, nodes)
            matrix = checked_matrix(name, getattr(self, field), rows, self.microbatches, meaning)
            object.__setattr__(self, field, matrix)
        if self.skipped:
            self._clear_skipped()
        if self.sizes is not None:
            object.__setattr__(self, "sizes", checked_sizes(self.sizes, self.microbatches))

    @classmethod
    def of_graph(
        cls,
        graph: TaskGraph,
        microbatches: int,
        *,
        skipped: tuple[Skipped, ...] = (),
        **others: Any,
    ) -> CostTable:
        """The table of a graph, any chain with unequal stages or skip edges among them.

        Args:
            graph: of the virtual stages. Its ``split`` is not read: backward is split where there is ``weight``.
            microbatches: M >= 1.
            skipped: for each microbatch the virtual stages that it does not visit; empty: each visits all.
            others: the matrices, and ``sizes``, by the names of the attributes; ``weight``, ``held`` and ``sizes`` may
                be absent.

        Raises:
            ConfigError: as the constructor's, or for two virtual stages of one name.
        """
        stages, chunks, rows = graph.placement.stages, _most_chunks(graph), {"weight": None, **others}
        return cls(stages, chunks, "table", microbatches, graph=graph, skipped=skipped, **rows)

    def _check_graph(self, graph: TaskGraph) -> None:
        form = (("stages", graph.placement.stages), ("chunks", _most_chunks(graph)), ("placement", "table"))
        for name, value in form:
            if getattr(self, name) != value:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, must be {value!r} for this graph")
        count = graph.placement.num_virtual_stages
        object.__setattr__(self, "graph", replace(graph, split=(self.split,) * count, names=names_of(graph)))
        object.__setattr__(self, "skipped", Visits(self.microbatches, tuple(self.skipped)).skipped)
        if beyond := sorted(v for skipped in self.skipped for v in skipped if not 0 <= v < count):
            raise ConfigError(f"skipped has virtual stage {beyond[0]}, must be 0..{count - 1}")

    def _clear_skipped(self) -> None:
        """What stands for absent tasks must not tell equal tables apart."""
        visited, used = self.visited(), self.used()
        for name, field in MATRICES.items():
            if (rows := getattr(self, field)) is not None:
                exists = used if name.startswith("latency_") else visited
                object.__setattr__(self, field, read_only(np.where(exists, rows, 0.0)))

    @property
    def num_virtual_stages(self) -> int:
        """V = stages x chunks, or the virtual stages of the graph."""
        return self.stages * self.chunks if self.graph is None else self.graph.placement.num_virtual_stages

    @property
    def num_edges(self) -> int:
        """The rows of latencies: V - 1, or the edges of the graph."""
        return self.num_virtual_stages - 1 if self.graph is None else len(self.graph.edges or ())

    @property
    def visits(self) -> Visits:
        """Which virtual stages each microbatch visits."""
        return Visits(self.microbatches, self.skipped)

    @property
    def num_tasks(self) -> int:
        visits = self.num_virtual_stages * self.microbatches - sum(map(len, self.skipped))
        return visits * len(self.durations)

    def to_graph(self) -> TaskGraph:
        """The graph of the virtual stages: of a chain too."""
        if self.placement != "table":
            return TaskGraph.chain(self.stages, chunks=self.chunks, layout=self.placement, split=self.split)
        assert self.graph is not None
        return self.graph

    def edges(self) -> tuple[tuple[int, int], ...]:
        """The pairs of virtual stages that the rows of latencies are for."""
        return self.to_graph().edges or ()

    def visited(self) -> Bits:
        """Whether each microbatch visits each virtual stage, V x M."""
        visited = np.ones((self.num_virtual_stages, self.microbatches), dtype=bool)
        for microbatch, skipped in enumerate(self.skipped):
            visited[list(skipped), microbatch] = False
        return visited

    def used(self) -> Bits:
        """Whether each edge is there for each microbatch, one row an edge: it visits both ends."""
        visited, edges = self.visited(), self.edges()
        return visited[[u for u, _ in edges]] & visited[[v for _, v in edges]]

    @property
    def durations(self) -> dict[Kind, Matrix]:
        """By kind, the durations of its tasks, V x M; without kinds that no virtual stage runs."""
        by_kind = {kind: getattr(self, row.name) for kind, row in KINDS.items()}
        return {kind: rows for kind, rows in by_kind.items() if rows is not None}

    @property
    def split(self) -> bool:
        """Whether backward is split into input gradient (B) and weight gradient (W)."""
        return self.weight is not None

    def stage_of(self, virtual_stage: int) -> int:
        """The stage that holds a virtual stage.

        Args:
            virtual_stage: 0..V-1.
        """
        return self._where.stage_of(virtual_stage)

    def virtual_stages_of(self, stage: int) -> tuple[int, ...]:
        """The virtual stages that a stage holds, by chunk.

        Args:
            stage: 0..N-1.
        """
        return self._where.virtual_stages(stage)

    def chunks_of(self, stage: int) -> int:
        """The number of virtual stages of a stage.

        Args:
            stage: 0..N-1.
        """
        return self._where.chunks_of(stage)

    @property
    def _where(self) -> Placement | TablePlacement:
        if self.placement != "table":
            return Placement(self.stages, self.chunks, self.placement)
        assert self.graph is not None
        return self.graph.placement

    def duration(self, kind: str, virtual_stage: int, microbatch: int) -> float:
        """Seconds for which one task occupies its lane.

        Args:
            kind: "F", "B" or "W".
            virtual_stage: 0..V-1.
            microbatch: 0..M-1.

        Raises:
            ConfigError: if `kind` is unknown, or is "W" and the table is not split.
        """
        durations: dict[Any, Matrix] = {**self.durations}
        if kind not in durations:
            kinds = ", ".join(durations) + ("" if self.split else " (the costs are not split)")
            raise ConfigError(f"kind is {str(kind)!r}, must be one of: {kinds}")
        return float(durations[kind][virtual_stage, microbatch])

    def held_bytes(self, microbatch: int, virtual_stage: int) -> int:
        """Bytes that a microbatch holds on a virtual stage from the end of its F to the end of its last task.

        Args:
            microbatch: 0..M-1.
            virtual_stage: 0..V-1.

        Returns:
            0 if the table has no sizes.
        """
        return 0 if self.held is None else int(self.held[virtual_stage, microbatch])

    def acting_latencies(self) -> tuple[Matrix, Matrix]:
        """The effective forward and backward latencies, a row an edge: zero between two chunks of one stage."""
        where = self._where
        crosses = np.array([where.stage_of(u) != where.stage_of(v) for u, v in self.edges()], dtype=bool)
        keep = crosses[:, np.newaxis]
        return np.where(keep, self.latency_forward, 0.0), np.where(keep, self.latency_backward, 0.0)

    def work(self) -> Matrix:
        """Seconds of lane time of each stage in the step, shape (N,)."""
        total = np.zeros(self.stages)
        for rows in self.durations.values():
            np.add.at(total, [self.stage_of(v) for v in range(self.num_virtual_stages)], rows.sum(axis=1))
        return total

    def to_unsplit(self) -> CostTable:
        """The same step with every B and its W as one task; this table itself if backward is not split."""
        return self if self.weight is None else replace(self, backward=self.backward + self.weight, weight=None)

    def digest(self) -> str:
        """16 hexadecimal digits that two tables share exactly when they are bitwise equal; sizes do not count."""
        header: list[object] = [self.stages, self.chunks, self.placement, self.microbatches, self.split]
        if self.graph is not None:
            header += [self.graph.names, self.graph.stage_of, self.graph.edges, [*map(sorted, self.skipped)]]
        total = hashlib.sha256(json.dumps(header).encode())
        for rows in (*self.durations.values(), self.latency_forward, self.latency_backward):
            total.update(rows.astype("<f8").tobytes())
        if self.held is not None:
            total.update(b"bytes" + self.held.astype("<f8").tobytes())
        return total.hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CostTable):
            return NotImplemented
        return self.sizes == other.sizes and self.digest() == other.digest()

    def __hash__(self) -> int:
        return hash(self.digest())

    def __repr__(self) -> str:
        shape = f"stages={self.stages}, chunks={self.chunks}, placement={self.placement!r}"
        if self.graph is not None:
            shape = f"stages={self.stages}, virtual_stages={self.num_virtual_stages}, edges={self.num_edges}"
        return f"CostTable({shape}, microbatches={self.microbatches}, split={self.split}, digest={self.digest()})"


def _most_chunks(graph: TaskGraph) -> int:
    return max(map(graph.placement.chunks_of, range(graph.placement.stages)))


#: Of each virtual stage: the stage that its output goes to -> seconds by microbatch. Arrays of Python: a number of one
#: of numpy costs more to read than an operation on a heap.
MessageTimes = dict[Kind, Sequence[dict[int, "array[float]"]]]


def message_times(costs: CostTable) -> MessageTimes:
    nodes = range(costs.num_virtual_stages)
    times: dict[Kind, list[dict[int, Matrix]]] = {kind: [{} for _ in nodes] for kind in SENT_TO}
    for kind, side in SENT_TO.items():
        for (u, v), row in zip(costs.edges(), getattr(costs, MATRICES[f"latency_{kind}"]), strict=True):
            sender, reader = (u, v) if side is Side.AFTER else (v, u)
            rows, peer = times[kind][sender], costs.stage_of(reader)
            if costs.stage_of(sender) != peer:
                rows[peer] = np.maximum(rows[peer], row) if peer in rows else row
    return {
        kind: [{peer: array("d", row.tobytes()) for peer, row in rows.items()} for rows in of_kind]
        for kind, of_kind in times.items()
    }

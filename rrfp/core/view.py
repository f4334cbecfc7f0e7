"""The read-only view of a stage that hints receive."""

from __future__ import annotations

from rrfp.core.durations import MeanDurations
from rrfp.core.graph import Graph
from rrfp.core.placement import Placement, TablePlacement
from rrfp.core.step import Step
from rrfp.core.tasks import Kind, Mode


class StageView:
    """Implements `rrfp.core.hint.View` over a step."""

    __slots__ = ("_durations", "_graph", "_stage", "_step")

    def __init__(self, graph: Graph, stage: int, step: Step, durations: MeanDurations) -> None:
        self._graph = graph
        self._stage = stage
        self._step = step
        self._durations = durations

    @property
    def stage(self) -> int:
        """This stage."""
        return self._stage

    @property
    def graph(self) -> Graph:
        """The dependency graph."""
        return self._graph

    @property
    def placement(self) -> Placement | TablePlacement:
        """Where virtual stages live."""
        return self._graph.placement

    @property
    def mode(self) -> Mode:
        """Training or forward only."""
        return self._step.id.mode

    @property
    def microbatches(self) -> int:
        """M."""
        return self._step.id.microbatches

    @property
    def sizes(self) -> tuple[float, ...] | None:
        """How large each microbatch is, where the caller says so."""
        return self._step.sizes

    @property
    def size_correlation(self) -> float | None:
        """The least correlation of sizes with the times of any stage, as last measured."""
        return self._step.size_correlation

    @property
    def skipped(self) -> tuple[frozenset[int], ...]:
        """By microbatch, the virtual stages that it does not visit."""
        return self._step.visits.skipped

    @property
    def slots(self) -> int | None:
        """K * C or None."""
        return self._step.admission.slots

    @property
    def held(self) -> int:
        """D."""
        return self._step.admission.held

    @property
    def held_bytes(self) -> int:
        """Bytes held."""
        return self._step.admission.bytes.own

    @property
    def most_bytes(self) -> int | None:
        """The limit on bytes or None."""
        return self._step.admission.most_bytes

    @property
    def last_kind(self) -> Kind | None:
        """The kind enqueued last."""
        return self._step.last_kind

    @property
    def consumed_downstream(self) -> int | None:
        """Forward outputs that successors have started to use."""
        reported = self._step.consumed_by
        return sum(reported.values()) if reported else None

    def num_enqueued(self, kind: Kind, chunk: int | None = None) -> int:
        """Tasks of ``kind`` enqueued in this step."""
        counts = self._step.enqueued[kind]
        return sum(counts) if chunk is None else counts[chunk]

    @property
    def num_enqueued_total(self) -> int:
        """Tasks enqueued in this step."""
        return self._step.num_enqueued

    def mean_seconds(self, kind: Kind, chunk: int) -> float | None:
        """Mean measured duration, seconds."""
        return self._durations.mean(kind, chunk)

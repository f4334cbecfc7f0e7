"""The read-only view of a stage that hints are given."""

from __future__ import annotations

from rrfp.core.graph import Graph
from rrfp.core.step_state import StepState
from rrfp.core.tasks import Kind, Mode
from rrfp.core.topology import Placement


class MeanDurations:
    """Running means of task durations in seconds, by kind and local chunk; they outlive steps."""

    def __init__(self) -> None:
        self._sums: dict[tuple[Kind, int], tuple[int, float]] = {}

    def add(self, kind: Kind, chunk: int, seconds: float) -> None:
        """One more measurement."""
        count, total = self._sums.get((kind, chunk), (0, 0.0))
        self._sums[kind, chunk] = (count + 1, total + seconds)

    def mean(self, kind: Kind, chunk: int) -> float | None:
        """The mean, or None before the first measurement."""
        count, total = self._sums.get((kind, chunk), (0, 0.0))
        return total / count if count else None


class StageView:
    """Implements `rrfp.core.hint.View` over a step's state."""

    __slots__ = ("_durations", "_graph", "_stage", "_state")

    def __init__(self, graph: Graph, stage: int, state: StepState, durations: MeanDurations) -> None:
        self._graph = graph
        self._stage = stage
        self._state = state
        self._durations = durations

    @property
    def stage(self) -> int:
        """This stage."""
        return self._stage

    @property
    def placement(self) -> Placement:
        """Where virtual stages live."""
        return self._graph.placement

    @property
    def mode(self) -> Mode:
        """Training or forward only."""
        return self._state.id.mode

    @property
    def microbatches(self) -> int:
        """M."""
        return self._state.id.microbatches

    @property
    def slots(self) -> int | None:
        """K * C or None."""
        return self._state.admission.slots

    @property
    def held(self) -> int:
        """D."""
        return self._state.admission.held

    @property
    def held_bytes(self) -> int:
        """Bytes held."""
        return self._state.admission.held_bytes

    @property
    def last_kind(self) -> Kind | None:
        """The kind enqueued last."""
        return self._state.last_kind

    @property
    def consumed_downstream(self) -> int | None:
        """Forward outputs that successors have started to use."""
        reported = self._state.consumed_by
        return sum(reported.values()) if reported else None

    def num_enqueued(self, kind: Kind, chunk: int | None = None) -> int:
        """Tasks of ``kind`` enqueued in this step."""
        counts = self._state.enqueued[kind]
        return sum(counts) if chunk is None else counts[chunk]

    @property
    def num_enqueued_total(self) -> int:
        """Tasks enqueued in this step."""
        return self._state.num_enqueued

    def mean_seconds(self, kind: Kind, chunk: int) -> float | None:
        """Mean measured duration, seconds."""
        return self._durations.mean(kind, chunk)

    @property
    def graph(self) -> Graph:
        """The dependency graph."""
        return self._graph

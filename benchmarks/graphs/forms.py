"""The forms of the multimodal model that real processes run: each as a graph of RRFP with cost tables of its own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import NamedTuple

import rrfp
from benchmarks.graphs.runs import FORMS, LIMITS, MICROBATCHES
from benchmarks.shared.tables import scaled
from rrfp.costs.table import CostTable
from rrfp.lab.generators.multimodal import PARTS, multimodal_costs, multimodal_sizes

#: Bytes held, and limits, over those of the tables: outputs on their way count too, and must be small beside them.
SCALE = 64


class Turn(NamedTuple):
    """One step; rounds count from 1, round 0 warms up."""

    number: int
    limit: str
    form: str


@dataclass(frozen=True, slots=True)
class Settings:
    """What one set of processes runs.

    Attributes:
        stages: N, one process each.
        images: share of microbatches with an image.
        sounds: share of microbatches with a sound.
        microbatches: M.
        rounds: measured steps of each form and limit; every round has microbatches of its own.
        num_bytes: of every tensor between virtual stages.
        pace: the factor on all durations. The longer tasks are, the less does the time of messages and decisions count.
    """

    stages: int
    images: float
    sounds: float
    microbatches: int = MICROBATCHES
    rounds: int = 20
    num_bytes: int = 2 << 20
    pace: float = 1.0

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    def turns(self) -> Iterator[Turn]:
        """All steps in order: the forms alternate, and the first one changes from round to round."""
        for number in range(self.rounds + 1):
            first, forms = number % len(FORMS), tuple(FORMS)
            for limit in LIMITS:
                for form in (*forms[first:], *forms[:first]):
                    yield Turn(number, limit, form)

    def table(self, turn: Turn) -> CostTable:
        """The durations and held bytes of a step."""
        graph, skip = FORMS[turn.form]
        sizes = (self.stages, self.microbatches)
        table = multimodal_costs(graph, *sizes, images=self.images, sounds=self.sounds, skip=skip, step=turn.number)
        return scaled(table, self.pace)

    def sizes(self, turn: Turn) -> tuple[float, ...]:
        """How large the microbatches are."""
        return multimodal_sizes(self.microbatches, images=self.images, sounds=self.sounds, step=turn.number)


def declared(table: CostTable) -> rrfp.Graph:
    """The graph of a table's parts."""
    tasks = table.to_graph()
    places: dict[str, list[int]] = {}
    for name, stage in zip(tasks.names, tasks.stage_of, strict=True):
        places.setdefault(name.partition(".")[0], []).append(stage)
    graph = rrfp.Graph()
    encoders = {name: graph.part(name, stages=places[name], optional=True) for name in PARTS if name != "lm"}
    graph.part("lm", stages=places["lm"], reads=encoders)
    return graph


def visits_of(table: CostTable) -> dict[str, list[bool]]:
    """Which microbatches visit each encoder."""
    names = table.to_graph().names
    first = {name.partition(".")[0]: v for v, name in reversed(list(enumerate(names)))}
    skipped = table.skipped or (frozenset(),) * table.microbatches
    return {part: [v not in each for each in skipped] for part, v in first.items() if part != "lm"}

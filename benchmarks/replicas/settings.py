"""What the benchmark of replicas and its workers share: layouts, and a rank that is slow."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import numpy as np

from rrfp.costs.table import CostTable
from rrfp.lab.simulation import simulate
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Layout as ChunkLayout

#: A forward and a whole backward, in seconds.
FORWARD_S, BACKWARD_S = 0.010, 0.020
#: Of the inputs of a microbatch, such as 8,192 tokens of 8 bytes; of an activation, and of a gradient.
TENSOR_BYTES = 1 << 16
#: Seconds that every message takes over slow links.
LATENCY_S = 0.001
FACTORS = (1.0, 1.5, 2.0, 4.0)
LIMIT = "2n"
#: How replicas share: not at all, ``share_replicas="dealt"``, ``share_replicas=True``.
METHODS = ("plain", "dealt", "claimed")


class Layout(NamedTuple):
    """Stages, copies of each, and where a stage has several chunks how these lie."""

    stages: int
    replicas: int
    chunks: int = 1
    placement: ChunkLayout = "looped"

    @property
    def slow_stage(self) -> int:
        """Whose rank in replica 0 is slow."""
        return self.stages // 2

    @property
    def microbatches(self) -> int:
        """M of each replica."""
        return 4 * self.stages

    @property
    def graph(self) -> TaskGraph:
        """Of one replica; its virtual stages are equal, and take a share of a stage's time each."""
        return TaskGraph.chain(self.stages, chunks=self.chunks, layout=self.placement)

    def __str__(self) -> str:
        text = f"PP {self.stages} x DP {self.replicas}"
        return text if self.chunks == 1 else f"{text}, {self.chunks} chunks {self.placement}"


REAL = (Layout(4, 2), Layout(2, 4))
CHUNKED = (Layout(4, 2, 2, "looped"), Layout(4, 2, 2, "v"))
LAYOUTS = (*REAL, Layout(8, 8), *CHUNKED)


@dataclass(frozen=True, slots=True)
class Settings:
    """A run of processes.

    Attributes:
        layout: of the ranks.
        factors: how much slower the slow rank is, one after the other.
        rounds: measured steps of each method and factor.
        pace: by how much tasks are longer than `FORWARD_S` and `BACKWARD_S`, and messages than ``latency``.
        latency: seconds that a message takes; 0: over the links that there are.
        methods: of `METHODS`.
    """

    layout: Layout
    factors: Sequence[float] = FACTORS
    rounds: int = 8
    pace: float = 1.0
    latency: float = 0.0
    methods: Sequence[str] = METHODS

    def to_json(self) -> str:
        """For a worker's command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Settings:
        """Read `to_json`'s text."""
        plain = json.loads(text)
        return cls(**{**plain, "layout": Layout(*plain["layout"])})


def table_of(
    layout: Layout, sizes: Sequence[float], slow: float = 1.0, stage: int | None = None, latency: float = 0.0
) -> CostTable:
    """One replica's step of microbatches of these sizes.

    Args:
        layout: of the ranks.
        sizes: of the microbatches.
        slow: the factor of its slow rank.
        stage: of that rank; None: `Layout.slow_stage`.
        latency: seconds that a message takes.
    """
    slow_stage, stage_of = layout.slow_stage if stage is None else stage, layout.graph.stage_of
    by_stage = [(slow if own == slow_stage else 1.0) / layout.chunks for own in stage_of]
    factors = np.asarray(by_stage)[:, np.newaxis] * np.asarray(sizes)
    travel = np.full((len(stage_of) - 1, len(sizes)), latency)
    forward, backward = FORWARD_S * factors, BACKWARD_S * factors
    return CostTable(
        layout.stages, layout.chunks, layout.placement, len(sizes), forward, backward, None, travel, travel
    )


def seconds_of(table: CostTable, sizes: Sequence[float] | None = None) -> float:
    """A step of one replica, by the engine; ``sizes`` are for the hint."""
    return simulate(table, hint="slot-aware-pyramid", limit=LIMIT, sizes=sizes).makespan

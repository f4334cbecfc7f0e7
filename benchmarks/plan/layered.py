"""Models of the profiles by layers: what a step takes with the layers anywhere, and the file of what each takes."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rrfp.costs import PROFILES, CostTable
from rrfp.costs.table import Matrix
from rrfp.lab.generators.jitter import with_jitter
from rrfp.lab.generators.latency import with_latency
from rrfp.lab.generators.profiles import PLAIN_BYTES, PLAIN_FORWARD
from rrfp.lab.generators.streams import RandomStream, generator
from rrfp.lab.generators.workloads import machine_factors, output_layer
from rrfp.lab.planning.layers import ModelLayout
from rrfp.model.placement import Placement

#: Of a plain stage.
LAYERS = 4


@dataclass(frozen=True, slots=True)
class Model:
    """A profile's model, four layers a plain stage, and the output layer behind them.

    Attributes:
        profile: says what the layers of each plain stage take for each microbatch, and which machine is slow.
        stages: N.
        microbatches: M.
        jitter: of tasks.
        seed: of all.
    """

    profile: str
    stages: int
    microbatches: int
    jitter: str = "J1"
    seed: int = 0

    @property
    def layers(self) -> int:
        """L."""
        return LAYERS * self.stages

    @property
    def slow(self) -> tuple[int, ...]:
        """Stages on slow machines."""
        return tuple(np.flatnonzero(machine_factors(self.profile, self.stages) > 1).tolist())

    def even(self, chunks: int = 1, placement: Any = "looped") -> ModelLayout:
        """Equally many layers in each virtual stage."""
        part = self.layers // (self.stages * chunks)
        return ModelLayout(Placement(self.stages, chunks, placement), tuple(range(part, self.layers, part)))

    def _pieces(self, step: int) -> Matrix:
        """The factors of each layer for each microbatch, first what is ahead of them (nothing), last the output."""
        random = generator(RandomStream.PROFILE, self.seed, step)
        factors = PROFILES[self.profile](self.stages, self.microbatches, random)
        ends = np.zeros((1, self.microbatches)), output_layer(self.profile) * factors[-1:]
        return np.concatenate([ends[0], np.repeat(factors / LAYERS, LAYERS, axis=0), ends[1]])

    def costs(self, layout: ModelLayout, step: int, *, split: bool = False) -> CostTable:
        """What a step takes; weight gradients take half of backward."""
        pieces, where = self._pieces(step), layout.where
        rows = PLAIN_FORWARD * np.array([pieces[part].sum(axis=0) for part in layout.pieces(self.layers)])
        slow = machine_factors(self.profile, self.stages)[[where.stage_of(v) for v in range(len(rows))], np.newaxis]
        none, held = np.zeros((len(rows) - 1, self.microbatches)), rows * (PLAIN_BYTES / PLAIN_FORWARD)
        times: Any = {"forward": rows * slow, "backward": 2 * rows * slow, "weight": None}
        shape = where.stages, where.chunks, where.layout, self.microbatches
        sizes = tuple(pieces.sum(axis=0).tolist())
        table = CostTable(*shape, latency_forward=none, latency_backward=none, held=held, sizes=sizes, **times)
        table = with_latency(
            with_jitter(table, self.jitter, seed=self.seed, step=step), "wire", seed=self.seed, step=step
        )
        return replace(table, backward=table.backward / 2, weight=table.backward / 2) if split else table

    def write_layers(self, path: Path, layout: ModelLayout, steps: int) -> None:
        """What each layer takes in the mean over the microbatches of some steps, on a machine that is not slow."""
        mean = np.mean([self._pieces(step).mean(axis=1) for step in range(steps)], axis=0) * PLAIN_FORWARD
        pieces = [
            {"names": [], "forward": seconds, "backward": 2 * seconds, "num_bytes": int(1e9 * seconds)}
            for seconds in mean.tolist()
        ]
        where = layout.where
        split = {"stages": where.stages, "chunks": where.chunks, "placement": where.layout, "cuts": [*layout.cuts]}
        path.write_text(json.dumps({**split, "before": pieces[0], "layers": pieces[1:-1], "after": pieces[-1]}))

    def to_json(self) -> str:
        """One line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Model:
        """Read `to_json`'s line back."""
        return cls(**json.loads(text))

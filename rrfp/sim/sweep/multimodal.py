"""The multimodal model as the workload of a run: a chain, a branch, or co-located; see `rrfp.costs.multimodal`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from rrfp.costs.multimodal import IMAGES, MULTIMODAL, SOUNDS, GraphName, multimodal_costs, multimodal_sizes
from rrfp.costs.streams import whole
from rrfp.costs.table import CostTable


@dataclass(frozen=True, slots=True, kw_only=True)
class MultimodalWorkload:
    """The arguments of `rrfp.costs.multimodal.multimodal_costs`, by the same names.

    Raises:
        ConfigError: a value is not allowed; one line naming it and the allowed values.
    """

    graph: GraphName = "branch"
    stages: int = 8
    microbatches: int = 32
    images: float = IMAGES
    sounds: float = SOUNDS
    skip: bool = True
    split: bool = False
    latency: str = "none"
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("stages", 1), ("microbatches", 1), ("seed", 0)):
            object.__setattr__(self, name, whole(name, getattr(self, name), least))
        # A table of one microbatch refuses every word that the real one would.
        multimodal_costs(self.graph, 1, 1, images=self.images, sounds=self.sounds, latency=self.latency)

    def costs(self) -> CostTable:
        """The cost table, which has bytes."""
        return _made(self)

    def sized_costs(self) -> CostTable:
        """The same."""
        return self.costs()

    def sizes(self) -> Sequence[float]:
        """How large each microbatch is, as a trainer would know it before the step."""
        return multimodal_sizes(self.microbatches, images=self.images, sounds=self.sounds, seed=self.seed)

    @property
    def profile(self) -> str:
        """Its name."""
        return MULTIMODAL

    @property
    def tp(self) -> None:
        """Stages of one rank."""
        return None

    @property
    def chunks(self) -> int:
        """The most chunks of a stage."""
        return self.costs().chunks

    @property
    def num_tasks(self) -> int:
        """Tasks of a step."""
        return self.costs().num_tasks

    @property
    def rank_draws(self) -> Mapping[str, Any]:
        """Nothing: there are no groups of ranks."""
        return {}

    def without_seed(self) -> MultimodalWorkload:
        """The same for all seeds."""
        return replace(self, seed=0)

    def __str__(self) -> str:
        shares = f"images {self.images:g}, sounds {self.sounds:g}, {'skipped' if self.skip else 'visited'} where absent"
        size = f"stages {self.stages}, microbatches {self.microbatches}"
        return f"{MULTIMODAL} as {self.graph}, {size}, {shares}, latency {self.latency}, seed {self.seed}"


@lru_cache(maxsize=4)
def _made(workload: MultimodalWorkload) -> CostTable:
    return multimodal_costs(
        workload.graph,
        workload.stages,
        workload.microbatches,
        images=workload.images,
        sounds=workload.sounds,
        skip=workload.skip,
        split=workload.split,
        seed=workload.seed,
        latency=workload.latency,
    )

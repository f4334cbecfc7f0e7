"""What a simulated run computes, as plain data: a seeded profile, or a cost file.

Everything that a caller can get wrong by itself is refused when these are made.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from rrfp.costs.files import read_costs, read_sizes
from rrfp.costs.table import CostTable
from rrfp.lab.generators.multimodal import IMAGES, MULTIMODAL, SOUNDS, GraphName, multimodal_costs, multimodal_sizes
from rrfp.lab.generators.profiles import make_costs, microbatch_sizes
from rrfp.lab.generators.rank_latency import SHUFFLED
from rrfp.lab.simulation import planned_sizes
from rrfp.model.placement import Layout
from rrfp.plain import whole

#: ``sizes`` of a cost file that stand for the sums of its times.
PLANNED = "planned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A named and seeded workload: the arguments of `rrfp.costs.make_costs`."""

    profile: str
    stages: int
    microbatches: int
    chunks: int = 1
    placement: Layout = "looped"
    split: bool = False
    jitter: str = "J0"
    latency: str = "none"
    seed: int = 0
    #: T, ranks of a tensor-parallel group, each of which draws its messages from ``latency``; None: single ranks.
    tp: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("stages", 1), ("microbatches", 1), ("chunks", 1), ("seed", 0)):
            object.__setattr__(self, name, whole(name, getattr(self, name), least))
        _check_ranks(self)
        # A table for one task refuses every word that the real one would.
        make_costs(self.profile, 1, 1, placement=self.placement, jitter=self.jitter, latency=self.latency)

    def costs(self) -> CostTable:
        """The cost table."""
        return _made(self)

    def sized_costs(self) -> CostTable:
        """The same with bytes, in proportion to planned times; see `rrfp.costs.make_costs`."""
        return _made(self, sized=True)

    def sizes(self) -> Sequence[float]:
        """How large each microbatch is, as a trainer would know it before the step."""
        return microbatch_sizes(self.profile, self.stages, self.microbatches, seed=self.seed)

    @property
    def num_tasks(self) -> int:
        """Tasks of a step, of all ranks."""
        kinds = 3 if self.split else 2
        return self.stages * self.chunks * self.microbatches * kinds * (self.tp or 1)

    @property
    def rank_draws(self) -> Mapping[str, Any]:
        """How the further ranks of a group draw their latencies."""
        return {"latency": self.latency, "seed": self.seed}

    @property
    def short_name(self) -> str:
        """For a file of its costs."""
        chunks = () if self.chunks == 1 else (f"{self.chunks}chunks", self.placement)
        size, split = f"{self.stages}x{self.microbatches}", ("split",) if self.split else ()
        latency = self.latency.replace(":", "-")
        return "-".join((self.profile, size, *chunks, *split, self.jitter, latency, f"seed{self.seed}"))

    def without_seed(self) -> Workload:
        """The same for all seeds."""
        return replace(self, seed=0)

    def __str__(self) -> str:
        return _written(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostFile:
    """A workload that a cost file holds."""

    costs_file: str
    #: What hints receive as sizes of microbatches: the file's own, if it has any (None), the sums of its times
    #: (``planned``), or the numbers of a JSON file, by its path.
    sizes_from: str | None = None
    #: As of `Workload`; further ranks have the file's own latencies of an edge in another order.
    tp: int | None = None

    def __post_init__(self) -> None:
        _check_ranks(self)
        self.sizes()

    def costs(self) -> CostTable:
        """The cost table."""
        try:
            file = os.stat(self.costs_file)
        except OSError:
            return read_costs(self.costs_file)  # which says what is wrong
        return _read(self.costs_file, (file.st_ino, file.st_mtime_ns, file.st_size))

    def sized_costs(self) -> CostTable:
        """The same: with bytes if the file has them."""
        return self.costs()

    def sizes(self) -> Sequence[float] | None:
        """How large each microbatch is; None: untold."""
        costs = self.costs()
        if self.sizes_from is None:
            return costs.sizes
        return planned_sizes(costs) if self.sizes_from == PLANNED else read_sizes(self.sizes_from, costs.microbatches)

    @property
    def chunks(self) -> int:
        """Chunks a stage."""
        return self.costs().chunks

    @property
    def num_tasks(self) -> int:
        """Tasks of a step, of all ranks."""
        return self.costs().num_tasks * (self.tp or 1)

    @property
    def rank_draws(self) -> Mapping[str, Any]:
        """How the further ranks of a group draw their latencies."""
        return {"latency": SHUFFLED, "seed": 0}

    def without_seed(self) -> CostFile:
        """A file has no seed."""
        return self

    def __str__(self) -> str:
        return _written(self)


def with_sizes(workload: Workload | CostFile | MultimodalWorkload, *, sized: bool = False) -> CostTable:
    """The cost table with the sizes that hints receive: what a cost file of the workload holds."""
    table, sizes = workload.sized_costs() if sized else workload.costs(), workload.sizes()
    return table if sizes is None else replace(table, sizes=tuple(sizes))


def _check_ranks(workload: Workload | CostFile) -> None:
    if workload.tp is not None:
        object.__setattr__(workload, "tp", whole("tp", workload.tp, 1))


def _written(workload: Workload | CostFile) -> str:
    values = {field.name: getattr(workload, field.name) for field in fields(workload)}
    return ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)


@lru_cache(maxsize=4)
def _made(workload: Workload, *, sized: bool = False) -> CostTable:
    """The methods of one workload follow each other in a sweep and share its table."""
    return make_costs(
        workload.profile,
        workload.stages,
        workload.microbatches,
        chunks=workload.chunks,
        placement=workload.placement,
        split=workload.split,
        seed=workload.seed,
        jitter=workload.jitter,
        latency=workload.latency,
        sized=sized,
    )


@lru_cache(maxsize=2)
def _read(path: str, version: tuple[int, ...]) -> CostTable:
    """Read once for all methods, and again when the file has another version."""
    return read_costs(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class MultimodalWorkload:
    """The arguments of `rrfp.lab.generators.multimodal.multimodal_costs`, by the same names."""

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
        return _made_multimodal(self)

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
def _made_multimodal(workload: MultimodalWorkload) -> CostTable:
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

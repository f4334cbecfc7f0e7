"""What a simulated run computes, as plain data: a seeded profile, or a cost file.

Everything that a caller can get wrong by itself is refused when these are made.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rrfp.lab.generators import IMAGES, MULTIMODAL, SOUNDS
from rrfp.plain import whole

# What computes is imported where it is used: `rrfp --help` looks at the fields, and must not wait for numpy.
if TYPE_CHECKING:
    from rrfp.costs.table import CostTable
    from rrfp.lab.generators.multimodal import GraphName
    from rrfp.model.placement import Layout

#: ``sizes`` of a cost file that stand for the sums of its times.
PLANNED = "planned"


def as_option(help: str, metavar: str = "", **more: Any) -> Mapping[str, Any]:
    """Metadata of a field for `rrfp.lab.commands.options`, which explains the keys."""
    return {"help": help, "metavar": metavar, **more}


#: A value of a profile's option is tried beside this one.
_LLM = {"profile": "llm"}
_LATENCY = "none, constant, constant:SECONDS, wire, spike or bimodal. Default {default}."
_LATENCIES = "rrfp.lab.generators.latency:LATENCY_MODELS"
_TP = "Ranks of a tensor-parallel group: each stage is T ranks, whose messages take times of their own."
_PROFILE = "A named, seeded workload: llm, mllm, modalities, video, zipf, bimodal, moe, straggler or head."
_WHOLE_IS_BF = "Split backward into input gradient and weight gradient; bfw on whole backwards is bf."
_COSTS = "Cost file (JSON): times of all tasks and messages; `rrfp sweep --save-costs` writes those of profiles."
_SIZES = (
    "Sizes of microbatches for hints: a JSON list of M numbers, or planned, the file's own sums of times. Default: the "
    "cost file's, if it has any."
)
_SHARE = "Share of microbatches with {}, which take as much longer; default {{default}}."
_SKIP = "Whether microbatches skip an encoder that has nothing to do for them, or visit it for no time. Not with chain."


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A named and seeded workload: the arguments of `rrfp.costs.make_costs`."""

    profile: str = field(
        metadata=as_option(_PROFILE, "NAME", known="rrfp.lab.generators.workloads:PROFILES", beside={})
    )
    stages: int = field(default=8, metadata=as_option("Stages; default {default}.", "N", beside=_LLM))
    microbatches: int = field(default=64, metadata=as_option("Microbatches; default {default}.", "M", beside=_LLM))
    chunks: int = field(default=1, metadata=as_option("Chunks a stage; default {default}.", "C", beside=_LLM))
    placement: Layout = field(
        default="looped",
        metadata=as_option("Where chunks live; default {default}.", known=("looped", "v"), beside=_LLM),
    )
    split: bool = field(default=False, metadata=as_option(_WHOLE_IS_BF))
    jitter: str = field(
        default="J0",
        metadata=as_option(
            "How much tasks are delayed; default {default}.",
            "J0..J3",
            known="rrfp.lab.generators.jitter:JITTER_LEVELS",
            beside=_LLM,
        ),
    )
    latency: str = field(default="none", metadata=as_option(_LATENCY, "MODEL", known=_LATENCIES, beside=_LLM))
    seed: int = field(default=0, metadata=as_option("The first seed; default {default}.", "S", least=0))
    #: T, ranks of a tensor-parallel group, each of which draws its messages from ``latency``; None: single ranks.
    tp: int | None = field(default=None, metadata=as_option(_TP, "T", beside=_LLM))

    def __post_init__(self) -> None:
        for name, least in (("stages", 1), ("microbatches", 1), ("chunks", 1), ("seed", 0)):
            object.__setattr__(self, name, whole(name, getattr(self, name), least))
        _check_ranks(self)
        from rrfp.lab.generators.profiles import make_costs

        # A table for one task refuses every word that the real one would.
        make_costs(self.profile, 1, 1, placement=self.placement, jitter=self.jitter, latency=self.latency)

    def costs(self, *, sized: bool = False) -> CostTable:
        """``sized``: with bytes, in proportion to planned times; see `rrfp.costs.make_costs`."""
        return _made(self, sized=sized)

    def sizes(self) -> Sequence[float]:
        from rrfp.lab.generators.profiles import microbatch_sizes

        return microbatch_sizes(self.profile, self.stages, self.microbatches, seed=self.seed)

    @property
    def num_tasks(self) -> int:
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

    def __str__(self) -> str:
        return _written(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostFile:
    """A workload that a cost file holds."""

    costs_file: str = field(metadata=as_option(_COSTS, "FILE", option="costs", is_list=False, beside={}))
    #: What hints receive as sizes of microbatches: the file's own, if it has any (None), the sums of its times
    #: (``planned``), or the numbers of a JSON file, by its path.
    sizes_from: str | None = field(
        default=None, metadata=as_option(_SIZES, "FILE|planned", option="sizes", known=(PLANNED,), is_list=False)
    )
    #: As of `Workload`; further ranks have the file's own latencies of an edge in another order.
    tp: int | None = field(default=None, metadata=as_option(_TP, "T", least=1))

    def __post_init__(self) -> None:
        _check_ranks(self)
        self.sizes()

    def costs(self, *, sized: bool = False) -> CostTable:
        """``sized`` or not: with bytes if the file has them."""
        return _read(self.costs_file, _version(self.costs_file))

    def sizes(self) -> Sequence[float] | None:
        """How large each microbatch is; None: untold."""
        from rrfp.lab.simulation import planned_sizes

        costs = self.costs()
        if self.sizes_from is None:
            return costs.sizes
        if self.sizes_from == PLANNED:
            return planned_sizes(costs)
        return _read_sizes(self.sizes_from, costs.microbatches, _version(self.sizes_from))

    @property
    def chunks(self) -> int:
        return self.costs().chunks

    @property
    def num_tasks(self) -> int:
        return self.costs().num_tasks * (self.tp or 1)

    @property
    def rank_draws(self) -> Mapping[str, Any]:
        """How the further ranks of a group draw their latencies."""
        from rrfp.lab.generators.latency import SHUFFLED

        return {"latency": SHUFFLED, "seed": 0}

    def __str__(self) -> str:
        return _written(self)


def with_sizes(workload: Workload | CostFile | MultimodalWorkload, *, sized: bool = False) -> CostTable:
    table, sizes = workload.costs(sized=sized), workload.sizes()
    return table if sizes is None else replace(table, sizes=tuple(sizes))


def _check_ranks(workload: Workload | CostFile) -> None:
    if workload.tp is not None:
        object.__setattr__(workload, "tp", whole("tp", workload.tp, 1))


def _values(workload: Workload | CostFile | MultimodalWorkload, but: str = "") -> dict[str, Any]:
    return {field.name: getattr(workload, field.name) for field in fields(workload) if field.name != but}


def _written(workload: Workload | CostFile) -> str:
    return ", ".join(f"{name}={value}" for name, value in _values(workload).items() if value is not None)


@lru_cache(maxsize=4)
def _made(workload: Workload, *, sized: bool = False) -> CostTable:
    """The table; methods of one workload follow each other."""
    from rrfp.lab.generators.profiles import make_costs

    return make_costs(**_values(workload, but="tp"), sized=sized)


def _version(path: str) -> tuple[int, ...] | None:
    """Another one when the file has changed; None where it cannot be read, which its reader says."""
    try:
        file = os.stat(path)
    except OSError:
        return None
    return file.st_ino, file.st_mtime_ns, file.st_size


@lru_cache(maxsize=2)
def _read(path: str, version: tuple[int, ...] | None) -> CostTable:
    """The file, read once for all methods, again when it changes."""
    from rrfp.costs.files import read_costs

    return read_costs(path)


@lru_cache
def _read_sizes(path: str, microbatches: int, version: tuple[int, ...] | None) -> tuple[float, ...]:
    """The same."""
    from rrfp.lab.simulation import read_sizes

    return read_sizes(path, microbatches)


@dataclass(frozen=True, slots=True, kw_only=True)
class MultimodalWorkload:
    """The arguments of `rrfp.lab.generators.multimodal.multimodal_costs`, by the same names."""

    graph: GraphName = field(
        default="branch",
        metadata=as_option(
            "Where the parts of the model are; default {default}.", known=("chain", "branch", "colocated"), beside={}
        ),
    )
    stages: int = field(default=8, metadata=as_option("Stages; default {default}.", "N", least=1))
    microbatches: int = field(default=32, metadata=as_option("Microbatches; default {default}.", "M", least=1))
    images: float = field(default=IMAGES, metadata=as_option(_SHARE.format("an image"), "P", beside={}))
    sounds: float = field(default=SOUNDS, metadata=as_option(_SHARE.format("a sound"), "P", beside={}))
    skip: bool = field(default=True, metadata=as_option(_SKIP))
    split: bool = field(default=False, metadata=as_option("Split backward into input gradient and weight gradient."))
    latency: str = field(default="none", metadata=as_option(_LATENCY, "MODEL", known=_LATENCIES, beside={}))
    seed: int = field(default=0, metadata=as_option("Of the microbatches; default {default}.", "S", least=0))

    def __post_init__(self) -> None:
        for name, least in (("stages", 1), ("microbatches", 1), ("seed", 0)):
            object.__setattr__(self, name, whole(name, getattr(self, name), least))
        from rrfp.lab.generators.multimodal import multimodal_costs

        # A table of one microbatch refuses every word that the real one would.
        multimodal_costs(self.graph, 1, 1, images=self.images, sounds=self.sounds, latency=self.latency)

    def costs(self, *, sized: bool = False) -> CostTable:
        return _made_multimodal(self)

    def sizes(self) -> Sequence[float]:
        from rrfp.lab.generators.multimodal import multimodal_sizes

        return multimodal_sizes(self.microbatches, images=self.images, sounds=self.sounds, seed=self.seed)

    @property
    def profile(self) -> str:
        return MULTIMODAL

    @property
    def tp(self) -> None:
        """Stages of one rank."""
        return None

    @property
    def chunks(self) -> int:
        return self.costs().chunks

    @property
    def num_tasks(self) -> int:
        return self.costs().num_tasks

    @property
    def rank_draws(self) -> Mapping[str, Any]:
        """Nothing: there are no groups of ranks."""
        return {}

    def __str__(self) -> str:
        shares = f"images {self.images:g}, sounds {self.sounds:g}, {'skipped' if self.skip else 'visited'} where absent"
        size = f"stages {self.stages}, microbatches {self.microbatches}"
        return f"{MULTIMODAL} as {self.graph}, {size}, {shares}, latency {self.latency}, seed {self.seed}"


@lru_cache(maxsize=4)
def _made_multimodal(workload: MultimodalWorkload) -> CostTable:
    from rrfp.lab.generators.multimodal import multimodal_costs

    return multimodal_costs(**_values(workload))

"""Costs of a model with a vision encoder, an audio encoder and a language model: as a chain, as a branch, co-located.

The three parts take 20, 10 and 50 ms forward for a microbatch of average size, twice that backward, and hold bytes in
proportion to their forward. Not every microbatch has an image or a sound; those that have take as much longer, so that
the mean stays. The three graphs have the same parts, work and bytes, and differ in where these are:

- ``chain``: the parts one after the other, cut into N equal shares of 80 / N ms, one a stage. Every microbatch passes
  through all of them; what it lacks takes no time there.
- ``branch``: the same shares on the same stages, but vision and audio both lead to the language model. A stage whose
  share is of two parts has a virtual stage for each.
- ``colocated``: every stage has an Nth of each part.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from rrfp.costs.table import CostTable, Matrix
from rrfp.errors import ConfigError
from rrfp.lab.generators import IMAGES, SOUNDS
from rrfp.lab.generators.jitter import with_jitter
from rrfp.lab.generators.latency import with_latency
from rrfp.lab.generators.profiles import PLAIN_BYTES, PLAIN_FORWARD
from rrfp.lab.generators.streams import RandomStream, generator
from rrfp.lab.generators.workloads import lognormal
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import TablePlacement
from rrfp.model.visits import Skipped
from rrfp.plain import one_of, whole

GraphName = Literal["chain", "branch", "colocated"]
GRAPHS: tuple[str, ...] = get_args(GraphName)

#: Mean seconds of the forward of each part, in the order of the chain.
PARTS = {"vision": 0.020, "audio": 0.010, "lm": 0.050}
#: Deviations of the logarithms of their factors, which have mean 1.
SIGMAS = {"vision": 0.5, "audio": 0.5, "lm": 0.25}


@dataclass(frozen=True, slots=True)
class _Piece:
    """A stage's share of one part: ``seconds`` of its mean forward."""

    part: str
    stage: int
    seconds: float


def multimodal_costs(
    graph: GraphName,
    stages: int,
    microbatches: int,
    *,
    images: float = IMAGES,
    sounds: float = SOUNDS,
    skip: bool = True,
    split: bool = False,
    seed: int = 0,
    step: int = 0,
    jitter: str = "J0",
    latency: str = "none",
) -> CostTable:
    """The costs of one step, with bytes; microbatches are the same for every graph and number of stages.

    Args:
        graph: ``"chain"``, ``"branch"`` or ``"colocated"``.
        stages: N >= 1.
        microbatches: M >= 1.
        images: the share of microbatches with an image, > 0 and at most 1; each draws by itself.
        sounds: the same of sounds.
        skip: whether microbatches skip an encoder that has nothing to do for them; else they visit it for no time. A
            chain has no way round an encoder: it takes no notice.
        split: whether backward is split into B and W.
        seed: >= 0.
        step: >= 0.
        jitter: a name in `JITTER_LEVELS`.
        latency: a model of `LATENCY_MODELS`.
    """
    one_of(GRAPHS, "graph", graph)
    stages, microbatches = whole("stages", stages, 1), whole("microbatches", microbatches, 1)
    factors = _factors(microbatches, _shares(images, sounds), whole("seed", seed, 0), whole("step", step, 0))
    pieces = _equal_shares(stages) if graph != "colocated" else _spread(stages)
    table = _chain(pieces, factors) if graph == "chain" else _graph(pieces, factors, skip=skip)
    table = with_latency(with_jitter(table, jitter, seed=seed, step=step), latency, seed=seed, step=step)
    return table if split else table.to_unsplit()


def multimodal_sizes(
    microbatches: int, *, images: float = IMAGES, sounds: float = SOUNDS, seed: int = 0, step: int = 0
) -> tuple[float, ...]:
    """The seconds of each microbatch in all, without jitter and latency."""
    factors = _factors(microbatches, _shares(images, sounds), whole("seed", seed, 0), whole("step", step, 0))
    total = sum(3 * seconds * factors[part] for part, seconds in PARTS.items())
    return tuple(np.asarray(total).tolist())


def _shares(images: float, sounds: float) -> dict[str, float]:
    for name, share in (("images", images), ("sounds", sounds)):
        if not 0 < share <= 1:
            raise ConfigError(f"{name} is {share}, must be a share of microbatches, more than 0 and at most 1")
    return {"vision": images, "audio": sounds, "lm": 1.0}


def _factors(microbatches: int, shares: dict[str, float], seed: int, step: int) -> dict[str, Matrix]:
    """By part, each microbatch's factor on its mean forward; 0 without the part."""
    random = generator(RandomStream.PROFILE, seed, step)
    draws = random.random((microbatches, len(PARTS)))
    normal = generator(RandomStream.MULTIMODAL, seed, step).standard_normal((microbatches, len(PARTS)))
    return {
        part: np.where(draws[:, i] < shares[part], lognormal(normal[:, i], SIGMAS[part]) / shares[part], 0.0)
        for i, part in enumerate(PARTS)
    }


def _equal_shares(stages: int) -> list[_Piece]:
    """The parts one after the other, cut into N equal shares."""
    ends = dict(zip(PARTS, itertools.accumulate(PARTS.values()), strict=True))
    cuts = sorted({*ends.values(), *(ends["lm"] * (i + 1) / stages for i in range(stages))})
    pieces, begin = [], 0.0
    for end in cuts:
        if end - begin > 1e-12:  # a cut of stages may be that of two parts, in another rounding
            middle = (begin + end) / 2
            part = next(part for part, until in ends.items() if middle < until)
            pieces.append(_Piece(part, int(middle / ends["lm"] * stages), end - begin))
            begin = end
    return pieces


def _spread(stages: int) -> list[_Piece]:
    return [_Piece(part, stage, seconds / stages) for part, seconds in PARTS.items() for stage in range(stages)]


def _chain(pieces: Sequence[_Piece], factors: dict[str, Matrix]) -> CostTable:
    """One virtual stage a stage."""
    stages = 1 + max(piece.stage for piece in pieces)
    rows = np.zeros((stages, len(factors["lm"])))
    for piece in pieces:
        rows[piece.stage] += piece.seconds * factors[piece.part]
    edges = np.zeros((stages - 1, rows.shape[1]))
    return CostTable(stages, 1, "looped", rows.shape[1], rows, rows, rows, edges, edges, _held(rows))


def _graph(pieces: Sequence[_Piece], factors: dict[str, Matrix], *, skip: bool) -> CostTable:
    """Both encoders' last virtual stages lead to the language model's first."""
    rows = np.stack([piece.seconds * factors[piece.part] for piece in pieces])
    by_part = {part: [v for v, piece in enumerate(pieces) if piece.part == part] for part in PARTS}
    edges = [edge for part in PARTS for edge in itertools.pairwise(by_part[part])]
    edges += [(by_part[part][-1], by_part["lm"][0]) for part in ("vision", "audio")]
    names = tuple(_name(piece.part, by_part[piece.part], v) for v, piece in enumerate(pieces))
    table = TablePlacement(tuple(piece.stage for piece in pieces))
    latencies = np.zeros((len(edges), rows.shape[1]))
    return CostTable.of_graph(
        TaskGraph(table, tuple(edges), names=names),
        rows.shape[1],
        skipped=_skipped(by_part, factors) if skip else (),
        forward=rows,
        backward=rows,
        weight=rows,
        latency_forward=latencies,
        latency_backward=latencies,
        held=_held(rows),
    )


def _held(forward: Matrix) -> Matrix:
    """Bytes in proportion to the forward, at least one."""
    return np.maximum(1.0, forward * (PLAIN_BYTES / PLAIN_FORWARD))


def _name(part: str, virtual_stages: Sequence[int], virtual_stage: int) -> str:
    return part if len(virtual_stages) == 1 else f"{part}.{virtual_stages.index(virtual_stage)}"


def _skipped(by_part: dict[str, list[int]], factors: dict[str, Matrix]) -> tuple[Skipped, ...]:
    """For each microbatch, the virtual stages that have nothing to do."""
    return tuple(
        frozenset(v for part, numbers in by_part.items() if not factors[part][m] for v in numbers)
        for m in range(len(factors["lm"]))
    )

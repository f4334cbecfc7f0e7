"""Runs the multimodal model as each graph on the tables of one draw, in several processes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from rich.console import Console
from rich.progress import Progress

from rrfp.costs import CostTable
from rrfp.engine.engine import run
from rrfp.hints.registry import create_hint
from rrfp.lab.generators.multimodal import GraphName, multimodal_costs, multimodal_sizes
from rrfp.lab.generators.profiles import PLAIN_BYTES, PLAIN_FORWARD
from rrfp.lab.sweep.pool import run_all
from rrfp.memory.admission import Limit

#: What a rank of the whole model's 80 ms holds of as many microbatches of average size as eight stages, and twice that.
LIMITS = {"N": int(0.080 / PLAIN_FORWARD * PLAIN_BYTES), "2N": int(0.160 / PLAIN_FORWARD * PLAIN_BYTES)}
MICROBATCHES = 32

#: The compared forms, by the names of the columns: the graph, and whether microbatches skip what they lack.
CHAIN = "chain"
FORMS: dict[str, tuple[GraphName, bool]] = {
    CHAIN: ("chain", False),
    "branch": ("branch", False),
    "branch, skipped": ("branch", True),
    "co-located": ("colocated", False),
    "co-located, skipped": ("colocated", True),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One draw of the model's microbatches.

    Attributes:
        stages: N.
        latency: a model of `rrfp.costs.LATENCY_MODELS`.
        shares: of microbatches with an image, and with a sound.
        limit: a key of `LIMITS`.
        seed: of the draw.
        hint: that decides.
    """

    stages: int
    latency: str
    shares: tuple[float, float]
    limit: str
    seed: int
    hint: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one case.

    Attributes:
        case: the draw.
        seconds: the step of each of `FORMS`.
        passed: by how many percent a stage of each form held more at most than it has to: than the limit, or than its
            largest microbatch where that is larger.
    """

    case: Case
    seconds: dict[str, float]
    passed: dict[str, float]


def run_case(case: Case) -> Outcome:
    """All forms of one case."""
    images, sounds = case.shares
    sizes = multimodal_sizes(MICROBATCHES, images=images, sounds=sounds, seed=case.seed)
    limits = [Limit(bytes=LIMITS[case.limit])] * case.stages
    seconds, passed = {}, {}
    for form, (graph, skip) in FORMS.items():
        costs = multimodal_costs(
            graph,
            case.stages,
            MICROBATCHES,
            images=images,
            sounds=sounds,
            skip=skip,
            seed=case.seed,
            latency=case.latency,
        )
        result = run(costs, [create_hint(case.hint) for _ in limits], limits, sizes=sizes)
        seconds[form] = result.makespan
        needed = [max(LIMITS[case.limit], largest) for largest in _largest(costs)]
        over = (peaks.num_bytes / most for peaks, most in zip(result.peaks, needed, strict=True))
        passed[form] = 100 * (max(over) - 1)
    return Outcome(case, seconds, passed)


def _largest(costs: CostTable) -> Iterator[float]:
    """By stage, the most bytes of one microbatch."""
    assert costs.held is not None
    for stage in range(costs.stages):
        yield float(costs.held[list(costs.virtual_stages_of(stage))].sum(axis=0).max())


def run_cases(cases: Sequence[Case], jobs: int) -> Iterator[Outcome]:
    """All cases, in their order; shows its progress on stderr."""
    with (
        Progress(console=Console(stderr=True), transient=True) as progress,
        closing(run_all(run_case, cases, jobs=jobs)) as outcomes,
    ):
        yield from progress.track(outcomes, len(cases), description="tables")

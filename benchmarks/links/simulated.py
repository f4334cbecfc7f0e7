"""Slow links in simulation: every method on PipeMorph's settings, and the limits of `auto` on other pipelines."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import fmean

import numpy as np

from benchmarks.replicas.claimed import PooledStep
from benchmarks.replicas.settings import Layout
from rrfp.costs import CostTable, make_costs
from rrfp.engine.engine import run
from rrfp.hints.registry import DEFAULT_HINT, create_hint
from rrfp.lab.cluster.ranks import Rank
from rrfp.lab.simulation import pace_of, resolve_limits, simulate
from rrfp.memory.admission import Limit
from rrfp.memory.round_trips import RoundTripRule
from rrfp.model.tasks import F, Task

#: PipeMorph's setting: stages, microbatches, and milliseconds of F, B and W.
STAGES, MICROBATCHES = 8, 24
MILLISECONDS = {"forward": 9.0, "backward": 10.0, "weight": 6.0}
#: One way, in milliseconds.
DELAYS = (10, 30, 60)
#: The slow links by name: each joins a stage with the next.
LINKS: Mapping[str, tuple[int, ...]] = {"6-7": (6,), "0-1": (0,), "0-1, 1-2": (0, 1), "0-1, 3-4, 6-7": (0, 3, 6)}

#: By name: how backward runs, and the options of `simulate`.
METHODS: Mapping[str, tuple[bool, Mapping[str, str]]] = {
    "1F1B, blocking": (False, {"strict": "1f1b", "sends": "blocking"}),
    "1F1B": (False, {"strict": "1f1b"}),
    "zb-h1": (True, {"strict": "zb-h1"}),
    **{f"whole, {limit}": (False, {"hint": DEFAULT_HINT, "limit": limit}) for limit in ("1f1b", "n", "2n", "auto")},
    **{f"split, {limit}": (True, {"hint": DEFAULT_HINT, "limit": limit}) for limit in ("1f1b", "n", "2n", "auto")},
}

#: Two replicas share forwards by claims, over the same slow links each, within ``limit="auto"``; backwards are whole.
CLAIMED = "claimed, auto"

#: What PipeMorph's own logs show on GPUs for the same links and delays (1F1B, zero bubble, PipeMorph), in milliseconds.
PUBLISHED: Mapping[tuple[str, int], tuple[int, int, int]] = {
    ("6-7", 10): (1082, 1007, 834),
    ("6-7", 30): (1580, 1825, 876),
    ("6-7", 60): (2334, 3257, 891),
    ("0-1", 60): (2532, 3403, 964),
    ("0-1, 1-2", 30): (2106, 2307, 898),
    ("0-1, 3-4, 6-7", 30): (1687, 2123, 944),
}


def table(links: Sequence[int], milliseconds: float, *, split: bool, scale: float = 1e-3) -> CostTable:
    """The cost table with these links slow, both ways; ``scale`` turns milliseconds into the table's seconds."""
    tasks = {kind: np.full((STAGES, MICROBATCHES), scale * each) for kind, each in MILLISECONDS.items()}
    latency = np.zeros((STAGES - 1, MICROBATCHES))
    latency[list(links)] = scale * milliseconds
    weight = tasks["weight"] if split else None
    backward = tasks["backward"] if split else tasks["backward"] + tasks["weight"]
    return CostTable(STAGES, 1, "looped", MICROBATCHES, tasks["forward"], backward, weight, latency, latency)


@dataclass(frozen=True, slots=True)
class Cell:
    """One method with some links slow: a step in milliseconds, and the microbatches that all stages hold at most."""

    links: str
    delay: int
    method: str
    milliseconds: float
    held: int


def cells() -> Iterator[Cell]:
    """Every method without a slow link, then on every setting."""
    settings = [("none", 0), *((links, delay) for links in LINKS for delay in DELAYS)]
    for links, delay in settings:
        for method, (split, options) in METHODS.items():
            found = simulate(table(LINKS.get(links, ()), delay, split=split), **options)  # type: ignore[arg-type]
            held = sum(peaks.held for peaks in found.peaks)
            yield Cell(links, delay, method, 1e3 * found.makespan, held)
        yield _claimed(links, delay)


def _claimed(links: str, delay: int) -> Cell:
    layout, slow = Layout(STAGES, 2), LINKS.get(links, ())
    costs = table(slow, delay, split=False)
    rule, pace = RoundTripRule(layout.graph, claims=True), pace_of(costs)

    def seconds(rank: Rank, task: Task, _: float) -> float:
        return float((costs.forward if task.kind is F else costs.backward)[rank.stage, 0])

    def latency(sender: int, receiver: int) -> float:
        return 1e-3 * delay * (sender != receiver and min(sender, receiver) in slow)

    homes = [replica for replica in range(layout.replicas) for _ in range(MICROBATCHES)]
    step = PooledStep(
        layout, homes, seconds, latency=latency, depths=rule.claimed_ahead(pace), limits=rule.limits(pace)
    )
    milliseconds = 1e3 * step.run()
    held = sum(max(node.core.peaks.held for node in step.nodes if node.rank.stage == stage) for stage in range(STAGES))
    return Cell(links, delay, CLAIMED, milliseconds, held)


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of pipeline under one limit: how much longer a step takes, and the memory as a share of N everywhere."""

    pipelines: str
    limit: str
    #: Percent over the same pipeline without any limit, mean and worst.
    over_unlimited: float
    worst: float
    held: float


#: Runs of each kind of pipeline.
RUNS = 24


def kinds(runs: int = RUNS) -> Iterator[Kind]:
    """Pipelines for which the rule is not proved: unequal stages, jitter, microbatches of different size, chunks.

    Each has one or two slow links of half a period to three periods, both ways, drawn anew for each run.
    """
    for pipelines in ("unequal stages", "llm, J2", "mllm, J2", "two chunks, looped", "two chunks, V"):
        over, held = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)
        for seed in range(1000, 1000 + runs):
            costs = _random(pipelines, seed)
            unlimited = _seconds(costs, [Limit()] * costs.stages)
            for limit in ("n", "2n", "auto without spread", "auto"):
                counts = _limits(costs, limit)
                over[limit].append(100 * (_seconds(costs, counts) / unlimited - 1))
                held[limit].append(
                    fmean(min(each.microbatches or 0, costs.microbatches) for each in counts) / costs.stages
                )
        for limit, each in over.items():
            yield Kind(pipelines, limit, fmean(each), max(each), fmean(held[limit]))


def _random(pipelines: str, seed: int) -> CostTable:
    random = np.random.default_rng(seed)
    shape = int(random.integers(4, 9)), 32
    name, _, more = pipelines.partition(", ")
    if name == "two chunks":
        costs = make_costs("llm", *shape, chunks=2, placement="v" if more == "V" else "looped", seed=seed)
    else:
        costs = make_costs(name if more else "llm", *shape, seed=seed, jitter=more or "J0")
    if name == "unequal stages":
        factors = random.uniform(0.5, 1.5, (costs.stages, 1))
        costs = replace(costs, forward=costs.forward * factors, backward=costs.backward * factors)
    period = pace_of(costs).period
    slow = np.zeros(costs.latency_forward.shape)
    stage_of = costs.to_graph().stage_of
    edges = sorted({tuple(sorted(pair)) for pair in pairwise(stage_of) if pair[0] != pair[1]})
    for index in random.choice(len(edges), size=int(random.integers(1, 3)), replace=False):
        seconds = period * float(random.uniform(0.5, 3.0)) / 2
        for v, pair in enumerate(pairwise(stage_of)):
            if tuple(sorted(pair)) == edges[index]:
                slow[v] = seconds
    return replace(costs, latency_forward=costs.latency_forward + slow, latency_backward=costs.latency_backward + slow)


def _limits(costs: CostTable, limit: str) -> list[Limit]:
    if limit != "auto without spread":
        return resolve_limits(costs, limit)
    pace = replace(pace_of(costs), spread=0.0)
    return [Limit(count) for count in RoundTripRule(costs.to_graph()).limits(pace)]


def _seconds(costs: CostTable, limits: Sequence[Limit]) -> float:
    return run(costs, [create_hint(DEFAULT_HINT) for _ in limits], limits).makespan

"""Runs the paper's methods on cost tables, in several processes, each distinct run once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import fmean, stdev
from typing import Literal

from rich.console import Console
from rich.progress import Progress

from benchmarks.paper.claims import DEFAULT_LIMIT
from benchmarks.paper.workloads import Workload
from rrfp.engine.engine import run as run_engine
from rrfp.engine.record import EngineResult
from rrfp.hints.registry import create_hint, create_strict
from rrfp.lab.blocking import run_blocking
from rrfp.lab.cluster.simulation import simulate_tensor_parallel
from rrfp.lab.sweep.pool import run_all
from rrfp.memory.admission import Limit


@dataclass(frozen=True, slots=True)
class Method:
    """One way to run an iteration.

    Attributes:
        kind: a hint on the group as one rank, the same under a coordination of its ranks, a schedule consumed strictly
            with eager sends, or 1F1B with blocking sends.
        name: the hint's or schedule's.
        limit: of a hint.
        split: whether backward is split.
    """

    kind: Literal["hint", "leader", "agreement", "strict", "blocking"]
    name: str
    limit: int | str | None = None
    split: bool = False


BLOCKING = Method("blocking", "1f1b")
EAGER = Method("strict", "1f1b")
ZB = Method("strict", "zb-h1", split=True)
BF = Method("hint", "bf", DEFAULT_LIMIT)
BFW = Method("hint", "bfw", DEFAULT_LIMIT, split=True)
BF_EQUAL = Method("hint", "bf", "1f1b")
BFW_EQUAL = Method("hint", "bfw", "1f1b", split=True)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One run.

    Attributes:
        seconds: the iteration.
        peak: the largest D of any stage.
        compute: mean share of the iteration in which a lane computes.
        coordination: mean share in which a task was ready on all ranks of a group and did not run.
    """

    seconds: float
    peak: int
    compute: float
    coordination: float = 0.0


def run(experiment: tuple[Method, Workload, int]) -> Outcome:
    """Simulate one iteration: a method on a workload's draw."""
    method, workload, seed = experiment
    if method.kind == "leader" or method.kind == "agreement":
        return _coordinated(method, method.kind, workload, seed)
    split = workload.costs(seed)
    costs = split if method.split else split.to_unsplit()
    stages = range(costs.stages)
    if method.kind == "blocking":
        result = run_blocking(costs)
    elif method.kind == "strict":
        result = run_engine(costs, [create_strict(method.name) for _ in stages], [Limit()] * costs.stages)
    else:
        limits = [Limit.resolve(method.limit, stage, costs.stages) for stage in stages]
        result = run_engine(costs, [create_hint(method.name) for _ in stages], limits)
    return _outcome(result)


def _coordinated(method: Method, how: Literal["leader", "agreement"], workload: Workload, seed: int) -> Outcome:
    """A hint whose ranks have to agree on an order."""
    split = workload.first_rank(seed)
    groups = simulate_tensor_parallel(
        split if method.split else split.to_unsplit(),
        workload.tp,
        coordination=how,
        hint=method.name,
        limit=method.limit,
        latency=workload.latency,
        seed=seed,
    )
    return replace(_outcome(groups.simulation.result), coordination=groups.result.coordination_share)


def _outcome(result: EngineResult) -> Outcome:
    share = fmean(result.busy) / result.makespan
    return Outcome(result.makespan, max(peak.held for peak in result.peaks), share)


class Runs:
    """Every wanted (method, workload, replicas), over the same seeds.

    Args:
        seeds: how many; the same draws for every method.
        most_microbatches: cut every workload down to this many, for a smoke run.
    """

    def __init__(self, seeds: int, most_microbatches: int | None = None) -> None:
        self.seeds = seeds
        self._most_microbatches = most_microbatches
        self._wanted: dict[tuple[Method, Workload], int] = {}
        self._found: dict[tuple[Method, Workload, int], Outcome] = {}

    def want(self, workload: Workload, methods: Iterable[Method], replicas: int = 1) -> None:
        """These will be asked for."""
        for method in methods:
            key = (method, workload)
            self._wanted[key] = max(replicas, self._wanted.get(key, 1))

    def run(self, jobs: int) -> None:
        """Run all that is wanted."""
        keys = [
            (method, workload, seed)
            for (method, workload), replicas in self._wanted.items()
            for seed in range(self.seeds * replicas)
        ]
        keys.sort(key=lambda key: -key[1].stages * key[1].microbatches)  # long ones first: no straggler at the end
        experiments = [(method, self.workload(workload), seed) for method, workload, seed in keys]
        with (
            Progress(console=Console(stderr=True), transient=True) as progress,
            closing(run_all(run, experiments, jobs=jobs)) as outcomes,
        ):
            for key, outcome in zip(keys, progress.track(outcomes, len(keys), description="runs"), strict=True):
                self._found[key] = outcome

    def workload(self, workload: Workload) -> Workload:
        """What is run for it: itself, or fewer microbatches in a smoke run."""
        most = self._most_microbatches
        return workload if most is None else replace(workload, microbatches=min(most, workload.microbatches))

    def seconds(self, method: Method, workload: Workload, replicas: int = 1) -> list[float]:
        """Iteration time by seed; the slowest replica counts."""
        return [
            max(self._found[method, workload, seed * replicas + replica].seconds for replica in range(replicas))
            for seed in range(self.seeds)
        ]

    def speedup(self, method: Method, over: Method, workload: Workload, replicas: int = 1) -> float:
        """Mean over the seeds of how many times faster ``method`` is."""
        pairs = zip(self.seconds(over, workload, replicas), self.seconds(method, workload, replicas), strict=True)
        return fmean(base / own for base, own in pairs)

    def peak(self, method: Method, workload: Workload) -> int:
        """The largest D of any stage and seed."""
        return max(outcome.peak for outcome in self._outcomes(method, workload))

    def compute(self, method: Method, workload: Workload) -> float:
        """Mean share of the iteration in which a lane computes."""
        return fmean(outcome.compute for outcome in self._outcomes(method, workload))

    def coordination(self, method: Method, workload: Workload) -> float:
        """Mean share of the iteration lost to coordination."""
        return fmean(outcome.coordination for outcome in self._outcomes(method, workload))

    def spread(self, method: Method, workload: Workload) -> float:
        """Standard deviation over the seeds, in seconds; 0 with one seed."""
        seconds = self.seconds(method, workload)
        return stdev(seconds) if len(seconds) > 1 else 0.0

    def _outcomes(self, method: Method, workload: Workload) -> Iterable[Outcome]:
        return (self._found[method, workload, seed] for seed in range(self.seeds))

    @property
    def found(self) -> Mapping[tuple[Method, Workload, int], Outcome]:
        """Everything that ran."""
        return self._found

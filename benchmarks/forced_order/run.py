"""What a forced order costs: `deterministic=True` and `order="natural"` against free order, simulated.

It takes a few minutes on two idle cores.

    python benchmarks/forced_order/run.py [--profile mllm|branch|colocated|..] [--seeds 3] [--jobs J] [--quick] [--json]

Forced is what a deterministic pipeline forces: on every virtual stage the tasks that add to gradients run in microbatch
order (B, or W where backward is split), and the reserve rule keeps slots for the lowest microbatch. "F too" forces
forwards as well, as modules with BatchNorm need; "natural" every kind, as `order="natural"` does. The free run of the
same hint within the same limit on the same cost table is the baseline: figures are percent of its makespan, mean over
the seeds and jitter levels J0 to J3, and in brackets the largest of one table. 64 microbatches.

bf, and slot-aware where it says so, run on whole backwards, the others on split ones. branch and colocated are graphs
of a multimodal model, whose microbatches skip encoders that have nothing to do for them. slot-aware-pyramid orders
microbatches by size where order is free, and cannot where it is forced; "passed in pyramids" is slot-aware in forced
order, given its microbatches in that hint's order, against that hint in free order. `--quick` only shows that
everything runs: its figures mean nothing.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from statistics import fmean
from typing import Any, Literal, cast

from rich.console import Console
from rich.table import Table

from benchmarks.shared.figures import table_of
from benchmarks.shared.load import OtherLoad
from benchmarks.shared.options import parsed, parser_of
from rrfp.core.ready_set import ForcedOrder, natural_order
from rrfp.costs import JITTER_LEVELS, PROFILES, make_costs, microbatch_sizes
from rrfp.costs.table import CostTable
from rrfp.engine.engine import graph_of, run
from rrfp.hints.pyramid import LENGTH_PER_STAGE, pyramids
from rrfp.hints.registry import create_hint
from rrfp.lab.generators.multimodal import multimodal_costs, multimodal_sizes
from rrfp.lab.sweep.pool import run_all, usable_cores
from rrfp.memory.admission import Limit
from rrfp.model.tasks import Kind

STAGES, MICROBATCHES = (4, 8, 16), 64
QUICK_STAGES, QUICK_MICROBATCHES = (2, 4), 8
LIMITS = ("1f1b", "2n")
LATENCIES = ("wire", "spike")
#: Forced order over microbatches that the caller has put into the order of the pyramid hint.
PASSED_IN_PYRAMIDS = "passed in pyramids"
#: Graphs of a multimodal model, beside the profiles of chains.
GRAPHS = ("branch", "colocated")
#: What is run: the hint in free order, the hint in forced order, and whether backward is split for them.
METHODS = {
    "bf": ("bf", "bf", False),
    "bfw": ("bfw", "bfw", True),
    "slot-aware, whole": ("slot-aware", "slot-aware", False),
    "slot-aware-pyramid": ("slot-aware-pyramid", "slot-aware-pyramid", True),
    PASSED_IN_PYRAMIDS: ("slot-aware-pyramid", "slot-aware", True),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One cost table, method and limit."""

    profile: str
    latency: str
    method: str
    limit: str
    stages: int
    jitter: str
    seed: int
    microbatches: int


@dataclass(frozen=True, slots=True)
class Cost:
    """Percent above the free makespan of the same case, negative where forced order was faster."""

    case: Case
    added: float
    forwards_too: float
    natural: float


def cost_of(case: Case) -> Cost:
    """Run a case in free and in forced order."""
    free_hint, forced_hint, split = METHODS[case.method]
    costs, sizes = _workload(case, split=split)
    graph = graph_of(costs)
    distances = map(graph.distance_to_sink, range(costs.stages))
    limits = [Limit.resolve(case.limit, s, costs.stages, distance=distance) for s, distance in enumerate(distances)]
    added: list[ForcedOrder] = [(Kind.W if split else Kind.B, v) for v in range(costs.num_virtual_stages)]
    forwards: list[ForcedOrder] = [(Kind.F, v) for v in range(costs.num_virtual_stages)]
    free = run(costs, [create_hint(free_hint) for _ in limits], limits, sizes=sizes).makespan
    if case.method == PASSED_IN_PYRAMIDS and min(sizes) < max(sizes):
        order = pyramids(sizes, LENGTH_PER_STAGE * case.stages)
        costs, sizes = _passed(costs, order), tuple(sizes[m] for m in order)

    def percent(in_order: Collection[ForcedOrder]) -> float:
        hints = [create_hint(forced_hint) for _ in limits]
        return 100 * (run(costs, hints, limits, sizes=sizes, in_order=in_order).makespan / free - 1)

    return Cost(case, percent(added), percent([*added, *forwards]), percent(natural_order(graph)))


def _workload(case: Case, *, split: bool) -> tuple[CostTable, tuple[float, ...]]:
    """The cost table of a case, and the sizes of its microbatches."""
    drawn: dict[str, Any] = {"split": split, "seed": case.seed, "jitter": case.jitter, "latency": case.latency}
    if case.profile in GRAPHS:
        graph = cast("Literal['branch', 'colocated']", case.profile)
        sizes = multimodal_sizes(case.microbatches, seed=case.seed)
        return multimodal_costs(graph, case.stages, case.microbatches, **drawn), sizes
    sizes = microbatch_sizes(case.profile, case.stages, case.microbatches, seed=case.seed)
    return make_costs(case.profile, case.stages, case.microbatches, **drawn), sizes


def _passed(costs: CostTable, order: Sequence[int]) -> CostTable:
    """The same microbatches, handed to the step in ``order``."""
    assert costs.weight is not None
    return replace(
        costs,
        held=None,  # limits count microbatches here
        skipped=tuple(costs.skipped[m] for m in order) if costs.skipped else costs.skipped,
        forward=costs.forward[:, order],
        backward=costs.backward[:, order],
        weight=costs.weight[:, order],
        latency_forward=costs.latency_forward[:, order],
        latency_backward=costs.latency_backward[:, order],
    )


def cases_of(profiles: Sequence[str], seeds: int, *, quick: bool) -> list[Case]:
    """Everything that is run, long runs first."""
    stages, microbatches = (QUICK_STAGES, QUICK_MICROBATCHES) if quick else (STAGES, MICROBATCHES)
    jitters = ("J0", "J3") if quick else JITTER_LEVELS
    return [
        Case(profile, latency, method, limit, n, jitter, seed, microbatches)
        for profile, latency, method, limit in product(profiles, LATENCIES, METHODS, LIMITS)
        for n, jitter, seed in product(stages[::-1], jitters, range(seeds))
    ]


def tables(costs: Sequence[Cost]) -> list[Table]:
    """For people: a table a profile."""
    result = []
    for profile in dict.fromkeys(cost.case.profile for cost in costs):
        mine = [cost for cost in costs if cost.case.profile == profile]
        stages = sorted({cost.case.stages for cost in mine})
        titles = [f"PP {n}{what}" for what in ("", ", F too", ", natural") for n in stages]
        table = table_of(f"{profile}: percent above free order", "method, limit, latency", *titles)
        for method, limit, latency in product(METHODS, LIMITS, LATENCIES):
            rows = [c for c in mine if (c.case.method, c.case.limit, c.case.latency) == (method, limit, latency)]
            cells = [[cost for cost in rows if cost.case.stages == n] for n in stages]
            added = [_figure([cost.added for cost in cell]) for cell in cells]
            forwards = [_figure([cost.forwards_too for cost in cell]) for cell in cells]
            natural = [_figure([cost.natural for cost in cell]) for cell in cells]
            table.add_row(f"{method}, {limit}, {latency}", *added, *forwards, *natural)
        result.append(table)
    return result


def _figure(percents: Sequence[float]) -> str:
    return f"{fmean(percents):+.2f} ({max(percents):+.1f})"


def main() -> None:
    """Run and print."""
    parser = parser_of("What a forced order costs, simulated.")
    parser.add_argument(
        "--profile", choices=[*PROFILES, *GRAPHS], action="append", help="this one only; may be repeated"
    )
    parser.add_argument("--seeds", type=int, default=3, help="draws of every workload, at least 1")
    parser.add_argument("--jobs", type=int, default=usable_cores(), help="processes, at least 1")
    arguments = parsed(parser, "seeds", "jobs")
    load, started = OtherLoad(), time.monotonic()
    seeds = 1 if arguments.quick else arguments.seeds
    cases = cases_of(arguments.profile or ("llm", "mllm"), seeds, quick=arguments.quick)
    costs = list(run_all(cost_of, cases, jobs=arguments.jobs))
    if arguments.json:
        print(json.dumps({"costs": [asdict(cost) for cost in costs], "other_load": load.share()}))
        return
    console = Console(width=max(Console().width, 170))
    for table in tables(costs):
        console.print(table)
    print(f"{len(costs)} cases, {time.monotonic() - started:.0f} s on {arguments.jobs} processes; {load.sentence()}")


if __name__ == "__main__":
    main()

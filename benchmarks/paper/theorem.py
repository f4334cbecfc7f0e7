"""The paper's Theorem 6.1 beside its bottleneck figures: what BF takes at most, and what it takes.

Without message times and without a limit, BF's step takes at most F + B and two sums. F and B are the makespans of the
pipeline of forwards and of that of backwards. The sums are the time of the slowest stage beyond the last stage's, over
all microbatches but the first (forward) and all but the last (backward). Where the last stage is the slowest for every
microbatch, both sums vanish: at most F + B.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

import numpy as np

from benchmarks.paper.claims import BOTTLENECK
from benchmarks.paper.runs import Method, Runs
from benchmarks.paper.tables import Section, Table
from benchmarks.paper.workloads import Workload
from rrfp.costs import CostTable
from rrfp.costs.table import Matrix

_BF = Method("hint", "bf")
_FACTORS = (1.0, 1.5, 2.0)


def flow(times: Matrix) -> float:
    """The makespan of a pipeline of one kind of tasks, in seconds: stages x microbatches, in their order."""
    ends = np.zeros(times.shape[1])
    for row in times:
        free = 0.0
        for m, (ready, duration) in enumerate(zip(ends.tolist(), row.tolist(), strict=True)):
            free = max(free, ready) + duration
            ends[m] = free
    return float(ends[-1])


def terms(costs: CostTable) -> tuple[float, float]:
    """F + B, and the two sums; in seconds, of a table whose backward is not split."""
    forward, backward = costs.forward, costs.backward
    excess = [rows.max(axis=0) - rows[-1] for rows in (forward, backward)]
    return flow(forward) + flow(backward[::-1]), float(excess[0][1:].sum() + excess[1][:-1].sum())


def theorem() -> Section:
    """The language and the multimodal workload, and with a slower last stage."""
    workloads = {(f, x): Workload(f, 8, 192, latency="none", last=x) for f in BOTTLENECK for x in _FACTORS}

    def want(runs: Runs) -> None:
        for workload in workloads.values():
            runs.want(workload, (_BF,))

    def table(runs: Runs) -> Table:
        rows: list[tuple[str, ...]] = []
        data: list[Mapping[str, object]] = []
        for (family, factor), workload in workloads.items():
            tables = [runs.workload(workload).costs(seed).to_unsplit() for seed in range(runs.seeds)]
            parts = [terms(one) for one in tables]
            steps = runs.seconds(_BF, workload)
            bounds = [(both + sums) / step for (both, sums), step in zip(parts, steps, strict=True)]
            ideal = fmean(both / step for (both, _), step in zip(parts, steps, strict=True))
            slowest = 100 * fmean(float((one.forward.argmax(axis=0) == one.stages - 1).mean()) for one in tables)
            holds = "yes" if min(bounds) >= 1 - 1e-9 else "NO"
            paper = f"{BOTTLENECK[family][0]}%"
            figures = (f"{fmean(bounds):.2f}", f"{ideal:.2f}", holds)
            rows.append((f"{family}, last stage x {factor:g}", f"{paper} | {slowest:.0f}%", *figures))
            data.append(
                {"family": family, "last": factor, "bound": fmean(bounds), "ideal": ideal, "least": min(bounds)}
            )
        heads = ("workload", "last is slowest", "Theorem 6.1 / BF's step", "(F + B) / BF's step", "holds")
        notes = (
            "PP 8, 192 microbatches, no message times, no limit, as the theorem assumes. last is slowest: paper | "
            "ours. F + B is what the theorem leaves where the last stage is always the slowest.",
        )
        return Table("Theorem 6.1 and the bottleneck", heads, tuple(rows), notes, tuple(data))

    return Section(want, table)

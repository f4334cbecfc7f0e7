"""What the paper tells beside its main tables: how the workload varies, and how much memory is enough."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from benchmarks.paper.claims import (
    BOTTLENECK,
    COMPUTE_MIDDLE,
    COMPUTE_SPREAD,
    DEFAULT_LIMIT,
    MESSAGE_MIDDLE,
    MESSAGE_SPREAD,
    SATURATION,
)
from benchmarks.paper.runs import BF, BF_EQUAL, BLOCKING, EAGER, Method, Runs
from benchmarks.paper.tables import Section, Table
from benchmarks.paper.workloads import Workload
from rrfp.costs import CostTable

#: By how much longer the last stage takes than in the profile.
_LAST_FACTORS = (1.0, 1.25, 1.5, 2.0)
#: The quantiles of the paper's two statistics.
_OUTER, _MIDDLE = (0.05, 0.95), (0.25, 0.75)
_Times: TypeAlias = npt.NDArray[np.float64]
_LIMITS = (1, 2, 4, 8, 16, 32, 64, 192)


def saturation() -> Section:
    """The limit beyond which the iteration gets no shorter."""
    workload = Workload("mllm", 8, 192)
    methods = {limit: Method("hint", "bf", limit) for limit in _LIMITS}

    def want(runs: Runs) -> None:
        runs.want(workload, [EAGER, *methods.values()])

    def table(runs: Runs) -> Table:
        best = fmean(runs.seconds(methods[_LIMITS[-1]], workload))
        rows: list[tuple[str, ...]] = []
        data: list[Mapping[str, object]] = []
        for limit, method in methods.items():
            over = 100 * (fmean(runs.seconds(method, workload)) / best - 1)
            speedup = runs.speedup(method, EAGER, workload)
            rows.append((str(limit), f"{over:+.1f}%", f"{speedup:.2f}", str(runs.peak(method, workload))))
            data.append({"limit": limit, "over_unlimited": over, "over_eager": speedup})
        heads = ("limit", "over no limit", "over eager 1F1B", "held")
        notes = (f"The paper: no gain beyond {SATURATION} (192 microbatches); its default is {DEFAULT_LIMIT}.",)
        return Table("BF by memory limit (mllm, PP 8, 192 microbatches)", heads, tuple(rows), notes, tuple(data))

    return Section(want, table)


def dominance() -> Section:
    """What a slower last stage does to BF's gain."""
    workloads = {
        (family, factor): Workload(family, 8, 192, last=factor) for family in BOTTLENECK for factor in _LAST_FACTORS
    }

    def want(runs: Runs) -> None:
        for workload in workloads.values():
            runs.want(workload, (BLOCKING, EAGER, BF, BF_EQUAL))

    def table(runs: Runs) -> Table:
        rows: list[tuple[str, ...]] = []
        data: list[Mapping[str, object]] = []
        for (family, factor), workload in workloads.items():
            share = 100 * fmean(_last_is_slowest(workload.costs(seed)) for seed in range(runs.seeds))
            gains = [
                runs.speedup(method, base, workload)
                for method, base in ((BF, BLOCKING), (BF, EAGER), (BF_EQUAL, EAGER))
            ]
            rows.append((f"{family}, last stage x {factor:g}", f"{share:.0f}%", *(f"{gain:.2f}" for gain in gains)))
            data.append({"family": family, "last": factor, "last_is_slowest": share, "speedups": gains})
        heads = ("workload", "last is slowest", "over blocking", "over eager", "equal memory")
        notes = (
            f"PP 8, 192 microbatches, BF with limit {DEFAULT_LIMIT}. The paper: the last stage is the slowest for "
            f"{BOTTLENECK['llm'][0]}% (language) and {BOTTLENECK['mllm'][0]}% (multimodal) of the microbatches.",
        )
        return Table("BF's speed-up where the last stage dominates", heads, tuple(rows), notes, tuple(data))

    return Section(want, table)


def workload_statistics() -> Section:
    """Whether the simulated workloads vary as the paper's do."""

    def table(runs: Runs) -> Table:
        rows: list[tuple[str, ...]] = []
        data: list[Mapping[str, object]] = []
        for family, (share, ratio) in BOTTLENECK.items():
            workload = Workload(family, 8, 192)
            tables = [workload.costs(seed) for seed in range(runs.seeds)]
            last = 100 * fmean(map(_last_is_slowest, tables))
            highest = max(float(np.quantile(one.forward[:-1] / one.forward[-1], 0.95, axis=1).max()) for one in tables)
            rows.append(
                (f"{family}: last stage is the slowest", f"{share:.1f}%", f"{last:.1f}%", "profile + compute noise")
            )
            rows.append((f"{family}: largest p95 of F_i / F_last", f"{ratio:.2f}", f"{highest:.2f}", "the same"))
            data.append({"family": family, "last_is_slowest": last, "highest_p95": highest})
        for name, (paper, times, rests) in _variations().items():
            ours = tuple(_spread(times, *reach) for reach in (_OUTER, _MIDDLE))
            for kind, theirs, value in zip(("(p95 - p5) / p50", "(p75 - p25) / p50"), paper, ours, strict=True):
                rows.append((f"{name}: {kind}", f"{theirs:.2f}", f"{value:.2f}", rests))
            data.append({"name": name, "paper": paper, "ours": ours})
        notes = (
            "In the paper the last stage dominates far more than in these profiles; the next table shows what that "
            "changes. `messages` runs Tables 1 and 2 with both latency models.",
        )
        heads = ("figure", "paper", "ours", "rests on")
        return Table("Workload statistics (PP 8)", heads, tuple(rows), notes, tuple(data))

    return Section(lambda runs: None, table)


def _last_is_slowest(costs: CostTable) -> float:
    """Share of microbatches whose longest forward is the last stage's."""
    return float((costs.forward.argmax(axis=0) == costs.stages - 1).mean())


def _variations() -> dict[str, tuple[tuple[float, float], _Times, str]]:
    """By name: the paper's two statistics, our times, and what these rest on."""
    spike, bimodal = (Workload("llm", 8, 192, latency=model).costs(0) for model in ("spike", "bimodal"))
    message = (MESSAGE_SPREAD, MESSAGE_MIDDLE)
    return {
        "compute": ((COMPUTE_SPREAD, COMPUTE_MIDDLE), spike.forward[:-1], "lognormal, fitted to the first number"),
        "messages, spike": (message, spike.latency_forward, "not fitted: 21% of the messages up to 30 ms longer"),
        "messages, bimodal": (message, bimodal.latency_forward, "fitted to both: 37.5% are 22 to 29 ms longer"),
    }


def _spread(times: _Times, low: float, high: float) -> float:
    below, middle, above = np.quantile(times, [low, 0.5, high])
    return float((above - below) / middle)

"""Table 3 of the paper: where an iteration's time goes, by TP degree."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean

from benchmarks.paper.claims import DEFAULT_LIMIT, TABLE_3, Parts
from benchmarks.paper.runs import BLOCKING, EAGER, Method, Runs
from benchmarks.paper.tables import Section, Table
from benchmarks.paper.workloads import Workload

_AGREED = Method("agreement", "bf", DEFAULT_LIMIT)
_LED = Method("leader", "bf", DEFAULT_LIMIT)


def breakdown() -> Section:
    """Qwen3-4B+ViT-Big, PP 16, batch 32."""
    workloads = {tp: Workload("mllm", 16, 32, tp) for tp in TABLE_3}

    def want(runs: Runs) -> None:
        for workload in workloads.values():
            runs.want(workload, (BLOCKING, EAGER, _AGREED, _LED))

    def table(runs: Runs) -> Table:
        rows: list[tuple[str, ...]] = []
        data: list[Mapping[str, object]] = []
        for tp, (fixed, ready) in TABLE_3.items():
            workload = workloads[tp]
            methods = {
                "1F1B blocking": (BLOCKING, fixed),
                "1F1B eager": (EAGER, fixed),
                "BF, agreement": (_AGREED, ready),
                "BF, leader": (_LED, ready),
            }
            for name, (method, paper) in methods.items():
                time = fmean(runs.seconds(method, workload)) / fmean(runs.seconds(BLOCKING, workload))
                compute, coordination = runs.compute(method, workload), runs.coordination(method, workload)
                ours = (time, compute, 1 - compute - coordination, coordination)
                theirs = _shares(paper, fixed.iteration)
                cells = [f"{a:.2f} | {b:.2f}" for a, b in zip(theirs[:3], ours[:3], strict=True)]
                rows.append((f"TP {tp}, {name}", *cells, f"{theirs[3]:.2%} | {ours[3]:.2%}", _RESTS[name]))
                data.append({"tp": tp, "method": name, "paper": theirs, "ours": ours})
        heads = ("method", "iteration / 1F1B's", "compute", "blocking", "TP coordination", "rests on")
        notes = (
            "A cell: paper | ours. The iteration is relative to (blocking) 1F1B's at the same TP; the parts are shares "
            "of the method's own iteration.",
            "The paper's compute grows under RRFP (0.86 to 1.02 s); fixed task times cannot show that.",
        )
        return Table("Table 3: breakdown (mllm, PP 16, 32 microbatches)", heads, tuple(rows), notes, tuple(data))

    return Section(want, table)


_RESTS = {
    "1F1B blocking": "rendezvous sends, spike latency",
    "1F1B eager": "eager sends, spike latency",
    "BF, agreement": "a round takes 120 us; limit 32",
    "BF, leader": "a control message takes 60 us; limit 32",
}


def _shares(parts: Parts, baseline: float) -> tuple[float, float, float, float]:
    """Iteration over the baseline's; then compute, blocking and coordination over the iteration."""
    total = parts.iteration
    return total / baseline, parts.compute / total, parts.blocking / total, parts.coordination / total

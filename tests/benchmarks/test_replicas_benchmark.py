"""The benchmark of replicas compares what it says it compares."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal

import pytest
from fork_server import fork_server, printed
from installed import ROOT

from benchmarks.replicas.run import measured
from benchmarks.replicas.settings import LATENCY_S, METHODS, TENSOR_BYTES, Layout, Settings
from benchmarks.replicas.simulated import gains, rows
from benchmarks.replicas.worker import crossed_bytes

__all__ = ["fork_server"]


def test_dealing_lies_between_the_bound_and_replicas_alone() -> None:
    every = [*rows((Layout(2, 4),), 2, ("J0", "late", "uneven"))]
    found = {(row.kind, row.factor): row for row in every if row.slow < 2}
    assert found["J0", 1.0].plain == found["J0", 1.0].dealt == pytest.approx(1.0)
    for factor in (1.5, 2.0, 4.0):
        row = found["J0", factor]
        assert row.dropped is not None
        assert row.bound is not None
        assert row.bound <= row.dealt < min(row.plain, row.dropped)
        assert row.moved > 0
        assert row.bound <= row.claimed < row.plain
    late = found["late", 2.0]
    assert late.claimed < late.plain - 0.1
    two = next(row for row in every if (row.kind, row.factor, row.slow) == ("J0", 4.0, 2))
    assert two.bound is not None
    assert two.bound <= two.claimed < two.dealt - 0.2
    assert found["uneven", 1.0].dealt < 0.97  # sizes tell which replica has more
    assert found["J0", 2.0].plain > 1.5
    assert found["J0", 2.0].dealt < 1.4


def test_gains_are_of_microbatches_that_differ() -> None:
    found = {(row.profile, row.jitter): row for row in gains((2,), 1)}
    even = found["even", "J0"]
    assert (even.claimed, even.average, even.bound, even.crossed) == pytest.approx((1, 1, 1, 0))
    assert found["mllm", "J0"].average < 1
    assert all(row.bound <= row.claimed + 1e-9 for row in found.values())


@pytest.mark.slow
@pytest.mark.parametrize("latency", [0.0, LATENCY_S])
def test_processes_run_all_methods_with_every_factor(latency: float) -> None:
    methods = METHODS[::2] if latency else METHODS
    settings = Settings(Layout(2, 2), (1.0, 4.0), rounds=1, pace=0.2, latency=latency, methods=methods)
    output = printed(ROOT / "benchmarks" / "replicas" / "worker.py", settings.to_json(), ranks=4)
    found = {(row.method, row.factor): row for row in measured(settings, map(json.loads, output.splitlines()))}
    assert set(found) == {(method, factor) for method in methods for factor in (1.0, 4.0)}
    for (method, factor), row in found.items():
        assert row.bytes % TENSOR_BYTES == 0
        assert row.bytes > 0 or method == "plain" or factor == 1.0


def test_bytes_that_cross_are_those_between_copies_of_two_replicas() -> None:
    first, second = [*range(8)], [*range(8, 16)]

    def crossed(*ran: Sequence[int]) -> int:
        """``ran`` is by virtual stage and copy."""
        layout = Layout(2, 2, len(ran) // 4, "v")
        stage_of, by_rank = layout.graph.stage_of, [list[tuple[int, int]]() for _ in range(4)]
        for place, microbatches in enumerate(ran):
            v, copy = divmod(place, 2)
            by_rank[2 * stage_of[v] + copy] += [(v, m) for m in microbatches]
        return crossed_bytes(layout, by_rank) // TENSOR_BYTES

    fewer, more = first[1:], [*second, 0]
    assert crossed(first, second, first, second) == 0
    assert crossed(first, second, fewer, more) == 2
    assert crossed(fewer, more, fewer, more) == 1
    assert crossed(first, second, first, second, first, second, fewer, more) == 2
    assert crossed(first, second, fewer, more, fewer, more, first, second) == 4


@pytest.mark.parametrize("placement", ["looped", "v"])
def test_stages_of_several_chunks_share_each_for_itself(placement: Literal["looped", "v"]) -> None:
    for row in rows((Layout(2, 2, 2, placement),), 1, ("J0",)):
        assert row.bound is not None
        assert row.bound <= row.claimed + 1e-9
        assert row.claimed < row.plain - 0.1 or row.factor == 1.0

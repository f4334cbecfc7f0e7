"""The benchmarks run and say what they promise. Never how fast: that is for people to read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.dispatch.arrivals import ROWS
from benchmarks.plan.orders import KNOWLEDGE, Case, Knowledge, searched
from benchmarks.soak.run import Sample, verdict

ROOT = Path(__file__).resolve().parents[2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]


def quick(name: str, *options: str) -> Any:
    """The JSON of a benchmark's smoke run."""
    command = [sys.executable, str(ROOT / "benchmarks" / name / "run.py"), "--quick", "--json", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    document = json.loads(done.stdout)
    assert document["other_load"] is None or document["other_load"] >= 0
    return document


def check_aims(aims: list[dict[str, Any]]) -> None:
    for aim in aims:
        within = aim["value"] <= aim["limit"] if aim["sense"] == "at most" else aim["value"] >= aim["limit"]
        assert aim["met"] is within, aim


@pytest.mark.long
def test_dispatch_reports_every_latency_with_its_aim() -> None:
    document = quick("dispatch")

    assert {(row["hint"], row["ready"]) for row in document["decisions"]} == {
        (hint, ready) for hint in ("bf", "b-priority", "1f1b") for ready in (4, 64, 1024)
    }
    assert tuple(document["arrivals"]) == ROWS
    for spread in (*document["decisions"], *document["arrivals"].values()):
        assert 0 < spread["p50"] <= spread["p90"] <= spread["p99"]
        assert spread["samples"] >= 9  # between ten tasks
    assert [(speed["stages"], speed["tasks_per_s"] > 0) for speed in document["engine"]] == [(4, True), (64, True)]
    assert len(document["aims"]) == 7 + len(document["outputs"])
    check_aims(document["aims"])


@pytest.mark.long
def test_processor_time_is_split_by_thread_for_every_system() -> None:
    document = quick("processor")
    for systems in document["cases"].values():
        assert set(systems) == {"torch", "Pipeline", "ScheduleRRFP"}
        for figures in systems.values():
            assert 0 < sum(figures["roles"].values()) <= 1.5 * figures["used"]
        assert systems["Pipeline"]["roles"]["lane"] > 0
    check_aims(document["aims"])


@pytest.mark.long
def test_tp_simulated_compares_every_way_at_every_number_of_ranks() -> None:
    document = quick("tp_simulated")

    assert [(row["hint"], row["tp"]) for row in document["rows"]] == [(h, tp) for h in ("bf", "bfw") for tp in (2, 4)]
    for row in document["rows"]:
        tp, ways = row["tp"], row["ways"]
        assert set(ways) == {"leader", "leader, depth 2", "agreement", "agreement, free"}
        for name in ("leader", "leader, depth 2"):
            assert (ways[name]["rounds"], ways[name]["failed"]) == (1, 0)
            assert 0 < ways[name]["share"] < 1
        agreed = ways["agreement"]
        assert agreed["rounds"] == pytest.approx(1 + agreed["failed"])
        # A proposal and an outcome; after a failed round a prompt as well.
        assert agreed["messages"] == pytest.approx((2 * agreed["rounds"] + agreed["failed"]) * (tp - 1))
        assert agreed["failed"] > 0
    free, slow = document["control"]
    assert free["over_free_leader"]["leader"] == {"mean": 1, "deviation": 0}
    assert slow["over_free_leader"]["leader"]["mean"] > 1


@pytest.mark.long
def test_tp_coordination_reports_every_way_to_one_order() -> None:
    document = quick("tp")

    methods = document["figures"]["2"]
    assert set(methods) == {"leader, depth 2", "leader, depth 1", "agreement"}
    assert methods["leader, depth 2"]["iteration"] == 1.0
    for figures in methods.values():
        assert 0 <= figures["coordination"] < 1
        assert 0 <= figures["to_start"]["p50"] <= figures["to_start"]["p99"]
        assert figures["to_start"]["samples"] == 2 * 7  # of two stages with 8 tasks each, from the second task on
        assert figures["messages_per_task"] > 1
    check_aims(document["aims"])


@pytest.mark.long
def test_callbacks_reports_the_time_of_loop_and_lanes() -> None:
    document = quick("callbacks")

    used = {(row["way"], row["threads"]): row["seconds"] for row in document["rows"]}
    assert len(used) == 4 * 3
    for (way, part), seconds in used.items():
        assert (seconds > 0) is (part != "callbacks" or way in ("empty", "all")), (way, part)
    assert document["callbacks"][:3] == ["Progress", "JsonLines", "Csv"]
    on_loop = {row["function"]: row["seconds"] for row in document["functions"] if row["thread"] == "loop"}
    always = {"read", "in reports"}
    assert always | {"_wake"} >= on_loop.keys() >= always  # the reports of a quick step may be here before its result
    assert document["aims"][0]["value"] == pytest.approx(1e6 * sum(on_loop.values()))
    check_aims(document["aims"])


@pytest.mark.long
def test_trace_to_costs_predicts_every_method_in_both_workloads() -> None:
    document = quick("trace_to_costs")

    methods = ["bf, limit 2n", "bf, limit 1f1b", "b-priority, limit n", "strict 1f1b", "strict gpipe"]
    shown = [(figures["workload"], figures["method"]) for figures in document["figures"]]
    assert shown == [(workload, method) for workload in ("paced", "cpu") for method in methods]
    for figures in document["figures"]:
        assert min(figures[way] for way in ("measured", "typical", "each_step", "averaged")) > 0


@pytest.mark.long
def test_advise_predicts_every_job() -> None:
    document = quick("advise")

    jobs = ["as recorded", "limit n", "limit 2n", "hint bf", "split", "twice as many microbatches"]
    assert [figures["job"] for figures in document["figures"]] == jobs
    for figures in document["figures"]:
        assert min(figures["predicted"], figures["measured"]) > 0


@pytest.mark.long
def test_advise_predicts_the_rows_of_the_demo() -> None:
    figures = quick("advise", "--demo")["figures"]

    rows = ["as recorded", "hint b-priority", "strict 1f1b", "split, hint bfw", "split, default hint"]
    assert [one["job"] for one in figures] == [*rows, "split, strict zb-h1"]
    assert all(min(one["predicted"], one["measured"]) > 0 for one in figures)


@pytest.mark.long
def test_plan_gains_and_predicts_moved_layers() -> None:
    [gains] = quick("plan")["gains"]
    parts = {"predicted", "saved", "over_1f1b", "over_zbv"}
    assert gains.keys() == {"profile", "stages", "plan", "seconds", *parts}
    recorded, *planned = quick("plan", "--processes")["predictions"]
    assert recorded["rank"] == 0
    assert [one["rank"] for one in planned] == [1]
    assert all(min(one["predicted"], one["measured"]) > 0 for one in (recorded, *planned))


@pytest.mark.parametrize("knowledge", KNOWLEDGE)
def test_an_order_is_searched_under_each_limit(knowledge: Knowledge) -> None:
    found = searched(Case("mllm", 2, 0, knowledge, 12))
    assert list(found.gains) == ["1f1b", "n", "2n", "bytes of 1f1b", "bytes of n"]
    for gains in found.gains.values():
        assert gains["all"].keys() == gains["3 tried"].keys() == {"J0", "J1", "J2", "J3"}
        if knowledge == "exact":
            assert gains["all"]["J0"] >= gains["3 tried"]["J0"] > -1e-9


@pytest.mark.long
def test_soak_samples_every_rank_and_names_what_grows() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "soak" / "run.py"), "--quick", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    document = json.loads(done.stdout)

    assert len({len(own) for own in document["samples"]}) == 1
    for own in document["samples"]:
        assert own[0]["slots"] > 0
        assert min(own[0]["in_use"], own[0]["free"], own[0]["blocks"]) > 0


def test_soak_names_a_figure_that_grows_to_the_end_and_none_that_is_bounded() -> None:
    def samples(in_use: Callable[[int], float]) -> list[Sample]:
        return [Sample(at, at, 40, 12, 100.0, 300.0 + at, in_use(at), float(at), 1000.0) for at in range(30)]

    assert verdict([samples(lambda at: 100.0 + min(at, 15))]) == []
    assert verdict([samples(lambda at: 100.0), samples(lambda at: 100.0 + at)]) == [
        "in use of rank 1 grows by 10.0, beyond 6"
    ]

"""The comparison with torch.distributed.pipelining: the arithmetic of its figures, its aims, and a smoke run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.against_torch.aims import CPU, END, OVER, TOLERATED, V_OVER_ZBV, CellAim, aims_of
from benchmarks.against_torch.own_bytes import limits_of
from benchmarks.against_torch.report import document_of, print_report
from benchmarks.against_torch.settings import DEFAULT_METHODS, METHODS, OWN_BYTES, TORCH_1F1B, TORCH_ZBV, Settings
from benchmarks.shared.clocks import GLOO, GROUPS, LANE, LOOP, MAIN, REST, Reading, group_of
from benchmarks.shared.comparison import Cell, Turn
from benchmarks.shared.overhead import makespan
from benchmarks.shared.step_figures import Results, results_of
from benchmarks.shared.steps import Step
from benchmarks.shared.tables import Form, scaled
from rrfp.engine.bound import lower_bound
from rrfp.engine.engine import run
from rrfp.hints.registry import DEFAULT_HINT, create_hint, create_strict
from rrfp.memory.admission import Limit

ROOT = Path(__file__).resolve().parents[2]

#: A strict order for each form: what runs does not matter to the figures.
_ORDERS = {Form.WHOLE: "1f1b", Form.SPLIT: "zb-h1", Form.V: "zb-v"}


def settings(*methods: str, rounds: int = 2) -> Settings:
    return Settings(2, ("llm",), ("J3",), methods, microbatches=4, rounds=rounds)


def line(
    of: Settings, turn: Turn, *, slower: float = 1.0, late: float = 0.0, others: float = 0.0, cpu: float = 1e-3
) -> dict[str, Any]:
    """What rank 0 reports of a step without overhead, on the same clock as all ranks, which starts at 100 s.

    ``slower``: tasks take so many times as long; ``late``: seconds from the last task's end to the return; ``others``:
    cores of other processes; ``cpu``: seconds of each rank's loop.
    """
    table = scaled(of.table(turn), slower)
    hints = [create_strict(_ORDERS[METHODS[turn.method].form]) for _ in range(table.stages)]
    result = run(table, hints, [Limit()] * table.stages)
    window = result.makespan + late
    ranks = [
        {
            "started": 100.0,
            "returned": 100.0 + window - (0.001 if stage else 0.0),
            "cpu": {**dict.fromkeys(GROUPS, 0.0), LOOP: cpu, MAIN: cpu, GLOO: cpu},
            "machine": others * window + 3 * cpu * table.stages,
            "window": window,
            "spans": [(str(span.task), 100.0 + span.start, 100.0 + span.end) for span in spans],
            "gradients": [10.0] * table.chunks,  # 1 + 2 + 3 + 4
        }
        for stage, spans in enumerate(result.spans)
    ]
    return {"turn": json.loads(json.dumps(turn)), "ranks": ranks}


def results(of: Settings, changes: Mapping[tuple[str, int], Mapping[str, float]]) -> Results:
    """The figures of a run whose steps have no overhead, but for ``changes`` by method and round."""
    lines = [line(of, turn, **changes.get((turn.method, turn.number), {})) for turn in of.turns()]
    return results_of(of, [Step.of(each, METHODS) for each in lines])


CELL = Cell(2, "llm", "J3")


def test_a_step_as_fast_as_its_order_has_no_overhead_and_holds_what_its_schedule_says() -> None:
    figures = results(settings(*METHODS, rounds=1), {})[CELL]

    assert set(figures) == {name for name, method in METHODS.items() if not method.has_sizes}  # llm: all are alike
    for name, one in figures.items():
        assert one.overhead.total == pytest.approx(0, abs=1e-9)
        assert one.overhead.in_sleeps == pytest.approx(0, abs=1e-9)
        assert (one.begin_s, one.end_s) == pytest.approx((0, 0))
        assert one.per_own_bound >= 1 - 1e-9
        assert one.held == {Form.WHOLE: (2, 1), Form.SPLIT: (2, 2), Form.V: (2, 2)}[METHODS[name].form]
    assert figures["bf, 2n"].per_bound == figures["bf, 2n"].per_own_bound


@pytest.mark.parametrize(("method", "schedule"), [("n", "zb-h1"), ("V, n", "zb-v"), (TORCH_1F1B, "1f1b")])
def test_bytes_that_a_step_held_are_those_that_the_engine_counts(method: str, schedule: str) -> None:
    of = replace(settings(method), profiles=("mllm",))
    turn = Turn(Cell(2, "mllm", "J3"), 1, method)
    table = of.table(turn)

    counted = run(table, [create_strict(schedule) for _ in range(2)], [Limit()] * 2)

    held = Step.of(line(of, turn), METHODS).held_bytes(table)
    assert held == tuple(peaks.num_bytes for peaks in counted.peaks)
    assert min(held) > 0


def test_own_bytes_limit_each_stage_to_what_the_hint_held_there_by_count() -> None:
    of = replace(settings(OWN_BYTES), profiles=("mllm",), microbatches=16)
    turn = Turn(Cell(2, "mllm", "J3"), 1, OWN_BYTES)
    table, sizes = of.table(turn), of.sizes(turn)
    counted = run(table, [create_hint(DEFAULT_HINT) for _ in range(2)], [Limit(2), Limit(2)], sizes=sizes)

    limits = limits_of(table, sizes)

    for limit, peaks in zip(limits, counted.peaks, strict=True):
        assert limit.microbatches is None
        assert limit.bytes is not None
        assert 1 <= limit.bytes / peaks.num_bytes <= 1.002


def test_late_returns_and_long_sleeps_are_told_apart() -> None:
    of = settings(TORCH_1F1B, "strict 1f1b", rounds=1)
    figures = results(of, {("strict 1f1b", 1): {"slower": 1.5, "late": 0.005}})[CELL]
    turn = Turn(CELL, 1, "strict 1f1b")
    order, table = Step.of(line(of, turn), METHODS).order, of.table(turn)

    own = figures["strict 1f1b"]

    planned = makespan(order, table)
    assert own.overhead.in_sleeps == pytest.approx(0.5)
    assert own.overhead.total == pytest.approx(0.5 + 0.005 / planned)
    assert own.end_s == pytest.approx(0.005)
    assert own.per_peer[TORCH_1F1B].value == pytest.approx(1.5 + 0.005 / planned)
    assert own.per_bound == pytest.approx((1.5 * planned + 0.005) / lower_bound(table, None))


def test_disturbed_steps_are_discarded_whatever_their_times() -> None:
    of = settings(TORCH_1F1B, "strict 1f1b", rounds=3)
    changes = {
        ("strict 1f1b", 1): {"others": 0.31},
        ("strict 1f1b", 2): {"late": 9.0},
        (TORCH_1F1B, 3): {"others": 2.0},
    }

    figures = results(of, changes)[CELL]

    own = figures["strict 1f1b"]
    assert (own.used, own.is_disturbed) == ((2, 3), False)
    assert own.discarded == pytest.approx({1: 0.31})
    assert own.end_s == pytest.approx(4.5)  # of round 2, 9 s late, and round 3
    # Only round 2 was undisturbed for both.
    assert not own.per_peer[TORCH_1F1B].is_disturbed
    assert own.per_peer[TORCH_1F1B].value > 5


def test_a_cell_without_an_undisturbed_step_is_marked_and_not_judged(capsys: pytest.CaptureFixture[str]) -> None:
    of = settings(TORCH_1F1B, "strict 1f1b", "n", rounds=2)
    found = results(of, {("strict 1f1b", number): {"others": 0.5} for number in (1, 2)})

    own, aims = found[CELL]["strict 1f1b"], aims_of(found)

    assert (own.used, own.discarded, own.is_disturbed) == ((1, 2), {}, True)
    assert own.per_peer[TORCH_1F1B].is_disturbed
    assert {each.method for each in aims if each.aim is None} == {"strict 1f1b"}
    assert {each.method for each in aims if each.aim is not None} == {"n"}
    document = document_of(found, aims)
    assert f"strict 1f1b, {END}, PP 2, llm, J3" in document["not_judged"]
    print_report(found, aims)
    text = capsys.readouterr().out
    assert "strict 1f1b †" in text
    assert "n †" not in text


def by_kind(aims: Sequence[CellAim], method: str) -> dict[str, Any]:
    """Value and verdict."""
    return {
        each.kind: (each.aim.value, each.aim.met) for each in aims if each.method == method and each.aim is not None
    }


def test_aims_compare_with_the_peer_whose_tasks_or_messages_are_alike() -> None:
    of = settings(TORCH_1F1B, TORCH_ZBV, "strict 1f1b", "n", "V, n", rounds=1)
    changes = {(name, 1): {"late": 0.001} for name in of.methods}
    changes[TORCH_ZBV, 1] = {"late": 0.02, "cpu": 1.4e-3}
    found = results(of, changes)

    figures, aims = found[CELL], aims_of(found)

    over = {name: 100 * one.overhead.total for name, one in figures.items()}
    whole, split, v = (by_kind(aims, name) for name in ("strict 1f1b", "n", "V, n"))
    assert whole[OVER] == (pytest.approx(0), False)  # it is to be a point ahead
    assert split[OVER] == (pytest.approx(over["n"] - over[TORCH_1F1B]), over["n"] <= over[TORCH_1F1B])
    assert v[OVER] == (pytest.approx(over["V, n"] - over[TORCH_ZBV]), True)
    assert whole[CPU] == (pytest.approx(100), True)
    assert split[CPU] == (pytest.approx(100 * (1e-3 / 24) / (1.4e-3 / 48)), False)
    assert split[TOLERATED] == (split[CPU][0], False)
    assert v[CPU] == (pytest.approx(100 / 1.4), True)
    assert v[V_OVER_ZBV][0] == pytest.approx(100 * figures["V, n"].per_peer[TORCH_ZBV].value)
    assert whole[END] == (pytest.approx(1), True)
    assert V_OVER_ZBV not in split


def test_every_row_of_the_report_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    found = results(settings(*METHODS, rounds=1), {})

    print_report(found, aims_of(found))

    text = capsys.readouterr().out
    for name in found[CELL]:
        assert text.count(f"│ {name} ") >= 2
    assert "discarded: none" in text


@pytest.mark.parametrize("change", ["missing", "twice", "gradient"])
def test_a_step_that_did_other_work_ends_the_run(change: str) -> None:
    of = settings("strict 1f1b", rounds=1)
    turn = Turn(CELL, 1, "strict 1f1b")
    reported = line(of, turn)
    rank = reported["ranks"][1]
    match change:
        case "missing":
            rank["spans"].pop()
        case "twice":
            rank["spans"].append(rank["spans"][-1])
        case "gradient":
            rank["gradients"] = [9.0]

    with pytest.raises(SystemExit, match=r"strict 1f1b, PP 2, llm, J3, round 1.* stage 1"):
        Step.of(reported, METHODS).check(of.table(turn))


def test_steps_alternate_and_each_method_has_every_table_of_a_round() -> None:
    of = replace(settings(TORCH_1F1B, "n", "n, sizes"), profiles=("llm", "mllm"), jitters=("J0", "J3"))

    turns = list(of.turns())

    assert Settings.from_json(of.to_json()) == of
    assert len(turns) == 3 + 2 * (2 * 2 + 2 * 3)
    measured = [turn for turn in turns if turn.number]
    assert [turn.method for turn in measured[:5]] == [TORCH_1F1B, "n", "n", TORCH_1F1B, "n, sizes"]
    assert all(of.table(turn) == of.table(replace_method(turn, "2n")) for turn in measured if turn.method == "n")


def replace_method(turn: Turn, method: str) -> Turn:
    return turn._replace(method=method)


def test_threads_are_told_apart_by_name_and_their_seconds_add_up() -> None:
    names = {"MainThread": MAIN, "rrfp-3": LOOP, "rrfp-lane-3": LANE, "gloo:listen": GLOO, "rrfp-loop-watch": REST}
    assert {name: group_of(name) for name in names} == names
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            sum(range(1000))

    lane = threading.Thread(target=work, name="rrfp-lane-0", daemon=True)
    before = Reading.now()
    lane.start()
    while (groups := Reading.now().by_group(before))[LANE] < 0.02:
        pass
    done.set()
    lane.join()

    after = Reading.now()

    groups = after.by_group(before)
    assert sum(groups.values()) == pytest.approx(after.process - before.process)
    assert groups[REST] >= 0.02 - 1e-6  # the lane has ended
    assert groups[MAIN] > 0


@pytest.mark.long
@pytest.mark.timeout(180)
def test_smoke_run_measures_every_default_method_under_every_jitter() -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "against_torch" / "run.py"), "--quick", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr[-4000:]

    document = json.loads(done.stdout)

    figures = document["figures"]
    assert [(one["jitter"], one["method"]) for one in figures] == [
        (jitter, name) for jitter in ("J0", "J3") for name in DEFAULT_METHODS
    ]
    for one in figures:
        most = {
            "strict 1f1b": [2, 1],
            "1f1b": [2, 1],
            TORCH_1F1B: [2, 1],
            "2n": [4, 4],
            "2n, sizes": [4, 4],
            OWN_BYTES: [4, 4],
        }
        held = zip(one["held"], most.get(one["method"], [2, 2]), strict=True)
        assert all(own <= bound for own, bound in held), one
        assert one["per_own_bound"] >= 1
        assert one["overhead"]["total"] > 0
        assert one["cpu_per_task"] == pytest.approx(sum(one["cpu_s"].values()))
        assert min(one["begin_s"], one["end_s"]) >= 0
        assert one["per_peer"][one["method"]]["value"] == 1 if one["method"] in one["per_peer"] else True
    assert len(document["aims"]) + len(document["not_judged"]) == 2 * (10 * 4 + 1)

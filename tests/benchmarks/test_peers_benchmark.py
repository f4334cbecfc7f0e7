"""The comparison with other systems: the arithmetic of its figures, its aims, its raw data, and a smoke run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fork_server import fork_server
from fork_server import run as run_scripts

from benchmarks.peers.aims import (
    BEHIND,
    CPU,
    END,
    OVER,
    OVER_TOLERATED,
    STRICT,
    TOLERATED,
    V_OVER_ZBV,
    CellAim,
    aims_of,
)
from benchmarks.peers.orders import own_bytes
from benchmarks.peers.raw import RawSteps
from benchmarks.peers.report import document_of, print_report, text_of
from benchmarks.peers.run import SITE
from benchmarks.peers.settings import (
    DEEPSPEED_1F1B,
    FULL_METHODS,
    MEGATRON_1F1B,
    METHODS,
    OWN_BYTES,
    TORCH_1F1B,
    TORCH_ZBV,
    Settings,
)
from benchmarks.shared.clocks import GLOO, GROUPS, LANE, LOOP, MAIN, REST, Reading, group_of
from benchmarks.shared.comparison import NUM_BYTES, Cell, Runtime, Turn
from benchmarks.shared.figures import median_interval
from benchmarks.shared.overhead import makespan
from benchmarks.shared.step_figures import Results, results_of
from benchmarks.shared.steps import Step
from benchmarks.shared.tables import Form, scaled
from rrfp.engine.bound import lower_bound
from rrfp.engine.engine import run
from rrfp.hints.registry import DEFAULT_HINT, create_hint, create_strict
from rrfp.lab.simulation import simulate
from rrfp.memory.admission import Limit

__all__ = ["fork_server"]

ROOT = Path(__file__).resolve().parents[2]

#: A strict order for each form: what runs does not matter to the figures.
_ORDERS = {Form.WHOLE: "1f1b", Form.SPLIT: "zb-h1", Form.V: "zb-v", Form.LOOPED: "interleaved-1f1b"}
#: Microbatches that each stage of two holds in them.
_HELD = {Form.WHOLE: (2, 1), Form.SPLIT: (2, 2), Form.V: (2, 2), Form.LOOPED: (2.5, 1.5)}


def settings(*methods: str, rounds: int = 2) -> Settings:
    plan = tuple(("llm", "J3", number) for number in range(1, 1 + rounds))
    return Settings(2, ("llm",), ("J3",), methods, microbatches=4, plan=plan)


def on(profile: str, of: Settings) -> Settings:
    return replace(of, profiles=(profile,), plan=tuple((profile, jitter, number) for _, jitter, number in of.plan))


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
        assert one.held == _HELD[METHODS[name].form]
    assert figures["bf, 2n"].per_bound == figures["bf, 2n"].per_own_bound


@pytest.mark.parametrize(("method", "schedule"), [("n", "zb-h1"), ("V, n", "zb-v"), (TORCH_1F1B, "1f1b")])
def test_bytes_that_a_step_held_are_those_that_the_engine_counts(method: str, schedule: str) -> None:
    of = on("mllm", settings(method))
    turn = Turn(Cell(2, "mllm", "J3"), 1, method)
    table = of.table(turn)

    counted = run(table, [create_strict(schedule) for _ in range(2)], [Limit()] * 2)

    held = Step.of(line(of, turn), METHODS).held_bytes(table)
    assert held == tuple(peaks.num_bytes for peaks in counted.peaks)
    assert min(held) > 0


def test_own_bytes_limit_each_stage_to_what_the_hint_held_there_by_count() -> None:
    of = replace(on("mllm", settings(OWN_BYTES)), microbatches=16)
    turn = Turn(Cell(2, "mllm", "J3"), 1, OWN_BYTES)
    table, sizes = of.table(turn), of.sizes(turn)
    counted = run(table, [create_hint(DEFAULT_HINT) for _ in range(2)], [Limit(2), Limit(2)], sizes=sizes)

    limits = own_bytes(table, sizes)

    for limit, peaks in zip(limits, counted.peaks, strict=True):
        assert limit.microbatches is None
        assert limit.bytes is not None
        assert 1 <= limit.bytes / peaks.num_bytes <= 1.002


@pytest.mark.parametrize(
    ("method", "alone"),
    [(TORCH_1F1B, {"strict": "1f1b"}), ("strict 1f1b", {"strict": "1f1b"}), ("bf, 2n", {"hint": "bf", "limit": "2n"})],
)
def test_a_method_stands_beside_what_its_order_alone_gives(method: str, alone: Mapping[str, str]) -> None:
    of = settings(TORCH_1F1B, method, rounds=1)
    turn = Turn(CELL, 1, method)
    simulated = simulate(of.table(turn), **alone)  # type: ignore[arg-type]

    one = results(of, {(method, 1): {"late": 0.1}})[CELL][method]

    assert one.alone_per_bound == pytest.approx(simulated.makespan / lower_bound(of.table(turn), None))
    assert one.per_alone == pytest.approx(one.seconds / simulated.makespan)
    assert one.per_peer[TORCH_1F1B].alone == pytest.approx(simulated.makespan / makespan_of_1f1b(of))


def makespan_of_1f1b(of: Settings) -> float:
    return simulate(of.table(Turn(CELL, 1, TORCH_1F1B)), strict="1f1b").makespan


@pytest.mark.parametrize("method", [name for name in METHODS if METHODS[name].runtime is Runtime.RRFP])
def test_every_method_of_rrfp_has_an_order_of_its_own(method: str) -> None:
    of = on("mllm", settings(method))
    turn = Turn(Cell(2, "mllm", "J3"), 1, method)

    alone = of.order_alone(turn)

    assert alone is not None
    assert alone >= lower_bound(of.table(turn), None) * (1 - 1e-12)


def test_an_interval_of_a_median_has_the_narrowest_ranks_that_cover_95_percent() -> None:
    intervals = {count: median_interval(range(count, 0, -1)) for count in (1, 5, 8, 9, 20)}

    # From tables of the sign test: its critical values are 0 up to 8 samples, 1 for 9, 5 for 20.
    assert intervals == {1: (1, 1), 5: (1, 5), 8: (1, 8), 9: (2, 8), 20: (6, 15)}


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


def test_strict_1f1b_is_to_keep_up_with_every_1f1b_and_all_methods_with_their_orders() -> None:
    of = settings(TORCH_1F1B, MEGATRON_1F1B, "strict 1f1b", "n", rounds=1)
    found = results(of, {("strict 1f1b", 1): {"slower": 1.05}, ("n", 1): {"slower": 1.02}})

    aims = aims_of(found)

    strict, n = (by_kind(aims, name) for name in ("strict 1f1b", "n"))
    for peer in (TORCH_1F1B, MEGATRON_1F1B):
        assert strict[f"{STRICT} {peer}"] == (pytest.approx(105), False)
    assert strict[BEHIND] == (pytest.approx(105), False)
    assert strict[OVER_TOLERATED] == (pytest.approx(5), False)
    one = found[CELL]["n"]
    assert n[BEHIND][0] == pytest.approx(100 * one.per_alone / found[CELL][TORCH_1F1B].per_alone)


def test_the_document_has_a_line_for_each_method_of_a_cell() -> None:
    found = results(settings(TORCH_1F1B, "n", rounds=3), {("n", 2): {"late": 0.2}})

    text = text_of(document_of(found, aims_of(found)))

    document = json.loads(text)
    assert [line.startswith('{"profile": "llm"') for line in text.splitlines()].count(True) == 2
    n, one = document["cells"][1], found[CELL]["n"]
    assert (n["stages"], n["method"], n["steps"]) == (2, "n", 3)
    assert (n["over_bound"], n["low"], n["high"]) == pytest.approx((one.per_bound, *one.per_bound_interval), abs=1e-4)
    assert n["over"][TORCH_1F1B]["high"] > n["over"][TORCH_1F1B]["value"] >= n["over"][TORCH_1F1B]["low"]


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
    plan = (("llm", "J0", 1), ("mllm", "J0", 1), ("llm", "J0", 2), ("mllm", "J0", 3))
    of = replace(settings(TORCH_1F1B, "n", "n, sizes"), profiles=("llm", "mllm"), jitters=("J0",), plan=plan)

    turns = list(of.turns())

    assert list(Settings.from_json(of.to_json()).turns()) == turns
    assert len(turns) == 3 + 2 * (2 + 3)
    measured = [turn for turn in turns if turn.number]
    assert [turn.method for turn in measured[:5]] == [TORCH_1F1B, "n", "n", "n, sizes", TORCH_1F1B]
    assert [turn.number for turn in measured[5:]] == [2, 2, 3, 3, 3]
    assert all(of.table(turn) == of.table(replace_method(turn, "2n")) for turn in measured if turn.method == "n")


def test_a_limit_that_follows_steps_has_seen_some_of_full_length() -> None:
    turns = [turn for turn in settings("n", "auto").turns() if turn.number <= 0]

    assert [(turn.method, turn.number) for turn in turns] == [("n", 0), ("auto", 0), *(("auto", -n) for n in (1, 2, 3))]


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


def kept(raw: RawSteps, of: Settings, disturbed: Sequence[tuple[str, int]] = ()) -> None:
    for turn in of.turns():
        others = 0.5 if (turn.method, turn.number) in disturbed else 0.0
        raw.keep(line(of, turn, others=others))


def test_a_run_goes_on_where_the_last_one_ended_and_measures_disturbed_steps_again(tmp_path: Path) -> None:
    of, common = settings(TORCH_1F1B, "n", rounds=2), {"microbatches": 4}
    methods = (*of.methods, "n, sizes")  # which llm has none of
    assert RawSteps(tmp_path / "a", common).lacking(CELL, methods, 3) == range(1, 4)
    kept(RawSteps(tmp_path / "a", common), of, [("n", 2)])
    file = tmp_path / "a" / "pp2-llm-J3.jsonl"
    whole = file.read_text()
    file.write_text(whole + whole.splitlines()[0][:100])  # the run ended within a line

    raw = RawSteps(tmp_path / "a", common)

    assert [(step.turn.method, step.turn.number) for step in raw.steps(CELL)] == [
        (TORCH_1F1B, 1), ("n", 1), ("n", 2), (TORCH_1F1B, 2),
    ]  # fmt: skip
    assert raw.lacking(CELL, methods, 1) == range(3, 3)
    assert raw.lacking(CELL, methods, 3) == range(3, 5)
    raw.keep(line(of, Turn(CELL, 3, "n")))
    assert [step.turn.number for step in raw.steps(CELL)] == [1, 1, 2, 2, 3]
    os.utime(file, times=(0, 86_400))
    assert raw.days([CELL]) == ["1970-01-02"]
    with pytest.raises(SystemExit, match=r"other settings.*--raw"):
        RawSteps(tmp_path / "a", {"microbatches": 8})
    assert not list(RawSteps(tmp_path / "a", {"microbatches": 8}, goes_on=False).steps(CELL))


PIPED: Any = {
    **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True},
    "env": {**os.environ, "OMP_NUM_THREADS": "1"},
}


def command(raw: Path, *arguments: str) -> list[str]:
    """Of a smoke run."""
    script = str(ROOT / "benchmarks" / "peers" / "run.py")
    return [sys.executable, script, "--quick", "--json", "--raw", str(raw), *arguments]


def quick(raw: Path, *arguments: str) -> Any:
    """The document of a smoke run."""
    done = subprocess.run(command(raw, *arguments), cwd=ROOT, **PIPED, timeout=270, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_without_time_the_cells_that_lack_no_step_are_reported(tmp_path: Path) -> None:
    of = replace(on("mllm", settings(TORCH_1F1B, "n", rounds=1)), seed=1)
    raw = RawSteps(tmp_path, {"microbatches": 4, "seed": 1, "num_bytes": NUM_BYTES})
    for turn in of.turns():
        raw.keep(line(of, turn, late=0.01))
    raw.keep(line(of, Turn(Cell(2, "mllm", "J0"), 1, "n")))  # the others lack it

    document = quick(tmp_path, "--minutes", "0", "--methods", TORCH_1F1B, "n")

    assert document["settings"]["asked"] == 2
    assert "other_load" not in document
    check(document, [TORCH_1F1B, "n"], ["J3"])


def test_a_round_ends_with_its_last_method() -> None:
    of = settings(TORCH_1F1B, "n", "V, n", rounds=2)
    assert [(turn.number, turn.method) for turn in of.last_turns()] == [(1, "V, n"), (2, TORCH_1F1B)]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_run_that_was_interrupted_or_out_of_time_goes_on(tmp_path: Path) -> None:
    methods, files = (
        [TORCH_1F1B, "strict 1f1b", "n"],
        [tmp_path / f"pp2-mllm-{jitter}.jsonl" for jitter in ("J0", "J3")],
    )
    with subprocess.Popen(command(tmp_path, "--resume", "--methods", *methods), cwd=ROOT, **PIPED) as process:
        while not (files[0].exists() and files[0].read_text().endswith("\n")):
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
    before = files[0].read_text()
    assert process.returncode != 0

    done = subprocess.run(command(tmp_path, "--minutes", "1e-9", "--methods", *methods), cwd=ROOT, **PIPED, check=True)

    assert done.stdout == ""  # it ended after a round, with cells that lack steps
    assert "of 2 cells have all their steps" in done.stderr
    after = [file.read_text() if file.exists() else "" for file in files]
    assert after[0].startswith(before)
    assert sum(text.count("\n") for text in after) == before.count("\n") + len(methods)
    check(quick(tmp_path, "--resume", "--methods", *methods), methods, ["J0", "J3"])
    assert all(file.read_text().startswith(text) for file, text in zip(files, after, strict=True))


def check(document: Mapping[str, Any], methods: Sequence[str], jitters: Sequence[str]) -> None:
    cells = document["cells"]
    assert [(one["jitter"], one["method"]) for one in cells] == [(j, name) for j in jitters for name in methods]
    peers = [name for name in methods if METHODS[name].runtime is not Runtime.RRFP]
    for one in cells:
        most = {"1f1b": 2, "n": 2, "2n": 4, "auto": 4}.get(str(METHODS[one["method"]].options.get("limit")), 4)
        assert one["held_microbatches"] <= most, one
        assert 0 < one["held_bytes"] <= one["held_bytes_sum"]
        assert one["low"] <= one["over_bound"] <= one["high"]
        assert one["engine_over_bound"] > 0
        assert one["over_engine"] > 0
        if one["steps"] == 1:  # of several steps each figure is a median of its own
            assert one["over_engine"] == pytest.approx(one["over_bound"] / one["engine_over_bound"], rel=0.01)
        assert 1 < one["over_executed_low"] <= one["over_executed_order"] <= one["over_executed_high"]
        assert one["cpu_ms_task"] > 0
        assert min(one["begin_ms"], one["end_ms"]) >= 0
        assert list(one["over"]) == [name for name in peers if name != one["method"]]


@pytest.mark.long
@pytest.mark.timeout(180)
def test_systems_alternate_on_the_same_stages_and_leave_raw_data(tmp_path: Path) -> None:
    methods = [TORCH_1F1B, MEGATRON_1F1B, "strict 1f1b", "n", "on Megatron's chunks, whole"]

    document = quick(tmp_path / "raw", "--jitter", "J3", "--methods", *methods)

    check(document, methods, ["J3"])
    raw = RawSteps(tmp_path / "raw", {"microbatches": 4, "seed": 1, "num_bytes": NUM_BYTES})
    assert {step.turn.method for step in raw.steps(Cell(2, "mllm", "J3"))} == set(methods)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_smoke_run_measures_every_method_under_every_jitter(tmp_path: Path) -> None:
    document = quick(tmp_path / "raw")

    is_left_out = {DEEPSPEED_1F1B} if not (SITE / ".ready").exists() else set()
    check(document, [name for name in FULL_METHODS if name not in is_left_out], ["J0", "J3"])


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--rounds", "0"), "--rounds is 0, must be at least 1"),
        (("--minutes", "-1"), "--minutes is -1, must be at least 0"),
        (("--stages", "1"), "--stages is 1, must be at least 2"),
        (("--headline", "--full"), "not allowed with argument --headline"),
        (("--methods", "torch 2F2B"), "choose from"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(arguments: Sequence[str], error: str) -> None:
    [done] = run_scripts(ROOT / "benchmarks" / "peers" / "run.py", *arguments)

    assert done.code == 2
    assert error in done.errors
    assert "Traceback" not in done.errors

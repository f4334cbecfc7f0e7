"""The plans for a trace: what the simulator gives for the same layers elsewhere, and how far the search gets."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from batches import long
from fork_server import TESTS, fork_server, printed

from rrfp.costs import CostTable, make_costs
from rrfp.errors import ConfigError
from rrfp.lab.advice.advice import Adviser, Wishes
from rrfp.lab.advice.recorded import Recorded, read_recording
from rrfp.lab.advice.replays import Replayer
from rrfp.lab.planning.layers import ModelLayout, read_layers
from rrfp.lab.planning.plan import Basis, Request, plan_file, plans_of
from rrfp.lab.planning.rebuilt import RebuiltSteps, Recomputed
from rrfp.lab.simulation import simulate
from rrfp.lab.traces.chrome_reader import read_chrome
from rrfp.model.placement import Placement
from rrfp.pipeline.plan_file import Plan
from rrfp.trace.chrome import write_chrome

__all__ = ["fork_server"]

STEPS, STAGES, MICROBATCHES = 5, 4, 8
METHOD: Any = {"hint": "slot-aware-pyramid", "limit": "2n"}

#: Layers whose head is as long as six of them, and whose first ones are longer than the others.
HEAVY = [1.5, 1.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
HEAD = 6.0

#: Layers that are all alike.
PLAIN = [1.0] * 8


def table(
    step: int, layout: ModelLayout, weights: Sequence[float] = HEAVY, head: float = HEAD, *, split: bool = False
) -> CostTable:
    """A step with the layers on this layout: every microbatch of its own length, the first layers' apart from it."""
    draw = np.random.default_rng(step)
    length, image = np.exp(0.25 * draw.standard_normal((2, MICROBATCHES)))
    rows = [0.004 * weight * (image if n < 2 else length) for n, weight in enumerate(weights)]
    pieces = np.array([0 * length, *rows, 0.004 * head * length])
    parts = np.array([pieces[part].sum(axis=0) for part in layout.pieces(len(weights))])
    times: Any = {"backward": 2 * parts, "weight": None}
    if split:
        times = {"backward": parts, "weight": parts}
    latency = np.full((len(parts) - 1, MICROBATCHES), 0.0005)
    where = layout.where
    return CostTable(
        where.stages,
        where.chunks,
        where.layout,
        MICROBATCHES,
        forward=parts,
        latency_forward=latency,
        latency_backward=latency,
        held=1e6 * parts / 0.004,
        **times,
    )


def table_of(forward: Any) -> CostTable:
    """One chunk a stage, whole backwards."""
    latency = np.full((len(forward) - 1, forward.shape[1]), 0.0005)
    times: Any = {"forward": forward, "backward": 2 * forward, "weight": None}
    shape: Any = {"stages": len(forward), "chunks": 1, "placement": "looped", "microbatches": forward.shape[1]}
    return CostTable(latency_forward=latency, latency_backward=latency, held=None, **shape, **times)


def even(chunks: int = 1, placement: Any = "looped", stages: int = STAGES, layers: int = 8) -> ModelLayout:
    parts = stages * chunks
    return ModelLayout(Placement(stages, chunks, placement), tuple(range(layers // parts, layers, layers // parts)))


def files(
    path: Path, layout: ModelLayout, *, weights: Sequence[float] = HEAVY, head: float = HEAD, **shape: Any
) -> Request:
    """A trace of the layout, and what each layer takes in any unit."""
    steps = [table(step, layout, weights, head, **shape) for step in range(STEPS)]
    traces = [simulate(step, **METHOD).result.trace(n) for n, step in enumerate(steps)]
    write_chrome(path / "trace.json", traces)
    write_layers(path / "layers.json", layout, weights, head)
    return Request(path / "layers.json")


def write_layers(path: Path, layout: ModelLayout, weights: Sequence[float], head: float) -> None:
    def piece(weight: float, name: str) -> dict[str, Any]:
        return {"names": [name], "forward": weight, "backward": 2 * weight, "num_bytes": int(1000 * weight)}

    where, layers = layout.where, [piece(weight, f"layers.{n}") for n, weight in enumerate(weights)]
    split = {"stages": where.stages, "chunks": where.chunks, "placement": where.layout, "cuts": [*layout.cuts]}
    document = {**split, "before": piece(0, "embed"), "layers": layers, "after": piece(head, "head")}
    path.write_text(json.dumps(document))


def plans_on(path: Path, request: Request, ran: Callable[[], object] = lambda: None, **wishes: Any) -> Any:
    return plan_file(str(path / "trace.json"), request, Wishes(skip_first=0, **{**METHOD, **wishes}), ran)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """For the even cut."""
    path = tmp_path_factory.mktemp("planned")
    return plans_on(path, files(path, even()))


def mean_seconds(layout: ModelLayout, weights: Sequence[float] = HEAVY, head: float = HEAD, **method: Any) -> float:
    steps = [table(step, layout, weights, head) for step in range(STEPS)]
    return float(np.mean([simulate(step, **{**METHOD, **method}).makespan for step in steps]))


def layout_of(plan: Plan | None) -> ModelLayout:
    assert plan is not None
    assert plan.cuts is not None
    return ModelLayout(plan.where, plan.cuts)


@pytest.mark.parametrize("recorded", [even(2, "v"), long(even()), long(even(2, "looped"))], ids=str)
def test_a_plan_takes_what_the_same_layers_take_there(tmp_path: Path, recorded: ModelLayout) -> None:
    plans = plans_on(tmp_path, files(tmp_path, recorded))
    assert plans.measured == pytest.approx(mean_seconds(recorded), rel=1e-4)
    assert plans.rebuilt == pytest.approx(plans.measured, rel=0.01)
    assert plans.doubt == ""
    assert plans.rows
    for row in plans.rows:
        assert row.plan is not None
        method: Any = {"hint": row.plan.hint, "limit": row.plan.limit}
        assert row.seconds == pytest.approx(mean_seconds(layout_of(row.plan), **method), rel=0.01)


def test_stalls_take_as_long_elsewhere_in_tasks_of_any_length(tmp_path: Path) -> None:
    """One microbatch in four is eight times as long, and one task in five stalls for a while, whatever its length."""
    draw, steps = np.random.default_rng(0), []
    for _ in range(8):
        lengths = np.where(draw.random(20) < 0.25, 8.0, 1.0)
        smooth = table_of(0.002 * np.tile(lengths, (STAGES, 1)))
        stalls = [0.005 * (draw.random((STAGES, 20)) < 0.2) for _ in range(2)]
        forward, backward = smooth.forward + stalls[0], smooth.backward + stalls[1]
        steps.append(replace(smooth, forward=forward, backward=backward))
    write_chrome(tmp_path / "trace.json", [simulate(s, **METHOD).result.trace(n) for n, s in enumerate(steps)])
    write_layers(tmp_path / "layers.json", even(), PLAIN, 0.0)
    plans = plans_on(tmp_path, Request(tmp_path / "layers.json", tasks=1))
    assert plans.rebuilt == pytest.approx(plans.measured, rel=0.02)


def test_the_best_cut_leaves_the_stage_with_the_head_few_layers(planned: Any) -> None:
    assert planned.best is not None
    assert planned.best.saved.low > 0.08
    assert planned.now.saved.value == 0
    one = [row for row in planned.rows if row.plan and row.plan.chunks == 1]
    assert all(layout_of(row.plan).bounds(8)[-1] == (7, 8) for row in one[:1])
    seconds = [row.seconds for row in planned.rows]
    assert seconds == sorted(seconds)
    assert [row.name for row in planned.peers] == ["torch's 1F1B", "torch's ZBV"]
    assert min(row.seconds for row in planned.peers) > planned.best.seconds


def best_of_all(weights: Sequence[float], head: float, methods: Sequence[tuple[str, str]]) -> float:
    """The least that any cut, placement and method takes."""
    found: list[float] = []
    for chunks, placement in ((1, "looped"), (2, "v"), (2, "looped")):
        where: Any = Placement(STAGES, chunks, placement)  # type: ignore[arg-type]
        for cuts in combinations(range(1, 8), where.num_virtual_stages - 1):
            found += [mean_seconds(ModelLayout(where, cuts), weights, head, hint=h, limit=k) for h, k in methods]
    return min(found)


EVERY_METHOD = [*product(("slot-aware-pyramid", "slot-aware", "bf"), ("1f1b", "n", "2n"))]


@pytest.mark.parametrize(
    ("seed", "methods"), [(0, EVERY_METHOD[2:3]), *(long(seed, EVERY_METHOD) for seed in range(1, 12))]
)
def test_the_search_comes_within_three_percent_of_trying_all(
    tmp_path: Path, seed: int, methods: Sequence[tuple[str, str]]
) -> None:
    """8 layers on 4 stages."""
    draw = np.random.default_rng(seed)
    weights, head = draw.choice([0.7, 1.0, 1.0, 2.0], 8).tolist(), float(draw.choice([0.5, 2.0, 5.0]))
    plans = plans_on(tmp_path, files(tmp_path, even(), weights=weights, head=head))
    whole = [row.plan for row in plans.rows if row.plan is not None]
    found = min(mean_seconds(layout_of(plan), weights, head, hint=plan.hint, limit=plan.limit) for plan in whole)
    assert found <= 1.03 * best_of_all(weights, head, methods)


def test_the_table_says_how_to_read_its_layers_and_leaves_out_columns_of_zeros(planned: Any) -> None:
    text = str(planned)
    assert any("*" in row.layers for row in planned.rows)
    assert "\nLayers: 4*2 stands for two virtual stages of four layers each, one after the other.\n" in text
    assert " 0 MB" not in text
    few = replace(planned, rows=planned.rows[:1], peers=(), guessed=None)
    first, now = (replace(row, layers="1 2 3", num_bytes=0) for row in (few.rows[0], few.now))
    few = replace(few, rows=(first,), now=now)
    assert "Layers:" not in str(few)
    small, large = (replace(few, now=replace(few.now, num_bytes=each)) for each in (499_999, 7_600_000))
    assert "  bytes  " not in str(small)
    assert "  8 MB  " in str(large)


def test_no_plan_rests_on_weight_gradients_that_nobody_has_measured(tmp_path: Path, planned: Any) -> None:
    assert not any(row.plan is not None and row.plan.split for row in planned.rows)
    assert planned.guessed is not None
    assert planned.guessed.settings.endswith("split True")
    assert any("weight gradients take a third to a half" in line for line in planned.assumed)
    split = plans_on(tmp_path, replace(files(tmp_path, even(), split=True), tasks=20_000))
    assert split.guessed is None
    assert any(row.plan is not None and row.plan.split for row in split.rows)


def test_without_layer_times_limits_and_hints_are_searched_on_the_recorded_steps(tmp_path: Path) -> None:
    files(tmp_path, even())
    plans = plans_on(tmp_path, Request(), limit="1f1b")
    assert plans.rebuilt is None
    assert any("layer times are not known" in line for line in plans.skipped)
    limits = [row for row in plans.rows if row.plan and row.plan.limit == "2n" and not row.plan.split]
    assert limits[0].seconds == pytest.approx(mean_seconds(even(), hint=limits[0].plan.hint if limits[0].plan else ""))
    assert all(row.plan is not None and row.plan.cuts is None for row in plans.rows)


def test_links_that_take_several_periods_ask_for_the_limit_auto(tmp_path: Path) -> None:
    steps = [table(step, even(stages=2), PLAIN, 0.0) for step in range(STEPS)]
    late = np.full((1, MICROBATCHES), 0.2)
    slow = [replace(step, latency_forward=late, latency_backward=late) for step in steps]
    write_chrome(tmp_path / "trace.json", [simulate(s, **METHOD).result.trace(n) for n, s in enumerate(slow)])
    plans = plans_on(tmp_path, Request())
    assert plans.best is not None
    assert plans.best.plan is not None
    assert plans.best.plan.limit == "auto"
    assert plans.best.seconds == pytest.approx(
        np.mean([simulate(step, hint=plans.best.plan.hint, limit="auto").makespan for step in slow])
    )


def test_a_budget_in_bytes_holds_for_every_row(tmp_path: Path, planned: Any) -> None:
    request, free = files(tmp_path, even()), planned
    assert free.best is not None
    tight = plans_on(tmp_path, replace(request, memory=f"{free.best.num_bytes // 2}B", tasks=15_000))
    assert tight.best is not None
    for row in tight.rows:
        assert 0 < row.num_bytes <= free.best.num_bytes // 2
        assert row.plan is not None
        assert row.plan.limit.bytes == free.best.num_bytes // 2
    assert tight.best.seconds >= free.best.seconds
    none = plans_on(tmp_path, replace(request, memory="1B", tasks=1))
    assert none.best is None
    assert any(line.startswith("layouts of 2 chunks, V: 1 tasks were simulated before") for line in none.skipped)
    assert "No candidate holds as little" in str(none)


def test_more_microbatches_are_compared_by_the_time_of_as_many(tmp_path: Path) -> None:
    plans = plans_on(tmp_path, replace(files(tmp_path, even()), microbatches=(20, 5)))
    more = [row for row in plans.rows if row.settings.endswith("20 microbatches")]
    assert more
    assert more[0].seconds < min(row.seconds for row in plans.rows if "microbatches" not in row.settings)


def test_a_slow_rank_keeps_less_of_the_layers(tmp_path: Path) -> None:
    """Stage 1 takes half as long again for the same layers."""
    layout, column = even(), np.array([[1.0], [1.5], [1.0], [1.0]])
    steps = [table(step, layout, [1.0] * 8, 0.0) for step in range(STEPS)]
    slowed = [replace(s, forward=s.forward * column, backward=s.backward * column) for s in steps]
    write_chrome(tmp_path / "trace.json", [simulate(s, **METHOD).result.trace(n) for n, s in enumerate(slowed)])
    write_layers(tmp_path / "layers.json", layout, [1.0] * 8, 0.0)
    plans = plans_on(tmp_path, Request(tmp_path / "layers.json"))
    assert any("stage 1 takes 1.50 times what its layers do" in line for line in plans.assumed)
    slow = plans_on(tmp_path, Request(tmp_path / "layers.json", slow=(1,)))
    one = next(row for row in slow.rows if row.plan and row.plan.chunks == 1)
    bounds = layout_of(one.plan).bounds(8)
    assert bounds[1][1] - bounds[1][0] == min(stop - start for start, stop in bounds)
    assert not any("--slow-rank" in line for line in slow.assumed)


def test_ctrl_c_gives_the_best_so_far(tmp_path: Path) -> None:
    request, count = files(tmp_path, even()), 0

    def ran() -> None:
        nonlocal count
        count += 1
        if count == 150:
            raise KeyboardInterrupt

    plans = plans_on(tmp_path, request, ran)
    assert plans.is_interrupted
    assert plans.best is not None
    assert plans.best.saved.value > 0.05
    assert "Tried, until Ctrl-C:" in str(plans)


def test_the_file_is_what_a_pipeline_reads(tmp_path: Path, planned: Any) -> None:
    document = json.loads(json.dumps(planned.to_json()))
    assert planned.best is not None
    assert Plan.read(document) == planned.best.plan
    (tmp_path / "plan.json").write_text(json.dumps(document))
    assert Plan.read(tmp_path / "plan.json") == planned.best.plan


def test_the_cut_in_the_words_of_others(tmp_path: Path) -> None:
    write_layers(tmp_path / "layers.json", even(), HEAVY, HEAD)
    layers = read_layers(tmp_path / "layers.json")
    layout = ModelLayout(Placement(2, 2), (1, 3, 6))
    assert layers.megatron(layout) == "Et|t*2|t*3|t*2L"
    assert layers.megatron(replace(layout, where=Placement(2, 2, "v"))) is None
    assert layers.torchtitan(layout) == [
        ["tok_embeddings", "layers.0"],
        ["layers.1", "layers.2"],
        ["layers.3", "layers.4", "layers.5"],
        ["layers.6", "layers.7", "norm", "lm_head"],
    ]


def test_megatron_reads_its_string(tmp_path: Path) -> None:
    module = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    write_layers(tmp_path / "layers.json", even(), HEAVY, HEAD)
    layers, layout = read_layers(tmp_path / "layers.json"), ModelLayout(Placement(2, 2), (1, 3, 6))
    read = module.PipelineParallelLayerLayout.parse_str_to_list(layers.megatron(layout))
    assert [[each.name for each in part].count("decoder") for part in read] == [1, 2, 3, 2]
    assert (read[0][0].name, read[-1][-1].name) == ("embedding", "loss")


def recomputing(costs: CostTable, stages: Sequence[int]) -> CostTable:
    """The step where some stages run the forward again in backward, and hold a quarter."""
    here = np.array([[costs.stage_of(v) in stages] for v in range(costs.num_virtual_stages)])
    assert costs.held is not None
    return replace(costs, backward=costs.backward + here * costs.forward, held=costs.held * np.where(here, 0.25, 1.0))


def recompute_files(path: Path, stages: Sequence[int] = range(STAGES)) -> Request:
    """Traces of the even cut without recomputation and with it, on other data."""
    request = files(path, even(), weights=PLAIN, head=0.0)
    steps = [recomputing(table(step, even(), PLAIN, 0.0), stages) for step in range(20, 28)]
    write_chrome(path / "recomputed.json", [simulate(s, **METHOD).result.trace(n) for n, s in enumerate(steps)])
    return replace(request, memory="6MB", recomputed=path / "recomputed.json")


def test_where_bytes_are_few_some_stages_recompute(tmp_path: Path) -> None:
    request = replace(recompute_files(tmp_path), layers=None)
    without, plans = (plans_on(tmp_path, each) for each in (replace(request, recomputed=None), request))
    assert plans.best is not None
    assert plans.best.plan is not None
    assert 0 < len(plans.best.plan.recompute) < STAGES
    assert without.best is None or plans.best.seconds < without.best.seconds
    assert any("--recomputed" in line for line in without.skipped)
    assert any("backward takes 1.50 to 1.50 times as long, and 0.25 to 0.25" in line for line in plans.assumed)
    for row in plans.rows:
        assert row.plan is not None
        method: Any = {"hint": row.plan.hint, "limit": row.plan.limit}
        steps = [recomputing(table(step, even(), PLAIN, 0.0), row.plan.recompute) for step in range(STEPS)]
        assert row.seconds == pytest.approx(np.mean([simulate(step, **method).makespan for step in steps]), rel=1e-3)
        assert row.num_bytes <= 6e6


def test_layers_that_move_recompute_as_they_did(tmp_path: Path) -> None:
    plans = plans_on(tmp_path, replace(recompute_files(tmp_path), tasks=60_000))
    rows = [row for row in plans.rows if row.plan and row.plan.recompute]
    assert rows
    for row in rows:
        assert row.plan is not None
        method: Any = {"hint": row.plan.hint, "limit": row.plan.limit}
        steps = [recomputing(table(step, layout_of(row.plan), PLAIN, 0.0), row.plan.recompute) for step in range(STEPS)]
        assert row.seconds == pytest.approx(np.mean([simulate(step, **method).makespan for step in steps]), rel=0.02)


def test_a_stage_that_nobody_has_seen_recompute_never_does(tmp_path: Path) -> None:
    """Stages 0 and 1 do in the other trace: the first four layers."""
    request = replace(recompute_files(tmp_path, stages=(0, 1)), layers=None)
    plans = plans_on(tmp_path, request)
    found = [row.plan.recompute for row in plans.rows if row.plan and row.plan.recompute]
    assert found
    assert {stage for stages in found for stage in stages} <= {0, 1}
    assert any("stages 2 3 hold no less there" in line for line in plans.assumed)
    assert any("backward takes 1.50 to 1.50 times as long, and 0.25 to 0.25" in line for line in plans.assumed)


@pytest.mark.parametrize(
    ("layout", "stages"),
    [
        (even(), (0, 1)),
        (ModelLayout(Placement(STAGES), (3, 4, 5)), (0, 1)),
        (ModelLayout(Placement(STAGES), (3, 5, 7)), (0,)),
        (even(2, "v"), ()),
        (even(2, "looped"), ()),
    ],
    ids=str,
)
def test_layers_that_nobody_has_seen_recompute_never_do_elsewhere(
    tmp_path: Path, layout: ModelLayout, stages: tuple[int, ...]
) -> None:
    request = recompute_files(tmp_path, stages=(0, 1))
    now, then = (read_recorded(tmp_path / name, 0) for name in ("trace.json", "recomputed.json"))
    found = Recomputed.between(now.steps, then.steps)
    assert request.layers is not None
    assert RebuiltSteps(now.steps, read_layers(request.layers), (), found).may_recompute(layout) == stages


def read_recorded(path: Path, skip_first: int) -> Recorded:
    """The steps of a trace, whatever else had the cores: not by plan_file, which refuses some."""
    [run] = read_chrome(path)
    return read_recording("job", run, skip_first=skip_first, most=10)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_job_that_checkpoints_is_measured_and_runs_its_plan_within_the_budget(tmp_path: Path) -> None:
    """Two processes; the first of two stages checkpoints in the second job."""

    def job(*jobs: str) -> list[list[int]]:
        output = printed(TESTS / "trace" / "recomputing_job.py", tmp_path, *jobs, ranks=2, timeout_s=80)
        return [json.loads(line)["peak_bytes"] for line in output.splitlines()]

    plain, checkpointed = job("none", "0")
    assert checkpointed[0] < plain[0] / 2
    assert checkpointed[1] == plain[1]
    recorded, other = (read_recorded(tmp_path / f"{number}.json", 2) for number in range(2))
    adviser = Adviser("job", recorded, [], Wishes(), Replayer(recorded.steps, lambda: None))
    budget = int(0.6 * plain[0])  # of two microbatches
    found = Recomputed.between(recorded.steps, other.steps)
    plans = plans_of(Basis.recorded(adviser), None, Request(memory=f"{budget}B"), lambda: None, found)
    assert found.backward[0] > 1, "the forward runs again"
    assert found.is_measured.tolist() == [True, False]
    assert plans.best is not None
    assert plans.best.plan is not None
    assert plans.best.plan.recompute == (0,)
    (tmp_path / "plan.json").write_text(json.dumps(plans.to_json()))
    [planned] = job(str(tmp_path / "plan.json"))
    assert max(planned) <= budget


@pytest.fixture
def measured(tmp_path: Path) -> Request:
    """The layers in seconds, and no trace; what is ahead of them takes no time."""
    write_layers(tmp_path / "layers.json", even(), [0.004 * weight for weight in HEAVY], 0.004 * HEAD)
    return Request(tmp_path / "layers.json", microbatches=(MICROBATCHES,))


def like_the_sample(layout: ModelLayout) -> CostTable:
    """A step whose microbatches are all like the sample, and whose messages take no time."""
    pieces = 0.004 * np.array([0.0, *HEAVY, HEAD])
    rows = np.repeat([[pieces[part].sum()] for part in layout.pieces(8)], MICROBATCHES, axis=1)
    none, where = np.zeros((len(rows) - 1, MICROBATCHES)), layout.where
    shape = where.stages, where.chunks, where.layout, MICROBATCHES
    times: Any = {"forward": rows, "backward": 2 * rows, "weight": None}
    return CostTable(*shape, latency_forward=none, latency_backward=none, held=1000 * rows, **times)


def test_layers_alone_are_enough_where_nothing_has_run(measured: Request) -> None:
    plans = plan_file(None, measured)
    assert (plans.measured, plans.rebuilt, plans.steps) == (None, None, 0)
    assert plans.predicted == pytest.approx(simulate(like_the_sample(even()), **METHOD).makespan)
    assert plans.best is not None
    assert plans.best.saved.value > 0.08
    for row in plans.rows:
        assert row.plan is not None
        method: Any = {"hint": row.plan.hint, "limit": row.plan.limit}
        assert row.seconds == pytest.approx(simulate(like_the_sample(layout_of(row.plan)), **method).makespan)
    assert Plan.read(json.loads(json.dumps(plans.to_json()))) == plans.best.plan


def test_of_layers_alone_the_assumptions_are_said(measured: Request) -> None:
    plans = plan_file(None, replace(measured, microbatches=()))
    assert plans.method == "16 microbatches on 4 stages, hint slot-aware-pyramid, limit 2n"
    for said in ("no jitter", "messages take no time", "all ranks are as fast", "a third to a half", "4 a stage"):
        assert any(said in line for line in plans.assumed), said
    assert "no step has run" in str(plans)
    assert "+-" not in str(plans)
    assert any(line.startswith("as cut ") for line in str(plans).splitlines())


def test_of_layers_alone_the_job_is_as_the_caller_says(measured: Request) -> None:
    strict = plan_file(None, measured, Wishes(strict="1f1b"))
    assert strict.now.settings == "strict 1f1b"
    assert strict.predicted == pytest.approx(simulate(like_the_sample(even()), strict="1f1b").makespan)
    within = plan_file(None, replace(measured, memory="100B"), Wishes(hint="bf", limit="n"))
    assert within.now.settings == "hint bf, limit n, split False"
    assert within.rows
    assert all(0 < row.num_bytes <= 100 for row in within.rows)


def test_of_layers_alone_limit_and_hint_stay_the_jobs(measured: Request) -> None:
    plans = plan_file(None, measured, Wishes(hint="bf", limit="n"))
    assert {row.plan and (row.plan.hint, row.plan.limit) for row in plans.rows} == {("bf", "n")}
    assert any(line.startswith("limits and hints: nothing varies") for line in plans.skipped)


def test_why_rebuilt_steps_take_another_time_is_said(tmp_path: Path) -> None:
    """All messages of one step are slow, and none of the others."""
    request = files(tmp_path, even(), weights=PLAIN, head=0.0)
    steps = [table(step, even(), PLAIN, 0.0) for step in range(STEPS)]
    slow = steps[0].latency_forward + 0.1
    steps[0] = replace(steps[0], latency_forward=slow, latency_backward=slow)
    write_chrome(tmp_path / "trace.json", [simulate(s, **METHOD).result.trace(n) for n, s in enumerate(steps)])
    plans = plans_on(tmp_path, replace(request, tasks=1))
    assert plans.rebuilt is not None
    assert abs(plans.rebuilt / plans.predicted - 1) > 0.05
    assert "if only the times of messages are drawn anew" in plans.doubt
    assert f"doubtful, as it is off by more than 5%: {plans.doubt}" in str(plans)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": 2, "cuts": [4]}, "layers: the trace has 4 stages of 1 chunk(s), looped, the file 2 of 1, looped"),
        ({"cuts": [2, 4]}, "cuts is [2, 4], must leave 4 parts a layer or more"),
        ({"placement": "u"}, "placement is 'u', must be one of: looped, v"),
        ({"layers": 3}, "layers is 3, must be a list"),
        ({"after": {"names": []}}, "after.forward is absent"),
        ({"more": 1}, "'more' is unknown, must be one of: stages"),
        (None, "layers.json: must be a JSON object with layers, as stages.save_layers of rrfp.split writes it"),
    ],
)
def test_a_file_of_layers_that_does_not_fit_is_refused(tmp_path: Path, change: Any, message: str) -> None:
    request = files(tmp_path, even())
    document = json.loads((tmp_path / "layers.json").read_text())
    changed = {"traceEvents": []} if change is None else {**document, **change}
    (tmp_path / "layers.json").write_text(json.dumps(changed))
    with pytest.raises(ConfigError) as refused:
        plans_on(tmp_path, request)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"memory": "much"}, "memory is 'much', must be a size such as 8GB"),
        ({"slow": (1,)}, "slow-rank needs --layers"),
        ({"slow": (4,)}, "slow-rank is 4, must be a whole number 0..3"),
        ({"recomputed": "trace.json"}, "recomputed needs --memory"),
        ({"microbatches": (0,)}, "microbatches is 0, must be a whole number >= 1"),
    ],
)
def test_a_request_that_does_not_fit_is_refused(tmp_path: Path, wanted: dict[str, Any], message: str) -> None:
    files(tmp_path, even())
    with pytest.raises(ConfigError) as refused:
        plans_on(tmp_path, Request(**wanted))
    assert message in str(refused.value)


def test_a_trace_that_does_not_recompute_is_refused(tmp_path: Path) -> None:
    request = replace(files(tmp_path, even()), memory="16MB", recomputed=tmp_path / "trace.json")
    with pytest.raises(ConfigError, match="no stage holds less than in the trace beside it"):
        plans_on(tmp_path, request)


def test_too_few_steps_and_graphs_are_refused(tmp_path: Path) -> None:
    files(tmp_path, even())
    with pytest.raises(ConfigError, match="must have at least 5"):
        plan_file(str(tmp_path / "trace.json"), Request(), Wishes(skip_first=3))
    steps = [make_costs("llm", 2, 4, step=step, latency="constant") for step in range(STEPS)]
    write_chrome(tmp_path / "trace.json", [simulate(s, strict="1f1b").result.trace(n) for n, s in enumerate(steps)])
    fixed = plan_file(str(tmp_path / "trace.json"), Request(), Wishes(skip_first=0, strict="1f1b"))
    assert fixed.now.settings == "strict 1f1b"
    assert fixed.best is not None
    assert fixed.best.plan is not None

"""What rows say together, by rows made by hand; and the picture, measured on what was drawn."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

from rrfp.errors import ConfigError
from rrfp.lab.sweep.plot import MOST_METHODS, draw_sweep, plot_sweep
from rrfp.lab.sweep.runs import SweepRow
from rrfp.lab.sweep.summary import Spread, in_common, label, summarise, useless_limits, varied, why_useless

HINT = SweepRow(
    costs=None,
    profile="mllm",
    stages=4,
    microbatches=8,
    chunks=1,
    placement="looped",
    split=False,
    tp=None,
    method="bf",
    kind="hint",
    limit="2n",
    admission="staircase",
    sends="eager",
    coordination=None,
    jitter="J0",
    latency="none",
    seed=0,
    makespan=2.0,
    lower_bound=1.0,
    ratio=2.0,
    peak_max=8,
    received_peak_max=3,
    busy_share=0.5,
    coordination_share=None,
    failed_rounds_per_task=None,
    messages_per_task=None,
    digest="0" * 16,
)
STRICT = replace(HINT, method="1f1b", kind="strict", limit=None, admission=None, makespan=3.0, ratio=3.0, peak_max=4)


def test_a_spread_is_the_textbooks() -> None:
    assert Spread.of([1.0, 2.0, 3.0, 6.0]) == Spread(3.0, 1.0, 6.0, (14 / 3) ** 0.5)
    assert Spread.of([5.0]) == Spread(5.0, 5.0, 5.0, None)


def test_rows_that_differ_in_the_seed_only_are_one_group() -> None:
    rows = [replace(HINT, seed=s, digest=str(s)) for s in range(3)] + [replace(HINT, limit="1f1b"), STRICT]
    groups = summarise(rows)
    assert [[row.seed for row in group.rows] for group in groups] == [[0, 1, 2], [0], [0]]
    assert [group.label for group in groups] == ["bf, limit 2n", "bf, limit 1f1b", "strict 1f1b"]


def test_speed_up_is_the_mean_of_the_seeds_own_ratios() -> None:
    rows = [HINT, replace(HINT, seed=1, makespan=1.0), STRICT, replace(STRICT, seed=1, makespan=4.0)]
    hint, strict = summarise(rows)
    assert hint.speed_up == Spread(2.75, 1.5, 4.0, 3.125**0.5)
    assert strict.speed_up == Spread(1.0, 1.0, 1.0, 0.0)


def test_speed_up_is_over_the_first_strict_method_of_the_same_workload() -> None:
    blocking = replace(STRICT, sends="blocking", makespan=6.0)
    elsewhere = replace(HINT, stages=8)
    groups = summarise([HINT, STRICT, blocking, elsewhere])
    speed_ups = [None if group.speed_up is None else group.speed_up.mean for group in groups]
    assert speed_ups == [1.5, 1.0, 0.5, None]
    assert groups[2].to_json()["speed_up"]["over"] == "strict 1f1b"


def test_summary_is_plain_data() -> None:
    document = json.loads(json.dumps(summarise([HINT, replace(HINT, seed=5, makespan=4.0)])[0].to_json()))
    assert (document["method"], document["seeds"], document["speed_up"]) == ("bf", [0, 5], None)
    assert document["makespan"] == {"mean": 3.0, "min": 2.0, "max": 4.0, "std": pytest.approx(2**0.5)}


def test_labels_tell_methods_apart() -> None:
    rows = [HINT, replace(HINT, admission="paper"), STRICT, replace(STRICT, sends="blocking")]
    assert [label(row) for row in rows] == [
        "bf, limit 2n",
        "bf, limit 2n, paper rule",
        "strict 1f1b",
        "strict 1f1b, blocking sends",
    ]


def test_rows_with_and_without_sizes_are_two_methods() -> None:
    rows = [replace(HINT, sizes=sizes) for sizes in (None, "own", "none", "planned")]
    assert [group.label for group in summarise(rows)] == [
        *["bf, limit 2n"] * 2,
        "bf, limit 2n, no sizes",
        "bf, limit 2n, planned sizes",
    ]


def waiting(limit: str, makespan: float, share: float, stage: int | None, ratio: float = 1.1) -> SweepRow:
    waits = replace(HINT, memory_wait_share=share, memory_wait_stage=stage)
    return replace(waits, limit=limit, makespan=makespan, ratio=ratio)


def reasons(*rows: SweepRow) -> list[tuple[str, str, str]]:
    return [
        (str(smaller.rows[0].limit), str(larger.rows[0].limit), why_useless(smaller, larger))
        for smaller, larger in useless_limits(summarise(rows))
    ]


def test_a_limit_that_gains_nothing_is_explained_by_what_stages_waited_for() -> None:
    rest = "; the step is 1.100 x its lower bound"
    assert reasons(waiting("n", 2.0, 0.2, 0), waiting("1f1b", 2.003, 0.25, 0)) == [
        (
            *("1f1b", "n"),
            "stage 0 holds at most 4 under both, and every microbatch passes it; it idles 25.0% of the step for memory",
        )
    ]
    assert reasons(waiting("4", 2.0, 0.0, None), waiting("2n", 2.0, 0.0, None)) == [
        ("4", "2n", f"with 4 no stage idles for memory{rest}")
    ]
    assert reasons(waiting("2", 2.0, 0.001, 3), waiting("3", 2.0, 0.0, None)) == [
        ("2", "3", f"with 2 no stage idles for memory for more than 0.1% of the step{rest}")
    ]
    assert reasons(waiting("2", 2.0, 0.3, 1), waiting("3", 2.0, 0.1, 2)) == [
        (
            *("2", "3"),
            "stage 1 idles 30.0% of the step for memory with 2, and with 3 at most 10.0%: it waits for inputs, or has "
            f"nothing left, instead{rest}",
        )
    ]
    assert reasons(waiting("2", 2.0, 0.1, 1), waiting("3", 2.0, 0.3, 2)) == [
        ("2", "3", f"a stage idles 30.0% of the step for memory with 3 too{rest}")
    ]
    assert reasons(waiting("2", 2.0, 0.3, 1), waiting("3", 2.0, 0.3, 1, ratio=1.001)) == [
        ("2", "3", "with 2 the step is already at the lower bound of 3: no order is faster")
    ]


def test_only_limits_of_one_kind_hint_and_workload_are_compared() -> None:
    same, other = waiting("n", 2.0, 0.0, None), waiting("2n", 2.0, 0.0, None)
    assert reasons(same, replace(other, method="fb")) == []
    assert reasons(same, replace(other, stages=8)) == []
    assert reasons(same, replace(other, limit="8MB")) == []
    assert reasons(same, replace(other, sizes="planned")) == []
    assert reasons(same, replace(other, makespan=1.99)) == []
    assert len(reasons(same, replace(other, makespan=2.1))) == 1, "longer: it gains nothing either"
    assert reasons(same, replace(other, limit="4")) == [], "both hold 4"
    assert [pair[:2] for pair in reasons(*(replace(other, limit=f"{n}MB") for n in (30, 20)))] == [("20MB", "30MB")]


def test_what_is_common_and_what_varies() -> None:
    rows = [HINT, replace(HINT, stages=8, seed=1)]
    assert varied(rows, ("profile", "stages", "jitter", "seed")) == ["stages", "seed"]
    assert in_common(rows) == "mllm, microbatches 8, whole backward, J0, latency none; 2 seeds: mean, least and most"
    assert in_common([replace(HINT, chunks=2)]).startswith("mllm, stages 4, microbatches 8, chunks 2, looped, whole")


def groups(seed: int, share: float) -> SweepRow:
    own = {"coordination_share": share, "failed_rounds_per_task": 2 * share, "messages_per_task": 3.0}
    return replace(HINT, tp=4, coordination="agreement", seed=seed, **own)  # type: ignore[arg-type]


def test_groups_of_ranks_are_another_workload_with_figures_of_their_own() -> None:
    alone, group = summarise([HINT, groups(0, 0.1), groups(1, 0.3)])
    assert (alone.has_groups, group.has_groups) == (False, True)
    assert "coordination_share" not in alone.to_json()
    document = group.to_json()
    assert (document["tp"], document["coordination"], group.label) == (4, "agreement", "bf, limit 2n, agreement")
    assert document["coordination_share"]["mean"] == pytest.approx(0.2)
    assert document["failed_rounds_per_task"]["max"] == 0.6
    assert in_common([groups(0, 0.1)]).endswith("whole backward, tp 4, J0, latency none, seed 0")


def test_cost_files_have_neither_profile_nor_seed() -> None:
    file = replace(HINT, costs="a.json", profile=None, jitter=None, latency=None, seed=None)
    assert in_common([file]) == "a.json, stages 4, microbatches 8, whole backward"
    one, other = summarise([file, replace(file, costs="b.json")])
    assert (one.workload["costs"], other.workload["costs"]) == ("a.json", "b.json")
    assert draw_sweep([file, replace(file, costs="b.json")]).axes[1].get_xlabel() == "costs"


def many() -> list[SweepRow]:
    """Two panels across, two down, three places on the axis, six methods, two seeds."""
    methods = [HINT, replace(HINT, limit="1f1b"), replace(HINT, method="a-hint-of-a-long-name", limit="1f1b")]
    methods += [STRICT, replace(STRICT, sends="blocking"), replace(STRICT, method="interleaved-1f1b")]
    workloads = itertools.product((4, 8, 1024), ("J0", "J3"), ("none", "constant:0.00025"), (0, 1))
    return [
        replace(row, stages=n, jitter=j, latency=latency, seed=seed, makespan=row.makespan * (1 + 0.1 * seed + n / 999))
        for n, j, latency, seed in workloads
        for row in methods
    ]


def drawn(rows: list[SweepRow]) -> Figure:
    figure = draw_sweep(rows)
    assert isinstance(figure.canvas, FigureCanvasAgg)
    figure.draw_without_rendering()
    return figure


def not_drawn(axis: Axis) -> Iterator[Text]:
    """The labels of ticks outside of the axis, and of all ticks where the axis has no labels."""
    low, high = sorted(axis.get_view_interval())
    for tick, place in zip(axis.get_major_ticks(), axis.get_majorticklocs(), strict=True):
        yield tick.label2
        if not (low <= place <= high and tick.label1.get_visible()):
            yield tick.label1


@pytest.mark.parametrize("rows", [many(), [HINT], [HINT, STRICT], [replace(row, chunks=2) for row in many()]])
def test_no_text_overlaps_another_or_leaves_the_picture(rows: list[SweepRow]) -> None:
    figure = drawn(rows)
    hidden = {label for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for label in not_drawn(axis)}
    texts = [one for one in figure.findobj(Text) if one.get_text() and one not in hidden]
    boxes = [(one.get_text(), one.get_window_extent()) for one in texts]
    names = [name for name, _ in boxes]
    assert len({label(row) for row in rows}.intersection(names)) == len({label(row) for row in rows})
    for name, box in boxes:
        assert figure.bbox.x0 <= box.x0 <= box.x1 <= figure.bbox.x1, name
        assert figure.bbox.y0 <= box.y0 <= box.y1 <= figure.bbox.y1, name
    for (one, a), (two, b) in itertools.combinations(boxes, 2):
        assert not (a.x0 < b.x1 and b.x0 < a.x1 and a.y0 < b.y1 and b.y0 < a.y1), (one, two)


def test_a_panel_for_each_workload_shows_speed_and_memory() -> None:
    figure = drawn(many())
    assert len(figure.axes) == 2 * 4
    speeds, memories = figure.axes[::2], figure.axes[1::2]
    assert [axes.get_title(loc="left") for axes in speeds] == [
        "J0, latency none",
        "J0, latency constant:0.00025",
        "J3, latency none",
        "J3, latency constant:0.00025",
    ]
    assert {axes.get_ylim() for axes in speeds} == {speeds[0].get_ylim()}
    assert {axes.get_ylim() for axes in memories} == {memories[0].get_ylim()}
    assert speeds[0].get_ylabel() == "speed-up over\nstrict 1f1b"
    assert [tick.get_text() for tick in memories[0].get_xticklabels()] == ["4", "8", "1024"]
    assert len(speeds[0].containers) == len(memories[0].containers) == 6


def test_without_a_fixed_order_speed_is_the_distance_to_the_bound() -> None:
    assert drawn([HINT]).axes[0].get_ylabel() == "makespan / lower bound"
    some = [HINT, STRICT, replace(HINT, stages=8)]
    assert drawn(some).axes[0].get_ylabel() == "makespan / lower bound"


def test_the_file_is_a_png(tmp_path: Path) -> None:
    plot_sweep([HINT, STRICT], tmp_path / "p.png")
    height, width, _ = imread(tmp_path / "p.png").shape
    assert (400 < height < 900, 400 < width < 900) == (True, True)
    with pytest.raises(ConfigError, match="cannot be written"):
        plot_sweep([HINT], tmp_path / "absent" / "p.png")


def test_the_points_of_one_place_are_together_and_those_of_two_clearly_apart() -> None:
    [speed, _] = drawn([replace(HINT, stages=n, method=f"h{index}") for n in (4, 8) for index in range(6)]).axes
    points = [
        np.asarray(line.get_xdata(), float) for line in speed.get_lines() if line.get_marker() not in ("None", "")
    ]
    assert [len(one) for one in points] == [2] * 6
    assert len({one[0] for one in points}) == 6
    assert max(abs(one[0]) for one in points) <= 0.0625  # a quarter of a stage, read on an axis from 4 to 8


def test_a_picture_that_nobody_could_read_is_refused() -> None:
    rows = [replace(HINT, method=f"h{index}") for index in range(MOST_METHODS + 1)]
    with pytest.raises(ConfigError, match=f"at most {MOST_METHODS} methods, this sweep has {MOST_METHODS + 1}"):
        draw_sweep(rows)
    with pytest.raises(ValueError, match="at least one row"):
        draw_sweep([])

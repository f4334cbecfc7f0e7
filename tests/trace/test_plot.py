"""The timeline: measured on the drawn figure, because numbers that overlap or are missing are what makes it useless."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.patches import Patch, Rectangle
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

from rrfp.core.usage import WaitCause
from rrfp.costs import make_costs
from rrfp.errors import ConfigError
from rrfp.lab.simulation import simulate
from rrfp.lab.traces.timeline import WHOLE, TimeWindow, draw_timelines, plot_timelines
from rrfp.model.tasks import Kind, Task
from rrfp.trace.spans import StepTrace, TaskSpan, WaitSpan


@pytest.fixture(scope="module")
def rows() -> list[tuple[str, StepTrace]]:
    """The demo's case: 4 stages, 24 microbatches, jitter."""
    costs = make_costs("mllm", 4, 24, jitter="J2", latency="spike", seed=1)
    fixed, readiness_driven = simulate(costs, strict="1f1b"), simulate(costs, hint="bf")
    return [("1f1b", fixed.result.trace()), ("bf", readiness_driven.result.trace())]


@pytest.fixture(scope="module")
def figure(rows: list[tuple[str, StepTrace]]) -> Figure:
    figure = draw_timelines(rows)
    assert isinstance(figure.canvas, FigureCanvasAgg)
    figure.draw_without_rendering()
    return figure


def numbers_of(axes: Axes) -> list[Text]:
    """The microbatches in the boxes; the other texts are annotations."""
    return [text for text in axes.texts if not isinstance(text, Annotation)]


def idle_of(axes: Axes) -> list[str]:
    """What stands at the end of each row."""
    return [text.get_text() for text in axes.texts if text.get_text().endswith("idle")]


def overlap(one: Bbox, two: Bbox) -> bool:
    return bool(one.x0 < two.x1 and two.x0 < one.x1 and one.y0 < two.y1 and two.y0 < one.y1)


def test_file_is_a_png_of_the_figures_size(rows: list[tuple[str, StepTrace]], tmp_path: Path) -> None:
    path = tmp_path / "timeline.png"
    plot_timelines(rows, path)
    height, width, _ = imread(path).shape
    assert width == 1400
    assert 400 < height < 700


def test_runs_share_one_time_axis(figure: Figure, rows: list[tuple[str, StepTrace]]) -> None:
    above, below = figure.axes
    assert above.get_xlim() == below.get_xlim() == (0.0, max(trace.end for _, trace in rows))
    assert [tick.get_text() for tick in below.get_yticklabels()] == ["stage 0", "stage 1", "stage 2", "stage 3"]
    assert above.get_position().y0 > below.get_position().y1


def test_boxes_with_room_have_their_number_and_none_leaves_its_box(
    figure: Figure, rows: list[tuple[str, StepTrace]]
) -> None:
    for axes, (_, trace) in zip(figure.axes, rows, strict=True):
        numbers = {text.get_position(): text for text in numbers_of(axes)}
        assert len(numbers) > 0.5 * len(trace.tasks)
        for box in trace.tasks:
            text = numbers.pop(((box.start + box.end) / 2, box.stage), None)
            if text is None:
                continue
            assert text.get_text() == str(box.task.microbatch)
            inside = text.get_window_extent()
            left, right = (axes.transData.transform((x, 0))[0] for x in (box.start, box.end))
            assert left <= inside.x0 + 0.5
            assert inside.x1 - 0.5 <= right
        assert not numbers


def test_nothing_is_written_over_anything_else(figure: Figure) -> None:
    below = figure.axes[-1]
    legend = figure.legends[0].get_window_extent()
    texts = [text for axes in figure.axes for text in axes.texts]
    texts += [label for axes in figure.axes for label in axes.get_yticklabels()]
    texts += [label for label in below.get_xticklabels() if 0 <= label.get_position()[0] <= below.get_xlim()[1]]
    boxes = [text.get_window_extent() for text in [*texts, *figure.texts]] + [legend]
    clashes = [(i, k) for i, one in enumerate(boxes) for k, two in enumerate(boxes[:i]) if overlap(one, two)]
    assert clashes == []
    page = figure.bbox
    assert all(page.x0 <= box.x0 and box.x1 <= page.x1 and page.y0 <= box.y0 and box.y1 <= page.y1 for box in boxes)
    assert not any(overlap(legend, axes.get_window_extent()) for axes in figure.axes)


def test_titles_name_the_makespan_and_the_legend_every_colour(
    figure: Figure, rows: list[tuple[str, StepTrace]]
) -> None:
    found = [[text.get_text() for text in axes.texts[-2:]] for axes in figure.axes]
    assert found == [[name, f"makespan {trace.end * 1e3:.4g} ms"] for name, trace in rows]
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["forward", "backward", "idle: input", "idle: memory", "idle: nothing left"]


def boxes(axes: Axes) -> list[PolyCollection]:
    return [artist for artist in axes.collections if isinstance(artist, PolyCollection)]


def swatches(figure: Figure) -> list[Patch]:
    """The legend's patches; a kind has one for each chunk."""
    return [patch for patch in figure.legends[0].findobj(Patch) if isinstance(patch, Rectangle)]


def looks(figure: Figure) -> set[tuple[tuple[float, ...], str | None]]:
    """Ground and hatch of all that is drawn."""
    shapes = [shape for axes in figure.axes for shape in boxes(axes)]
    return {(rounded(colour), shape.get_hatch()) for shape in shapes for colour in np.asarray(shape.get_facecolor())}


def rounded(colour: Any) -> tuple[float, ...]:
    return tuple(np.round(colour, 6).tolist())


@pytest.mark.parametrize(
    "how", [{"strict": "zb-v"}, {"strict": "interleaved-1f1b"}, {"hint": "bf", "limit": 1}, {"hint": "bf"}]
)
def test_the_legend_has_every_tint_and_hatch_that_is_drawn_and_no_other(how: dict[str, Any]) -> None:
    shape: dict[str, Any] = {"strict": {"chunks": 2}}.get(next(iter(how)), {})
    if how.get("strict") == "zb-v":
        shape |= {"placement": "v", "split": True}
    trace = simulate(make_costs("mllm", 4, 8, jitter="J2", **shape), **how).result.trace()
    figure = draw_timelines([("one", trace)])
    found = {(rounded(patch.get_facecolor()), patch.get_hatch()) for patch in swatches(figure)}
    assert found == looks(figure)


def test_time_that_is_left_blank_has_an_entry_where_it_is_visible() -> None:
    def labels(blank: float, window: TimeWindow = WHOLE) -> list[str]:
        """Of stage 0, which computes all the time, and stage 1, which does not at first."""
        spans = (TaskSpan(0, Task(Kind.F, 0, 0), 5.0, 15.0), TaskSpan(1, Task(Kind.F, 0, 1), 5.0 + blank, 15.0))
        figure = draw_timelines([("one", StepTrace(0, 5.0, 15.0, spans))], window)
        return [text.get_text() for text in figure.legends[0].get_texts()]

    assert labels(0.2) == ["forward"]
    assert labels(0.5) == ["forward", "other: the runtime"]
    assert labels(0.5, TimeWindow(1.0)) == ["forward"]
    assert labels(0.2, TimeWindow(0.0, 2.0)) == ["forward", "other: the runtime"]


def test_a_kind_is_paler_on_a_deeper_chunk_and_the_legend_names_the_chunks() -> None:
    kinds = [(Kind.F, 0), (Kind.F, 1), (Kind.W, 1), (Kind.W, 0)]
    spans = tuple(TaskSpan(0, Task(kind, 0, v), float(i), i + 1.0) for i, (kind, v) in enumerate(kinds))
    figure = draw_timelines([("one", StepTrace(0, 0.0, 4.0, spans))])
    [tasks] = boxes(figure.axes[0])
    shallow, deep = np.asarray(tasks.get_facecolor())[:2, :3].sum(axis=1)
    assert shallow < deep
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert labels == ["forward, chunk 0, 1", "weight gradient, chunk 0, 1"]


def test_idle_times_are_told_apart_without_colour() -> None:
    """Each pair differs in its hatch, and tasks have none."""
    waits = tuple(WaitSpan(0, cause, float(i), i + 1.0) for i, cause in enumerate(WaitCause))
    end = float(len(WaitCause))
    trace = StepTrace(0, 0.0, end + 1, (TaskSpan(0, Task(Kind.F, 0, 0), end, end + 1),), waits)
    figure = draw_timelines([("one", trace)])
    hatches: list[str | None] = [shape.get_hatch() for shape in boxes(figure.axes[0])]
    assert len(hatches) == 6
    assert len(set(hatches[:-1])) == 5
    assert hatches[-1] is None
    plain = [shape for shape in boxes(figure.axes[0]) if shape.get_hatch() is None]
    ground, task = (np.asarray(shape.get_facecolor())[0, :3].mean() for shape in plain)
    assert ground - task > 0.3  # lightness alone


def test_a_window_shows_a_part_of_the_step(rows: list[tuple[str, StepTrace]]) -> None:
    _, trace = rows[0]
    start, end = 0.25 * trace.end, 0.5 * trace.end
    figure = draw_timelines(rows[:1], TimeWindow(start, end))
    figure.draw_without_rendering()
    [axes] = figure.axes
    assert axes.get_xlim() == (start, end)
    tasks = boxes(axes)[-1]
    assert len(tasks.get_paths()) == sum(box.end >= start and box.start <= end for box in trace.tasks)
    title, makespan = (text.get_text() for text in axes.texts[-2:])
    shown = f"{start * 1e3:.6g} to {end * 1e3:.6g} ms shown"
    assert (title, makespan) == ("1f1b", f"makespan {trace.end * 1e3:.4g} ms; {shown}")
    assert len(numbers_of(axes)) > 0.9 * len(tasks.get_paths())
    for text in numbers_of(axes):
        assert start <= text.get_position()[0] <= end
    assert not axes.lines  # the step's end is not there


def test_a_window_may_end_after_the_step_and_not_begin_there(rows: list[tuple[str, StepTrace]]) -> None:
    figure = draw_timelines(rows[:1], TimeWindow(0.0, 1e6))
    assert figure.axes[0].get_xlim() == (0.0, rows[0][1].end)
    with pytest.raises(ConfigError, match=r"^from is 1e\+06 ms, must be less than the step's [0-9.]+ ms$"):
        draw_timelines(rows, TimeWindow(1000.0))


@pytest.mark.parametrize(
    ("start", "end", "message"),
    [
        (-1.0, None, "from is -1 ms, must be 0 ms or more"),
        (float("nan"), None, "from is nan ms, must be 0 ms or more"),
        (None, 0.0, "to is 0 ms, must be more than from (0 ms)"),
        (5.0, 4.0, "to is 4 ms, must be more than from (5 ms)"),
        (None, float("inf"), "to is inf ms, must be more than from (0 ms)"),
    ],
)
def test_times_that_make_no_window_are_refused(start: float | None, end: float | None, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        TimeWindow.of_milliseconds(start, end)


def test_a_step_of_too_thin_boxes_has_the_dense_form() -> None:
    """No number, no edge that would cover a box, and the share of the stages below; a part of it has numbers again."""
    trace = simulate(make_costs("mllm", 6, 200, jitter="J2"), hint="bf", limit=2).result.trace()
    figure = draw_timelines([("many", trace)])
    axes, panel = figure.axes
    assert [text.get_text() for text in axes.texts[-2:]] == ["many", f"makespan {trace.end:.4g} s"]
    assert not numbers_of(axes)
    assert np.all(np.asarray(boxes(axes)[-1].get_linewidth()) == 0.0)
    assert panel.get_xlim() == axes.get_xlim()
    assert [shape.get_hatch() for shape in boxes(panel)] == [None, None, None, "//////", "...."]
    top = np.asarray(boxes(panel)[-1].get_paths()[0].vertices)[:, 1]
    assert top.max() == pytest.approx(1.0)  # a simulated stage always computes or waits
    detail = draw_timelines([("many", trace)], TimeWindow(0.1 * trace.end, 0.15 * trace.end))
    assert len(detail.axes) == 1
    assert len(numbers_of(detail.axes[0])) > 40
    assert len(draw_timelines([("many", trace)], panels=False).axes) == 1


def test_each_row_ends_with_the_part_of_the_shown_time_without_a_task() -> None:
    spans = (TaskSpan(0, Task(Kind.F, 0, 0), 5.0, 8.0), TaskSpan(1, Task(Kind.F, 0, 1), 8.0, 9.0))
    row = [("one", StepTrace(0, 5.0, 9.0, spans))]
    assert idle_of(draw_timelines(row).axes[0]) == ["25% idle", "75% idle"]
    assert idle_of(draw_timelines(row, TimeWindow(2.0)).axes[0]) == ["50% idle", "50% idle"]


def test_only_recorded_stages_have_a_row() -> None:
    spans = tuple(TaskSpan(stage, Task(Kind.F, 0, stage), 0.0, 1.0) for stage in (2, 5))
    [axes] = draw_timelines([("two ranks", StepTrace(0, 0.0, 1.0, spans))]).axes
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["stage 2", "stage 5"]


def test_extreme_sizes_are_drawn_within_bounds(rows: list[tuple[str, StepTrace]], tmp_path: Path) -> None:
    """A single task that took no time, and a run of far more tasks than any width could number."""
    instant = StepTrace(0, 5.0, 5.0, (TaskSpan(0, Task(Kind.F, 0, 0), 5.0, 5.0),))
    costs = make_costs("llm", 2, 150)
    many = simulate(costs, strict="1f1b").result.trace(1)
    for name, trace in (("instant", instant), ("many", many)):
        plot_timelines([(name, trace)], tmp_path / f"{name}.png")
        assert imread(tmp_path / f"{name}.png").shape[1] == 1400


def test_a_run_without_tasks_is_refused() -> None:
    for rows in ([], [("empty", StepTrace(0, 0.0, 1.0))]):
        with pytest.raises(ValueError, match="at least one"):
            draw_timelines(rows)


def test_a_file_that_cannot_be_written_is_one_line(rows: list[tuple[str, StepTrace]], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing/t\.png: cannot be written \(No such file or directory\)$"):
        plot_timelines(rows, tmp_path / "missing" / "t.png")


def test_without_matplotlib_the_error_says_what_to_install(
    rows: list[tuple[str, StepTrace]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"^a timeline needs matplotlib: pip install 'rrfp\[plot\]'$"):
        plot_timelines(rows, tmp_path / "t.png")


def test_importing_the_package_imports_neither_matplotlib_nor_a_backend() -> None:
    code = "import sys, rrfp.lab.traces.timeline, rrfp.lab.commands.trace; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

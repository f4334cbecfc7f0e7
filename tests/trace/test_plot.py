"""The timeline: measured on the drawn figure, because numbers that overlap or are missing are what makes it useless."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.transforms import Bbox

from rrfp.core.tasks import Kind, Task
from rrfp.costs import make_costs
from rrfp.errors import ConfigError
from rrfp.sim.simulation import simulate
from rrfp.trace.plot import DPI, draw_timelines, plot_timelines
from rrfp.trace.spans import StepTrace, TaskSpan


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


def overlap(one: Bbox, two: Bbox) -> bool:
    return bool(one.x0 < two.x1 and two.x0 < one.x1 and one.y0 < two.y1 and two.y0 < one.y1)


def test_file_is_a_png_of_the_figures_size(rows: list[tuple[str, StepTrace]], tmp_path: Path) -> None:
    path = tmp_path / "timeline.png"
    plot_timelines(rows, path)
    height, width, _ = imread(path).shape
    assert (400 < height < 700, 1500 < width < 3000) == (True, True)


def test_runs_share_one_time_axis(figure: Figure, rows: list[tuple[str, StepTrace]]) -> None:
    above, below = figure.axes
    assert above.get_xlim() == below.get_xlim() == (0.0, max(trace.end for _, trace in rows))
    assert [tick.get_text() for tick in below.get_yticklabels()] == ["stage 0", "stage 1", "stage 2", "stage 3"]
    assert above.get_position().y0 > below.get_position().y1


def test_nearly_every_box_has_its_number_and_none_leaves_its_box(
    figure: Figure, rows: list[tuple[str, StepTrace]]
) -> None:
    for axes, (_, trace) in zip(figure.axes, rows, strict=True):
        numbers = {(text.get_position()): text for text in axes.texts[: -len(("title", "makespan"))]}
        assert len(numbers) > 0.9 * len(trace.tasks)
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


def test_a_kind_is_paler_on_a_deeper_chunk_and_w_is_in_the_legend() -> None:
    kinds = [(Kind.F, 0), (Kind.F, 1), (Kind.W, 1), (Kind.W, 0)]
    spans = tuple(TaskSpan(0, Task(kind, 0, v), float(i), i + 1.0) for i, (kind, v) in enumerate(kinds))
    figure = draw_timelines([("one", StepTrace(0, 0.0, 4.0, spans))])
    [boxes] = [artist for artist in figure.axes[0].collections if isinstance(artist, PolyCollection)]
    shallow, deep = np.asarray(boxes.get_facecolor())[:2, :3].sum(axis=1)
    assert shallow < deep
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["forward", "weight gradient"]


def test_extreme_sizes_are_drawn_within_bounds(rows: list[tuple[str, StepTrace]], tmp_path: Path) -> None:
    """A single task that took no time, and a run of far more tasks than any width could number."""
    instant = StepTrace(0, 5.0, 5.0, (TaskSpan(0, Task(Kind.F, 0, 0), 5.0, 5.0),))
    costs = make_costs("llm", 2, 150)
    many = simulate(costs, strict="1f1b").result.trace(1)
    for name, trace in (("instant", instant), ("many", many)):
        plot_timelines([(name, trace)], tmp_path / f"{name}.png")
        assert imread(tmp_path / f"{name}.png").shape[1] <= 19 * DPI


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
    code = "import sys, rrfp.trace.plot, rrfp.trace.table; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

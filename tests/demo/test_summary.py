"""The demo's figures, from lines as rank 0 prints them."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from rrfp.engine.bound import lower_bound
from rrfp.errors import ConfigError
from rrfp.lab.demo.report import DemoReport, MethodFigures, Steps
from rrfp.lab.demo.settings import METHODS, DemoSettings
from rrfp.trace.breakdown import Breakdown

SETTINGS = DemoSettings(out="unused", stages=2, microbatches=3, warm_up=1, steps=3)
#: Of the three measured steps: no method is faster than these, whatever memory it takes.
BOUNDS = [lower_bound(SETTINGS.costs(step, METHODS["1f1b"], split=True), None) for step in (1, 2, 3)]
#: The same of two chunks in V, whose stages have other layers.
V_BOUNDS = [lower_bound(SETTINGS.costs(step, METHODS["v"]), None) for step in (1, 2, 3)]
#: Part of each measured step in which stage 0 is blocked; stage 1 always is for half of it.
BLOCKED = (0.1, 0.2, 0.6)


def line(method: str, step: int, seconds: float, blocked: tuple[float, float], held: list[int]) -> dict[str, Any]:
    """Stage 0 waits for memory, stage 1 for inputs, for these parts of the step."""
    parts = [
        Breakdown(seconds, seconds * (1 - blocked[0]), memory=seconds * blocked[0]),
        Breakdown(seconds, seconds * (1 - blocked[1]), input=seconds * blocked[1]),
    ]
    told = {"event": "step", "method": method, "step": step, "seconds": seconds, "loss": 5.0 - step}
    return {
        **told,
        "peak_held": held,
        "peak_bytes": [10 * each for each in held],
        "breakdown": [asdict(part) for part in parts],
    }


def steps_of(settings: DemoSettings) -> Steps:
    """1f1b takes 4, 3 and 2 bounds, bf 2, 2 and 1, all others just the bounds; the warm-up is much slower."""
    steps = Steps(settings)
    factors = {**dict.fromkeys(METHODS, (1, 1, 1)), "1f1b": (4, 3, 2), "bf": (2, 2, 1)}
    for method in METHODS:
        steps.add(line(method, 0, 1e3, (1.0, 1.0), [9, 9]))
    for step in (1, 2, 3):
        for method, of_method in factors.items():
            seconds = of_method[step - 1] * BOUNDS[step - 1]
            steps.add(line(method, step, seconds, (BLOCKED[step - 1], 0.5), [2, 1] if step < 3 else [1, 2]))
    return steps


@pytest.fixture
def figures() -> dict[str, MethodFigures]:
    return steps_of(SETTINGS).figures()


def test_iteration_time_is_the_median_and_the_spread_longest_minus_shortest(figures: dict[str, MethodFigures]) -> None:
    times = sorted([4 * BOUNDS[0], 3 * BOUNDS[1], 2 * BOUNDS[2]])
    assert figures["1f1b"].iteration_s == times[1]
    assert figures["1f1b"].iteration_s_spread == times[2] - times[0]


def test_ratio_is_the_median_over_steps_of_time_over_that_steps_bound(figures: dict[str, MethodFigures]) -> None:
    assert {method: of_one.ratio for method, of_one in figures.items()} == {
        **dict.fromkeys(METHODS, pytest.approx(1)),
        "1f1b": pytest.approx(3),
        "bf": pytest.approx(2),
        "v": pytest.approx(median(one / of_v for one, of_v in zip(BOUNDS, V_BOUNDS, strict=True))),
    }


def test_speedup_pairs_the_steps_of_one_cost_table(figures: dict[str, MethodFigures]) -> None:
    """4/2, 3/2 and 2/1: the median is 2; the medians of the times would tell something else."""
    assert {method: of_one.speedup for method, of_one in figures.items()} == {
        **dict.fromkeys(METHODS, pytest.approx(3)),
        "1f1b": 1.0,
        "bf": pytest.approx(2),
    }


def test_blocking_is_the_mean_share_over_stages_and_steps_and_the_sum_of_its_causes(
    figures: dict[str, MethodFigures],
) -> None:
    bf = figures["bf"]
    assert bf.blocking == pytest.approx((0.3 + 0.35 + 0.55) / 3)
    assert bf.blocking_by_cause == {
        "input": pytest.approx(0.25),
        "memory": pytest.approx(0.15),
        "order": 0,
        "choice": 0,
        "drained": 0,
    }


def test_peaks_are_the_most_of_any_measured_step_and_losses_are_all(figures: dict[str, MethodFigures]) -> None:
    assert (figures["bf"].peak_held, figures["bf"].losses) == ((2, 2), (5.0, 4.0, 3.0, 2.0))
    assert figures["bf"].peak_bytes == (20, 20)


def test_what_chunks_hold_counts_in_microbatches(figures: dict[str, MethodFigures]) -> None:
    """Two chunk tasks are one microbatch on both chunks, and one chunk task is one that takes a slot as well."""
    assert (figures["slot-aware"].peak_held, figures["v"].peak_held) == ((2, 2), (1, 1))


def test_real_compute_has_no_table_and_no_bound() -> None:
    steps = steps_of(DemoSettings(out="unused", stages=2, microbatches=3, steps=3, real_compute=True))
    assert (steps.bounds(METHODS["1f1b"]), steps.figures()["bf"].ratio) == (None, None)


def test_the_step_to_show_is_the_one_of_the_median_speedup() -> None:
    steps = Steps(SETTINGS)
    for method, times in (("1f1b", (9, 30, 40, 20)), ("bf", (1, 10, 10, 10))):
        for step, seconds in enumerate(times):
            steps.add(line(method, step, seconds, (0, 0), [1, 1]))
    assert steps.typical_step("bf") == 0  # 30/10 lies between 20/10 and 40/10


@pytest.mark.parametrize("overrun_s", [1.0, 40.0])
def test_a_run_on_busy_cores_says_so(overrun_s: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = replace(SETTINGS, out=str(tmp_path))
    (tmp_path / "parts").mkdir()
    part = {"traces": [], "overrun": {"planned_s": 100.0, "overrun_s": overrun_s}, "weights_sha256": {}}
    for method in METHODS:
        for stage in range(2):
            (tmp_path / "parts" / f"{method}-{stage}.json").write_text(json.dumps(part))
    DemoReport(settings, steps_of(settings)).show()
    said = " ".join(capsys.readouterr().out.split())
    assert f"real compute overran it by {overrun_s:.1f}% in sum" in said
    assert ("the cores were busy, so compare on a quieter machine" in said) == (overrun_s > 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stages": 1}, r"^stages is 1, must be 2\.\.4"),
        ({"stages": 5}, r"^stages is 5, must be 2\.\.4"),
        ({"microbatches": 0}, "^microbatches is 0, must be at least 1$"),
        ({"steps": 0}, "^steps is 0, must be at least 1$"),
        ({"warm_up": -1}, "^warm-up is -1, must be at least 0$"),
        ({"seed": -1}, "^seed is -1, must be at least 0$"),
    ],
)
def test_impossible_settings_are_named(change: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DemoSettings(out="unused", **change)  # type: ignore[arg-type]


def test_settings_travel_as_one_line() -> None:
    settings = DemoSettings(out="a b", text="c", warm_up=0, real_compute=True)
    assert DemoSettings.from_json(settings.to_json()) == settings
    assert "\n" not in settings.to_json()

"""The timeline of a step in a notebook."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest
import torch
from report.conftest import simulated
from torch import nn

import rrfp
from rrfp.core.usage import WaitCause
from rrfp.trace.breakdown import CAUSE_LABELS, idle_waits
from rrfp.trace.spans import StepTrace

SVG = "{http://www.w3.org/2000/svg}"


def boxes(text: str) -> dict[str, tuple[float, float]]:
    """Left edge and width of each box, by what pointing at it says."""
    found = {}
    for box in ElementTree.fromstring(text).iter(f"{SVG}rect"):
        title = box.find(f"{SVG}title")
        if title is not None and title.text:
            found[title.text.partition(",")[0]] = float(box.attrib["x"]), float(box.attrib["width"])
    return found


@pytest.fixture(scope="module")
def step() -> StepTrace:
    return simulated("bf", "1f1b", steps=1)[0]


def test_a_box_for_each_task_where_it_ran_and_the_idle_causes_by_name(step: StepTrace) -> None:
    text = step._repr_html_()
    drawn, label = boxes(text), {"F": "forward", "B": "backward", "W": "weight gradient"}
    own = [drawn[f"{span.task}: {label[span.task.kind]}"] for span in step.tasks]
    scale = sum(width for _, width in own) / sum(span.end - span.start for span in step.tasks)
    for span, (left, width) in zip(step.tasks, own, strict=True):
        assert width == pytest.approx((span.end - span.start) * scale, abs=0.02)
        assert left - drawn["F0@0: forward"][0] == pytest.approx((span.start - step.tasks[0].start) * scale, abs=0.02)
    causes = {wait.cause for stage in range(4) for wait in idle_waits(step, stage)}
    assert {WaitCause.INPUT, WaitCause.MEMORY} <= causes
    assert {f"idle: {CAUSE_LABELS[cause]}" for cause in causes} <= drawn.keys()
    assert "% idle</text>" in text


def test_a_long_step_stays_small() -> None:
    large = simulated("bf", "n", steps=1, stages=16, microbatches=256)[0]._repr_html_()
    ElementTree.fromstring(large)
    assert len(large) < 4_000_000


def test_a_step_without_spans_is_a_sentence(step: StepTrace) -> None:
    assert "nothing was recorded" in replace(step, tasks=(), waits=())._repr_html_()


def test_a_pipeline_shows_its_newest_step() -> None:
    batch = [torch.ones(2, 4) for _ in range(4)]
    with rrfp.local([nn.Linear(4, 4), nn.Linear(4, 4)], loss_fn=nn.functional.mse_loss) as pipe:
        assert "<svg" not in pipe._repr_html_()
        for number in range(2):
            result = pipe.step(batch, batch)
            assert result.trace._repr_html_() in pipe._repr_html_()
            assert f"step {number}, " in pipe._repr_html_()
        assert "2 stages" in pipe._repr_html_()
        assert len(boxes(result.trace._repr_html_())) >= 16


async def test_an_asynchronous_pipeline_too() -> None:
    batch = [torch.ones(2, 4) for _ in range(4)]
    pipeline = rrfp.local([nn.Linear(4, 4)], loss_fn=nn.functional.mse_loss)
    assert "<svg" not in pipeline._repr_html_()
    async with pipeline as pipe:
        await pipe.step(batch, batch)
        assert "<svg" in pipe._repr_html_()

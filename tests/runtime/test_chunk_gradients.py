"""Gradients of chunks and of split backward against the one-process reference, every stage in a thread of its own."""

from __future__ import annotations

from typing import Any

import pytest
from runtime.toys import TOLERANCE, data, expect, largest_difference, loss_fn, placed, same_bits, stages

import rrfp
from rrfp.compute.split import backward as split_backward
from rrfp.model.placement import Layout
from rrfp.model.tasks import Kind

#: Chunks, placement, and how they are run.
WAYS: list[tuple[int, Layout, dict[str, Any]]] = [
    (1, "looped", {"hint": "bf", "split": True}),
    (1, "looped", {"hint": "bfw", "split": True, "limit": "1f1b"}),
    (1, "looped", {"hint": "slot-aware", "split": True}),
    (1, "looped", {"hint": "1f1b", "split": True}),
    (1, "looped", {"strict": "1f1b", "split": True}),
    (1, "looped", {"hint": "zb-h1", "split": True}),
    (1, "looped", {"strict": "zb-h1", "split": True}),
    (2, "looped", {"hint": "bf"}),
    (2, "looped", {"hint": "fb", "limit": 1}),
    (2, "looped", {"hint": "bfw", "split": True}),
    (2, "looped", {"hint": "interleaved-1f1b"}),
    (2, "looped", {"strict": "interleaved-1f1b"}),
    (2, "v", {"hint": "b-priority", "limit": "n"}),
    (2, "v", {"hint": "slot-aware", "split": True, "limit": 1}),
    (2, "v", {"hint": "zb-v", "split": True}),
    (2, "v", {"strict": "zb-v", "split": True}),
    (3, "v", {"hint": "bfw-pyramid", "split": True}),
    (3, "looped", {"hint": "f-priority", "split": True, "limit": rrfp.Limit(2, rule="paper")}),
]


@pytest.fixture(autouse=True)
def everything_is_deferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers of these sizes would not be."""
    monkeypatch.setattr(split_backward, "MIN_FLOPS", 0.0)


@pytest.mark.every_other
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("count", [1, 3])
def test_gradients_of_accumulated_steps_are_the_references(
    count: int, way: tuple[int, Layout, dict[str, Any]], deterministic: bool
) -> None:
    """Two steps of every M into the same gradients, with dropout, ragged microbatches and weights."""
    chunks, layout, how = way
    actual, expected = stages(count * chunks), stages(count * chunks)
    parts, number = placed(actual, count, layout), 0
    options: Any = {"placement": layout, "deterministic": deterministic, **how}
    with rrfp.local(parts, loss_fn=loss_fn, **options).blocking() as pipe:
        for microbatches in (1, 3, 8):
            for module in (*actual, *expected):
                module.zero_grad()
            for _ in range(2):
                batch = data(microbatches, seed=number)
                result = pipe.step(batch.inputs, batch.targets, weights=batch.lengths, sizes=batch.lengths)
                wanted = expect(expected, batch, weights=batch.lengths, step=number)
                assert result.losses == pytest.approx(wanted.losses, rel=TOLERANCE)
                assert result.loss == pytest.approx(wanted.loss, rel=TOLERANCE)
                number += 1
            assert largest_difference(actual, expected) < TOLERANCE
            if deterministic:
                assert same_bits(actual, expected)
                assert (result.losses, result.loss) == (wanted.losses, wanted.loss)


@pytest.mark.parametrize("layout", ["looped", "v"])
@pytest.mark.parametrize("hint", ["bfw", "slot-aware"])
def test_an_evaluation_of_chunks_holds_no_more_than_the_limit_and_changes_no_gradient(
    hint: str, layout: Layout
) -> None:
    actual, expected, batch = stages(6), stages(6), data(7)
    with rrfp.local(
        placed(actual, 3, layout), loss_fn=loss_fn, placement=layout, hint=hint, split=True, limit=2
    ).blocking() as pipe:
        scored = pipe.evaluate(batch.inputs, batch.targets)
        put_out = pipe.evaluate(batch.inputs)
        result = pipe.step(batch.inputs, batch.targets)
    assert max(scored.peak_held) <= 2 * 2
    assert {span.task.kind for span in scored.trace.tasks} == {Kind.F}
    assert len(scored.trace.tasks) == 6 * 7
    assert sorted(put_out.outputs) == list(range(7))
    wanted = expect(expected, batch)
    assert result.losses == pytest.approx(wanted.losses, rel=TOLERANCE)
    assert largest_difference(actual, expected) < TOLERANCE

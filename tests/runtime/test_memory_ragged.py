"""A limit on bytes with real modules whose microbatches differ in size, within a step and between steps."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import pytest
import torch
from runtime.toys import placed
from torch import Tensor, nn

import rrfp
from rrfp import StepResult
from rrfp.compute.split import backward as split_backward
from rrfp.core.events import Event, Previewed
from rrfp.hints.priorities import ForwardPriority
from rrfp.pipeline.faces import BlockingPipeline

WIDTH = 32
#: What a row of a microbatch keeps on a stage alone: its input, the Tanh's output, and the target, in float32.
ROW = 3 * WIDTH * 4
SMALL, LARGE = 16, 64


def stage() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def pipeline(parts: Sequence[Any], **options: Any) -> BlockingPipeline:
    return rrfp.local(parts, loss_fn=nn.functional.mse_loss, **options).blocking()


def step(pipe: BlockingPipeline, rows: Sequence[int], sizes: Sequence[float] | None = None) -> StepResult:
    return pipe.step([torch.randn(n, WIDTH) for n in rows], [torch.zeros(n, WIDTH) for n in rows], sizes=sizes)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_microbatches_that_grow_with_their_inputs_are_known_before_they_run(depth: int) -> None:
    rows, limit = [SMALL] * 6 + [LARGE] * 6, 6 * SMALL * ROW
    with pipeline([stage()], hint="f-priority", limit=rrfp.Limit(bytes=limit), depth=depth) as pipe:
        first, second = step(pipe, rows), step(pipe, rows)
    for result in (first, second):
        assert LARGE * ROW <= result.peak_bytes[0] <= limit


class Pairs(nn.Module):
    """Keeps a number for each pair of rows, as attention does, so more than in proportion to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = (x @ x.T).tanh() @ self.linear(x)
        return output


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("sizes", [None, [SMALL] * 6 + [LARGE] * 4])
def test_more_than_in_proportion_passes_the_limit_once_by_less_than_one_of_them(
    depth: int, sizes: list[int] | None
) -> None:
    rows = [SMALL] * 6 + [LARGE] * 4
    with pipeline([Pairs()], hint="f-priority", limit=1) as pipe:
        small, large = (step(pipe, [n]).peak_bytes[0] for n in (SMALL, LARGE))
    assert large > small * LARGE / SMALL
    limit = 2 * small + 3 * large // 2
    with pipeline([Pairs()], hint="f-priority", limit=rrfp.Limit(bytes=limit), depth=depth) as pipe:
        first, second = (step(pipe, rows, sizes).peak_bytes[0] for _ in range(2))
    assert limit < first < limit + large
    assert second <= limit


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_microbatches_that_grow_between_steps_are_known_before_they_run(depth: int) -> None:
    limit = 6 * SMALL * ROW
    with pipeline([stage()], hint="f-priority", limit=rrfp.Limit(bytes=limit), depth=depth) as pipe:
        small = [step(pipe, [SMALL] * 8) for _ in range(2)]
        large = step(pipe, [LARGE] * 4)
    assert [result.peak_held for result in small] == [(6,), (6,)], "all that fits"
    assert large.peak_held == (1,), "two would not fit"


def test_after_larger_steps_the_limit_is_used_in_full() -> None:
    limit = 6 * SMALL * ROW
    with pipeline([stage()], hint="f-priority", limit=rrfp.Limit(bytes=limit)) as pipe:
        step(pipe, [LARGE] * 4)
        assert step(pipe, [SMALL] * 8).peak_held == (6,)


def test_an_evaluation_is_not_held_back_by_what_training_kept() -> None:
    limit = LARGE * ROW + 1
    modules = [stage(), stage()]
    with pipeline(modules, hint="f-priority", limit=rrfp.Limit(bytes=limit)) as pipe:
        step(pipe, [LARGE] * 4)
        with torch.no_grad():
            outcome = pipe.evaluate([torch.randn(LARGE, WIDTH) for _ in range(8)], [torch.zeros(LARGE, WIDTH)] * 8)
    assert len(outcome.losses) == 8
    assert outcome.peak_bytes[0] <= limit


@pytest.mark.parametrize("layout", ["looped", "v"])
def test_a_lane_that_runs_ahead_measures_what_its_own_forwards_pass_on(layout: Any) -> None:
    """On one stage all inputs but the first chunk's are still to be computed when their readers are enqueued."""
    limit = rrfp.Limit(bytes=9 * SMALL * ROW)
    most = {}
    for depth in (1, 6):
        parts = placed([stage() for _ in range(3)], 1, layout)
        with pipeline(parts, hint="f-priority", limit=limit, depth=depth, placement=layout) as pipe:
            step(pipe, [SMALL] * 6)
            (most[depth],) = step(pipe, [SMALL] * 3 + [LARGE] * 3).peak_bytes
    assert LARGE * ROW < most[6] <= most[1]


@pytest.mark.parametrize(("limit", "is_asked"), [(None, False), (rrfp.Limit(bytes=1), True)])
@pytest.mark.parametrize("depth", [1, 2])
def test_a_forward_is_previewed_where_a_limit_on_bytes_asks_for_it(
    limit: rrfp.Limit | None, is_asked: bool, depth: int
) -> None:
    seen: dict[str, Previewed] = {}

    class Observer(ForwardPriority):
        def observe(self, event: Event) -> None:
            if isinstance(event, Previewed):
                assert str(event.task) not in seen
                seen[str(event.task)] = event

    with pipeline(placed([stage(), stage()], 1), hint=Observer, limit=limit, depth=depth) as pipe:
        step(pipe, [SMALL, SMALL, LARGE])
    if not is_asked:
        assert not seen
        return
    every = {f"F{m}@{v}" for m in range(3) for v in range(2)}
    # A lane that runs ahead may take a forward of the second chunk before its input is there.
    assert set(seen) | {task for task in every if depth > 1 and task.endswith("@1")} == every
    assert seen["F0@0"].signature == seen["F1@0"].signature != seen["F2@0"].signature
    assert [seen[f"F{m}@0"].input_bytes for m in range(3)] == [n * WIDTH * 4 for n in (SMALL, SMALL, LARGE)]
    for one, other in combinations([m for m in range(3) if f"F{m}@1" in seen], 2):
        is_alike = seen[f"F{one}@1"].signature == seen[f"F{other}@1"].signature
        assert is_alike == (seen[f"F{one}@0"].signature == seen[f"F{other}@0"].signature)


def test_a_microbatch_larger_than_the_limit_runs_alone() -> None:
    with pipeline([stage()], hint="f-priority", limit=rrfp.Limit(bytes=100)) as pipe:
        results = [step(pipe, rows) for rows in ([SMALL] * 3, [LARGE] * 3)]
    assert [result.peak_held for result in results] == [(1,), (1,)]
    assert [result.peak_bytes for result in results] == [(SMALL * ROW,), (LARGE * ROW,)]


def test_what_a_split_backward_adds_is_kept_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forwards first, weight gradients last: between, a microbatch keeps an output gradient a layer as well."""
    monkeypatch.setattr(split_backward, "MIN_FLOPS", 0.0)
    module = nn.Sequential(*[stage() for _ in range(4)])
    after_forward = LARGE * WIDTH * 4 * (1 + 4 + 1)  # input, outputs of four layers, target
    after_backward = LARGE * WIDTH * 4 * (4 + 4)  # inputs and output gradients of four layers
    limit = 6 * after_forward
    with pipeline([module], hint="f-priority", split=True, limit=rrfp.Limit(bytes=limit)) as pipe:
        first, second = (step(pipe, [LARGE] * 12) for _ in range(2))
    assert first.peak_held == (6,)
    assert first.peak_bytes == (5 * after_forward + after_backward,), "the first backward was the only surprise"
    assert second.peak_held == (5,)
    assert second.peak_bytes == (limit,)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("layout", "hint"), [("looped", "bfw"), ("v", "bfw"), ("v", "f-priority"), ("looped", "bf")])
def test_ragged_microbatches_in_chunks_end_and_stay_near_the_limit(
    layout: Any, hint: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two stages of two chunks, ten steps of random sizes: nothing is stuck, and each chunk surprises at most once."""
    monkeypatch.setattr(split_backward, "MIN_FLOPS", 0.0)
    draw = random.Random(3)
    modules = [stage() for _ in range(4)]
    # A split backward of these keeps inputs and output gradients, and sends an input gradient.
    most_of_one = 4 * LARGE * WIDTH * 4
    limit = 5 * most_of_one
    options = {"placement": layout, "hint": hint, "limit": rrfp.Limit(bytes=limit), "deterministic": deterministic}
    options["split"] = hint == "bfw"
    with pipeline(placed(modules, 2, layout), **options) as pipe:
        for number in range(10):
            factor = 4 if number in (3, 7) else 1
            rows = [draw.randrange(1, SMALL) * factor for _ in range(8)]
            result = step(pipe, rows)
            assert len(result.losses) == len(rows)
            assert all(most <= limit + 2 * most_of_one for most in result.peak_bytes)


def test_the_rows_of_these_tests_are_what_a_stage_keeps() -> None:
    module, x = stage(), torch.randn(SMALL, WIDTH)
    with pipeline([module], limit=1) as pipe:
        assert step(pipe, [SMALL]).peak_bytes == (SMALL * ROW,)
    output: Tensor = module(x)
    assert output.shape == x.shape

"""`order="natural"` through the real runtime: on every transport, in groups, and to the bit the sums of one process."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
from core.test_natural_order import is_natural
from runtime.group_programs import MESH, programs, steps
from runtime.ranks import ThreadedRanks
from runtime.toys import TOLERANCE, data, expect, largest_difference, loss_fn, placed, same_bits, stages
from sim.adversaries import Worst

import rrfp
from rrfp import View
from rrfp.core.ready_set import ReadySet
from rrfp.errors import ConfigError
from rrfp.hints.pyramid import Pyramids, bfw_pyramid
from rrfp.hints.slot_aware import SlotAware
from rrfp.model.tasks import Task


class Shuffle(rrfp.Hint):
    """Any ready task."""

    def __init__(self) -> None:
        self._random = random.Random(3)

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        return self._random.choice(list(ready))


def orders(result: rrfp.StepResult, count: int) -> Iterable[list[Task]]:
    spans = sorted(result.trace.tasks, key=lambda span: span.start)
    return [[span.task for span in spans if span.stage == stage] for stage in range(count)]


@pytest.mark.parametrize("transport", ["inproc", "zmq", "shm"])
@pytest.mark.parametrize("split", [False, True])
def test_any_hint_on_any_transport_keeps_the_callers_order(transport: str, split: bool) -> None:
    actual, expected, batch = stages(4), stages(4), data(7)
    options: dict[str, Any] = {"hint": Shuffle(), "order": "natural", "split": split, "limit": 3}
    with rrfp.local(placed(actual, 2, "v"), loss_fn=loss_fn, placement="v", transport=transport, **options) as pipe:
        result = pipe.step(batch.inputs, batch.targets, sizes=batch.lengths)
    wanted = expect(expected, batch)
    assert all(map(is_natural, orders(result, 2)))
    assert result.losses == pytest.approx(wanted.losses, rel=TOLERANCE)
    if split:  # weight gradients are formed apart there
        assert largest_difference(actual, expected) < TOLERANCE
    else:
        assert same_bits(actual, expected)


def test_without_it_the_same_hint_leaves_that_order() -> None:
    with rrfp.local(stages(2), loss_fn=loss_fn, hint=Shuffle(), limit=4) as pipe:
        batch = data(7)
        assert not all(map(is_natural, orders(pipe.step(batch.inputs, batch.targets), 2)))


@pytest.mark.parametrize("coordination", ["leader", "agreement"])
def test_groups_keep_it(coordination: str) -> None:
    for order in ("natural", "free"):
        parts = programs()
        mesh: dict[str, Any] = {"mesh": MESH, "coordination": coordination}
        outcomes = ThreadedRanks(parts, steps(1), hint=Worst(), order=order, limit=4, **mesh).join()
        assert [outcome.error for outcome in outcomes] == [None] * 4
        assert all(is_natural(part.ran) for part in parts) is (order == "natural")
        assert [part.ran for part in parts[0::2]] == [part.ran for part in parts[1::2]]


@pytest.mark.parametrize("hint", ["slot-aware-pyramid", "bfw-pyramid", Pyramids(SlotAware()), bfw_pyramid])
def test_a_hint_that_orders_microbatches_is_refused_by_name(hint: Any) -> None:
    named = hint if isinstance(hint, str) else "yramid"
    with pytest.raises(ConfigError, match=f"hint is .*{named}.*, which orders microbatches itself: must be another"):
        rrfp.local(stages(2), loss_fn=loss_fn, hint=hint, order="natural")


def test_a_schedule_is_refused_beside_it() -> None:
    with pytest.raises(ConfigError, match="order is 'natural', must be 'free' with strict"):
        rrfp.local(stages(2), loss_fn=loss_fn, strict="1f1b", order="natural")
    with pytest.raises(ConfigError, match="order is 'fifo', must be one of: free, natural"):
        rrfp.local(stages(2), loss_fn=loss_fn, order="fifo")  # type: ignore[arg-type]


def test_its_default_hint_has_no_order_of_its_own_and_sizes_reorder_nothing() -> None:
    batch = data(7)
    with rrfp.local(stages(2), loss_fn=loss_fn, order="natural") as pipe:
        result = pipe.step(batch.inputs, batch.targets, sizes=batch.lengths)
        state = pipe.state_dict()
    assert all(map(is_natural, orders(result, 2)))
    assert (state["hint"], state["order"]) == ("slot-aware", "natural")


def test_a_schedule_as_a_hint_goes_with_it() -> None:
    batch = data(5)
    with rrfp.local(stages(2), loss_fn=loss_fn, hint="1f1b", order="natural") as pipe:
        assert all(map(is_natural, orders(pipe.step(batch.inputs, batch.targets), 2)))


def test_a_state_without_an_order_is_of_a_free_one(caplog: pytest.LogCaptureFixture) -> None:
    state = rrfp.local(stages(2), loss_fn=loss_fn, hint="bf").state_dict()
    assert state.pop("order") == "free"
    rrfp.local(stages(2), loss_fn=loss_fn, hint="bf").load_state_dict(state)
    assert not caplog.records
    rrfp.local(stages(2), loss_fn=loss_fn, hint="bf", order="natural").load_state_dict(state)
    assert "the state was saved with order free, this pipeline has natural" in caplog.text

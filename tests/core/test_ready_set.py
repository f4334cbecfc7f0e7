"""The ready set: sorted heads by kind and chunk, forwards behind the gate."""

from __future__ import annotations

import pytest
from core_script import Script, T

from rrfp.core.ready_set import ChunkOrder
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Kind


@pytest.fixture
def script() -> Script:
    """Stage 0 of 2, two looped chunks, three microbatches: F of both chunks and B of the deeper one are ready."""
    script = Script(TaskGraph.chain(2, chunks=2, split=True), microbatches=3)
    script.ran("F1@0", "F0@0")
    script.arrived("F1@1", "F0@1")
    script.ran("F1@2", "F0@2")
    script.arrived("B1@3", "B0@3", "F2@1")
    script.ran("B0@2")
    return script


def test_it_lists_kinds_then_deeper_chunks_then_microbatches(script: Script) -> None:
    assert script.ready == "F2@2 F2@0 B1@2 W0@2"
    assert repr(script.core.ready) == "ReadySet(F2@2 F2@0 B1@2 W0@2)"
    assert len(script.core.ready) == 4


def test_heads_are_the_lowest_microbatch_of_a_kind_and_chunk(script: Script) -> None:
    heads = {(kind, chunk): script.core.ready.head(kind, chunk) for kind in Kind for chunk in (0, 1)}
    assert heads == {
        (Kind.F, 0): T("F2@0"),
        (Kind.F, 1): T("F2@2"),
        (Kind.B, 0): None,
        (Kind.B, 1): T("B1@2"),
        (Kind.W, 0): None,
        (Kind.W, 1): T("W0@2"),
    }


@pytest.mark.parametrize(("order", "first"), [("deeper", "F2@2"), ("paper", "F2@0")])
def test_the_first_forward_depends_on_the_chunk_order(script: Script, order: ChunkOrder, first: str) -> None:
    assert script.core.ready.first(Kind.F, order) == T(first)


@pytest.mark.parametrize("order", ["deeper", "paper"])
def test_backwards_go_deeper_first_in_both_orders(order: ChunkOrder) -> None:
    script = Script(TaskGraph.chain(1, chunks=2), microbatches=2)
    script.ran("F0@0", "F0@1", "B0@1", "F1@0", "F1@1")
    assert script.ready == "B1@1 B0@0"
    assert script.core.ready.first(Kind.B, order) == T("B1@1")


def test_membership_asks_for_exactly_this_task(script: Script) -> None:
    ready = script.core.ready
    assert [text for text in ("F2@2", "F1@2", "F2@1", "B1@2", "W1@2", "W0@2") if T(text) in ready] == [
        "F2@2",
        "B1@2",
        "W0@2",
    ]
    assert "F2@2" not in ready


def test_a_forward_that_memory_keeps_out_is_gated_and_not_ready() -> None:
    script = Script(TaskGraph.chain(2), microbatches=3, limit=1)
    script.ran("F0@0")
    ready = script.core.ready
    assert (bool(ready), len(ready), T("F1@0") in ready, ready.head(Kind.F, 0)) == (False, 0, False, None)
    assert [*ready.gated()] == [T("F1@0"), T("F2@0")]

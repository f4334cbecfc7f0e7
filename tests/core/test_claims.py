"""Forwards that replicas share, event by event: what a core offers, claims and grants."""

from __future__ import annotations

import pytest
from core_script import Script, T

from rrfp.core import events as ev
from rrfp.errors import ProtocolError
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Mode


def shared(graph: TaskGraph, stage: int, homes: tuple[int, ...] = (0, 1)) -> Script:
    """A stage of replica 0 of two; by microbatch the replica whose caller has it."""
    script = Script(graph, stage, microbatches=0)
    script.step = script.step._replace(microbatches=len(homes))
    script.begun = script.told(ev.StepOpened(0, Mode.TRAIN, len(homes), pool=ev.Pool(0, 2, homes)))
    return script


def test_chunks_that_follow_one_another_on_a_stage_are_claimed_together_and_the_last_is_offered() -> None:
    script = shared(TaskGraph.chain(2, chunks=2, layout="v"), 1)
    assert script.told(ev.Offered(script.step, T("F0@1"), 0)) == [ev.Claim(T("F0@1"), 0)]
    script.arrived("F0@0")
    assert not [i for i in script.ran("F0@1") if isinstance(i, ev.Offer)]
    assert script.ready == "F0@2"
    assert ev.Offer(T("F0@3")) in script.ran("F0@2")
    assert ev.Grant(T("F0@3"), 1) in script.told(ev.Claimed(script.step, T("F0@3"), 1))


def test_of_what_a_caller_has_one_copy_gets_each_microbatch() -> None:
    script = shared(TaskGraph.chain(2), 0, (0, 0, 1))
    assert script.begun == [ev.Grant(T("F0@0"), 0)]
    claimed = ev.Claimed(script.step, T("F1@0"), 1)
    assert script.told(claimed) == [ev.Grant(T("F1@0"), 1), ev.Give(T("F1@0"), 1)]
    assert script.told(ev.Claimed(script.step, T("F0@0"), 1)) == []
    with pytest.raises(ProtocolError, match=r"^copy 1 claimed microbatch 1 twice$"):
        script.told(claimed)


def test_a_claim_of_a_chunk_keeps_the_slot_free_that_a_deeper_one_needs() -> None:
    script = Script(TaskGraph.chain(2, chunks=2), 1, microbatches=0, limit=1)
    script.step = script.step._replace(microbatches=2)
    script.told(ev.StepOpened(0, Mode.TRAIN, 2, pool=ev.Pool(0, 2, (0, 0), depth=2)))
    assert script.told(ev.Offered(script.step, T("F0@1"), 0)) == [ev.Claim(T("F0@1"), 0)]
    assert script.told(ev.Offered(script.step, T("F1@1"), 0)) == []
    script.arrived("F0@0")
    script.ran("F0@1")
    assert script.told(ev.Offered(script.step, T("F0@3"), 0)) == [ev.Claim(T("F0@3"), 0)]

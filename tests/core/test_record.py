"""Plain data that type checkers hold frozen: compared and hashed by type and fields, without room for anything else."""

from __future__ import annotations

import pickle

import pytest

from rrfp.core.events import Enqueued, Release, Send
from rrfp.model.tasks import Kind, Task

FORWARD, BACKWARD = Task(Kind.F, 3, 5), Task(Kind.B, 3, 5)


def test_records_are_equal_when_their_fields_are() -> None:
    assert Send(FORWARD, 1) == Send(FORWARD, 1, 0)
    assert Send(FORWARD, 1) != Send(BACKWARD, 1)
    assert len({Send(FORWARD, 1), Send(FORWARD, 1), Send(FORWARD, 2)}) == 2


def test_records_of_two_types_are_never_equal() -> None:
    assert Enqueued(FORWARD) != Release(FORWARD)  # type: ignore[comparison-overlap]
    assert Enqueued(FORWARD) != (FORWARD,)  # type: ignore[comparison-overlap]


def test_records_show_their_fields_and_match_by_position() -> None:
    event = Send(FORWARD, 1, consumed=2)
    assert repr(event) == f"Send(task={FORWARD!r}, peer=1, consumed=2, copy=None)"
    match event:
        case Send(task, peer, consumed):
            assert (task, peer, consumed) == (FORWARD, 1, 2)


def test_a_value_has_room_for_its_fields_only() -> None:
    with pytest.raises(AttributeError):
        Enqueued(FORWARD).tsak = BACKWARD  # type: ignore[attr-defined]


def test_records_survive_pickling() -> None:
    assert pickle.loads(pickle.dumps(Send(FORWARD, 1))) == Send(FORWARD, 1)

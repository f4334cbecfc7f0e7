"""The queue of a simulated cluster: all of an instant happens before anyone decides, in the order of insertion."""

from __future__ import annotations

import pytest

from rrfp.lab.cluster.event_queue import EventQueue


def test_an_instant_happens_in_the_order_of_insertion_and_names_the_ranks_that_it_touched() -> None:
    queue, happened = EventQueue(), []

    def note(rank: int, what: str) -> None:
        happened.append((queue.now, rank, what))

    queue.put(2.0, 0, note, "late")
    queue.put(1.0, 2, note, "first")
    queue.put(1.0, 1, note, "second")
    assert queue.instant() == [1, 2]
    assert happened == [(1.0, 2, "first"), (1.0, 1, "second")]
    assert (queue.instant(), queue.instant()) == ([0], None)
    assert (happened[2:], queue.num_happened) == ([(2.0, 0, "late")], 3)


def test_whatever_an_event_makes_happen_at_once_belongs_to_its_instant() -> None:
    queue, happened = EventQueue(), []

    def send(rank: int, peer: int) -> None:
        queue.put(queue.now, peer, lambda rank, _: happened.append(rank), None)

    queue.put(1.0, 0, send, 1)
    assert queue.instant() == [0, 1]
    assert happened == [1]


def test_an_absent_rank_takes_in_later_and_one_that_ended_never() -> None:
    back = {0: 5.0, 1: None, 2: 0.0}
    queue = EventQueue(lambda rank, now: None if (time := back[rank]) is None else max(now, time))
    happened: list[tuple[float, int]] = []
    for rank in back:
        queue.put(1.0, rank, lambda rank, _: happened.append((queue.now, rank)), None)
    assert (queue.instant(), queue.instant(), queue.instant()) == ([2], [0], None)
    assert happened == [(1.0, 2), (5.0, 0)]


@pytest.mark.parametrize("kept", [True, False])
def test_an_instant_in_which_nothing_could_happen_touches_nobody(kept: bool) -> None:
    queue = EventQueue(lambda rank, now: max(now, 3.0) if kept else None)
    queue.put(1.0, 0, lambda rank, _: None, None)
    assert queue.instant() == []
    assert queue.instant() == ([0] if kept else None)

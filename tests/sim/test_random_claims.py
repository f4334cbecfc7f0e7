"""Random small pipelines whose replicas share forwards: whatever the hints, delays and limits, each task runs once.

`RandomRun` checks on the way what it checks of all pipelines. A failure names its seed: `PYTHONPATH=tests python -c
"import sim.test_random_claims as t; t.run_pipeline(SEED)"` replays it alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from batches import batches
from sim.adversaries import ADVERSARIES

from rrfp.core import events as ev
from rrfp.core.claims import Claims
from rrfp.errors import Origin, ProtocolError
from rrfp.lab.cluster.cluster import ClaimMessage, Envelope
from rrfp.lab.cluster.random_run import Delivery, RandomRun
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Placement
from rrfp.model.tasks import Kind, Mode, Task

NUM_PIPELINES, QUICK, BATCH = 1_000, 100, 50


def random_run(seed: int, make: Callable[..., RandomRun] = RandomRun) -> tuple[RandomRun, list[tuple[Mode, int]]]:
    """The run of this seed, and its steps."""
    rng = random.Random(seed)
    stages, replicas = rng.randint(1, 4), rng.randint(2, 3)
    graph = TaskGraph(Placement(stages, 1), split=tuple(rng.random() < 0.5 for _ in range(stages)))
    deliveries: list[Delivery] = ["any", "any", "oldest", "newest"]
    adversary = rng.choice(ADVERSARIES)
    paces = tuple(rng.choice([1.0, 1.0, 2.0, 5.0]) for _ in range(replicas))
    network = make(
        graph,
        [adversary(rng) for _ in range(stages * replicas)],
        [Limit(rng.choice([1, 1, 2, 3, None])) for _ in range(stages)],
        seed=seed,
        depth=rng.choice([1, 1, 2]),
        delivery=rng.choice(deliveries),
        takes_offers=rng.random() < 0.5,
        replicas=replicas,
        claims=rng.randint(1, 3),
        paces=paces if rng.random() < 0.5 else (),
    )
    return network, [(rng.choice([Mode.TRAIN, Mode.TRAIN, Mode.FORWARD]), rng.randint(1, 7)) for _ in range(3)]


def run_pipeline(seed: int) -> None:
    """Make the pipeline of this seed and run it to its end."""
    network, steps = random_run(seed)
    network.run(steps)


@pytest.mark.parametrize("first", batches(NUM_PIPELINES, BATCH, QUICK))
def test_every_random_pipeline_ends_with_each_task_run_once(first: int) -> None:
    for seed in range(first, first + BATCH):
        try:
            run_pipeline(seed)
        except Exception as error:
            raise AssertionError(f"run_pipeline({seed}) failed: {type(error).__name__}: {error}") from error


class Faulty(RandomRun):
    """One message by which forwards are shared is lost, comes twice, or changes places with the next one."""

    fault, number = "", 0

    def send(self, packet: Envelope) -> None:
        if not isinstance(packet.content, ClaimMessage):
            super().send(packet)
            return
        self.number -= 1
        if self.number == 0 and self.fault == "lost":
            return
        super().send(packet)
        if self.number == 0 and self.fault == "twice":
            super().send(packet)


def ending(seed: int, fault: str) -> str:
    """How a run with one fault ends: ``""``, or its error."""
    network, steps = random_run(seed, Faulty)
    assert isinstance(network, Faulty)
    network.fault, network.number = fault, 1 + seed % 17
    try:
        network.run([(Mode.TRAIN, count) for _, count in steps])
    except (ProtocolError, AssertionError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("first", batches(200, 50, 50))
def test_a_message_that_comes_twice_is_refused_by_name(first: int) -> None:
    found = [ending(seed, "twice") for seed in range(first, first + 50)]
    refusals = ("twice", "did not ask", "reached stage")  # the last of one that comes in the next step
    assert all(any(each in text for each in refusals) for text in found if text), found
    assert sum(map(bool, found)) > 25


@pytest.mark.parametrize("first", batches(200, 50, 50))
def test_a_message_that_is_lost_stops_the_run_and_the_report_says_who_waits(first: int) -> None:
    found = [ending(seed, "lost") for seed in range(first, first + 50)]
    refusals = ("before it was offered", "claimed from stage", "offered by no copy", "a claim for F")
    assert all(any(each in text for each in refusals) for text in found if text), found
    assert sum(map(bool, found)) > 25


def test_a_core_that_was_aborted_claims_and_grants_nothing() -> None:
    network, _ = random_run(7)
    node = network.nodes[0]
    pool = ev.Pool(0, 2, (0, 1, 0, 1))
    opened = ev.StepOpened(0, Mode.TRAIN, 4, pool=pool)
    assert node.core.apply(opened)
    node.core.apply(ev.Aborted(Origin(0, None, "enough")))
    step = node.core.step
    assert step is not None
    for event in (ev.Claimed, ev.Granted, ev.Offered):
        assert node.core.apply(event(step.id, Task(Kind.F, 0, 0), 1)) == ()
    assert node.core.decide() is None


def test_where_a_pace_is_0_no_copy_counts_as_slow() -> None:
    claims = Claims(ev.Pool(1, 2, (0, 1), paces=(0.0, 1.0)), (0, 1))
    claims.offer(1, 1)
    assert claims.next(0, None, is_idle=True) == 1


def _claims_of(copy: int, holders: Sequence[int | None], homes: Sequence[int], **options: Any) -> Claims:
    """The claims of one of three copies; by microbatch who offers it, None for one that another copy runs."""
    claims = Claims(ev.Pool(copy, 3, tuple(homes)), range(len(homes)), **options)
    for m, holder in enumerate(holders):
        claims.offer(m, 1 - copy if holder is None else holder)
        if holder is None:
            claims.grant(m, 1 - copy)
    return claims


def test_what_of_its_own_caller_comes_from_another_copy_keeps_no_copy_from_helping() -> None:
    for homes in ([0, 0], [0, 1]):
        assert _claims_of(1, [None, 0], homes, spare=1.0).next(0, None, is_idle=True) == 1


def test_a_copy_that_holds_microbatches_leaves_the_only_forward_of_another_to_it() -> None:
    for holders, held, expected in (([0], 0, 0), ([0], 1, None), ([0, 0], 1, 0), ([0, 2], 1, None), ([0, 1], 1, 1)):
        assert _claims_of(1, holders, holders).next(held, None, is_idle=True) == expected
    first = _claims_of(1, [0, 0, 0], [0, 0, 0], has_gradients=False)  # its caller has them all from the beginning
    assert first.next(1, None, is_idle=True) is None
    assert first.next(0, None, is_idle=True) == 0


def test_near_the_end_the_holder_of_most_goes_first() -> None:
    assert _claims_of(1, [1, 2, 2], [1, 2, 2]).next(0, None, is_idle=True) == 1
    assert _claims_of(1, [1, 2, 2], [1, 2, 2], has_gradients=False).next(0, None, is_idle=True) == 0
    not_the_end = Claims(ev.Pool(1, 3, (1, 2, 2, 0)), range(4))
    for m, holder in enumerate((1, 2, 2)):
        not_the_end.offer(m, holder)
    assert not_the_end.next(0, None, is_idle=True) == 0

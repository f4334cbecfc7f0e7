"""Random small pipelines whose replicas share forwards: whatever the hints, delays and limits, each task runs once.

`RandomRun` checks on the way what it checks of all pipelines. A failure names its seed: `PYTHONPATH=tests python -c
"import sim.test_random_claims as t; t.run_pipeline(SEED)"` replays it alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from batches import batches
from sim.adversaries import ADVERSARIES

from rrfp import Hint, View
from rrfp.core import events as ev
from rrfp.core.claims import Claims, are_even
from rrfp.core.ready_set import ReadySet
from rrfp.core.stage_core import StageCore
from rrfp.errors import Origin, ProtocolError
from rrfp.hints.registry import create_hint
from rrfp.lab.cluster.cluster import ClaimMessage, Envelope
from rrfp.lab.cluster.random_run import Delivery, RandomRun
from rrfp.memory.admission import Limit
from rrfp.memory.held_bytes import Owner
from rrfp.memory.rules import MemoryRule
from rrfp.memory.seen_sizes import SeenSizes
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Placement, TablePlacement
from rrfp.model.tasks import Kind, Mode, StepId, Task

NUM_PIPELINES, QUICK, BATCH = 1_000, 100, 50


def random_run(
    seed: int, make: Callable[..., RandomRun] = RandomRun, placements: Sequence[Placement | TablePlacement] = ()
) -> tuple[RandomRun, list[tuple[Mode, int]]]:
    """The run of this seed, and its steps; one chunk a stage, or on one of ``placements``."""
    rng = random.Random(seed)
    stages, replicas = rng.randint(1, 4), rng.randint(2, 3)
    placement = rng.choice(placements) if placements else Placement(stages, 1)
    stages = placement.stages
    graph = TaskGraph(placement, split=tuple(rng.random() < 0.5 for _ in range(placement.num_virtual_stages)))
    deliveries: list[Delivery] = ["any", "any", "oldest", "newest"]
    adversary = rng.choice(ADVERSARIES)
    paces = tuple(rng.choice([1.0, 1.0, 2.0, 5.0]) for _ in range(replicas))
    is_even = random.Random(f"{seed} even").random() < 0.3
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
        paces=paces if rng.random() < 0.5 and not is_even else (),
        is_even=is_even,
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


#: Looped, V, and any: neighbours on one stage, and stages without an equal number of chunks.
PLACEMENTS: list[Placement | TablePlacement] = [
    *(Placement(stages, chunks, layout) for stages in (1, 2, 3) for chunks in (2, 3) for layout in ("looped", "v")),
    Placement(2, 4, "v"),
    *map(TablePlacement, [(1, 0), (0, 0, 1, 1), (0, 1, 1, 0, 1), (0, 1, 2, 1, 0, 0)]),
]


@pytest.mark.parametrize("first", batches(NUM_PIPELINES, BATCH, QUICK))
def test_every_random_pipeline_of_several_chunks_ends_with_each_task_run_once(first: int) -> None:
    for seed in range(first, first + BATCH):
        network, steps = random_run(seed, placements=PLACEMENTS)
        try:
            network.run(steps)
        except Exception as error:
            raise AssertionError(f"seed {seed} failed: {type(error).__name__}: {error}") from error


def with_bytes(held: Sequence[int], limit: Limit, *, are_known: bool) -> type[RandomRun]:
    """A run in which microbatches hold so many bytes, under the same limit everywhere; sizes ``are_known``, or not."""

    class Sized(RandomRun):
        def __init__(self, graph: TaskGraph, hints: Sequence[Hint], limits: Sequence[Limit], **options: Any) -> None:
            super().__init__(
                graph, hints, [limit] * len(limits), num_bytes=lambda task: held[task.microbatch], **options
            )

        def opened(self, step: StepId) -> ev.StepOpened:
            sizes = tuple(map(float, held[: step.microbatches]))
            return replace(super().opened(step), sizes=sizes if are_known else None)

    return Sized


@pytest.mark.parametrize("first", batches(NUM_PIPELINES, BATCH, QUICK))
@pytest.mark.parametrize("are_known", [True, False])
def test_limits_on_bytes_end_every_run_and_hold_where_sizes_are_known(first: int, are_known: bool) -> None:
    for seed in range(first, first + BATCH):
        rng = random.Random(-seed)
        held, limit = [rng.randint(1, 9) for _ in range(7)], Limit(rng.choice((None, 1, 3)), rng.randint(1, 30))
        has_chunks = rng.random() < 0.5
        network, steps = random_run(
            seed, with_bytes(held, limit, are_known=are_known), PLACEMENTS if has_chunks else ()
        )
        try:
            network.run(steps)
        except Exception as error:
            raise AssertionError(f"seed {seed} failed: {type(error).__name__}: {error}") from error
        if are_known and not has_chunks:
            most = max(node.checker.memory.peak_bytes for node in network.nodes)
            assert most <= max(limit.bytes or 0, *held), f"seed {seed}"


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


def holding(held: int) -> MemoryRule:
    """A rank that holds so much, without a limit."""
    rule = MemoryRule(None, None, [()], seen=SeenSizes(1), followers=0)
    rule.held = held
    return rule


def test_where_a_pace_is_0_no_copy_counts_as_slow() -> None:
    claims = Claims(ev.Pool(1, 2, (0, 1), paces=(0.0, 1.0)), (0, 1))
    claims.offer(1, 1)
    assert claims.next(holding(0), is_idle=True) == 1


def test_a_claim_of_a_shallower_chunk_keeps_no_copy_from_a_deeper_one() -> None:
    """Else one that waits for a slot would keep it from the forward that frees one."""
    core = StageCore(TaskGraph.chain(2, chunks=2), 0, create_hint("bf"), Limit(2))
    asked = core.apply(ev.StepOpened(0, Mode.TRAIN, 3, pool=ev.Pool(0, 2, (1, 1, 1))))
    assert asked == (ev.Claim(Task(Kind.F, 0, 0), 1),)
    deeper = [Task(Kind.F, m, 2) for m in (1, 2)]
    step = StepId(0, Mode.TRAIN, 3)
    assert core.apply(ev.Offered(step, deeper[0], 1)) == (ev.Claim(deeper[0], 1),)
    assert core.apply(ev.Offered(step, deeper[1], 1)) == (), "that counts"


class ForwardsFirst(Hint):
    """Of the shallowest chunk that is ready."""

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        return ready.first(Kind.F, "paper") or ready.first(Kind.B)


@pytest.mark.parametrize("counts_all", [False, True])
def test_where_claims_of_shallower_chunks_count_a_v_of_four_chunks_may_deadlock(
    monkeypatch: pytest.MonkeyPatch, counts_all: bool
) -> None:
    """Those that wait for a slot, which the second chunk has taken meanwhile, keep the copy from the third."""
    if counts_all:
        following = Claims.next

        def next_of_all(self: Claims, admission: MemoryRule, deeper: Sequence[Owner], *, is_idle: bool) -> int | None:
            others = [owner for each in self.of_stage if each is not self for owner in each.unbegun]
            return following(self, admission, others, is_idle=is_idle)

        monkeypatch.setattr(Claims, "next", next_of_all)
    graph, stuck = TaskGraph(Placement(2, 4, "v")), list[str]()
    for seed in range(12):
        network = RandomRun(graph, [ForwardsFirst() for _ in range(4)], [Limit(2)] * 2, seed=seed, replicas=2)
        try:
            network.run([(Mode.TRAIN, 14)])
        except AssertionError as error:
            stuck.append(str(error))
    assert bool(stuck) == counts_all
    assert all("nothing can happen any longer" in text for text in stuck)


def test_chunks_that_follow_each_other_on_a_stage_are_claimed_together() -> None:
    core = StageCore(TaskGraph.chain(2, chunks=2, layout="v"), 1, create_hint("bf"), Limit(2))
    core.apply(ev.StepOpened(0, Mode.TRAIN, 2, pool=ev.Pool(0, 2, (0, 1))))
    step = StepId(0, Mode.TRAIN, 2)
    assert core.apply(ev.Offered(step, Task(Kind.F, 0, 1), 0)) == (ev.Claim(Task(Kind.F, 0, 1), 0),)
    core.apply(ev.Arrived(step, Task(Kind.F, 0, 0)))
    core.apply(ev.Offered(step, Task(Kind.F, 1, 1), 1))
    core.apply(ev.Granted(step, Task(Kind.F, 1, 1), 1))
    assert core.view.forwards_here == 2, "of one microbatch"
    for task in (Task(Kind.F, 0, 1), Task(Kind.F, 0, 2)):
        assert core.decide() == ev.Run(task)
        core.apply(ev.Enqueued(task))
    with pytest.raises(ProtocolError, match="which is no forward of this stage"):
        core.apply(ev.Offered(step, Task(Kind.F, 0, 2), 0))


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
        assert _claims_of(1, [None, 0], homes, spare=1.0).next(holding(0), is_idle=True) == 1


def test_a_claim_that_another_copy_has_won_awaits_no_answer() -> None:
    claims = _claims_of(1, [0], [0])
    claims.claim(0)
    assert claims.is_asked(0)
    claims.grant(0, 2)
    assert not claims.is_asked(0)
    with pytest.raises(ProtocolError, match="which did not ask"):
        claims.receive(0)


def test_a_copy_that_holds_microbatches_leaves_the_only_forward_of_another_to_it() -> None:
    for holders, held, expected in (([0], 0, 0), ([0], 1, None), ([0, 0], 1, 0), ([0, 2], 1, None), ([0, 1], 1, 1)):
        assert _claims_of(1, holders, holders).next(holding(held), is_idle=True) == expected
    first = _claims_of(1, [0, 0, 0], [0, 0, 0], has_gradients=False)  # its caller has them all from the beginning
    assert first.next(holding(1), is_idle=True) is None
    assert first.next(holding(0), is_idle=True) == 0


@pytest.mark.parametrize(("copies", "is_even", "lead"), [(6, False, 0), (4, True, 0), (6, True, 2)])
def test_of_many_even_copies_others_go_first_where_they_are_earlier_by_more_than_chance(
    copies: int, is_even: bool, lead: int
) -> None:
    """Replica 1 offers one of its microbatches, and replica 2 its first ones."""
    homes = tuple(copy for copy in range(copies) for _ in range(5))
    for place in range(5):
        pool = ev.Pool(1, copies, homes, is_even=is_even)
        claims = Claims(pool, [copies * (m % 5) + homes[m] for m in range(len(homes))])
        for m, holder in ((5 + place, 1), (10, 2), (11, 2)):
            claims.offer(m, holder)
        assert claims.next(holding(1), is_idle=True) == (10 if place > lead else 5 + place)


def test_copies_are_even_where_none_is_slow_on_any_stage() -> None:
    assert are_even([(1.0,) * 8, (1.1,) * 8])
    assert are_even([(1.0, 1.2)])
    assert not are_even([(1.0,) * 8, (1.0,) * 7 + (1.5,)])
    assert not are_even([]), "nobody knows yet"
    assert not are_even([(), ()])


def test_even_replicas_keep_their_first_microbatch_in_the_first_chunk_without_a_word() -> None:
    """Microbatches 0 and 2 are the first ones of the replicas 1 and 0."""
    graph, pool = TaskGraph.chain(2, chunks=2), ev.Pool(0, 2, (1, 1, 0, 0), is_even=True)
    first, last = (StageCore(graph, stage, create_hint("bf"), Limit(2)) for stage in range(2))
    opened, step = ev.StepOpened(0, Mode.TRAIN, 4, pool=pool), StepId(0, Mode.TRAIN, 4)
    assert first.apply(opened) == last.apply(opened) == ()
    assert first.decide() == ev.Run(Task(Kind.F, 2, 0))
    first.apply(ev.Enqueued(Task(Kind.F, 2, 0)))
    assert first.apply(ev.Completed(Task(Kind.F, 2, 0), 0, 1.0, 0)) == (ev.Send(Task(Kind.F, 2, 0), 1, copy=0),)
    last.apply(ev.Arrived(step, Task(Kind.F, 2, 0)))
    assert last.decide() == ev.Run(Task(Kind.F, 2, 1))
    with pytest.raises(ProtocolError, match="offered twice: by copy 1"):
        last.apply(ev.Offered(step, Task(Kind.F, 0, 1), 1))
    offered = Task(Kind.F, 2, 2)
    assert first.apply(ev.Offered(step, offered, 0)) == (ev.Claim(offered, 0),), "the second chunk is claimed"


@pytest.mark.parametrize(("table", "kept"), [((0, 1, 2), 3), ((0, 1, 0, 1), 2), ((0, 1, 1, 0), 1), ((0, 0, 1, 1), 0)])
def test_what_is_claimed_with_the_next_chunk_is_not_kept(table: tuple[int, ...], kept: int) -> None:
    """Otherwise a microbatch between the two could take the memory that the second needs, for ever."""
    graph = TaskGraph(TablePlacement(table), split=(False,) * len(table))
    opened = ev.StepOpened(0, Mode.TRAIN, 2, pool=ev.Pool(0, 2, (0, 1), is_even=True))
    found = set[int]()
    for stage in range(graph.placement.stages):
        core = StageCore(graph, stage, create_hint("bf"), Limit(2))
        core.apply(opened)
        assert core.step is not None
        assert core.step.sharing is not None
        found |= {v for v, claims in core.step.sharing.claims.items() if claims.takers[1] == 1}
    assert found == {*range(kept)}


def test_a_copy_claims_no_more_until_its_first_microbatch_has_begun() -> None:
    core = StageCore(TaskGraph.chain(2), 1, create_hint("bf"), Limit(2))
    core.apply(ev.StepOpened(0, Mode.TRAIN, 4, pool=ev.Pool(0, 2, (0, 0, 1, 1), depth=2, is_even=True)))
    step = StepId(0, Mode.TRAIN, 4)
    assert core.apply(ev.Offered(step, Task(Kind.F, 1, 1), 0)) == ()
    assert core.apply(ev.Arrived(step, Task(Kind.F, 0, 0))) == ()
    assert core.apply(ev.Enqueued(Task(Kind.F, 0, 1))) == (ev.Claim(Task(Kind.F, 1, 1), 0),)


def test_near_the_end_the_holder_of_most_goes_first() -> None:
    assert _claims_of(1, [1, 2, 2], [1, 2, 2]).next(holding(0), is_idle=True) == 1
    assert _claims_of(1, [1, 2, 2], [1, 2, 2], has_gradients=False).next(holding(0), is_idle=True) == 0
    not_the_end = Claims(ev.Pool(1, 3, (1, 2, 2, 0)), range(4))
    for m, holder in enumerate((1, 2, 2)):
        not_the_end.offer(m, holder)
    assert not_the_end.next(holding(0), is_idle=True) == 0

"""Ten thousand random small pipelines of groups under leaders, on the real cores: one order on all ranks, and no stall.

`RandomRun` checks on the way that a leader orders only what has arrived on every rank, that each rank runs exactly
its leader's log, each task once and after its inputs, and that D keeps its limit on every rank. Messages between two
ranks of a group stay in order; everything else is delayed at will. A failure names its seed: `PYTHONPATH=tests python
-c "from sim import test_random_groups as t; t.run_groups(SEED)"` replays it alone.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable

import pytest
from batches import batches
from sim.adversaries import ADVERSARIES

from rrfp import Hint, View
from rrfp.arbiter.coordination import GroupMessage, GroupMessageKind
from rrfp.core.ready_set import ReadySet
from rrfp.errors import HintError, ProtocolError, RrfpError
from rrfp.lab.cluster.random_run import Carry, Delivery, RandomRun
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Kind, Mode, Task

NUM_PIPELINES, QUICK = 10_000, 250
BATCH = 250


class Follower(Hint):
    """Must never be asked, nor told anything."""

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        raise AssertionError("a follower was asked")


def network_of(seed: int, carry: Carry = lambda message: (message,)) -> tuple[RandomRun, list[tuple[Mode, int]]]:
    """The pipeline of this seed, and its steps."""
    rng = random.Random(seed)
    stages, chunks, members = rng.randint(1, 3), rng.choice([1, 1, 2]), rng.choice([2, 2, 3, 4])
    graph = TaskGraph.chain(stages, chunks=chunks, layout=rng.choice(["looped", "v"]), split=rng.random() < 0.3)
    microbatches = rng.randint(1, 3 if members < 4 else 2)
    steps = [(rng.choice([Mode.TRAIN, Mode.TRAIN, Mode.FORWARD]), microbatches)]
    if rng.random() < 0.1:
        steps.append((rng.choice([*Mode]), rng.randint(1, 2)))
    adversary, forced = rng.choice(ADVERSARIES), rng.choice([*Kind])
    deliveries: list[Delivery] = ["any", "any", "oldest", "newest"]
    sizes = [[rng.randint(1, 5) for _ in range(microbatches)] for _ in range(members)]
    network = RandomRun(
        graph,
        [adversary(rng) for _ in range(stages)],
        random_limits(rng, stages, microbatches),
        seed=seed,
        depth=rng.randint(1, 3),
        in_order=[(forced, v) for v in range(stages * chunks)] if rng.random() < 0.3 else [],
        delivery=rng.choice(deliveries),
        members=members,
        coupled=rng.random() < 0.7,
        more_bytes=lambda member, task: sizes[member][task.microbatch % microbatches],
        carry=carry,
    )
    return network, steps


def random_limits(rng: random.Random, stages: int, microbatches: int) -> list[Limit]:
    """A limit of its own for each stage, on bytes too unless all go by the paper's rule."""
    is_paper = rng.random() < 0.2
    limits = []
    for _ in range(stages):
        count = rng.choice([1, 1, rng.randint(1, microbatches), None])
        num_bytes = rng.randint(1, 12) if not is_paper and rng.random() < 0.25 else None
        limits.append(Limit(count, num_bytes, "paper" if is_paper else "staircase"))
    return limits


def run_groups(seed: int) -> None:
    """Make the pipeline of this seed and run it to its end."""
    network, steps = network_of(seed)
    network.run(steps)


@pytest.mark.parametrize("first", batches(NUM_PIPELINES, BATCH, QUICK))
def test_every_group_runs_one_order_and_none_stalls(first: int) -> None:
    for seed in range(first, first + BATCH):
        try:
            run_groups(seed)
        except Exception as error:
            raise AssertionError(f"run_groups({seed}) failed: {type(error).__name__}: {error}") from error


# A limit on bytes counts the worst rank.


@pytest.mark.every_other
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("worst", [0, 1, 2])
def test_a_limit_on_bytes_holds_on_the_rank_that_holds_the_most(depth: int, worst: int) -> None:
    """A microbatch holds 10 bytes, on one rank 25: with 60 bytes two fit at once, where 6 would on the others."""
    most = []
    for seed in range(30):
        network = RandomRun(
            TaskGraph.chain(2),
            [ADVERSARIES[seed % 2](random.Random(seed)) for _ in range(2)],
            [Limit(bytes=60)] * 2,
            seed=seed,
            depth=depth,
            num_bytes=lambda task: 10,
            more_bytes=lambda member, task: 15 * (member == worst),
            members=3,
            coupled=seed % 3 > 0,
        )
        network.run([(Mode.TRAIN, 6), (Mode.TRAIN, 4)])
        most += [network.most_bytes(stage, worst) for stage in range(2)]
    assert max(most) == 50


# What breaks the rules is refused by name.


def outcome(network: RandomRun) -> Exception | None:
    """How a step of four microbatches ends."""
    try:
        network.run([(Mode.TRAIN, 4)])
    except (RrfpError, AssertionError) as error:
        return error
    return None


class Lying(Hint):
    """Answers with a task of the stage that is not ready, or with None without the right to, sooner or later."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        if self._rng.random() < 0.3:
            tasks = [t for t in view.graph.tasks(view.stage, view.microbatches, view.mode) if t not in ready]
            return self._rng.choice([*tasks, None])
        return next(iter(ready))


@pytest.mark.parametrize("first", [0, 100])
def test_a_hint_that_lies_is_named_and_orders_nothing_wrong(first: int) -> None:
    caught = 0
    for seed in range(first, first + 100):
        rng = random.Random(seed)
        network = RandomRun(
            TaskGraph.chain(2), [Lying(rng), Lying(rng)], [Limit(2)] * 2, seed=seed, depth=rng.randint(1, 3), members=2
        )
        error = outcome(network)
        if error is not None:
            caught += 1
            assert type(error) is HintError, error
            assert re.match(r"hint Lying chose (\w+@\d|None) on stage \d; ready are: ReadySet\(\w", str(error))
        for stage, orders in enumerate(network.orders):
            follower = network.order_of(stage, 1)
            opened = [*orders, *[[]] * (len(follower) - len(orders))]  # a follower may open a step before its leader
            assert [run[: len(other)] for run, other in zip(opened, follower, strict=False)] == follower
    assert caught > 90


class Tamper:
    """Does something to the ``number``-th message of a kind: loses, repeats or swaps it with the next."""

    def __init__(self, kind: GroupMessageKind, how: str, number: int) -> None:
        self._kind, self._how, self._number = kind, how, number
        self._seen: list[GroupMessage] = []
        self.done = False

    def __call__(self, message: GroupMessage) -> Iterable[GroupMessage]:
        if message.kind is not self._kind:
            return (message,)
        self._seen.append(message)
        at = len(self._seen) - 1
        if self._how == "lose" and at == self._number:
            return ()
        if self._how == "repeat" and at == self._number:
            self.done = True
            return (message, message)
        if self._how == "swap" and at == self._number:
            return ()
        if self._how == "swap" and at == self._number + 1:
            self.done = True
            return (message, self._seen[self._number])
        self.done |= self._how == "lose" and at > self._number
        return (message,)


@pytest.mark.parametrize(
    ("kind", "how", "texts"),
    [
        (GroupMessageKind.ORDER, "lose", ["order log leaves a gap: got entry"]),
        (GroupMessageKind.ORDER, "repeat", ["order log repeats an entry: got entry"]),
        (GroupMessageKind.ORDER, "swap", ["order log leaves a gap: got entry"]),
        (GroupMessageKind.READY, "repeat", ["of the group reported", "does not await", "a message of step"]),
        (GroupMessageKind.HELD, "repeat", ["of the group reported the bytes of"]),
    ],
)
def test_lost_repeated_and_swapped_messages_are_named(kind: GroupMessageKind, how: str, texts: list[str]) -> None:
    """With one follower all messages of a kind are of one channel, so the next one tells."""
    caught = 0
    for seed in range(150):
        tamper = Tamper(kind, how, seed % 7)
        network = RandomRun(
            TaskGraph.chain(2),
            [ADVERSARIES[3](random.Random(seed)) for _ in range(2)],
            [Limit(2), Limit(2)],
            seed=seed,
            depth=1 + seed % 3,
            members=2,
            carry=lambda message, tamper=tamper: tamper(message) if _on_stage(message, 1) else (message,),  # type: ignore[misc]
        )
        error = outcome(network)
        if kind is GroupMessageKind.HELD and error is None:
            continue  # no task waits for the last of these, so the leader may have ended the step
        if tamper.done:
            caught += 1
            assert isinstance(error, ProtocolError), error
            assert any(text in str(error) for text in texts), error
    assert caught > 80


def _on_stage(message: GroupMessage, stage: int) -> bool:
    return message.task is not None and message.task.virtual_stage == stage


def test_a_log_without_its_last_entries_stalls_and_both_say_what_is_awaited() -> None:
    def carry(message: GroupMessage) -> Iterable[GroupMessage]:
        is_lost = message.kind is GroupMessageKind.ORDER and message.numbers[0] >= 2
        return () if is_lost else (message,)

    network = RandomRun(TaskGraph.chain(1), [ADVERSARIES[1](random.Random(0))], [Limit()], members=2, carry=carry)
    with pytest.raises(AssertionError, match=r"stage 0 member 0 waits for: B0@0 .*\(idle for: .*\)"):
        network.run([(Mode.TRAIN, 3)])


def test_every_case_is_another() -> None:
    """The generator does draw groups of every size, chunks, both modes and all depths."""
    networks = [network_of(seed) for seed in range(50)]
    orders = []
    for network, steps in networks:
        network.run(steps)
        orders.append(str(network.orders))
    assert len(set(orders)) > 30

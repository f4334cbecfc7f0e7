"""A whole pipeline of real cores joined by queues, without time: a seeded generator picks what happens next.

Anything may happen in any order that the contracts allow: messages overtake each other, ranks idle although something
is ready, memory of sends is released late, a rank opens its next step while others are in the last one (in a group, not
before all have opened that). Only what the ranks of a group say to each other stays in order, between any two of them.
What every run must satisfy is checked on the way, by counting anew rather than by asking the cores. Failures raise
`AssertionError`.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal

from rrfp.core import events as ev
from rrfp.core.admission import Limit
from rrfp.core.graph import Graph
from rrfp.core.hint import Hint
from rrfp.core.mesh import PIPELINE, Mesh
from rrfp.core.order_log import Group
from rrfp.core.readiness import ForcedOrder
from rrfp.core.stage_core import StageCore
from rrfp.core.tasks import Mode, StepId, Task
from rrfp.core.topology import Topology
from rrfp.core.waiting import describe, wait_line
from rrfp.testing.core_node import CoreNode, Followed

#: Which pending message is delivered: any, the oldest, or the newest.
Delivery = Literal["any", "oldest", "newest"]

#: What becomes of something that a rank of a group says to another; usually it is delivered as it is.
Carry = Callable[[ev.Event], Iterable[ev.Event]]

#: How likely each sort of thing is to happen next, where groups make them differ: drawn anew for each run.
_LIKELY = (1.0, 1.0, 0.03)


class CoreNetwork:
    """One pipeline, run to its end with `run`.

    Args:
        graph: the dependency graph.
        hints: one fresh hint a stage; its followers have none.
        limits: one limit a stage.
        seed: decides every order.
        depth: tasks enqueued and not complete, at most, a rank.
        in_order: (kind, virtual stage) pairs that run in microbatch order.
        num_bytes: what a microbatch holds after a task.
        delivery: which pending message is delivered.
        members: ranks of a stage, one group under a leader; member t exchanges tensors with member t elsewhere.
        coupled: whether a task ends on no member before all have begun it, as with collectives inside.
        more_bytes: what a microbatch holds in addition on a member after a task.
        carry: what becomes of what members say, such as a loss; for tests of what is refused.

    Attributes:
        orders: for each stage and step, the tasks in the order in which they were enqueued (by the leader).
    """

    def __init__(
        self,
        graph: Graph,
        hints: Sequence[Hint],
        limits: Sequence[Limit],
        *,
        seed: int = 0,
        depth: int = 1,
        in_order: Collection[ForcedOrder] = (),
        num_bytes: Callable[[Task], int] = lambda task: 0,
        delivery: Delivery = "any",
        members: int = 1,
        coupled: bool = True,
        more_bytes: Callable[[int, Task], int] = lambda member, task: 0,
        carry: Carry = lambda event: (event,),
    ) -> None:
        self._members = members
        self._coupled = coupled
        self._random = random.Random(seed)
        self._depth = depth
        self._delivery = delivery
        self._carry = carry
        self._nodes = [
            CoreNode(
                StageCore(graph, stage, hint, limit, group=Group(member, members), in_order=in_order),
                lambda task, member=member: num_bytes(task) + more_bytes(member, task),  # type: ignore[misc]
                self._follow,
            )
            for stage, (hint, limit) in enumerate(zip(hints, limits, strict=True))
            for member in range(members)
        ]
        self.orders = [node.orders for node in self._nodes[::members]]
        self._likely = [1.0] * 4 if members == 1 else [self._random.choice(_LIKELY) for _ in range(4)]
        #: What was not told to a rank yet; and what members of a group say, by sender and receiver.
        self._pending: list[tuple[int, ev.Event]] = []
        self._words: dict[tuple[int, int], deque[ev.Event]] = {}
        #: Next steps of ranks whose groups have not all opened the last one.
        self._to_open: dict[int, ev.StepOpened] = {}

    def order_of(self, stage: int, member: int) -> list[list[Task]]:
        """For each step, the tasks in the order in which ``member`` of ``stage`` enqueued them."""
        return self._nodes[stage * self._members + member].orders

    def most_bytes(self, stage: int, member: int) -> int:
        """The most bytes that ``member`` of ``stage`` held after any task, counted anew; outputs are not counted."""
        return self._nodes[stage * self._members + member].most_bytes

    def run(self, steps: Sequence[tuple[Mode, int]]) -> None:
        """Run one step for each (mode, M), and check that every rank does every task of each.

        Raises:
            AssertionError: with what went wrong, or what each stage waits for if nothing can happen any longer.
        """
        ids = [StepId(number, mode, count) for number, (mode, count) in enumerate(steps)]
        for place, node in enumerate(self._nodes):
            self._pending += [(place, event) for event in node.begin(ids)]
        while self._act():
            pass
        mesh = Mesh(((PIPELINE, len(self._nodes) // self._members), ("tp", self._members)))
        for rank, node in enumerate(self._nodes):
            if node.num_finished < len(steps):
                waits = wait_line(node.name, describe(node.core, Topology.at(rank, mesh), most=4))
                raise AssertionError(f"nothing can happen any longer: {waits} (idle for: {node.core.wait_cause()})")
        for place, node in enumerate(self._nodes):
            leader = self._nodes[place - place % self._members]
            assert node.orders == leader.orders, f"{node.name} runs another order than its leader"

    def _act(self) -> bool:
        """Let one thing happen; False if nothing can."""
        lanes = [place for place, node in enumerate(self._nodes) if node.num_running and self._may_end(place, node)]
        deciding = [
            place for place, node in enumerate(self._nodes) if not node.is_idle and node.num_running < self._depth
        ]
        words = [pair for pair, said in self._words.items() if said]
        if not (lanes or deciding or self._pending or words):
            return False
        on_lane, to_decide, to_deliver, to_hear = self._likely
        on_lane *= len(lanes)
        to_decide = on_lane + to_decide * len(deciding)
        to_deliver = to_decide + to_deliver * len(self._pending)
        drawn = self._random.random() * (to_deliver + to_hear * len(words))
        if drawn < on_lane:
            self._nodes[self._random.choice(lanes)].complete()
        elif drawn < to_decide:
            self._decide(self._random.choice(deciding))
        elif drawn < to_deliver:
            last = len(self._pending) - 1
            at = {"any": self._random.randint(0, last), "oldest": 0, "newest": last}[self._delivery]
            place, event = self._pending.pop(at)
            self._nodes[place].tell(event)
            if isinstance(event, ev.StepOpened):
                self._let_open(place)
        else:
            pair = self._random.choice(words)
            self._nodes[pair[1]].tell(self._words[pair].popleft())
        return True

    def _group(self, place: int) -> list[CoreNode]:
        first = place - place % self._members
        return self._nodes[first : first + self._members]

    def _may_end(self, place: int, node: CoreNode) -> bool:
        """Whether all members have begun the task on the lane of this one."""
        if self._members == 1 or not self._coupled:
            return True
        return all(other.has_begun(*node.position) for other in self._group(place))

    def _decide(self, place: int) -> None:
        task = self._nodes[place].decide()
        if task is not None and place % self._members == 0:
            for node in self._group(place):
                node.check_arrived(task)

    def _follow(self, node: CoreNode, step: StepId, instruction: Followed) -> None:
        member, leader = node.core.group.rank, node.core.stage * self._members
        place = leader + member
        match instruction:
            case ev.Send(task, peer, consumed):
                arrived = ev.Arrived(step, task, node.num_bytes(task), consumed)
                self._pending.append((peer * self._members + member, arrived))
                self._pending.append((place, ev.SendReleased(task, peer)))
            case ev.Credit(peer, task):
                self._pending.append((peer * self._members + member, ev.Consumed(step, node.core.stage, task)))
            case ev.ReduceChunk(virtual_stage):
                self._pending.append((place, ev.ChunkReduced(virtual_stage)))
            case ev.StepOpened():
                self._to_open[place] = instruction
                self._let_open(place)
            case ev.ReportReady(task):
                self._say(place, leader, ev.ReadyReported(step, member, task))
            case ev.Completed(task, held) if member:
                self._say(place, leader, ev.HeldReported(step, member, task, held))
            case ev.Order(sequence, task):
                for follower in range(leader + 1, leader + self._members):
                    self._say(place, follower, ev.Ordered(step, sequence, task))

    def _let_open(self, place: int) -> None:
        """Let those of the group open their next step whose last one all have opened."""
        opened = min(node.num_opened for node in self._group(place))
        first = place - place % self._members
        for member in range(first, first + self._members):
            if member in self._to_open and self._to_open[member].step <= opened:
                self._pending.append((member, self._to_open.pop(member)))

    def _say(self, sender: int, receiver: int, event: ev.Event) -> None:
        self._words.setdefault((sender, receiver), deque()).extend(self._carry(event))

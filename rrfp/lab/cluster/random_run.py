"""A cluster without time: a seeded generator picks what happens next.

Anything may happen in any order that the contracts allow: messages overtake each other, ranks idle although something
is ready, memory of sends is released late, a rank opens its next step while others are in the last one (in a group, not
before all have opened that). Only the messages inside a group, and those by which replicas share forwards, stay in
order, between any two ranks. A checker counts
anew on the way what every run must satisfy. Failures raise `AssertionError`.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import Literal

from rrfp.arbiter.coordination import GroupMessage
from rrfp.core import events as ev
from rrfp.core.group_step import GroupMembership
from rrfp.core.hint import Hint
from rrfp.core.ready_set import ForcedOrder
from rrfp.core.stage_core import StageCore
from rrfp.core.waiting import describe, wait_line
from rrfp.lab.cluster.checker import RankChecker
from rrfp.lab.cluster.cluster import ClaimMessage, Cluster, Envelope
from rrfp.lab.cluster.node import Node
from rrfp.lab.cluster.ranks import Rank, ranks_of
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.mesh import Mesh
from rrfp.model.tasks import Mode, StepId, Task
from rrfp.model.topology import Topology
from rrfp.model.visits import Visits

#: Which pending message is delivered: any, the oldest, or the newest.
Delivery = Literal["any", "oldest", "newest"]

#: What becomes of a message inside a group; usually it is delivered as it is.
Carry = Callable[[GroupMessage], Iterable[GroupMessage]]

#: How likely each sort of thing is to happen next, where groups make them differ: drawn anew for each run.
_LIKELY = (1.0, 1.0, 0.03)


class RandomRun(Cluster[Node]):
    """One pipeline, run to its end with `run`."""

    reports_all_bytes = True

    def __init__(
        self,
        graph: TaskGraph,
        hints: Sequence[Hint],
        limits: Sequence[Limit],
        *,
        seed: int = 0,
        # Tasks enqueued and not complete, at most, a rank.
        depth: int = 1,
        # (kind, virtual stage) pairs that run in microbatch order.
        in_order: Collection[ForcedOrder] = (),
        # What a microbatch holds after a task.
        num_bytes: Callable[[Task], int] = lambda task: 0,
        delivery: Delivery = "any",
        # Ranks of a stage, one group under a leader; member t exchanges tensors with member t elsewhere.
        members: int = 1,
        # Whether a task ends on no member before all have enqueued it, as with collectives inside.
        coupled: bool = True,
        # Whether lanes take offered tasks, some time before their cores hear of it.
        takes_offers: bool = False,
        # What a microbatch holds in addition on a member after a task.
        more_bytes: Callable[[int, Task], int] = lambda member, task: 0,
        # What becomes of the messages inside groups, such as a loss; for tests of what is refused.
        carry: Carry = lambda message: (message,),
        # By step, what each microbatch visits; empty where all visit everything.
        visits: Sequence[Visits] = (),
        # Makes the cores, called like `StageCore`; tests pass broken ones.
        make_core: Callable[..., StageCore] = StageCore,
        # Copies of the pipeline; more than one share the forwards of training steps, and `hints` are by rank then.
        replicas: int = 1,
        # How: forwards that a rank has claimed and not begun, how long a microbatch takes on each copy, and whether
        # replicas keep their first microbatch.
        claims: int = 1,
        paces: tuple[float, ...] = (),
        is_even: bool = False,
    ) -> None:
        self._visits = visits

        def core(rank: Rank) -> StageCore:
            group = GroupMembership(rank.member, members)
            hint = hints[rank.stage if replicas == 1 else rank]
            return make_core(graph, rank.stage, hint, limits[rank.stage], group=group, in_order=in_order)

        def node(rank: Rank) -> Node:
            limit, is_forced = limits[rank.stage], bool(in_order)
            checker = RankChecker(
                rank, graph, limit, visits_of=self._visits_of, is_forced=is_forced, claims=claims if replicas > 1 else 0
            )
            return Node(rank, core(rank), checker)

        nodes = [node(rank) for rank in ranks_of(len(limits), replicas, members)]
        # When a task begins is of no interest here, so lanes need not meet: `_may_end` couples their ends.
        super().__init__(
            nodes,
            members=members,
            depth=depth,
            coordination="leader",
            coupled=False,
            takes_offers=takes_offers,
            shares=replicas > 1,
        )
        self._mesh = Mesh((("pp", len(limits)), ("dp", replicas), ("tp", members)))
        self._replicas, self._how = replicas, (claims, paces, is_even)
        #: By step, where replicas share forwards: whose caller has each microbatch.
        self._homes: dict[int, tuple[int, ...]] = {}
        self._graph = graph
        self._is_coupled = coupled and members > 1
        self._random = random.Random(seed)
        self._depth = depth
        self._delivery = delivery
        self._num_bytes = num_bytes
        self._more_bytes = more_bytes
        self._carry = carry
        #: For each stage and step, the tasks in the order in which they were enqueued (by the leader).
        self.orders = [node.orders for node in self.nodes[::members]]
        self._likely = [1.0] * 4 if members == 1 else [self._random.choice(_LIKELY) for _ in range(4)]
        #: What has not happened yet; and messages inside groups on their way, by sender and receiver.
        self._pending: list[tuple[Callable[..., None], tuple[object, ...]]] = []
        self._in_groups: dict[tuple[Rank, Rank], deque[Envelope]] = {}

    def order_of(self, stage: int, member: int) -> list[list[Task]]:
        return self.nodes[stage * self.members + member].orders

    def most_bytes(self, stage: int, member: int) -> int:
        """The most bytes held after any task, counted anew, outputs excluded."""
        return self.nodes[stage * self.members + member].checker.memory.peak_bytes

    def run(self, steps: Sequence[tuple[Mode, int]]) -> None:
        """Run a step for each (mode, M); every rank must do every task."""
        self.steps = [StepId(number, mode, count) for number, (mode, count) in enumerate(steps)]
        for node in self.nodes:
            node.arbiter.kick()
        self.allow_step(self.nodes)
        while self._act():
            pass
        waiting = [
            (node, describe(node.core, Topology.at(node.rank, self._mesh), most=4))
            for node in self.nodes
            if node.num_finished < len(self.steps)
        ]
        if waiting:
            named = [each for each in waiting if each[1]] or waiting[:1]
            waits = (f"{wait_line(each.rank.name, why)} (idle for: {each.core.wait_cause()})" for each, why in named)
            raise AssertionError(f"nothing can happen any longer: {'; '.join(waits)}")
        for node in self.nodes:
            leader = self.group_of(node).nodes[0]
            assert node.orders == leader.orders, f"{node.rank.name} runs another order than its leader"
        if self._replicas > 1:
            self._check_once()

    def _check_once(self) -> None:
        """Over all copies each task must have run once."""
        for step in self.steps:
            ran = Counter(task for node in self.nodes for task in node.orders[step.number])
            stages = range(self._graph.placement.stages)
            wanted = {task for stage in stages for task in self._graph.tasks(stage, step.microbatches, step.mode)}
            copies = 1 if step.mode is Mode.TRAIN else self._replicas
            assert ran == dict.fromkeys(wanted, copies), f"{step} ran other tasks, or some more than once"

    def _act(self) -> bool:
        """Let one thing happen; False if nothing can."""
        lanes = [node for node in self.nodes if node.lane and self._may_end(node)]
        deciding = [node for node in self.nodes if node.arbiter.is_due and self._may_decide(node)]
        taking = [node for node in self.nodes if node.slot is not None and node.slot.task is not None]
        in_groups = [pair for pair, packets in self._in_groups.items() if packets]
        if not (lanes or deciding or self._pending or in_groups):
            return False
        on_lane, to_decide, to_happen, to_arrive = self._likely
        on_lane *= len(lanes)
        to_decide = on_lane + to_decide * len(deciding)
        to_happen = to_decide + to_happen * len(self._pending)
        in_group = to_happen + to_arrive * len(in_groups)
        drawn = self._random.random() * (in_group + len(taking))
        if drawn < on_lane:
            self.complete(self._random.choice(lanes))
        elif drawn < to_decide:
            arbiter = self._random.choice(deciding).arbiter
            arbiter.is_due = arbiter.dispatch_next()
        elif drawn < to_happen:
            last = len(self._pending) - 1
            at = {"any": self._random.randint(0, last), "oldest": 0, "newest": last}[self._delivery]
            call, arguments = self._pending.pop(at)
            call(*arguments)
        elif drawn < in_group:
            self.deliver(self._in_groups[self._random.choice(in_groups)].popleft())
        else:
            self.take_offer(self._random.choice(taking))
        return True

    def _may_decide(self, node: Node) -> bool:
        """Whether a decision could put a task on the lane, or offer one."""
        return len(node.lane) < self._depth or node.slot is not None

    def _may_end(self, node: Node) -> bool:
        """Whether all members have enqueued the task on this lane."""
        if not self._is_coupled:
            return True
        step, index = len(node.orders) - 1, node.num_completed
        return all(len(other.orders) > step and len(other.orders[step]) > index for other in self.group_of(node).nodes)

    def opened_on(self, node: Node, step: StepId) -> ev.StepOpened:
        """With the microbatches that replicas share."""
        opened = super().opened_on(node, step)
        if self._replicas == 1 or step.mode is not Mode.TRAIN:
            return opened
        if step.number not in self._homes:
            self._homes[step.number] = tuple(self._random.choices(range(self._replicas), k=step.microbatches))
        homes = self._homes[step.number]
        return replace(opened, pool=ev.Pool(node.rank.replica, self._replicas, homes, *self._how))

    def opened(self, step: StepId) -> ev.StepOpened:
        return replace(super().opened(step), visits=self._visits_of(step))

    def _visits_of(self, step: StepId) -> Visits:
        return self._visits[step.number] if self._visits else Visits(step.microbatches)

    # A network without time, and what is checked.

    def now(self) -> float:
        """Any time: a pause may begin or not, whatever was reported when."""
        return self._random.random()

    def wake(self, node: Node, seconds: float, pause: int) -> None:
        self._pending.append((self.pause_over, (node, pause)))

    def send(self, packet: Envelope) -> None:
        """Let it arrive at some time."""
        if isinstance(packet.content, ClaimMessage):
            self._in_groups.setdefault((packet.sender, packet.receiver), deque()).append(packet)
        elif isinstance(packet.content, GroupMessage):
            on_the_way = self._in_groups.setdefault((packet.sender, packet.receiver), deque())
            on_the_way.extend(packet._replace(content=message) for message in self._carry(packet.content))
        else:
            self._pending.append((self.deliver, (packet,)))

    def begin(self, nodes: Sequence[Node]) -> None:
        """It ends at some time."""

    def allow_step(self, nodes: Sequence[Node]) -> None:
        self._pending += [(self.open_step, (node,)) for node in sorted(nodes, key=lambda node: node.rank)]

    def release(self, node: Node, released: ev.SendReleased) -> None:
        self._pending.append((self.notify, (node, released)))

    def reduce(self, node: Node, virtual_stage: int) -> None:
        self._pending.append((self.notify, (node, ev.ChunkReduced(virtual_stage))))

    def enqueued(self, node: Node, task: Task) -> None:
        """D, as the core counts it, must be in bounds too."""
        super().enqueued(node, task)
        held, most = node.core.view.held, node.checker.memory.most_held
        if most is not None and held > most:
            node.checker.object_to(f"counts {held} chunk tasks, the limit is {most}")

    def finish_step(self, node: Node) -> None:
        super().finish_step(node)
        if node.num_finished < len(self.steps) and self.opens_with(node).may_open(node):
            self.allow_step([node])

    def bytes_held(self, node: Node, task: Task) -> int:
        return self._num_bytes(task) + self._more_bytes(node.rank.member, task)

    def output_bytes(self, node: Node, task: Task) -> int:
        return self.bytes_held(node, task)

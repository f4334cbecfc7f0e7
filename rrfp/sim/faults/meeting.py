"""Where ranks of a simulated run meet: members of a group in tasks and at the beginning of steps, replicas in sums."""

from __future__ import annotations

from collections.abc import Sequence

from rrfp.core.tasks import Task
from rrfp.sim.faults.node import Node


class GroupMeeting:
    """The members of one group: they run one order, which holds nothing that some member could not run.

    Args:
        nodes: the members, leader first.
        coupled: a task begins when the last member comes to it.
        is_led: the leader waits for all members' reports.
    """

    def __init__(self, nodes: Sequence[Node], *, coupled: bool, is_led: bool) -> None:
        self._nodes = nodes
        self._coupled = coupled and len(nodes) > 1
        self._is_led = is_led
        #: By step: the one order, as whoever came first ran it; and how many came to each of its tasks.
        self._orders: dict[int, list[Task]] = {}
        self._present: dict[tuple[int, int], list[Node]] = {}
        self._waiting: dict[int, int] = {}

    def may_open(self, node: Node, number: int) -> bool:
        """Whether all members have opened the step before; if not, `take_waiting` gives the rank back later."""
        if all(other.num_opened >= number for other in self._nodes):
            return True
        self._waiting[node.rank] = number
        return False

    def take_waiting(self) -> list[tuple[int, int]]:
        """Ranks that waited to open a step and now may, each with its number."""
        opened = min(node.num_opened for node in self._nodes)
        free = [(rank, number) for rank, number in self._waiting.items() if number <= opened]
        for rank, _ in free:
            del self._waiting[rank]
        return free

    def enqueue(self, node: Node, task: Task) -> None:
        """``node`` enqueues ``task``."""
        number, place = node.step.number, node.num_enqueued
        node.num_enqueued += 1
        if len(self._nodes) == 1:
            return
        order = self._orders.setdefault(number, [])
        if place == len(order):
            order.append(task)
        elif order[place] != task:
            node.witness.object_to(f"runs {task} where others of its group run {order[place]}")
        if self._is_led and node is self._nodes[0]:
            for other in self._nodes[1:]:
                if lacks := other.witness.lacks(task, node.step):
                    what = " ".join(map(str, lacks))
                    node.witness.object_to(f"ordered {task}, and {other.rank.name} has not got {what}")

    def begin(self, node: Node) -> Sequence[Node]:
        """The lane of ``node`` comes to its next task; returns the members who run theirs from now on."""
        key = node.step.number, node.num_begun
        node.num_begun += 1
        if not self._coupled:
            return (node,)
        present = self._present.setdefault(key, [])
        present.append(node)
        return present if len(present) == len(self._nodes) else ()


class ReplicaMeeting:
    """Sums of gradients over replicas, chunk by chunk.

    Args:
        replicas: how many take part.
    """

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._given: dict[tuple[int, int, int, int], list[Node]] = {}

    def give(self, node: Node, virtual_stage: int) -> Sequence[Node]:
        """``node`` gives its gradients of ``virtual_stage``; returns all who gave theirs once everybody has."""
        given = self._given.setdefault((node.step.number, virtual_stage, node.rank.stage, node.rank.member), [])
        given.append(node)
        if len(given) < self._replicas:
            return ()
        total = sum(one.values.gradients.get(virtual_stage, 0) for one in given)
        for one in given:
            one.sums[virtual_stage] = total
        return given

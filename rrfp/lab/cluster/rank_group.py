"""The members of a group in a simulated cluster: they begin steps together and run the same tasks in the same order.

It has no time, and is independent of how they agree on an order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from rrfp.lab.cluster.node import Node
from rrfp.model.tasks import Task

NodeT = TypeVar("NodeT", bound=Node)


class RankGroup(Generic[NodeT]):
    """The members, leader first. Coupled, they begin a task when the last of them reaches it, as with collectives."""

    def __init__(self, nodes: Sequence[NodeT], *, coupled: bool) -> None:
        self.nodes = nodes
        self._coupled = coupled and len(nodes) > 1
        #: By step: the order of the group; the first member to reach an index sets the task there.
        self._orders: dict[int, list[Task]] = {}
        #: By step and index in the order: the members whose lanes have reached it.
        self._present: dict[tuple[int, int], list[NodeT]] = {}
        self._waiting: list[NodeT] = []

    def may_open(self, node: NodeT) -> bool:
        """Whether all members have opened the step before; if not, `take_waiting` returns ``node`` later."""
        if all(other.num_opened >= node.num_opened for other in self.nodes):
            return True
        self._waiting.append(node)
        return False

    def take_waiting(self) -> list[NodeT]:
        """Members that waited to open a step and now may."""
        if not self._waiting:
            return []
        opened = min(node.num_opened for node in self.nodes)
        free = [node for node in self._waiting if node.num_opened <= opened]
        self._waiting = [node for node in self._waiting if node.num_opened > opened]
        return free

    def enqueue(self, node: NodeT, task: Task) -> Task | None:
        """``node`` enqueues ``task``; returns the task that another member has at this index, if the two differ."""
        index = len(node.order)
        node.order.append(task)
        if len(self.nodes) == 1:
            return None
        order = self._orders.setdefault(node.step.number, [])
        if index == len(order):
            order.append(task)
        return None if order[index] == task else order[index]

    def reach(self, node: NodeT) -> Sequence[NodeT]:
        """The lane of ``node`` reaches its next task; returns the members that begin theirs now."""
        index = node.num_begun
        node.num_begun += 1
        if not self._coupled:
            return (node,)
        present = self._present.setdefault((node.step.number, index), [])
        present.append(node)
        if len(present) < len(self.nodes):
            return ()
        return self._present.pop((node.step.number, index))

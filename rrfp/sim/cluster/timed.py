"""A simulated cluster in virtual time: what happens waits in an event queue."""

from __future__ import annotations

from typing import Any

from rrfp.sim.cluster.cluster import Cluster
from rrfp.sim.cluster.event_queue import EventQueue
from rrfp.sim.cluster.rank_group import NodeT


class TimedCluster(Cluster[NodeT]):
    """A subclass says how long tasks and messages take.

    Args:
        queue: what happens next, and the time.
        args: as of `Cluster`, as are ``kwargs``.
    """

    def __init__(self, queue: EventQueue, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.queue = queue

    def now(self) -> float:
        """Virtual time."""
        return self.queue.now

    def wake(self, node: NodeT, seconds: float, pause: int) -> None:
        """After these seconds of virtual time."""
        self.queue.put(self.queue.now + seconds, node.rank, self._pause_over, pause)

    def _pause_over(self, rank: int, pause: int) -> None:
        self.pause_over(self.nodes[rank], pause)

"""How one rank's failure in a simulated run reaches all others: each is notified once, and must stop at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from rrfp.core import events as ev
from rrfp.errors import Origin, PeerLostError, ProtocolError
from rrfp.sim.cluster.event_queue import EventQueue
from rrfp.sim.cluster.ranks import Rank
from rrfp.sim.faults.checker import Ending
from rrfp.sim.faults.faults import Death
from rrfp.sim.faults.message_checker import Breach
from rrfp.sim.faults.node import FaultNode

T = TypeVar("T")

Failure = tuple[Ending, Origin]


class Failures:
    """Those of one run of ``num_steps``; for each stage that it passes, a report travels ``latency`` seconds."""

    def __init__(
        self,
        nodes: Sequence[FaultNode],
        queue: EventQueue,
        latency: float,
        num_steps: int,
        report: Callable[[FaultNode, str, object], None],
    ) -> None:
        self._nodes = nodes
        self._queue = queue
        self._latency = latency
        self._num_steps = num_steps
        self._report = report
        #: The first failure of the run, by any rank.
        self.first: Failure | None = None
        self.objections: list[str] = []

    @property
    def all_finished(self) -> bool:
        """Whether every rank has done every step."""
        return all(node.num_finished == self._num_steps for node in self._nodes)

    def accept(self, node: FaultNode, receive: Callable[[], T], what: object, breach: Breach | None) -> T | None:
        """``node`` must refuse ``what`` if it is a breach, and only then; returns its answer, None if it refused."""
        try:
            result = receive()
        except ProtocolError as error:
            self.refused(node, what, error, breach)
            return None
        if breach is not None:
            self.objections.append(f"{node.rank.name} accepted {breach.parcel.id}, which {breach.how}")
        return result

    def refused(self, node: FaultNode, what: object, error: ProtocolError, breach: Breach | None) -> None:
        """``node`` refused ``what``, and all end; it must have been a breach, and the error must name it."""
        self._report(node, "refuses:", error)
        if breach is None:
            self.objections.append(f"{node.rank.name} refused {what}, which keeps the contract: {error}")
        elif unnamed := [word for word in breach.words if word not in str(error)]:
            self.objections.append(f"the refusal of {breach.parcel.id} does not name {', '.join(unnamed)}: {error}")
        failure = Ending.REFUSED, self._origin(node.rank, f"ProtocolError: {error}")
        self._abort(node.rank, failure)
        self._spread(node.rank, failure, self._queue.now)

    def foretell(self, death: Death) -> None:
        """Notify every other rank of ``death`` once it is detected."""
        error = PeerLostError(death.rank, "its connection ended or fell silent")
        rank = self._nodes[death.rank].rank
        failure = Ending.ABORTED, self._origin(rank, f"{type(error).__name__}: {error.reason}")
        self._spread(rank, failure, death.at + death.detection)

    def _origin(self, rank: Rank, cause: str) -> Origin:
        is_alone = rank.name == f"stage {rank.stage}"
        return Origin(rank.stage, None, cause, None if is_alone else int(rank))

    def _spread(self, origin: Rank, failure: Failure, time: float) -> None:
        """From ``time`` on the report of a failure travels from stage to stage."""
        for node in self._nodes:
            if node.rank != origin:
                delay = self._latency * max(1, abs(origin.stage - node.rank.stage))
                self._queue.put(time + delay, node.rank, self._abort, failure)

    def _abort(self, rank: int, failure: Failure) -> None:
        node, (ending, origin) = self._nodes[rank], failure
        if node.origin is not None:
            return  # only the first failure counts
        if self.first is None and ending is Ending.ABORTED and self.all_finished:
            return  # all ranks had left in order before any of them noticed
        self._report(node, "is notified of a failure:", origin)
        node.origin = origin
        self.first = self.first or failure
        for instruction in node.core.apply(ev.Aborted(origin)):
            if isinstance(instruction, ev.Abort):
                node.aborts.append(instruction.origin)
            else:
                self.objections.append(f"{node.rank.name} answers an abort with {instruction}")

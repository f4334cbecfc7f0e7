"""A fault plan for the real shell: transport `simulated` with FIFO channels, and what the plan does to messages.

The plan is the one that `rrfp.lab.faults.cluster` applies to bare cores, by the same `FaultyNetwork`. Outputs, credits
and what is said of forwards that replicas share take part; what else travels (reports, polls, aborts) arrives at once
and unharmed. A message that is kept back arrives when its receiver has begun a later step, or after `Links.late_after`
at the latest.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from rrfp.errors import FrameError
from rrfp.lab.faults.faults import AnyId, ClaimMessageId, ClaimSort, Death, Fault, MessageId
from rrfp.lab.faults.network import FaultyNetwork, Parcel
from rrfp.lab.simulated_transport import Latency, SimulatedTransport, no_latency
from rrfp.transports.base import Channel, Message, MessageKind, TransportContext
from rrfp.transports.links.flow import Window


class Links:
    """What the transports of one run share.

    Args:
        faults: the plan. Pauses are none of a transport's business.
        latency: how long each of these takes without a spike, in seconds.
        checks: whether a receiving end refuses messages that its peer did not number next, as transport `zmq` does. If
            not, the faults reach the shell and its core.
        late_after: seconds after which a message that is kept back arrives.
    """

    def __init__(
        self, faults: tuple[Fault, ...], latency: Latency = no_latency, *, checks: bool, late_after: float
    ) -> None:
        self.network = FaultyNetwork(faults)
        self.checks = checks
        self.late_after = late_after
        self._latency = latency
        self._deaths = {fault.rank: fault for fault in faults if isinstance(fault, Death)}
        #: How each message is handed over.
        self._arrive: dict[AnyId, Callable[[], None]] = {}

    def send(self, stage: int, peer: int, message: Message, arrive: Callable[[], None]) -> None:
        """Stage ``stage`` sends ``message``; ``arrive`` hands it over, as often as the plan says."""
        if self._is_silent(stage):
            return
        one = _identity(stage, peer, message)
        if one is None or message.step is None:
            arrive()
            return
        self._arrive[one] = arrive
        now, latency = asyncio.get_running_loop().time(), self._latency(stage, peer, message)
        self._deliver(self.network.send(Parcel(one, message.sequence), now, latency))
        if any(parcel.id == one for _, parcel in self.network.kept):
            asyncio.get_running_loop().call_later(self.late_after, self._release, one)

    def step_opened(self, stage: int, step: int) -> None:
        """The program of ``stage`` began ``step``."""
        self._deliver_now(self.network.step_opened(stage, step))

    def _release(self, message: AnyId) -> None:
        self._deliver_now(self.network.release(lambda _, parcel: parcel.id == message))

    def _deliver_now(self, parcels: Iterable[Parcel]) -> None:
        self._deliver((asyncio.get_running_loop().time(), parcel) for parcel in parcels)

    def _deliver(self, arrivals: Iterable[tuple[float, Parcel]]) -> None:
        for time, parcel in arrivals:
            # By a timer even if it is due: timers of one instant keep their order, so a channel stays a FIFO.
            asyncio.get_running_loop().call_at(time, self._land, parcel.id)

    def _land(self, message: AnyId) -> None:
        death = self._deaths.get(message.sender)
        if death is None or not (death.drops and self._is_silent(message.sender)):
            self._arrive[message]()

    def _is_silent(self, stage: int) -> bool:
        death = self._deaths.get(stage)
        return (math.inf if death is None else death.at) <= asyncio.get_running_loop().time()


class FaultyTransport(SimulatedTransport):
    """See the module's docstring.

    Args:
        context: who this rank is and whom it talks to.
        links: shared by all ranks of the run.
    """

    def __init__(self, context: TransportContext, links: Links) -> None:
        super().__init__(context)
        self._links = links
        self._due: dict[tuple[int, Channel], int] = {}

    async def receive(self) -> Message:
        """The next message of any peer.

        Raises:
            FrameError: if a message of a data channel is not the next of its sender, where that is checked.
        """
        message = await super().receive()
        if not self._links.checks or message.channel is Channel.CONTROL:
            return message
        route = (message.sender, message.channel)
        due = self._due.get(route, 0)
        if message.sequence != due:
            raise FrameError(message.sender, "sequence", f"is {message.sequence}, must be {due}")
        self._due[route] = due + 1
        return message

    def _deliver(self, peer: int, message: Message, window: Window, cost: int) -> None:
        arrive = partial(super()._deliver, peer, message, window, cost)
        self._links.send(self.context.rank, peer, message, arrive)


_SAID: Mapping[MessageKind, ClaimSort] = {
    MessageKind.OFFERED: "offer",
    MessageKind.CLAIMED: "claim",
    MessageKind.GRANTED: "grant",
    # What a caller passed goes to the copy that runs the forward, and grants it on the first stage.
    MessageKind.MICROBATCH: "grant",
}


def _identity(stage: int, peer: int, message: Message) -> AnyId | None:
    """Which message of the run it is; None for what no plan speaks of."""
    if message.task is None or message.step is None:
        return None
    if (sort := _SAID.get(message.kind)) is not None:
        return ClaimMessageId(message.step.number, sort, message.task, stage, peer)
    if message.kind not in (MessageKind.OUTPUT, MessageKind.CONSUMED):
        return None
    return MessageId(message.step.number, message.task, stage, peer, message.kind is MessageKind.CONSUMED)

"""Sends what simulated ranks send: outputs, credits and messages inside groups, each over the faulty links."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from rrfp.arbiter.group_messages import GroupMessage, GroupMessageKind
from rrfp.core import events as ev
from rrfp.sim.faults.agenda import Agenda
from rrfp.sim.faults.faults import GroupMessageId, MessageId
from rrfp.sim.faults.network import Delivery, Network, Parcel
from rrfp.sim.faults.node import Node
from rrfp.sim.faults.ranks import Rank
from rrfp.sim.faults.scenario import Scenario

#: A rank by its stage, replica and member.
Numbers = Mapping[tuple[int, int, int], Rank]


class Post:
    """See the module's docstring.

    Args:
        scenario: says how long messages travel.
        network: the links.
        agenda: when what happens.
        numbers: the ranks.
        deliver: takes what arrives at a rank.
    """

    def __init__(
        self,
        scenario: Scenario,
        network: Network,
        agenda: Agenda,
        numbers: Numbers,
        deliver: Callable[[int, Parcel], None],
    ) -> None:
        self._scenario = scenario
        self._network = network
        self._agenda = agenda
        self._numbers = numbers
        self._deliver = deliver

    def output(self, node: Node, send: ev.Send) -> None:
        """``node`` sends an output to its like on another stage."""
        kind, microbatch, virtual_stage = send.task
        one = MessageId(node.step.number, send.task, node.rank, self._like(node, send.peer))
        parcel = Parcel(one, node.step, self._network.next_place(one), node.values.output(send.task), send.consumed)
        lag = self._scenario.crew.lag(node.step.number, microbatch, virtual_stage, node.rank.member)
        self._send(parcel, self._scenario.latencies[kind][virtual_stage][microbatch] + lag)

    def credit(self, node: Node, credit: ev.Credit) -> None:
        """``node`` tells its like on another stage that it is done with an output."""
        one = MessageId(node.step.number, credit.task, node.rank, self._like(node, credit.peer), is_credit=True)
        self._send(Parcel(one, node.step, self._network.next_place(one)), self._scenario.control_latency)

    def to_member(self, node: Node, member: int, message: GroupMessage) -> None:
        """``node`` sends ``message`` to a member of its group."""
        peer = self._numbers[node.rank.stage, node.rank.replica, member]
        about = message.task if message.kind in (GroupMessageKind.READY, GroupMessageKind.HELD) else message.numbers[0]
        assert about is not None, f"{message} is about nothing"
        one = GroupMessageId(message.step.number, message.kind, about, node.rank, peer)
        self._send(
            Parcel(one, message.step, self._network.next_place(one), group_message=message),
            self._scenario.control_latency,
        )

    def later(self, deliveries: Iterable[Delivery]) -> None:
        """Messages arrive at their time."""
        for time, parcel in deliveries:
            self._agenda.put(time, parcel.id.receiver, self._deliver, parcel)

    def _like(self, node: Node, stage: int) -> Rank:
        return self._numbers[stage, node.rank.replica, node.rank.member]

    def _send(self, parcel: Parcel, latency: float) -> None:
        self.later(self._network.send(parcel, self._agenda.now, latency))

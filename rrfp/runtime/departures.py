"""Peers that left in order: no loss, unless this rank is in a call that they have not made."""

from __future__ import annotations

from rrfp.errors import PeerLostError, ProtocolError
from rrfp.runtime.activity import RankActivity
from rrfp.transports.base import Channel, Message, MessageKind


class Departures:
    """The peers that left, each with the number of steps and collective calls that it took part in."""

    def __init__(self, activity: RankActivity) -> None:
        self._activity = activity
        self._steps: dict[int, int] = {}
        self._gatherings: dict[int, int] = {}

    def __contains__(self, peer: int) -> bool:
        return peer in self._steps

    def on_message(self, message: Message) -> None:
        """A CLOSED message arrived; raises as `check` if this rank is in a call."""
        steps, gatherings = message.body.get("steps"), message.body.get("gatherings")
        if not isinstance(steps, int) or not isinstance(gatherings, int):
            raise ProtocolError(f"rank {message.sender} closed without saying after how many steps and gatherings")
        self._steps[message.sender] = steps
        self._gatherings[message.sender] = gatherings
        self.check()

    def check(self) -> None:
        """This rank begins a call, or is in one: a PeerLostError if a peer left before it."""
        activity = self._activity
        if activity.step is not None:
            number = activity.step.number
            if (peer := _left_before(number, self._steps)) is not None:
                steps = self._steps[peer]
                raise PeerLostError(
                    peer, f"its program left after {steps} step(s), but step {number} was begun elsewhere"
                )
        if activity.gathering and (peer := _left_before(activity.gatherings_ended, self._gatherings)) is not None:
            raise PeerLostError(peer, f"its program left, but {activity.gathering} was called elsewhere")

    def own_message(self) -> Message:
        """The CLOSED message of this rank."""
        body = {"steps": self._activity.steps_ended, "gatherings": self._activity.gatherings_ended}
        return Message(Channel.CONTROL, MessageKind.CLOSED, body=body)


def _left_before(number: int, ended: dict[int, int]) -> int | None:
    """The first peer that took part in fewer calls than up to ``number``."""
    return next((peer for peer, count in ended.items() if count <= number), None)

"""Peers that left in order: no loss, unless this rank begins a call that they have not made."""

from __future__ import annotations

from rrfp.errors import PeerLostError, ProtocolError
from rrfp.transports.base import Channel, Message, MessageKind


class Departures:
    """Which peers left in order, and after how many steps and gatherings."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}
        self._gatherings: dict[int, int] = {}

    def __contains__(self, peer: int) -> bool:
        return peer in self._steps

    def note(self, message: Message) -> None:
        """A CLOSED message arrived.

        Raises:
            ProtocolError: if it does not say after how much.
        """
        steps, gatherings = message.body.get("steps"), message.body.get("gatherings")
        if not isinstance(steps, int) or not isinstance(gatherings, int):
            raise ProtocolError(f"rank {message.sender} closed without saying after how many steps and gatherings")
        self._steps[message.sender] = steps
        self._gatherings[message.sender] = gatherings

    def check(self, step: int) -> None:
        """This rank begins, or is in, ``step``.

        Raises:
            PeerLostError: if a peer left before it.
        """
        for peer, steps in self._steps.items():
            if steps <= step:
                raise PeerLostError(
                    peer, f"its program left after {steps} step(s), but step {step} was begun elsewhere"
                )

    def check_gathering(self, number: int) -> None:
        """This rank begins, or is in, gathering ``number``.

        Raises:
            PeerLostError: if a peer left before it.
        """
        for peer, gatherings in self._gatherings.items():
            if gatherings <= number:
                raise PeerLostError(peer, "its program left, but gradients are being clipped elsewhere")


def closed_message(steps: int, gatherings: int = 0) -> Message:
    """This rank's caller left in order after ``steps`` steps and ``gatherings`` of values between them."""
    return Message(Channel.CONTROL, MessageKind.CLOSED, body={"steps": steps, "gatherings": gatherings})

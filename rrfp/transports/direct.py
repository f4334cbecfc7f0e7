"""Two shortcuts that a transport may offer: messages without a task, a queue or a future each."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from rrfp.transports.base import Message
from rrfp.transports.flow import Deliver


@runtime_checkable
class DeliversMessages(Protocol):
    """A transport that can pass on messages where it reads them, instead of keeping them for `receive`."""

    def deliver_to(self, deliver: Deliver) -> None:
        """Pass on messages from now on; ``receive`` is not called any more. Called once, on the loop, after ``start``.

        Args:
            deliver: called on the loop and from no other callback than the transport's own: at once with each message
                and error that waits, later with each that comes. What is passed to it counts as received.

        Raises:
            TransportClosedError: this end is not started, or closed.
        """


@runtime_checkable
class SendsAtOnce(Protocol):
    """A transport that can send a small message without waiting."""

    def send_at_once(self, peer: int, message: Message) -> bool:
        """Send a message if nothing has to be waited for.

        Args:
            peer: one of the context's peers.
            message: as for ``send``.

        Returns:
            Whether the message was sent and its tensors are not read any more. If not, nothing of it was sent:
            ``send`` waits, or raises the error.
        """

"""Two shortcuts that a transport may offer: messages without a task, a queue or a future each.

A class derived from a transport with shortcuts may change ``send`` or ``receive`` alone, to delay or count messages. A
shortcut would pass its method by, so it counts as offered only where no class further down replaces that method.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from rrfp.transports.base import Message, Transport
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


def delivering(transport: Transport) -> DeliversMessages | None:
    """``transport``, if it offers `DeliversMessages.deliver_to` beside its own ``receive``."""
    return transport if isinstance(transport, DeliversMessages) and _fits(transport, "deliver_to", "receive") else None


def sending_at_once(transport: Transport) -> SendsAtOnce | None:
    """``transport``, if it offers `SendsAtOnce.send_at_once` beside its own ``send``."""
    return transport if isinstance(transport, SendsAtOnce) and _fits(transport, "send_at_once", "send") else None


def _fits(transport: object, shortcut: str, method: str) -> bool:
    """Whether no class replaces ``method`` that leaves the ``shortcut`` of a class above it."""
    classes = type(transport).__mro__
    defined = [next((i for i, each in enumerate(classes) if name in vars(each)), -1) for name in (shortcut, method)]
    return defined[0] <= defined[1]

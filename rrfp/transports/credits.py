"""Credit: how a receiver returns the bytes of the messages that ``receive`` returned to their sender's window.

One frame for many messages: it is sent once it is half of the sender's window, or when the sender has to wait and asks
for it, so that no sender waits for the timer. The timer, `CREDIT_DELAY_S`, only keeps ``queued_bytes`` true.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from rrfp.core import timeouts
from rrfp.transports.base import Channel
from rrfp.transports.flow import Window, cost_of
from rrfp.transports.header_checks import HeaderChecks
from rrfp.transports.wire import Sealed

#: The part of the sender's window after which credit is sent at once.
CREDIT_SHARE = 2


class _Debt:
    """Bytes and messages that were consumed, and for which no credit was sent yet."""

    def __init__(self) -> None:
        self.cost = 0
        self.messages = 0
        self.timer: asyncio.TimerHandle | None = None


class Credits:
    """What this rank owes one peer. Used on one loop only.

    Args:
        queue_bytes: the peer's window for each channel.
        send: sends the fields of one credit frame, without waiting; `apply_credit` reads them.
    """

    def __init__(self, queue_bytes: int, send: Callable[[str, int, int], None]) -> None:
        self._threshold = queue_bytes // CREDIT_SHARE
        self._send = send
        self._debts = {channel: _Debt() for channel in Channel}
        #: Channels whose sender waits, and nothing was consumed since.
        self._wanted: set[Channel] = set()
        self._closed = False

    def consumed(self, channel: Channel, num_bytes: int) -> None:
        """``receive`` returned a message of ``channel`` with so many bytes of tensors."""
        debt = self._debts[channel]
        debt.cost += cost_of(num_bytes)
        debt.messages += 1
        if debt.cost >= self._threshold or channel in self._wanted:
            self._flush(channel)
        elif debt.timer is None and not self._closed:
            loop = asyncio.get_running_loop()
            debt.timer = loop.call_later(timeouts.CREDIT_DELAY_S, self._flush, channel)

    def want(self, sender: int, name: str, fields: Any) -> None:
        """The peer waits for room, by the field ``name``: answer with credit, now or once there is any.

        Raises:
            FrameError: if a part of the field is malformed.
        """
        check = HeaderChecks(sender)
        (value,) = check.array(name, fields, 1)
        channel = check.choice(f"{name}.channel", value, Channel)
        if self._debts[channel].messages:
            self._flush(channel)
        else:
            self._wanted.add(channel)

    def _flush(self, channel: Channel) -> None:
        self._wanted.discard(channel)
        debt, self._debts[channel] = self._debts[channel], _Debt()
        if debt.timer is not None:
            debt.timer.cancel()
        if not self._closed:
            self._send(channel.value, debt.cost, debt.messages)

    def close(self) -> None:
        """Send nothing more. May be called twice."""
        self._closed = True
        for debt in self._debts.values():
            if debt.timer is not None:
                debt.timer.cancel()


def apply_credit(sealed: Sealed, window_of: Callable[[Channel], Window]) -> None:
    """Release the bytes of a credit frame; a FrameError if a field is malformed."""
    grant(sealed.sender, "credit", sealed.fields, window_of)


def grant(sender: int, name: str, fields: Any, window_of: Callable[[Channel], Window]) -> None:
    """Release the bytes of a credit that came in the field ``name``; a FrameError if a part of it is malformed."""
    check = HeaderChecks(sender)
    channel, cost, messages = check.array(name, fields, 3)
    window = window_of(check.choice(f"{name}.channel", channel, Channel))
    window.release(check.integer(f"{name}.bytes", cost), check.integer(f"{name}.messages", messages))

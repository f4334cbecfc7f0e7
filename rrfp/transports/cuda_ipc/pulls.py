"""From announcements to whole messages, for one peer: tensors are pulled when they are announced, whatever `receive`
does, and messages are passed on in the order of their channel.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from rrfp.errors import FrameError, RrfpError, TransportClosedError, TransportError
from rrfp.transports.base import Channel, Message
from rrfp.transports.carried.announcements import EDGE
from rrfp.transports.carried.arrivals import Arrivals, Arriving
from rrfp.transports.cuda_ipc.announcements import SHARED, Shared, shared
from rrfp.transports.device_sharing import SharesDeviceMemory


class Pulls(Arrivals):
    """See the module's docstring. Used on one loop only.

    Args:
        copies: pulls.
        max_message_bytes: larger announced messages are refused.
        deliver: takes whole messages, and the bytes of their tensors.
        on_pulled: takes the number of an announcement whose memory is not read any more.
        on_failed: takes the error of memory that cannot be opened.
        on_broken: takes the error of a device that failed.
    """

    def __init__(
        self,
        copies: SharesDeviceMemory,
        max_message_bytes: int,
        deliver: Callable[[Message, int], None],
        on_pulled: Callable[[int], None],
        on_failed: Callable[[Exception], None],
        on_broken: Callable[[RrfpError], None],
    ) -> None:
        super().__init__(None, None, max_message_bytes, deliver, on_failed)
        self._copies = copies
        self._on_pulled = on_pulled
        self._on_broken = on_broken
        self._pulling: set[asyncio.Task[None]] = set()

    def add(self, message: Message) -> None:
        """See `Arrivals.add`."""
        if EDGE not in message.body and SHARED not in message.body:
            self._queue(message.channel, Arriving(message, message.num_bytes))
            return
        if message.channel is Channel.CONTROL:
            raise FrameError(message.sender, SHARED, "announces tensors of a control message, which brings them itself")
        announced = shared(message, self._max_message_bytes, self._copies.check_shared)
        arriving = Arriving(None, announced.whole.num_bytes)
        self._queues[message.channel].append(arriving)
        self.posted += 1
        task = asyncio.create_task(self._pull(announced, arriving))
        self._pulling.add(task)
        task.add_done_callback(self._pulling.discard)

    async def _pull(self, announced: Shared, arriving: Arriving) -> None:
        whole, channel = announced.whole, announced.whole.message.channel
        try:
            tensors = await self._copies.pull(announced.fields, announced.specs)
        except TransportClosedError:
            self.posted -= 1
        except OSError as error:
            self._on_ended(announced)
            self._on_failed(error)
        except Exception as error:
            self._on_ended(announced)
            self._queues[channel].remove(arriving)
            self._flush(channel)
            self._on_broken(_failure(error, whole.message))
        else:
            self._on_ended(announced)
            arriving.message = whole.assemble(tensors)
            self._flush(channel)

    def _on_ended(self, announced: Shared) -> None:
        """The sender's memory is not read any more."""
        self.posted -= 1
        self._on_pulled(announced.number)

    def end(self) -> None:
        """Give up all pulls, whose copies end by themselves. May be called twice."""
        for task in self._pulling:
            task.cancel()


def _failure(error: Exception, message: Message) -> TransportError:
    failure = TransportError(
        f"{type(error).__name__}: {error}, while tensors of {message.kind} {message.task} from rank {message.sender} "
        "were received"
    )
    failure.__cause__ = error
    return failure

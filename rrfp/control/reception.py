"""Every received message goes to whoever it is for. Knows neither how messages travel nor what they lead to."""

from __future__ import annotations

from collections.abc import Callable

from rrfp.control.courier import Courier
from rrfp.control.exchange import TreeExchange
from rrfp.control.failure import Failure
from rrfp.control.farewell import origin_of
from rrfp.control.progress import Progress
from rrfp.control.watchdog import Watchdog
from rrfp.errors import ProtocolError
from rrfp.transports.base import Message, MessageKind


class Reception:
    """Sorts the messages of one rank.

    Args:
        stage: this stage.
        courier: files tensors and credits, and knows which peers left.
        exchange: takes what ranks give to each other.
        watchdog: takes the polls of idle ranks.
        progress: the step that runs, if one does.
        abort: told a failure elsewhere.
    """

    def __init__(
        self,
        stage: int,
        courier: Courier,
        exchange: TreeExchange,
        watchdog: Watchdog,
        progress: Progress,
        abort: Callable[[Failure], None],
    ) -> None:
        self._stage = stage
        self._courier = courier
        self._exchange = exchange
        self._watchdog = watchdog
        self._progress = progress
        self._abort = abort

    def take(self, message: Message) -> None:
        """A message arrived.

        Raises:
            ProtocolError: if it makes no sense.
            PeerLostError: if it says that a peer left before the step that runs here.
        """
        match message.kind:
            case MessageKind.OUTPUT | MessageKind.CONSUMED:
                self._courier.file(message)
            case MessageKind.REPORT | MessageKind.RESULT:
                self._exchange.take(message)
            case MessageKind.PROBE:
                self._watchdog.take(message)
            case MessageKind.ABORT:
                self._abort(Failure(origin_of(message.body)))
            case MessageKind.CLOSED:
                self._courier.departures.note(message)
                if self._progress.step is not None:
                    self._courier.departures.check(self._progress.step.number)
            case kind:
                raise ProtocolError(f"stage {message.sender} sent a {kind} message that stage {self._stage} cannot use")

"""Every received message goes to whoever it is for. Knows neither how messages travel nor what they lead to."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from rrfp.arbiter.group_messages import GroupMessage, GroupMessageKind
from rrfp.core.topology import Topology
from rrfp.errors import ProtocolError
from rrfp.runtime.all_gather import TreeExchange
from rrfp.runtime.departures import origin_of
from rrfp.runtime.failure import Failure
from rrfp.runtime.messenger import Courier
from rrfp.runtime.stall.progress import Progress
from rrfp.runtime.stall.watchdog import Watchdog
from rrfp.transports.base import Message, MessageKind

_GROUP_KINDS = frozenset(MessageKind(kind.value) for kind in GroupMessageKind)


class Reception:
    """Sorts the messages of one rank.

    Args:
        place: where this rank is.
        courier: files tensors and credits, and knows which peers left.
        exchange: takes what ranks give to each other.
        watchdog: takes the polls of idle ranks.
        progress: the step that runs, if one does.
        hear: told what a member of this rank's group says; None where it is alone.
        abort: told a failure elsewhere.
        tie: takes gradients of tied parameters.
    """

    def __init__(
        self,
        place: Topology,
        courier: Courier,
        exchange: TreeExchange,
        watchdog: Watchdog,
        progress: Progress,
        hear: Callable[[int, GroupMessage], None] | None,
        abort: Callable[[Failure], None],
        tie: Callable[[Message], None],
    ) -> None:
        self._place = place
        self._courier = courier
        self._exchange = exchange
        self._watchdog = watchdog
        self._progress = progress
        self._hear = hear
        self._abort = abort
        self._tie = tie

    def take(self, message: Message) -> None:
        """A message arrived.

        Raises:
            ProtocolError: if it makes no sense; where a stage has several ranks, the text names the sender.
            PeerLostError: if it says that a peer left before the step, or the gathering, that runs here.
        """
        try:
            self._sort(message)
        except ProtocolError as error:
            self._name(message.sender, error)

    @contextmanager
    def opening(self) -> Iterator[None]:
        """In here a step opens, and messages that came before it are taken in.

        Raises:
            ProtocolError: as `take`.
        """
        try:
            yield
        except ProtocolError as error:
            if error.told_by is None:
                raise
            kind, index = error.told_by
            self._name(self._place.rank_of(index) if kind == "stage" else self._place.group[index], error)

    def _name(self, sender: int, error: ProtocolError) -> NoReturn:
        if self._place.world == self._place.stages:
            raise error
        raise ProtocolError(f"{error} (told by {self._place.name_of(sender)})") from error

    def _sort(self, message: Message) -> None:
        match message.kind:
            case MessageKind.OUTPUT | MessageKind.CONSUMED:
                self._courier.file(message)
            case MessageKind.TIE:
                self._tie(message)
            case MessageKind.REPORT | MessageKind.RESULT:
                self._exchange.take(message)
            case MessageKind.PROBE:
                self._watchdog.take(message)
            case kind if kind in _GROUP_KINDS and self._hear is not None:
                self._hear(*self._courier.heard(message))
            case MessageKind.ABORT:
                self._abort(Failure(origin_of(message.body)))
            case MessageKind.CLOSED:
                self._courier.departures.note(message)
                if self._progress.step is not None:
                    self._courier.departures.check(self._progress.step.number)
                if self._progress.is_gathering:
                    self._courier.departures.check_gathering(self._progress.gatherings_ended)
            case kind:
                raise ProtocolError(
                    f"rank {message.sender} sent a {kind} message that rank {self._place.rank} cannot use"
                )

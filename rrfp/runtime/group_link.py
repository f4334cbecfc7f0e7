"""How the messages of a group travel: as control messages between its ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rrfp.arbiter.group_messages import GroupMessage, GroupMessageKind
from rrfp.errors import ProtocolError
from rrfp.transports.base import Channel, Message, MessageKind

_SENT_AS = {kind: MessageKind(kind.value) for kind in GroupMessageKind}
_RECEIVED_AS = {sent_as: kind for kind, sent_as in _SENT_AS.items()}

#: The kinds of messages inside a group.
GROUP_KINDS = frozenset(_RECEIVED_AS)


class GroupLink:
    """The way from one rank to the other members of its ``group``, which has their ranks by member."""

    def __init__(self, group: Sequence[int], post: Callable[[int, Message], None]) -> None:
        self._group = group
        self._post = post

    def send(self, member: int, message: GroupMessage) -> None:
        """Queue ``message`` for ``member``."""
        body = {"numbers": message.numbers}
        sent = Message(Channel.CONTROL, _SENT_AS[message.kind], message.step, message.task, body=body)
        self._post(self._group[member], sent)

    def read(self, message: Message) -> tuple[int, GroupMessage]:
        """The member that sent ``message``, and its contents; a ProtocolError if it cannot be read."""
        sender, kind = message.sender, message.kind
        numbers: Any = message.body.get("numbers")
        if sender not in self._group:
            raise ProtocolError(f"rank {sender} sent {kind.value!r}, but is not of this rank's group")
        can_be_read = isinstance(numbers, list | tuple) and all(type(number) is int for number in numbers)
        if message.step is None or not can_be_read:
            raise ProtocolError(f"rank {sender} sent {kind.value!r} with what cannot be read")
        contents = GroupMessage(_RECEIVED_AS[kind], message.step, message.task, tuple(numbers))
        return self._group.index(sender), contents

"""Messages as bytes: a msgpack header of at most 64 KiB in its own frame, then the raw bytes of each tensor.

Pure: no socket, no clock. Every field of a header is checked before memory is allocated for it, and nothing is ever
unpickled. A header is one msgpack array. It begins with the *seal*, [version, run id, restart, sender, kind],
which other frames of a transport share (`Codec.seal`, `Codec.open`); a message continues with [channel, sequence, step,
task, tensors, body]: step is [number, mode, M] or nil, task [kind, microbatch, virtual stage] or nil, tensors a list of
[dtype, shape, requires_grad] or nil, body a map.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgpack

from rrfp.errors import ConfigError, FrameError
from rrfp.plain import shown
from rrfp.transports.base import Message, Plain, TransportContext
from rrfp.transports.wire.announcements import Announcement, KnownHeaders
from rrfp.transports.wire.header_checks import MAX_ITEMS, HeaderChecks
from rrfp.transports.wire.tensor_bytes import DTYPE_NAMES, as_bytes

#: Changes whenever the meaning of a frame does.
VERSION = 2

MAX_HEADER_BYTES = 64 << 10
"""The most that a header may have, in bytes. A reader refuses more before it reads or allocates anything."""

_SEAL_LENGTH = 5
_HEADER_LENGTH = 11


class Sealed(NamedTuple):
    """A header whose seal was checked: sender, kind, and the fields after the seal."""

    sender: int
    kind: str
    fields: list[Any]


class Codec:
    """Writes and reads the frames of one rank.

    Args:
        context: run id, restart, this rank, its peers and ``max_message_bytes``.
    """

    def __init__(self, context: TransportContext) -> None:
        self._run_id = context.run_id
        self._restart = context.restart
        self._rank = context.rank
        self._peers = frozenset(context.peers)
        self._max_bytes = context.max_message_bytes
        self._packer = msgpack.Packer()
        self._known = KnownHeaders(context.max_message_bytes)
        self._checks = {peer: HeaderChecks(peer) for peer in context.peers}

    def seal(self, kind: str, *fields: Any) -> bytes:
        """The header of a frame.

        Args:
            kind: its meaning; the kinds of a transport's own frames must differ from those of `MessageKind`.
            fields: further plain data, which `open` returns.

        Raises:
            ConfigError: if it is too large, or a field is not plain data.
        """
        return _pack([VERSION, self._run_id, self._restart, self._rank, kind, *fields], self._packer)

    def open(self, header: bytes | memoryview, peer: int | None = None) -> Sealed:
        """Check the seal of a header.

        Args:
            header: at most `MAX_HEADER_BYTES`.
            peer: the rank to which the connection belongs, where that is certain: it must be the sender, and errors
                name it. Without it they name no rank, since the sender is only claimed.

        Returns:
            Sender, kind and the fields after the seal, which are not checked.

        Raises:
            FrameError: for malformed bytes, another version or sender, or another run or restart. The latter two name
                no rank: a frame of another run is no fault of a rank of this one.
        """
        try:
            return self._open(header, peer)
        except FrameError:
            raise
        except Exception as error:  # whatever the bytes are, they must not end a rank
            raise _unreadable(peer, error) from error

    def _open(self, header: bytes | memoryview, peer: int | None) -> Sealed:
        fields = _unpack(header, peer)
        if type(fields) is not list or len(fields) < _SEAL_LENGTH:
            raise FrameError(peer, "header", f"must be an array of at least {_SEAL_LENGTH} fields")
        version, run_id, restart, sender, kind = fields[:_SEAL_LENGTH]
        if type(version) is not int or version != VERSION:
            raise FrameError(peer, "version", f"is {shown(version)}, must be {VERSION}")
        if run_id != self._run_id:
            raise FrameError(None, "run_id", f"is {shown(run_id)}, must be {self._run_id!r}")
        if type(restart) is not int or restart != self._restart:
            raise FrameError(None, "restart", f"is {shown(restart)}, must be {self._restart}")
        if type(sender) is not int or sender not in self._peers:
            raise FrameError(peer, "sender", f"is {shown(sender)}, must be one of: {sorted(self._peers)}")
        if peer is not None and sender != peer:
            raise FrameError(peer, "sender", f"is {sender}, but the connection is not that rank's")
        if type(kind) is not str:
            raise FrameError(peer, "kind", f"is {shown(kind)}, must be a string")
        return Sealed(sender, kind, fields[_SEAL_LENGTH:])

    def check_size(self, num_bytes: int) -> None:
        """Refuse a message that the receiver would refuse for its size.

        Args:
            num_bytes: of its tensors.

        Raises:
            ConfigError: if it has more than ``max_message_bytes``.
        """
        if num_bytes > self._max_bytes:
            raise ConfigError(f"message has {num_bytes} bytes, max_message_bytes is {self._max_bytes}")

    def encode(self, message: Message, sequence: int = 0) -> tuple[bytes, list[memoryview]]:
        """The header and the frames after it; views of the tensors' memory where that is contiguous.

        Args:
            message: of any channel.
            sequence: its number in its channel; ``message.sequence`` does not count.

        Returns:
            The header, and the bytes of each tensor that is not None.

        Raises:
            ConfigError: for an unsupported tensor or body.
        """
        if len(message.tensors) > MAX_ITEMS:
            raise ConfigError(f"message has {len(message.tensors)} tensors, must have at most {MAX_ITEMS}")
        check_body(message.body)
        frames, tensors = list[memoryview](), list[tuple[str, tuple[int, ...], bool] | None]()
        for tensor in message.tensors:
            if tensor is None:
                tensors.append(None)
            else:
                frames.append(as_bytes(tensor))
                tensors.append((DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), tensor.requires_grad))
        header = self.seal(message.kind, message.channel, sequence, message.step, message.task, tensors, message.body)
        return header, frames

    def announcement(self, sealed: Sealed) -> Announcement:
        """Check every field of a message's header. Fields that equal those of an earlier one were checked then.

        Args:
            sealed: from `open`.

        Returns:
            The checked header; nothing was allocated for its tensors.

        Raises:
            FrameError: names the field that is wrong.
        """
        try:
            return self._announcement(sealed)
        except FrameError:
            raise
        except Exception as error:  # as in `open`
            raise _unreadable(sealed.sender, error) from error

    def _announcement(self, sealed: Sealed) -> Announcement:
        if len(sealed.fields) != _HEADER_LENGTH - _SEAL_LENGTH:
            length = _SEAL_LENGTH + len(sealed.fields)
            raise FrameError(sealed.sender, "header", f"has {length} fields, must have {_HEADER_LENGTH}")
        check = self._checks[sealed.sender]
        channel, sequence, step, task, tensors, body = sealed.fields
        checked = self._known.check(check, sealed.kind, channel, step, tensors)
        return Announcement(
            sealed.sender,
            checked.channel,
            check.integer("sequence", sequence),
            checked.kind,
            checked.step,
            check.task(task),
            check.body(body),
            checked.specs,
            checked.sizes,
            checked.num_bytes,
        )

    def decode(self, header: bytes | memoryview, frames: Sequence[memoryview]) -> Message:
        """A whole message at once.

        Args:
            header: of the message.
            frames: the bytes of each tensor that is not None.

        Raises:
            FrameError: names the field that is wrong.
        """
        return self.announcement(self.open(header)).assemble(frames)


def copy_body(body: Mapping[str, Plain]) -> dict[str, Any]:
    """A message's body as a receiver gets it: a deep copy, tuples become lists.

    Args:
        body: plain data.

    Raises:
        ConfigError: if it is too large or not plain data.
    """
    if not body:
        return {}
    check_body(body)
    copy: dict[str, Any] = _unpack(_pack(body, msgpack.Packer()))
    return copy


def check_body(body: Mapping[str, Plain]) -> None:
    """Refuse a body that a receiver would refuse."""
    try:
        HeaderChecks(None).body(body)
    except FrameError as error:
        raise ConfigError(f"message body cannot be sent: it {error.reason}") from error


def _pack(value: Any, packer: Any) -> bytes:
    try:
        header: bytes = packer.pack(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise ConfigError(f"message body cannot be sent: {error}; it must be plain data") from error
    if len(header) > MAX_HEADER_BYTES:
        raise ConfigError(f"message header has {len(header)} bytes, must have at most {MAX_HEADER_BYTES}")
    return header


def _unreadable(peer: int | None, error: Exception) -> FrameError:
    return FrameError(peer, "header", f"cannot be read: {type(error).__name__}: {error!s:.80}")


def _unpack(header: bytes | memoryview, peer: int | None = None) -> Any:
    """Plain data out of at most 64 KiB, checked before it is allocated."""
    size = len(header)
    if size > MAX_HEADER_BYTES:
        raise FrameError(peer, "header", f"has {size} bytes, must have at most {MAX_HEADER_BYTES}")
    try:
        return msgpack.unpackb(
            header,
            raw=False,
            use_list=True,
            strict_map_key=True,
            max_str_len=size,
            max_bin_len=size,
            max_array_len=min(size, MAX_ITEMS),
            max_map_len=min(size, MAX_ITEMS),
            max_ext_len=0,
        )
    except Exception as error:  # msgpack raises many types, and malformed bytes must not end a rank
        raise FrameError(peer, "header", f"is not msgpack: {type(error).__name__}: {error!s:.80}") from error

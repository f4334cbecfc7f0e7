"""Decoders of what comes over a connection: headers, datagrams, announcements and greetings."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from random import Random
from typing import Any, cast

from fuzz.mutations import MSGPACK, pack
from fuzz.targets import Decode, Target, join, parts, plain

from rrfp.devices.cuda_sharing import CudaSharing
from rrfp.errors import FrameError, PeerLostError, TransportError
from rrfp.lab.device_double import DoubleSharing
from rrfp.model.tasks import Kind, Mode
from rrfp.transports import BufferPool
from rrfp.transports.base import Channel, Message, MessageKind, TransportContext
from rrfp.transports.cuda_ipc.slots import MIN_SLOT_BYTES, SLOTS, SlotChannel, Slots
from rrfp.transports.links.flow import Credits, HomeLoop, Window, grant
from rrfp.transports.rendezvous import LocalRendezvous
from rrfp.transports.shm.endpoint import Connected
from rrfp.transports.shm.link import LINK_KINDS, ShmLink
from rrfp.transports.shm.packets import BUFFER_BYTES, DatagramBody, Packet, PacketSocket
from rrfp.transports.shm.packets import pack as pack_datagram
from rrfp.transports.shm.slots import Slot
from rrfp.transports.shm.state import Copier, TransportState
from rrfp.transports.shm.transport import PendingConnections
from rrfp.transports.tunnel.p2p import BESIDE, CREDIT, ENTRY, FAREWELL, WANT, announced, number_of
from rrfp.transports.wire.codec import VERSION, Codec, Sealed
from rrfp.transports.wire.header_checks import HeaderChecks
from rrfp.transports.wire.tensor_bytes import DTYPES
from rrfp.transports.zmq.pieces import Assembly, cut

RUN_ID = "run"
CAP_BYTES = 1 << 20
CHANNELS, KINDS, NAMES = list(Channel), list(MessageKind), sorted(DTYPES)


def context(**changes: Any) -> TransportContext:
    """Of the rank that reads."""
    fields: dict[str, Any] = {"run_id": RUN_ID, "rendezvous": LocalRendezvous(), "max_message_bytes": CAP_BYTES}
    return TransportContext(1, (0, 2), **(fields | changes))


# Grammar.


def tensor(random: Random) -> tuple[list[Any], bytes]:
    """An announced tensor and its bytes."""
    name = random.choice(NAMES)
    shape = [random.choice((0, 1, 1, 2, 3, 5)) for _ in range(random.randint(0, 3))]
    size = DTYPES[name].itemsize
    for each in shape:
        size *= each
    may_learn = DTYPES[name].is_floating_point or DTYPES[name].is_complex
    return [name, shape, may_learn and random.random() < 0.3], bytes(size)


def message(random: Random, body: dict[str, Any] | None = None, kind: str | None = None) -> dict[str, Any]:
    """A message: its header, and its frames."""
    tensors, frames = list[Any](), list[bytes]()
    for _ in range(random.choice((0, 0, 1, 1, 2, 3))):
        if random.random() < 0.15:
            tensors.append(None)
            continue
        spec, content = tensor(random)
        tensors.append(spec)
        frames.append(content)
    if random.random() < 0.02:  # more than travels with its header
        tensors, frames = [["uint8", [70_000], False]], []
    step = None if random.random() < 0.2 else [random.randint(0, 3), random.choice(list(Mode)), random.randint(1, 4)]
    task = None if random.random() < 0.2 else [random.choice(list(Kind)), random.randint(0, 3), random.randint(0, 3)]
    fields = [
        *(VERSION, RUN_ID, 0, random.choice((0, 0, 0, 2)), random.choice(KINDS) if kind is None else kind),
        *(random.choice(CHANNELS), random.choice((0, 0, 0, 1)), step, task, tensors, {} if body is None else body),
    ]
    return {"header": fields, "frames": frames}


def link_frame(random: Random) -> dict[str, Any]:
    """A frame of a link itself."""
    channel = random.choice(CHANNELS)
    fields = random.choice(([], [channel], [channel, 512, 1], [random.randint(1, 3)]))
    return {"header": [VERSION, RUN_ID, 0, 0, random.choice(LINK_KINDS), *fields], "frames": []}


def any_frame(random: Random) -> dict[str, Any]:
    """A message or a link's frame."""
    if random.random() < 0.3:
        return link_frame(random)
    return message(random, random.choice(({}, {"index": 3}, {"structure": ["t", 0]})))


def in_parts(tree: Any) -> tuple[bytes, list[bytes]]:
    """The header and the frames of a tree, whatever damage made of it."""
    if not isinstance(tree, dict) or "header" not in tree:
        return pack(tree), []
    frames = tree.get("frames")
    return pack(tree["header"]), [each for each in frames if isinstance(each, bytes)] if type(frames) is list else []


def as_case(tree: Any) -> bytes:
    """The header and the frames, each as a part."""
    header, frames = in_parts(tree)
    return join([header, *frames])


def announcing(random: Random) -> dict[str, Any]:
    """A message whose tensors go beside the base transport, or another entry of such links."""
    tree = message(random)
    whole = tree["header"][9]
    specs = [spec if spec is not None and random.random() < 0.7 else None for spec in whole]
    tree["header"][9] = [None if moved is not None else own for own, moved in zip(whole, specs, strict=True)]
    tree["frames"] = [bytes(_bytes_of(own)) for own in tree["header"][9] if own is not None]
    body: dict[str, Any] = {BESIDE: [random.randint(0, 2), specs, random.choice((None, 0, 3, 4))]}
    if random.random() < 0.3:
        channel = random.choice(CHANNELS)
        others: list[dict[str, Any]] = [
            *({CREDIT: [channel, 512, 1]}, {WANT: [channel]}, {FAREWELL: True}),
            *({ENTRY: [random.randint(0, 2), 1]}, {ENTRY: 2}, {ENTRY: _fields(random)}),
        ]
        body = random.choice(others)
    tree["header"][10] = body
    return tree


def _bytes_of(spec: list[Any]) -> int:
    size = DTYPES[spec[0]].itemsize
    for each in spec[1]:
        size *= each
    return size


def _fields(random: Random) -> dict[str, Any]:
    """Of shared memory: of the double's, or of CUDA's."""
    if random.random() < 0.5:
        return {"process": 1, "descriptor": 3, "inode": 5, "size": 4096}
    return {"handle": bytes(64), "size": 4096}


# Decoders.


def _decoding_headers() -> Decode:
    codec, pool = Codec(context()), BufferPool()

    def decode(case: bytes) -> object:
        header, *frames = parts(case)
        sealed = codec.open(header)
        if sealed.kind in LINK_KINDS:
            _on_link_frame(sealed)
            return sealed
        announcement = codec.announcement(sealed)
        views = [memoryview(bytearray(frame)) for frame in frames]
        assembly = Assembly(announcement, views or [memoryview(b"")], pool)
        for piece in cut(announcement.sizes) if not assembly.is_complete else ():
            assembly.add(memoryview(bytes(piece.num_bytes)))
        return assembly.message(), announcement.assemble(views, copy=True)

    return decode


def _on_link_frame(sealed: Sealed) -> None:
    check = HeaderChecks(sealed.sender)
    check.choice("channel", sealed.fields[0] if sealed.fields else None, Channel)


class _Owner:
    """Takes what an inlet reports, as a transport does; keeps the error."""

    def __init__(self) -> None:
        self.errors = list[TransportError]()
        self.messages = list[Message]()

    def on_message(self, message: Message, num_bytes: int) -> None:
        self.messages.append(message)

    def on_bad_frame(self, error: TransportError) -> None:
        self.errors.append(error)

    def on_error(self, error: PeerLostError) -> None:
        raise AssertionError(f"a frame ended the connection: {error}")


def _shared(stack: ExitStack) -> TransportState:
    home, owner = HomeLoop(), cast(Any, _Owner())
    copier = Copier(home, "fuzz-copies")
    stack.callback(copier.close)
    return TransportState(
        owner, home, Codec(context()), copier, 1 << 20, bytearray(BUFFER_BYTES), lambda _: None, lambda: None
    )


def _socket_pair(stack: ExitStack) -> tuple[socket.socket, socket.socket]:
    near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    stack.callback(near.close)
    stack.callback(far.close)
    far.setblocking(False)
    return near, far


def _drain(far: socket.socket) -> None:
    try:
        while far.recv(1):
            pass
    except BlockingIOError:
        return


@contextmanager
def _datagrams() -> Iterator[Decode]:
    """Every case is the first datagram of a connection, some with a descriptor, some with less than was sent."""
    with ExitStack() as stack:
        shared, slots = _shared(stack), [Slot.make(1, 4096)]
        stack.callback(slots[0].close_descriptor)

        def decode(case: bytes) -> object:
            with ExitStack() as ends:
                case_shared = replace(shared, owner=cast(Any, owner := _Owner()))
                link, fars = ShmLink(0, case_shared), []
                for channel in Channel:
                    near, far = _socket_pair(ends)
                    link.attach(channel, PacketSocket(near, shared.home), os.getpid(), accepted=True)
                    fars.append(far)
                ends.callback(link.end, PeerLostError(0, "the case is over"))
                how, datagram = case[:1], case[1:][:BUFFER_BYTES]
                shared.buffer[: len(datagram)] = datagram
                assert slots[0].descriptor is not None
                descriptor = os.dup(slots[0].descriptor) if how == b"d" else None
                packet = Packet(len(datagram), descriptor, how == b"c", how == b"l")
                link._connections[Channel.FORWARD].inlet.accept(packet, memoryview(shared.buffer))
                assert descriptor is None or not _is_open(descriptor), "the descriptor was not closed"
                for error in owner.errors:
                    raise error
                return owner.messages

        yield decode


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def _a_datagram(random: Random) -> Any:
    tree = any_frame(random)
    if tree["header"][4] not in LINK_KINDS and random.random() < 0.7:
        tree["header"][3], tree["header"][5], tree["header"][6] = 0, "forward", 0
    return {**tree, "how": random.choice(("n", "n", "n", "d", "d", "c", "l")), "slot": random.choice((0, 0, 1, 2))}


def _as_datagram(tree: Any) -> bytes:
    header, frames = in_parts(tree)
    how = str(tree.get("how"))[:1].encode() if isinstance(tree, dict) else b"n"
    slot = tree.get("slot") if isinstance(tree, dict) else 0
    ident = slot % 2**64 if type(slot) is int else 0
    total = sum(map(len, frames))
    payload = DatagramBody(len(frames), total, ident, 4096 if ident else 0)
    views = [] if ident else [memoryview(frame) for frame in frames]
    return (how or b"n") + b"".join(pack_datagram(header, payload, views))


@contextmanager
def _greetings() -> Iterator[Decode]:
    """Every case is what a stranger sends first."""
    with ExitStack() as stack:
        shared, greeted, refused = _shared(stack), list[PacketSocket](), list[str]()
        codec = shared.codec

        def decode(case: bytes) -> object:
            with ExitStack() as ends:
                near, far = _socket_pair(ends)
                strangers = PendingConnections(
                    codec, shared.home, shared.buffer, lambda *args: greeted.append(args[2]), refused.append
                )
                strangers.add(Connected(near, os.getpid()))
                (packets,) = strangers._waiting
                ends.callback(packets.close)
                far.send(case[:BUFFER_BYTES] or b"x")
                strangers._read(packets)
                assert len(greeted) + len(refused) == 1
                greeted.clear()
                refused.clear()
                return None

        yield decode


def _a_greeting(random: Random) -> Any:
    return {"header": [VERSION, RUN_ID, 0, 0, "hello", random.choice(CHANNELS)], "frames": []}


def _as_greeting(tree: Any) -> bytes:
    return _as_datagram(tree)[1:]


class _Entries:
    """In place of a link: takes what its channel sends."""

    peer = 0

    def post(self, body: object) -> None:
        """Nothing."""


@contextmanager
def _announcements() -> Iterator[Decode]:
    codec, home = Codec(context()), HomeLoop()
    windows = {channel: Window(1 << 20, home) for channel in Channel}
    credits = Credits(1 << 20, lambda *_: None)
    sharing, link = DoubleSharing(), cast(Any, _Entries())
    memory = sharing.allocate(SLOTS * MIN_SLOT_BYTES)

    def decode(case: bytes) -> object:
        header, *frames = parts(case)
        message = codec.decode(header, [memoryview(bytearray(frame)) for frame in frames])
        body, slots = message.body, SlotChannel(Slots(*(memory, MIN_SLOT_BYTES) * 2), cast(Any, None), link)
        if CREDIT in body:
            grant(message.sender, CREDIT, body[CREDIT], windows.__getitem__)
        if WANT in body:
            credits.want(message.sender, WANT, body[WANT])
        if isinstance(entry := body.get(ENTRY), dict):
            (CudaSharing(0) if "handle" in entry else sharing).check(entry)
        elif ENTRY in body:
            slots.on_entry(entry)
        if BESIDE not in body:
            return message
        number, fields = number_of(message)
        slots.refuse(number, fields)
        return announced(message, CAP_BYTES)

    yield decode
    credits.close()
    memory.close()


TARGETS: tuple[Target, ...] = (
    Target("headers", (FrameError,), any_frame, as_case, MSGPACK, plain(_decoding_headers())),
    Target("datagrams", (TransportError,), _a_datagram, _as_datagram, MSGPACK, _datagrams),
    Target("greetings", (), _a_greeting, _as_greeting, MSGPACK, _greetings),
    Target("announcements", (FrameError,), announcing, as_case, MSGPACK, _announcements),
)

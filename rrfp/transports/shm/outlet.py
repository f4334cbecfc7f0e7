"""The sending side of one channel to one peer: tensors go into the datagram or into a slot, and are copied once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial

from rrfp.errors import PeerLostError, RrfpError, TransportError
from rrfp.transports.base import Message
from rrfp.transports.links.flow import Window, cost_of
from rrfp.transports.shm.datagrams import INLINE_BYTES, DatagramBody, pack
from rrfp.transports.shm.inlet import DROP
from rrfp.transports.shm.packets import PacketSocket
from rrfp.transports.shm.shared import TransportState
from rrfp.transports.shm.slot_pool import SlotLoan, SlotPool, is_same
from rrfp.transports.shm.slots import Slot, padded, with_limit
from rrfp.transports.wire.tensor_bytes import copy_bytes

#: Larger messages are copied in the helper thread. Up to here a copy keeps the loop busy for less than half a
#: millisecond, without the GIL; a thread costs as much processor time in switches alone.
COPIED_ON_LOOP_BYTES = 2 << 20


class ShmOutlet:
    """One channel to ``peer`` over ``packets``; ``ask`` is the window's. Used on one loop only."""

    def __init__(self, peer: int, packets: PacketSocket, shared: TransportState, ask: Callable[[], None]) -> None:
        home = shared.home
        self.window = Window(shared.queue_bytes, home, ask)
        self.pool = SlotPool(home.loop.time, self._on_dropped, shared.register, shared.make_room)
        self._peer = peer
        self._packets = packets
        self._codec = shared.codec
        self._copier = shared.copier
        self._turn = asyncio.Lock()
        self._sequence = 0
        self._error: RrfpError | None = None
        self._loan: SlotLoan | None = None

    async def send(self, message: Message, num_bytes: int) -> None:
        """Send a whole message, whose tensors have ``num_bytes``. Cancelled, it has sent nothing.

        Raises the error passed to `fail`, a ConfigError for a message that cannot be sent, and a TransportError if
        there is no shared memory for it.
        """
        cost = cost_of(num_bytes)
        self._codec.check_size(num_bytes)
        async with self._turn:
            await self.window.acquire(cost)
            try:
                header, frames = self._codec.encode(message, self._sequence)
                if num_bytes <= INLINE_BYTES:
                    await self._send(pack(header, DatagramBody(len(frames), num_bytes), frames))
                else:
                    await self._send_in_slot(header, frames, num_bytes)
            except BaseException:
                self.window.release(cost)
                raise
            self._sequence += 1

    def send_at_once(self, message: Message, num_bytes: int) -> bool:
        """Send a message if nothing has to be waited for; see `SendsAtOnce`."""
        cost = cost_of(num_bytes)
        if self._turn.locked() or num_bytes > COPIED_ON_LOOP_BYTES:
            return False
        self._codec.check_size(num_bytes)
        if not self.window.try_acquire(cost):
            return False
        sent = False
        try:
            sent = self._push(message, num_bytes)
        except OSError:
            return False  # the peer is gone, or there is no memory: `send` says so
        finally:
            if not sent:
                self.window.release(cost)
        self._sequence += 1
        return True

    def _push(self, message: Message, num_bytes: int) -> bool:
        header, frames = self._codec.encode(message, self._sequence)
        if num_bytes <= INLINE_BYTES:
            return self._packets.push(pack(header, DatagramBody(len(frames), num_bytes), frames))
        slot = self._slot_for(frames)
        sent = False
        try:
            _fill(slot, _copies_into(slot, frames))
            payload = DatagramBody(len(frames), num_bytes, slot.ident, slot.num_bytes)
            sent = self._packets.push(pack(header, payload), slot.descriptor)
        finally:
            if not sent:
                self._put_back(slot)
        slot.close_descriptor()
        return sent

    async def _send_in_slot(self, header: bytes, frames: list[memoryview], num_bytes: int) -> None:
        slot = self._slot_for(frames)
        copies = _copies_into(slot, frames)
        is_short = sum(frame.nbytes for _, frame in copies) <= COPIED_ON_LOOP_BYTES
        filled = self._copier.run(partial(_fill, slot, copies), now=is_short)
        try:
            await asyncio.shield(filled)
            payload = DatagramBody(len(frames), num_bytes, slot.ident, slot.num_bytes)
            await self._send(pack(header, payload), slot.descriptor)
        except BaseException as error:
            # A slot in the middle of a copy must not be lent to another message.
            filled.add_done_callback(partial(self._on_unsent, slot))
            if isinstance(error, OSError):
                raise self._no_memory(slot.num_bytes, error) from error
            raise
        slot.close_descriptor()

    def lend(self, sizes: Sequence[int]) -> SlotLoan | None:
        """A slot for the next message, whose tensors have these sizes; None if it would have no slot."""
        if sum(sizes) <= INLINE_BYTES:
            return None
        self._loan = SlotLoan(self._acquire(sum(map(padded, sizes))), sizes, self.pool)
        return self._loan

    def _slot_for(self, frames: Sequence[memoryview]) -> Slot:
        if self._loan is not None and self._loan.accept(frames):
            slot, self._loan = self._loan.slot, None
            return slot
        return self._acquire(sum(padded(frame.nbytes) for frame in frames))

    def _acquire(self, num_bytes: int) -> Slot:
        try:
            return self.pool.acquire(num_bytes)
        except OSError as error:
            raise self._no_memory(num_bytes, error) from error

    def _on_unsent(self, slot: Slot, filled: asyncio.Future[None]) -> None:
        """The copy into ``slot`` has ended, which the receiver did not get."""
        if not filled.cancelled():
            filled.exception()  # else the loop reports it as never retrieved
        self._put_back(slot)

    def _put_back(self, slot: Slot) -> None:
        """The receiver did not get ``slot``, and nothing is copied into it."""
        if slot.descriptor is None:
            slot.free()
        else:
            self.pool.forget(slot)

    def _on_dropped(self, ident: int) -> None:
        self._packets.post(pack(self._codec.seal(DROP, ident)))

    async def _send(self, parts: Sequence[bytes | memoryview], descriptor: int | None = None) -> None:
        try:
            await self._packets.send(parts, descriptor)
        except OSError:  # this end is closed, for the reason passed to `fail`, or the peer's is
            error = self._error or PeerLostError(self._peer, "its connection ended")
            self.window.fail(error)
            raise type(error)(*error.args) from None

    def _no_memory(self, num_bytes: int, error: OSError) -> TransportError:
        return TransportError(
            f"no {num_bytes} bytes of shared memory for a message to rank {self._peer}: {with_limit(error)}"
        )

    async def post_in_turn(self, header: bytes) -> None:
        """Send a frame of the link itself behind all accepted messages, or raise the error passed to `fail`."""
        async with self._turn:
            await self._send(pack(header))

    def fail(self, error: RrfpError) -> None:
        """Free everything at once; waiting and later sends raise ``error``, the first one passed."""
        self.window.fail(error)
        self._error = self._error or error
        self.pool.clear()


def _copies_into(slot: Slot, frames: Sequence[memoryview]) -> list[tuple[memoryview, memoryview]]:
    """Targets in ``slot`` and sources, but for frames that lie there already."""
    targets = slot.frames([frame.nbytes for frame in frames])
    return [pair for pair in zip(targets, frames, strict=True) if not is_same(*pair)]


def _fill(slot: Slot, copies: Sequence[tuple[memoryview, memoryview]]) -> None:
    if slot.descriptor is not None:
        slot.reserve()
    for target, frame in copies:
        copy_bytes(target, frame)

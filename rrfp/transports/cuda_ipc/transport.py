"""For ranks on devices: slots of device memory with the peers of this host where a trial works, staging with others.

Everything else goes over shm or zmq, as `auto` chooses. A virtual machine may refuse to share a device's memory, hence
the trial. Each of two ranks makes memory for its slots, writes random bytes into the first one, and publishes these and
the memory's fields. It opens the other's memory, reads it, and publishes why that failed, if it did. The slots are used
only if both ways work, which both ends then know.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import msgpack
import torch

from rrfp import timeouts
from rrfp.devices.base import ByteRange, SharedMemory
from rrfp.devices.copies import SharesDeviceMemory
from rrfp.errors import FrameError, TransportClosedError
from rrfp.plain import whole
from rrfp.transports.auto import HostChoice, log_choice
from rrfp.transports.base import Transport, TransportContext
from rrfp.transports.cuda_ipc.slots import MIN_SLOT_BYTES, SLOTS, SlotChannel, Slots, room_of_slots
from rrfp.transports.links.flow import HomeLoop
from rrfp.transports.rendezvous import by_peer, lookup_peer, publish_in_time
from rrfp.transports.shm.transport import ShmTransport
from rrfp.transports.shm.trial import Host, this_host
from rrfp.transports.tunnel.link import TunnelLink
from rrfp.transports.tunnel.transport import StagedLink, TunnelTransport
from rrfp.transports.wire.header_checks import TensorSpec
from rrfp.transports.wire.tensor_bytes import as_bytes

#: Bytes that are tried, which fit into any slot.
TRIED_BYTES = 4096

_SPEC, _PART = TensorSpec(torch.uint8, (TRIED_BYTES,), False), ByteRange(0, 0, TRIED_BYTES, 0)


class _Trial:
    def __init__(self, context: TransportContext, copies: SharesDeviceMemory, peer: int, deadline_s: float) -> None:
        self._context = context
        self._copies = copies
        self._peer = peer
        self._deadline_s = deadline_s
        self._room = room_of_slots(context.queue_bytes)
        #: Of the peer, once it is open, and the room of its slots.
        self._other: SharedMemory | None = None
        self._other_room = 0

    async def run(self) -> Slots | str:
        rank, peer = self._context.rank, self._peer
        own, offer = await self._offer()
        if failure := await self._try(await self._exchange("memory", offer)):
            failure = f"rank {rank} cannot read memory of rank {peer}: {failure}"
        other = self._other
        answer = await self._exchange("answer", _packed(failure, other is not None))
        their_failure, is_open = self._read_answer(answer)
        if own is not None and other is not None and not (failure or their_failure):
            return Slots(own, self._room, other, self._other_room)
        if own is not None:
            with suppress(Exception):  # a device may be stuck, or raise anything
                async with asyncio.timeout(timeouts.TRIAL_S):
                    await self._copies.close_shared(own, is_open_elsewhere=is_open, peer=peer)
        return next(filter(None, (failure, their_failure) if rank < peer else (their_failure, failure)))

    async def _exchange(self, part: str, value: bytes) -> bytes:
        """Publish a value for the peer, and wait for the peer's."""
        context, rank, peer = self._context, self._context.rank, self._peer
        key = f"cuda_ipc/{context.run_id}/{context.restart}/{part}"
        await publish_in_time(context, f"{key}/{rank}-{peer}", value)
        return await lookup_peer(context, peer, f"{key}/{peer}-{rank}", self._deadline_s)

    async def _offer(self) -> tuple[SharedMemory | None, bytes]:
        """The memory, and what to publish: why there is none, or its fields, the room of a slot and its first bytes."""
        first = secrets.token_bytes(TRIED_BYTES)
        try:
            content = torch.frombuffer(bytearray(first), dtype=torch.uint8)
            on_device = await self._copies.to_device([content], peer=self._peer)
            memory = await self._copies.share(SLOTS * self._room, peer=self._peer)
            await self._copies.write(memory, on_device, [_PART], peer=self._peer)
        except TransportClosedError:
            raise
        except Exception as error:  # a device may raise anything
            return None, _packed(f"rank {self._context.rank} cannot share memory: {_line(error)}", None, 0, b"")
        return memory, _packed("", memory.fields, self._room, first)

    async def _try(self, published: bytes) -> str:
        """Open and read what the peer offers; says why that failed, if it did."""
        try:
            obstacle, fields, room, first = msgpack.unpackb(published)
            if obstacle:
                return str(obstacle)
            if type(fields) is not dict:
                raise ValueError("its fields must be a map")
            self._other_room = whole("slot_bytes", room, MIN_SLOT_BYTES, self._copies.check_shared(fields))
        except FrameError as error:
            return f"what it published is malformed: {error.field} {error.reason}"
        except Exception as error:  # msgpack raises many types
            return f"what it published is malformed: {_line(error)}"
        try:
            async with asyncio.timeout(timeouts.TRIAL_S):
                self._other = await self._copies.open_shared(fields, peer=self._peer)
                read = await self._copies.read(self._other, [_SPEC], [_PART], peer=self._peer)
                (content,) = await self._copies.to_host(read, peer=self._peer)
        except TransportClosedError:
            raise
        except TimeoutError:
            return f"it did not end within {timeouts.TRIAL_S:g} s"
        except Exception as error:
            return _line(error)
        return "" if bytes(as_bytes(content)) == first else "it brings other bytes"

    def _read_answer(self, answer: bytes) -> tuple[str, bool]:
        """Why the peer cannot read this rank's memory, and whether it is open there."""
        try:
            failure, is_open = msgpack.unpackb(answer)
            return str(failure), bool(is_open)
        except Exception as error:  # msgpack raises many types
            return f"what rank {self._peer}, or another program, wrote to the store is malformed: {_line(error)}", True


def _packed(*fields: Any) -> bytes:
    return bytes(msgpack.packb(fields))


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


class CudaIpcTransport(TunnelTransport):
    """Device tensors through slots or staged; a peer may compute on the CPU."""

    def _host(self) -> Host:
        return this_host(self.context.max_message_bytes)

    async def _connect(self, home: HomeLoop, deadline_s: float) -> None:
        context, copies = self.context, self.context.copies
        sharing = copies if isinstance(copies, SharesDeviceMemory) else None
        choice = HostChoice(context, replace(self._host(), sharing="" if sharing is None else sharing.sharing))
        await choice.look(home, deadline_s)
        self._check_open()
        tried: dict[int, Slots | str] = {}
        if sharing is not None:
            like = [peer for peer in context.tensor_peers if choice.hosts[peer].sharing == sharing.sharing]
            near = [peer for peer in like if not choice.obstacles[peer]]
            tried = await by_peer(near, lambda peer: _Trial(context, sharing, peer, deadline_s).run())
            self._check_open()
        log_choice(context.rank, {peer: _describe(choice.describe(peer), tried.get(peer)) for peer in context.peers})
        slots = {peer: found for peer, found in tried.items() if isinstance(found, Slots)}
        bases: list[Transport] = []
        if slots:
            # A run of its own: this rank may have another end of shm, with the other peers.
            bases.append(ShmTransport(replace(context, peers=tuple(slots), run_id=f"{context.run_id}/cuda_ipc")))
        others = tuple(peer for peer in context.peers if peer not in slots)
        if others or not slots:
            bases += choice.transports(replace(context, peers=others))
        await self._start_bases(bases)
        self._attach(self._link(peer, base, slots, home) for base in self._bases for peer in base.context.peers)
        for base in self._bases:
            self._read(base, by_turns=not slots.keys() & set(base.context.peers))

    def _link(self, peer: int, base: Transport, slots: dict[int, Slots], home: HomeLoop) -> StagedLink:
        copies, found = self.context.copies, slots.get(peer)
        if found is None:
            return StagedLink(peer, base, self, home)
        assert isinstance(copies, SharesDeviceMemory)
        return TunnelLink(peer, base, self, home, partial(SlotChannel, found, copies))


def _describe(chosen: str, tried: Slots | str | None) -> str:
    """The choice for a peer, and why it has no slots if its device could."""
    if isinstance(tried, Slots):
        return f"cuda_ipc over {chosen}"
    return chosen if tried is None else f"{chosen}, device tensors through host memory ({tried})"

"""Whether two ranks can pull from each other: one tensor each way, at the start. A virtual machine may refuse it.

Each end publishes a tensor's fields and checksum, pulls the other's, and publishes why that failed, if it did. A pair
pulls only if both ways work, which both ends then know.
"""

from __future__ import annotations

import asyncio
import secrets
import zlib
from collections.abc import Collection, Mapping
from typing import Any

import msgpack
import torch
from torch import Tensor

from rrfp import timeouts
from rrfp.devices.copies import SharesDeviceMemory
from rrfp.errors import FrameError, TransportClosedError
from rrfp.transports.base import TransportContext
from rrfp.transports.header_checks import TensorSpec
from rrfp.transports.host_choice import lookup_peer
from rrfp.transports.rendezvous import publish_in_time
from rrfp.transports.tensor_bytes import as_bytes

#: Bytes of the tensor that is tried.
TRIED_BYTES = 1 << 20

_SPEC = TensorSpec(torch.uint8, (TRIED_BYTES,), False)


async def try_pulls(
    context: TransportContext, copies: SharesDeviceMemory, peers: Collection[int], deadline_s: float
) -> dict[int, str]:
    """For each of ``peers``, why the two cannot pull from each other; empty where they can."""
    if not peers:
        return {}
    trial = _Trial(context, copies, deadline_s)
    await trial.prepare()
    tries = [asyncio.create_task(trial.run(peer)) for peer in peers]
    try:
        return dict(zip(peers, await asyncio.gather(*tries), strict=True))
    finally:
        for each in tries:
            each.cancel()  # those that are left behind an error


class _Trial:
    """One rank's part."""

    def __init__(self, context: TransportContext, copies: SharesDeviceMemory, deadline_s: float) -> None:
        self._context = context
        self._copies = copies
        self._deadline_s = deadline_s
        self._tensor: Tensor | None = None
        self._checksum = 0
        self._obstacle = ""

    def _key(self, source: int, target: int, part: str) -> str:
        return f"cuda_ipc/{self._context.run_id}/{self._context.restart}/{source}-{target}/{part}"

    async def prepare(self) -> None:
        """Make the tensor that all peers pull."""
        content = torch.frombuffer(bytearray(secrets.token_bytes(TRIED_BYTES)), dtype=torch.uint8)
        self._checksum = _checksum(content)
        try:
            (self._tensor,) = await self._copies.to_device([content])
        except TransportClosedError:
            raise
        except Exception as error:  # a device may raise anything
            self._obstacle = f"rank {self._context.rank} cannot hold {TRIED_BYTES} bytes: {_line(error)}"

    async def run(self, peer: int) -> str:
        """Both ways."""
        context, rank = self._context, self._context.rank
        offer, kept = await self._offer()
        await publish_in_time(context, self._key(rank, peer, "memory"), offer)
        memory = await lookup_peer(context, peer, self._key(peer, rank, "memory"), self._deadline_s)
        reason = await self._try(memory)
        own = f"rank {rank} cannot pull from rank {peer}: {reason}" if reason else ""
        await publish_in_time(context, self._key(peer, rank, "answer"), own.encode())
        answer = await lookup_peer(context, peer, self._key(rank, peer, "answer"), self._deadline_s)
        other = answer.decode(errors="replace")
        del kept
        return own or other if rank < peer else other or own  # the same at both ends

    async def _offer(self) -> tuple[bytes, object]:
        """The bytes to publish, and what keeps the shared memory."""
        if self._tensor is None:
            return _packed(self._obstacle, None, 0), None
        try:
            ((fields, kept),) = await self._copies.share([self._tensor])
        except TransportClosedError:
            raise
        except Exception as error:
            return _packed(f"rank {self._context.rank} cannot share memory: {_line(error)}", None, 0), None
        return _packed("", fields, self._checksum), kept

    async def _try(self, memory: bytes) -> str:
        """Pull what a peer offers; why that failed, if it did."""
        try:
            obstacle, fields, checksum = msgpack.unpackb(memory)
            if obstacle:
                return str(obstacle)
            if type(fields) is not dict:
                return "what it published is malformed"
            self._copies.check_shared(fields, TRIED_BYTES)
        except FrameError as error:
            return f"what it published is malformed: {error.field} {error.reason}"
        except Exception as error:  # msgpack raises many types
            return f"what it published is malformed: {_line(error)}"
        try:
            async with asyncio.timeout(timeouts.TRIAL_S):
                pulled = await self._copies.pull([fields], [_SPEC])
                (content,) = await self._copies.to_host(pulled)
        except TransportClosedError:
            raise
        except TimeoutError:
            return f"it did not end within {timeouts.TRIAL_S:g} s"
        except Exception as error:
            return _line(error)
        return "" if _checksum(content) == checksum else "it brings other bytes"


def _packed(obstacle: str, fields: Mapping[str, Any] | None, checksum: int) -> bytes:
    packed: bytes = msgpack.packb([obstacle, fields, checksum])
    return packed


def _checksum(content: Tensor) -> int:
    return zlib.crc32(as_bytes(content))


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]

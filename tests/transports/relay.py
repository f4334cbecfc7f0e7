"""A relay between the ranks of a pair, which can stop carrying anything without closing, as a pulled cable does."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, suppress

from rrfp.transports.rendezvous import LocalRendezvous

_CHUNK_BYTES = 1 << 16


class RelayingRendezvous(LocalRendezvous):
    """Publishes, instead of each tcp endpoint, one of its own that passes every byte on until `silence`.

    Args:
        stack: closes the relays.
    """

    def __init__(self, stack: AsyncExitStack) -> None:
        super().__init__()
        self._stack = stack
        self._carries = asyncio.Event()
        self._carries.set()

    async def publish(self, key: str, value: bytes) -> None:
        endpoint, *rest = value.decode().split(" ")
        address, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
        relay = await self._stack.enter_async_context(_Relay(address, int(port), self._carries))
        await super().publish(key, " ".join([f"tcp://127.0.0.1:{relay.port}", *rest]).encode())

    async def silence(self) -> None:
        """Carry nothing from now on, in either direction; every connection stays open."""
        self._carries.clear()


class _Relay:
    """Listens on loopback and connects each caller to ``address``."""

    def __init__(self, address: str, port: int, carries: asyncio.Event) -> None:
        self._target = (address, port)
        self._carries = carries
        self._writers: list[asyncio.StreamWriter] = []
        self._copying: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> _Relay:
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        self.port: int = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._copying:
            task.cancel()
        await asyncio.gather(*self._copying, return_exceptions=True)
        for writer in self._writers:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        far_reader, far_writer = await asyncio.open_connection(*self._target)
        self._writers.append(far_writer)
        for source, target in ((reader, far_writer), (far_reader, writer)):
            self._copying.add(asyncio.create_task(self._copy(source, target)))

    async def _copy(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while read := await source.read(_CHUNK_BYTES):
                await self._carries.wait()
                target.write(read)
                await target.drain()
            target.close()

"""A transport around another one, which does all work: for wrappers that change one part of it."""

from rrfp.transports.base import Message, Transport, TransportStatistics


class WrappedTransport(Transport):
    """Passes every call on to ``inner``."""

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner.context)
        self.carries = inner.carries
        self._inner = inner

    async def start(self) -> None:
        await self._inner.start()

    async def send(self, peer: int, message: Message) -> None:
        await self._inner.send(peer, message)

    async def receive(self) -> Message:
        return await self._inner.receive()

    async def close(self) -> None:
        await self._inner.close()

    def abort(self) -> None:
        self._inner.abort()

    def statistics(self) -> TransportStatistics:
        return self._inner.statistics()

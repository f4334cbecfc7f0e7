"""Watches the event loops of peers. A rank whose loop stands still is named on all others.

A hint that blocks, or a call that keeps the interpreter's lock, stops a rank's loop, while its connections stand: the
operating system and libzmq's own threads keep them alive. So the loop of a rank answers every question at once, and a
rank that does not answer one in time is announced. The announcement goes from peer to peer, since the way along the
control tree may lead through the very rank that is stuck.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rrfp import timeouts
from rrfp.errors import PeerLostError, ProtocolError
from rrfp.host import ProcessIdentity
from rrfp.log import get_logger
from rrfp.runtime.context import RankContext
from rrfp.runtime.messenger import Handler
from rrfp.transports.base import Channel, Message, MessageKind

logger = get_logger(__name__)


@dataclass(slots=True)
class _Question:
    #: When it was asked.
    since: float
    #: Run while it is open.
    timers: list[asyncio.TimerHandle]
    #: This rank has announced that the peer does not answer.
    announced: bool = False


class PeerMonitor:
    """Announces peers that do not answer questions. Used on one loop only.

    ``processes`` is filled in once all ranks have exchanged theirs. While a rank asks, an announcement is repeated
    twice in ``stall_after`` seconds.
    """

    def __init__(
        self,
        context: RankContext,
        processes: Mapping[int, ProcessIdentity],
        post: Callable[[int, Message], None],
    ) -> None:
        self._context = context
        self._topology = context.topology
        self._processes = processes
        self._post = post
        self._repeat_s = context.settings.stall_after / 2
        self._abort_after = context.settings.abort_after
        self._open: dict[int, _Question] = {}
        self._announced_at: dict[int, float] = {}
        self.handlers: Mapping[MessageKind, Handler] = {
            MessageKind.ACKNOWLEDGED: lambda message: self.on_answer(message.sender),
            MessageKind.UNRESPONSIVE: self._on_unresponsive,
        }

    def expect_answer(self, peer: int) -> None:
        """``peer`` is asked something, which it answers as soon as its loop runs."""
        loop = asyncio.get_running_loop()
        question = self._open.get(peer)
        if question is None:
            timers = [loop.call_later(timeouts.ANSWER_S, self._missed, peer)]
            if self._abort_after is not None:
                timers.append(loop.call_later(max(self._abort_after, timeouts.ANSWER_S), self._give_up, peer))
            self._open[peer] = _Question(loop.time(), timers)
        elif question.announced:
            self._missed(peer)

    def acknowledge(self, peer: int) -> None:
        """Answer a question of ``peer`` that has no answer yet."""
        self._post(peer, Message(Channel.CONTROL, MessageKind.ACKNOWLEDGED))

    def on_answer(self, peer: int) -> None:
        question = self._open.pop(peer, None)
        if question is None:
            return
        for timer in question.timers:
            timer.cancel()
        if question.announced:
            silent = asyncio.get_running_loop().time() - question.since
            logger.warning("%s answers again, after %.1f s", self._topology.name_of(peer), silent)

    def _on_unresponsive(self, message: Message) -> None:
        """A peer announced a rank that does not answer."""
        match message.body:
            case {"rank": int(rank), "seconds": int() | float() as seconds} if 0 <= rank < self._topology.world:
                self._announce(rank, float(seconds))
            case _:
                raise ProtocolError(f"rank {message.sender} sent a {message.kind} message that names no rank and time")

    def close(self) -> None:
        """Stop waiting for answers. May be called twice."""
        for question in self._open.values():
            for timer in question.timers:
                timer.cancel()
        self._open.clear()

    def process_of(self, rank: int) -> str:
        """The host and process id of ``rank``; empty before all have exchanged theirs."""
        process = self._processes.get(rank)
        return "" if process is None else str(process)

    def describe(self, rank: int) -> str:
        """The display name of ``rank``, with its host and process id where they are known."""
        process = self.process_of(rank)
        return self._topology.name_of(rank) + (f" ({process})" if process else "")

    def _missed(self, peer: int) -> None:
        question = self._open[peer]
        if peer in self._context.closed_peers:  # it left, and answers nothing any more
            self.on_answer(peer)
            return
        question.announced = True
        self._announce(peer, asyncio.get_running_loop().time() - question.since)

    def _announce(self, rank: int, seconds: float) -> None:
        """Log it here, and let the peers do so. Each rank logs it once, however many announce it."""
        now = asyncio.get_running_loop().time()
        if rank == self._topology.rank or now - self._announced_at.get(rank, -self._repeat_s) < self._repeat_s:
            return
        self._announced_at[rank] = now
        text = (
            f"{self.describe(rank)} has not answered for {seconds:.1f} s: its event loop does not run, because "
            "plugged-in code such as a hint blocks it, a call keeps the interpreter's lock, or the process is stopped"
        )
        logger.warning("%s", text, stage=self._topology.place_of(rank).stage, rank=rank)
        self._context.settings.observer.stalled(text)
        for peer in self._context.transport.context.peers:
            if peer != rank:
                body = {"rank": rank, "seconds": seconds}
                self._post(peer, Message(Channel.CONTROL, MessageKind.UNRESPONSIVE, body=body))

    def _give_up(self, peer: int) -> None:
        if peer in self._context.closed_peers:
            return
        silent = asyncio.get_running_loop().time() - self._open[peer].since
        process = f" ({process})" if (process := self.process_of(peer)) else ""
        self._context.fail(
            PeerLostError(peer, f"its event loop has not run for {silent:.1f} s, which is abort_after{process}")
        )

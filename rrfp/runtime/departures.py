"""The last messages of a rank: that it leaves in order, or that the pipeline is aborted."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rrfp.core import timeouts
from rrfp.errors import Origin, PeerLostError, ProtocolError
from rrfp.log import get_logger
from rrfp.transports.base import Channel, Message, MessageKind, Transport

logger = get_logger(__name__)


class Departures:
    """Which peers left in order, and after how many steps and gatherings."""

    def __init__(self) -> None:
        self._steps: dict[int, int] = {}
        self._gatherings: dict[int, int] = {}

    def __contains__(self, peer: int) -> bool:
        return peer in self._steps

    def note(self, message: Message) -> None:
        """A CLOSED message arrived.

        Raises:
            ProtocolError: if it does not say after how much.
        """
        steps, gatherings = message.body.get("steps"), message.body.get("gatherings")
        if not isinstance(steps, int) or not isinstance(gatherings, int):
            raise ProtocolError(f"rank {message.sender} closed without saying after how many steps and gatherings")
        self._steps[message.sender] = steps
        self._gatherings[message.sender] = gatherings

    def check(self, step: int) -> None:
        """This rank begins, or is in, ``step``.

        Raises:
            PeerLostError: if a peer left before it.
        """
        for peer, steps in self._steps.items():
            if steps <= step:
                raise PeerLostError(
                    peer, f"its program left after {steps} step(s), but step {step} was begun elsewhere"
                )

    def check_gathering(self, number: int) -> None:
        """This rank begins, or is in, gathering ``number``.

        Raises:
            PeerLostError: if a peer left before it.
        """
        for peer, gatherings in self._gatherings.items():
            if gatherings <= number:
                raise PeerLostError(peer, "its program left, but gradients are being clipped elsewhere")


def closed_message(steps: int, gatherings: int = 0) -> Message:
    """This rank's caller left in order after ``steps`` steps and ``gatherings`` of values between them."""
    return Message(Channel.CONTROL, MessageKind.CLOSED, body={"steps": steps, "gatherings": gatherings})


def origin_of(body: Mapping[str, Any]) -> Origin:
    """The origin that an ABORT message names.

    Raises:
        ProtocolError: if it names none.
    """
    match body:
        case {"stage": int(stage), "task": str() | None as task, "cause": str(cause), "rank": int() | None as rank}:
            return Origin(stage, task, cause, rank)
    raise ProtocolError("an abort arrived without stage, task and cause")


async def spread_abort(transport: Transport, origin: Origin) -> None:
    """Tell every peer, then free the transport. Takes `ABORT_GRACE_S` at most and raises nothing.

    A peer that could not be told sees this rank's end as lost, because the transport is then not closed in order.
    """
    body = asdict(origin)
    message = Message(Channel.CONTROL, MessageKind.ABORT, body=body)
    try:
        async with asyncio.timeout(timeouts.ABORT_GRACE_S):
            sends = (transport.send(peer, message) for peer in transport.context.peers)
            outcomes = await asyncio.gather(*sends, return_exceptions=True)
            if all(outcome is None or isinstance(outcome, PeerLostError) for outcome in outcomes):
                await transport.close()
    except Exception as error:  # a transport may be anybody's, and there is a failure to report already
        logger.debug("telling the peers of a failure failed: %r", error)
    finally:
        transport.abort()

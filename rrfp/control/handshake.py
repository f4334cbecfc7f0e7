"""What all ranks must have in common, compared once at the start, before they connect.

Who connects to whom follows from the model's shape. Ranks that differ in it would wait for peers that never come, so
terms travel through the rendezvous and not through the transport: stage 0 reads what every rank says and publishes one
verdict, which all raise alike. That takes 2 N keys, however many ranks there are.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from typing import Any

import msgpack

from rrfp.errors import ConfigError, ProtocolError, RrfpError, TransportError
from rrfp.transports.base import TransportContext

#: Field by field, plain values that must be the same on every rank.
Terms = Mapping[str, str | int | bool | None]

#: How much longer than stage 0 the others wait for its verdict, in seconds.
VERDICT_GRACE_S = 2.0

#: What a verdict may raise, by the name under which it travels; none: all agree.
_ERRORS: Mapping[str, type[RrfpError]] = {
    error.__name__: error for error in (ConfigError, ProtocolError, TransportError)
}


class Handshake:
    """Compares the terms of all ranks.

    Args:
        terms: this rank's.
        stages: N, as this rank sees it.
        context: this rank's place, and where the ranks meet.
    """

    def __init__(self, terms: Terms, stages: int, context: TransportContext) -> None:
        self._terms = terms
        self._stages = stages
        self._context = context

    async def shake(self) -> None:
        """Wait for all ranks, and compare. The outcome is the same on every rank.

        Raises:
            ConfigError: if two ranks differ; names the fields, the stages and their values.
            TransportError: if a rank does not come within ``connect_timeout_s``; names it.
            ProtocolError: if what a rank published cannot be read.
        """
        context = self._context
        if context.stage == 0:
            verdict = await self._judge()
            await self._publish("verdict", verdict)
        else:
            await self._publish(str(context.stage), self._terms)
            verdict = await self._lookup("verdict", 0, context.connect_timeout_s + VERDICT_GRACE_S)
        if (error := _ERRORS.get(verdict.get("error", ""))) is not None:
            raise error(verdict.get("text"))

    async def _judge(self) -> Mapping[str, Any]:
        """Stage 0: what to raise, if anything; as soon as a rank differs or time is up."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._context.connect_timeout_s
        try:
            for stage in range(1, self._stages):
                left_s = math.ceil(10 * max(deadline - loop.time(), 0.0)) / 10  # people read it
                theirs = await self._lookup(str(stage), stage, left_s)
                if told := differences(self._terms, theirs, stage):
                    raise ConfigError(told)
        except RrfpError as error:
            return {"error": type(error).__name__, "text": str(error)}
        return {}

    async def _publish(self, key: str, value: Mapping[str, Any]) -> None:
        await self._context.rendezvous.publish(self._key(key), msgpack.packb(dict(value)))

    async def _lookup(self, key: str, stage: int, timeout_s: float) -> Mapping[str, Any]:
        try:
            data = await self._context.rendezvous.lookup(self._key(key), timeout_s)
        except TransportError as error:
            raise TransportError(f"stage {stage} did not come: {error}") from error
        try:
            return dict(msgpack.unpackb(data))
        except (TypeError, ValueError, msgpack.UnpackException) as error:
            raise ProtocolError(f"what stage {stage} said at the start cannot be read: {error}") from None

    def _key(self, key: str) -> str:
        return f"terms/{self._context.run_id}/{self._context.restart}/{key}"


def differences(ours: Terms, theirs: Terms, stage: int) -> str:
    """In what ``stage`` differs from stage 0, in one line; empty where in nothing.

    Args:
        ours: the terms of stage 0.
        theirs: those of the other stage.
        stage: which that is.
    """
    fields = [field for field in dict.fromkeys((*ours, *theirs)) if ours.get(field) != theirs.get(field)]
    told = [f"{field} is {ours.get(field)!r} on stage 0 and {theirs.get(field)!r} on stage {stage}" for field in fields]
    return f"{'; '.join(told)}: must be the same on all ranks" if told else ""

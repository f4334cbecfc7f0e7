"""The terms that all ranks must have in common, compared once at the start, before they connect.

Who connects to whom follows from the model's shape. Ranks that differ in it would wait for peers that never come, so
terms travel through the rendezvous and not through the transport: rank 0 reads those of every rank and publishes one
verdict, which all raise alike. That takes as many keys as there are ranks. One more key a rank names the pipeline that
the rank entered last: so a rank that does not come can be found.
"""

from __future__ import annotations

import asyncio
import math
import reprlib
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any

import msgpack

from rrfp.compute.gradients.tie_copies import CopyTerms, Tie
from rrfp.core import timeouts
from rrfp.core.topology import Topology
from rrfp.errors import ConfigError, ProtocolError, RrfpError, TransportError
from rrfp.graphs.names import TextOf, numbered
from rrfp.runtime import records
from rrfp.runtime.tie_terms import agree as agree_on_ties
from rrfp.transports.base import TransportContext

#: Field by field, plain values that must be the same on every rank.
Terms = Mapping[str, str | int | bool | None]

#: The errors that a verdict may raise, by the name under which they travel; none: all agree.
_ERRORS: Mapping[str, type[RrfpError]] = {
    error.__name__: error for error in (ConfigError, ProtocolError, TransportError)
}


class Handshake:
    """Compares the terms of all ranks.

    Only the ranks of one group must have ``group_terms`` in common. ``topology`` is this rank's as it sees it;
    ``copies`` are its copies of tied parameters; ``text_of`` names virtual stages in errors.
    """

    def __init__(
        self,
        terms: Terms,
        topology: Topology,
        context: TransportContext,
        group_terms: Terms | None = None,
        copies: Sequence[CopyTerms] = (),
        text_of: TextOf = numbered,
    ) -> None:
        #: The ties of the job, once all ranks agree.
        self.ties: tuple[Tie, ...] = ()
        self._terms = terms
        self._group_terms = {} if group_terms is None else group_terms
        self._topology = topology
        self._context = context
        self._copies = copies
        self._text_of = text_of

    async def shake(self) -> None:
        """Wait for all ranks, and compare. The outcome is the same on every rank.

        Raises:
            ConfigError: if two ranks differ; names the fields, the ranks and their values. Or if ties do not fit.
            TransportError: if a rank does not come within ``connect_timeout_s``; names it.
            ProtocolError: if what a rank published cannot be read.
        """
        context = self._context
        await context.rendezvous.publish(self._whereabouts(context.rank), self._label.encode())
        if context.rank == 0:
            verdict = await self._judge()
            await self._publish("verdict", verdict)
        else:
            copies = records.to_plain(self._copies)
            await self._publish(str(context.rank), {"all": self._terms, "group": self._group_terms, "copies": copies})
            verdict = await self._lookup("verdict", 0, context.connect_timeout_s + timeouts.VERDICT_GRACE_S)
        name, text = verdict.get("error"), verdict.get("text")
        if name is not None:
            if not isinstance(name, str) or name not in _ERRORS or not isinstance(text, str):
                raise ProtocolError(f"the verdict of rank 0 cannot be read: {reprlib.repr(verdict):.80}")
            raise _ERRORS[name](text)
        self.ties = records.from_plain(tuple[Tie, ...], verdict.get("ties"), "the verdict of rank 0 about ties")

    async def _judge(self) -> Mapping[str, Any]:
        """Rank 0: what to raise, if anything; as soon as a rank differs or time is up."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._context.connect_timeout_s
        try:
            leaders: dict[int, Terms] = {0: self._group_terms}
            copies: dict[int, Sequence[CopyTerms]] = {0: self._copies}
            for rank in range(1, self._topology.world):
                left_s = math.ceil(10 * max(deadline - loop.time(), 0.0)) / 10  # for the message
                terms, group_terms, copies[rank] = self._read(rank, await self._lookup(str(rank), rank, left_s))
                self._compare(0, self._terms, rank, terms, "all ranks")
                # Members of a group have ascending ranks: its leader's terms came before.
                leader = self._leader_of(rank)
                own = leaders.setdefault(leader, group_terms)
                self._compare(leader, own, rank, group_terms, "the ranks of a group")
            return {"ties": records.to_plain(agree_on_ties(copies, self._topology, self._text_of))}
        except RrfpError as error:
            return {"error": type(error).__name__, "text": str(error)}

    def _read(self, rank: int, published: Mapping[str, Any]) -> tuple[Terms, Terms, Sequence[CopyTerms]]:
        match published:
            case {"all": dict(terms), "group": dict(group_terms), "copies": copies}:
                return terms, group_terms, records.from_plain(tuple[CopyTerms, ...], copies, "a tied-copy record")
        raise ProtocolError(
            f"the terms that {self._topology.name_of(rank)} published cannot be read: {reprlib.repr(published):.80}"
        )

    def _leader_of(self, rank: int) -> int:
        coordinate = self._topology.place_of(rank)
        return self._topology.mesh.rank(coordinate._replace(member=0))

    def _compare(self, rank: int, ours: Terms, other: int, theirs: Terms, who: str) -> None:
        name = self._topology.name_of
        if text := differences(name(rank), ours, name(other), theirs):
            raise ConfigError(f"{text}: must be the same on {who}")

    async def _publish(self, key: str, value: Mapping[str, Any]) -> None:
        await self._context.rendezvous.publish(self._key(key), msgpack.packb(dict(value)))

    async def _lookup(self, key: str, rank: int, timeout_s: float) -> Mapping[str, Any]:
        try:
            data = await self._context.rendezvous.lookup(self._key(key), timeout_s)
        except TransportError as error:
            elsewhere = await self._elsewhere(rank)
            raise TransportError(f"{self._topology.name_of(rank)} did not come{elsewhere}: {error}") from error
        try:
            return dict(msgpack.unpackb(data))
        except (TypeError, ValueError, msgpack.UnpackException) as error:
            raise ProtocolError(
                f"the terms that {self._topology.name_of(rank)} published cannot be read: {error}"
            ) from None

    async def _elsewhere(self, rank: int) -> str:
        """Which other pipeline ``rank`` has entered instead of this one, if any."""
        try:
            data = await self._context.rendezvous.lookup(self._whereabouts(rank), timeouts.LOOK_S)
        except TransportError:
            return ""
        label = data.decode(errors="replace")
        return "" if label == self._label else f" to pipeline {self._label!r}, it is at pipeline {label!r}"

    @property
    def _label(self) -> str:
        return self._context.run_id.removeprefix(f"{self._topology.run_id}/")

    def _whereabouts(self, rank: int) -> str:
        return f"entered/{self._topology.run_id}/{self._context.restart}/{rank}"

    def _key(self, key: str) -> str:
        return f"terms/{self._context.run_id}/{self._context.restart}/{key}"


#: Shows what another rank published, which may be anything.
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 200

#: Between the entries of a value that is a list in words, such as the parts of a graph.
_SEPARATOR = "; "


def differences(name: str, ours: Terms, other: str, theirs: Terms) -> str:
    """The fields in which the ranks ``name`` and ``other`` differ, in one line; empty if there are none."""
    fields = [field for field in dict.fromkeys((*ours, *theirs)) if ours.get(field) != theirs.get(field)]
    shown = {field: _apart(ours.get(field), theirs.get(field)) for field in fields}
    return "; ".join(f"{field} is {own} on {name} and {their} on {other}" for field, (own, their) in shown.items())


def _apart(ours: object, theirs: object) -> tuple[str, str]:
    """Two different values as they are shown: of long lists in words only the first entries that differ."""
    shown = _SHOWN.repr(ours), _SHOWN.repr(theirs)
    if not isinstance(ours, str) or not isinstance(theirs, str) or shown == (repr(ours), repr(theirs)):
        return shown
    pairs = zip_longest(ours.split(_SEPARATOR), theirs.split(_SEPARATOR), fillvalue="")
    own, their = next(pair for pair in pairs if pair[0] != pair[1])
    return _SHOWN.repr(own), _SHOWN.repr(their)

"""The settings that all ranks must have in common, compared once at the start, before they connect.

Who connects to whom follows from the model's shape. Ranks that differ in it would wait for peers that never come, so
settings travel through the rendezvous and not through the transport: rank 0 reads those of every rank and publishes one
verdict, which all raise alike. That takes as many keys as there are ranks. One more key a rank names the pipeline that
the rank entered last: so a rank that does not come can be found.

Any program that reaches the store may write to it. With a secret, each value has a voucher. With or without one, ranks
compare `StartDigests` once they are connected, so that no rank trains on settings or a verdict of another program.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import reprlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, TypeVar

import msgpack

from rrfp import timeouts
from rrfp.compute.gradients.ties import CopySettings, Tie
from rrfp.errors import ConfigError, ProtocolError, RrfpError, TransportError
from rrfp.model.graph import TextOf, numbered
from rrfp.model.topology import Topology
from rrfp.runtime import records
from rrfp.transports.base import TransportContext
from rrfp.transports.rendezvous import LocalRendezvous, publish_in_time
from rrfp.transports.secret import vouch, vouched

#: The copies of one tie: rank and settings, by virtual stage.
_Copies = dict[int, tuple[int, CopySettings]]


def agree_on_ties(
    settings: Mapping[int, Sequence[CopySettings]], topology: Topology, text_of: TextOf = numbered
) -> tuple[Tie, ...]:
    """The ties of a job, the first virtual stages' first.

    A tie is between ranks of one replica that have the same place in their groups, and the same in all of these.
    """
    pipelines: dict[tuple[int, int], dict[str, _Copies]] = {}
    for rank, copies in sorted(settings.items()):
        at = topology.place_of(rank)
        ties = pipelines.setdefault((at.replica, at.member), {})
        for copy in copies:
            ties.setdefault(copy.tie, {})[copy.virtual_stage] = (rank, copy)
    agreed: dict[str, Tie] = {}
    for name in dict.fromkeys(name for ties in pipelines.values() for name in ties):
        of_all = [dict(sorted(ties.get(name, {}).items())) for ties in pipelines.values()]
        _check_same(name, of_all, text_of)
        for copies_by_stage in of_all:
            _check_copies(name, copies_by_stage, topology, text_of)
        is_shared = any(copy.is_guest for copies_by_stage in of_all for _, copy in copies_by_stage.values())
        agreed[name] = Tie(name, tuple(of_all[0]), is_shared)
    return tuple(sorted(agreed.values(), key=lambda tie: (tie.virtual_stages, tie.name)))


def check_agreed(
    ties: Sequence[Tie], copies: Sequence[CopySettings], own: Collection[int], virtual_stages: int
) -> None:
    """Refuse ties that another rank gave for those of the job and that cannot be: gradients would not be summed."""
    by_name = {tie.name: tie for tie in ties}
    held = {name: {copy.virtual_stage for copy in copies if copy.tie == name} for name in {c.tie for c in copies}}
    if len(by_name) < len(ties):
        raise ProtocolError("the verdict of rank 0 cannot be right: it has a tie twice")
    for name in sorted(by_name.keys() | held.keys()):
        tie, here = by_name.get(name), held.get(name, set())
        stages = () if tie is None else tie.virtual_stages
        is_sound = len(stages) > 1 and list(stages) == sorted({*stages}) and {*stages} <= {*range(virtual_stages)}
        lacks_object = tie is not None and not tie.is_shared and any(c.is_guest for c in copies if c.tie == name)
        if not is_sound or here != {*stages}.intersection(own) or lacks_object:
            raise ProtocolError(
                f"the verdict of rank 0 cannot be right: it has tie {name!r} on virtual stages {list(stages)}, of "
                f"{virtual_stages}, and this rank holds a copy on {sorted(here)}; another program may have written to "
                "the store"
            )


def _check_same(name: str, of_all: Sequence[_Copies], text_of: TextOf) -> None:
    for copies in of_all[1:]:
        if list(copies) != list(of_all[0]):
            raise ConfigError(
                f"tie {name!r} is on {_listed(of_all[0], text_of)} of one replica or group member and on "
                f"{_listed(copies, text_of)} of another: must be the same in all"
            )


def _check_copies(name: str, copies: _Copies, topology: Topology, text_of: TextOf) -> None:
    (v, (rank, first)), *others = copies.items()
    if not others:
        raise ConfigError(
            f"tie {name!r} is on {text_of(v)} ({topology.name_of(rank)}) alone, must be on two at least: every "
            "rank with a copy passes it by the same name"
        )
    for _, (other, copy) in others:
        here, there = topology.name_of(rank), topology.name_of(other)
        if copy.kind != first.kind:
            raise ConfigError(f"tie {name!r} is {first.kind} on {here} and {copy.kind} on {there}: must be the same")
        if copy.requires_grad != first.requires_grad:
            with_grad, frozen = (here, there) if first.requires_grad else (there, here)
            raise ConfigError(f"tie {name!r} requires grad on {with_grad} and not on {frozen}: must be the same")
        if not copy.is_guest and copy.values != first.values:
            raise ConfigError(
                f"tie {name!r} has other values on {there} than on {here}: must start equal, from one checkpoint or "
                "one seed"
            )


def _listed(copies: _Copies, text_of: TextOf) -> str:
    return ", ".join(map(text_of, copies)) or "none"


_Record = TypeVar("_Record")

#: Field by field, plain values that must be the same on every rank.
JobSettings = Mapping[str, str | int | bool | None]

#: The errors that a verdict may raise, by the name under which they travel; none: all agree.
_ERRORS: Mapping[str, type[RrfpError]] = {
    error.__name__: error for error in (ConfigError, ProtocolError, TransportError)
}

#: Of the vouchers for settings and verdicts; see `vouch`.
_PURPOSE = "rrfp settings 1"

#: What another process wrote is shown to so many characters.
_MOST_SHOWN = 8192


@dataclass(frozen=True, slots=True)
class StartDigests:
    """Digests of what a rank published and read at the start; ranks compare them once they are connected."""

    #: The digest of what the rank published.
    settings: bytes = b""
    #: Of rank 0's verdict, as the rank has it; on rank 0 as it was decided there.
    verdict: bytes = b""
    #: Of the settings of all other ranks, as rank 0 read them; in the verdict. Empty where nothing was compared.
    read: bytes = b""

    def check(self, agreements: Sequence[StartDigests]) -> None:
        """Compare those of all ranks, by rank; the outcome is the same on all."""
        if any(other.verdict != self.verdict for other in agreements):
            read = "two different verdicts of rank 0"
        elif self.read and self.read != _digest(other.settings for other in agreements[1:]):
            read = "settings that no rank of this job has published"
        else:
            return
        raise TransportError(f"ranks found {read} in the rendezvous store: another program wrote to the store")


class Handshake:
    """Compares the settings of all ranks.

    Only the ranks of one group must have ``group_settings`` in common. ``topology`` is this rank's as it sees it;
    ``copies`` are its copies of tied parameters; ``text_of`` names virtual stages in errors.
    """

    def __init__(
        self,
        settings: JobSettings,
        topology: Topology,
        context: TransportContext,
        group_settings: JobSettings | None = None,
        copies: Sequence[CopySettings] = (),
        text_of: TextOf = numbered,
    ) -> None:
        #: The ties of the job, once all ranks agree.
        self.ties: tuple[Tie, ...] = ()
        #: For the other ranks, once all agree.
        self.agreement = StartDigests()
        #: Whether all ranks have the verdict, or will: they all raise its error.
        self.is_decided = False
        self._settings = settings
        self._group_settings = {} if group_settings is None else group_settings
        self._topology = topology
        self._context = context
        self._copies = copies
        self._text_of = text_of

    async def shake(self) -> None:
        """Wait for all ranks, and compare. The outcome is the same on every rank."""
        context = self._context
        entered = self._address_key(context.rank)
        await publish_in_time(
            context, entered, vouch(context.secret, self._label.encode(), *self._about_entry(entered))
        )
        copies = records.to_plain(self._copies)
        own = _pack({"all": self._settings, "group": self._group_settings, "copies": copies})
        if context.rank == 0:
            data = _pack(await self._judge())
            await self._publish("verdict", data)
            verdict = _unpack(data, "a verdict of rank 0")
        else:
            await self._publish(str(context.rank), own)
            data = await self._lookup("verdict", 0, context.connect_timeout_s + timeouts.VERDICT_GRACE_S)
            verdict = _unpack(data, "a verdict of rank 0")
        match verdict:
            case {"error": str(name), "text": str(text), "read": bytes(read)} if name in _ERRORS:
                self.is_decided = True
                self._check_own(_digest([own]), read)
                raise _ERRORS[name](printable(text))
            case {"ties": ties, "read": bytes(read)}:
                self.ties = _records_of(Tie, ties, "a verdict of rank 0")
                self.agreement = StartDigests(_digest([own]), _digest([data]), read)
            case _:
                raise _unreadable("a verdict of rank 0", reprlib.repr(verdict))

    def _check_own(self, settings: bytes, read: bytes) -> None:
        """Refuse rank 0's error if it read others than this rank's settings, whose digest is ``settings``."""
        rank = self._context.rank
        theirs = read[(rank - 1) * len(settings) : rank * len(settings)] if rank else b""
        if theirs and theirs != settings:
            raise TransportError(
                f"the rendezvous store had settings of {self._topology.name_of(rank)} for rank 0 that are not this "
                "rank's: another program wrote to the store"
            )

    @property
    def _is_forgeable(self) -> bool:
        """Whether another program may have written what is found in the store."""
        return self._context.secret is None and not isinstance(self._context.rendezvous, LocalRendezvous)

    async def _judge(self) -> Mapping[str, Any]:
        """Rank 0: what to raise, if anything; as soon as a rank differs or time is up."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._context.connect_timeout_s
        read = list[bytes]()
        try:
            leaders: dict[int, JobSettings] = {0: self._group_settings}
            copies: dict[int, Sequence[CopySettings]] = {0: self._copies}
            for rank in range(1, self._topology.world):
                left_s = math.ceil(10 * max(deadline - loop.time(), 0.0)) / 10  # for the message
                data = await self._lookup(str(rank), rank, left_s)
                read.append(_digest([data]))
                settings, group_settings, copies[rank] = self._read(rank, data)
                self._compare(0, self._settings, rank, settings, "all ranks")
                # Members of a group have ascending ranks: its leader's settings came before.
                leader = self._leader_of(rank)
                own = leaders.setdefault(leader, group_settings)
                self._compare(leader, own, rank, group_settings, "the ranks of a group")
            ties = records.to_plain(agree_on_ties(copies, self._topology, self._text_of))
            return {"ties": ties, "read": _digest(read)}
        except RrfpError as error:
            text = str(error)
            if isinstance(error, ConfigError) and self._is_forgeable:
                text += " (values as the rendezvous store has them)"
            # One digest a rank, in which each finds its own.
            return {"error": type(error).__name__, "text": text, "read": b"".join(read)}

    def _read(self, rank: int, data: bytes) -> tuple[JobSettings, JobSettings, Sequence[CopySettings]]:
        what = self._terms_of(rank)
        match published := _unpack(data, what):
            case {"all": dict(settings), "group": dict(group_settings), "copies": copies}:
                return settings, group_settings, _records_of(CopySettings, copies, what)
        raise _unreadable(what, reprlib.repr(published))

    def _terms_of(self, rank: int) -> str:
        return f"settings of {self._topology.name_of(rank)}"

    def _leader_of(self, rank: int) -> int:
        coordinate = self._topology.place_of(rank)
        return self._topology.mesh.rank(coordinate._replace(member=0))

    def _compare(self, rank: int, ours: JobSettings, other: int, theirs: JobSettings, who: str) -> None:
        name = self._topology.name_of
        if text := differences(name(rank), ours, name(other), theirs):
            raise ConfigError(f"{text}: must be the same on {who}")

    async def _publish(self, key: str, value: bytes) -> None:
        name = self._key(key)
        await publish_in_time(self._context, name, vouch(self._context.secret, value, _PURPOSE, *self._parts(name)))

    async def _lookup(self, key: str, rank: int, timeout_s: float) -> bytes:
        name, topology, context = self._key(key), self._topology, self._context
        try:
            data = await context.rendezvous.lookup(name, timeout_s)
        except TransportError as error:
            raise TransportError(f"{await self._missing(key, rank)}: {error}") from error
        what = "a verdict of rank 0" if key == "verdict" else self._terms_of(rank)
        return vouched(context.secret, data, what, topology.name_of(context.rank), _PURPOSE, *self._parts(name))

    def _parts(self, name: str) -> tuple[str | int, ...]:
        """What vouchers are about, beside their purpose and the value."""
        return self._context.run_id, self._context.restart, name

    async def _missing(self, key: str, rank: int) -> str:
        """Why there is nothing of ``rank`` under ``key``: a sentence without an end."""
        context, entered = self._context, self._address_key(rank)
        name, reader = self._topology.name_of(rank), self._topology.name_of(context.rank)
        try:
            data = await context.rendezvous.lookup(entered, timeouts.LOOK_S)
        except TransportError:
            return f"{name} did not come{self._or_another}"
        try:
            data = vouched(context.secret, data, f"an entry of {name}", reader, *self._about_entry(entered))
        except TransportError as error:
            return str(error)
        label = printable(data.decode(errors="replace"), 80)
        if label != self._label:
            where = f"it is at pipeline {label!r}{self._or_another}"
            return f"{name} did not come to pipeline {self._label!r}, {where}"
        lacks = (
            "verdict is missing: it waits for another rank" if key == "verdict" else "settings are missing: it ended"
        )
        return f"{name} came, and its {lacks}{self._or_another}"

    @property
    def _or_another(self) -> str:
        in_process = isinstance(self._context.rendezvous, LocalRendezvous)
        return "" if in_process else ", or another program wrote to the store"

    def _about_entry(self, name: str) -> tuple[str | int, ...]:
        """What vouchers are about that name the pipeline which a rank entered, beside that."""
        # Not about one pipeline's run id: a rank may be at another one.
        return _PURPOSE, self._topology.run_id, self._context.restart, name

    @property
    def _label(self) -> str:
        return self._context.run_id.removeprefix(f"{self._topology.run_id}/")

    def _address_key(self, rank: int) -> str:
        return f"entered/{self._topology.run_id}/{self._context.restart}/{rank}"

    def _key(self, key: str) -> str:
        return f"settings/{self._context.run_id}/{self._context.restart}/{key}"


def _pack(value: Mapping[str, Any]) -> bytes:
    packed: bytes = msgpack.packb(dict(value))
    return packed


def _unpack(data: bytes, what: str) -> Mapping[str, Any]:
    try:
        return dict(msgpack.unpackb(data))
    except (TypeError, ValueError, msgpack.UnpackException) as error:
        raise _unreadable(what, str(error)) from None


def _records_of(kind: type[_Record], plain: Any, what: str) -> tuple[_Record, ...]:
    try:
        return records.from_plain(tuple[kind, ...], plain, what)  # type: ignore[valid-type]
    except ProtocolError as error:
        raise _unreadable(what, str(error)) from None


def _unreadable(what: str, why: str) -> ProtocolError:
    return ProtocolError(
        f"the rendezvous store has {what} that cannot be read: the rank has another version of rrfp, or another "
        f"program wrote to the store ({printable(why, 160)})"
    )


def _digest(values: Iterable[bytes]) -> bytes:
    """Of a sequence of values that are digests themselves, or of one value."""
    return hashlib.sha256(b"".join(values)).digest()


def printable(text: str, most: int = _MOST_SHOWN) -> str:
    """A text that another process wrote, as it may be shown."""
    cut = text if len(text) <= most else f"{text[:most]} ..."
    return "".join(each if each.isprintable() or each == "\n" else "?" for each in cut)


#: Shows what another rank published, which may be anything.
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 200

#: Between the entries of a value that is a list in words, such as the parts of a graph.
_SEPARATOR = "; "


def differences(name: str, ours: JobSettings, other: str, theirs: JobSettings) -> str:
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

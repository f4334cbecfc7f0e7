"""`save_trace` on one rank: the traces of all ranks go to rank 0, which writes them into one file.

The ranks first agree on the steps. Then each rank whose trace is wanted sends it in pieces, one a round, so that no
message holds more than `ROUND_BYTES` however many ranks there are and however long their traces. Rank 0 keeps the
packed traces and unpacks a step at a time while it writes.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Literal, Self, TypeVar

import msgpack

from rrfp.errors import ConfigError, ProtocolError
from rrfp.host import ProcessIdentity, boot_id, namespace
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Mode
from rrfp.model.topology import Topology
from rrfp.plain import or_none, whole
from rrfp.runtime import records
from rrfp.runtime.all_gather import TreeAllGather
from rrfp.runtime.context import RankContext
from rrfp.runtime.lane_executor import LaneExecutor
from rrfp.runtime.steps.plan import StepPlan
from rrfp.trace.chrome import ChromeRun, write_runs
from rrfp.trace.job_data import JOB, TracedJob
from rrfp.trace.plain import from_plain, to_plain
from rrfp.trace.spans import StepTrace, TraceHistory, merge, shifted

#: Round trips of a measurement; the shortest one counts.
ROUND_TRIPS = 8


@dataclass(frozen=True, slots=True)
class ClockOffset:
    """A rank's clock plus ``seconds`` is the clock of rank 0, to at most ``error_s`` more or less."""

    seconds: float = 0.0
    error_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HostClock:
    """The ranks that share a clock, and how far it is from that of rank 0."""

    host: str
    ranks: tuple[int, ...]
    offset: ClockOffset


async def measure_offset(now: Callable[[], float], ask: Callable[[], Awaitable[float]]) -> ClockOffset:
    """Measure how far this rank's clock is from rank 0's, which ``ask`` reads between its call and its return."""
    readings = []
    for _ in range(ROUND_TRIPS):
        before = now()
        theirs = await ask()
        after = now()
        readings.append(((after - before) / 2, theirs - (before + after) / 2))
    error, seconds = min(readings)
    return ClockOffset(seconds, error)


def host_clocks(clocks: Sequence[tuple[str, str]], offsets: Sequence[ClockOffset]) -> list[HostClock]:
    """The clocks of all ranks, that of rank 0 first; ranks that share one share the best of their ``offsets``."""
    ranks_of: dict[str, list[int]] = {}
    for rank, (clock, _) in enumerate(clocks):
        ranks_of.setdefault(clock, []).append(rank)
    best = [min((offsets[rank] for rank in ranks), key=lambda offset: offset.error_s) for ranks in ranks_of.values()]
    best[0] = ClockOffset()
    hosts = [clocks[ranks[0]][1] for ranks in ranks_of.values()]
    return [HostClock(*each) for each in zip(hosts, map(tuple, ranks_of.values()), best, strict=True)]


def own_clock() -> str:
    """What ranks with the same monotonic clock have in common: the start of the host, and the space of its times."""
    with suppress(OSError):
        return f"{boot_id()} {namespace('time')}"
    return ProcessIdentity.own().host


T = TypeVar("T")

_TOPIC = "save_trace"

#: The most bytes of traces in one message.
ROUND_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """The arguments of ``save_trace``."""

    #: Of the file; rank 0 alone writes.
    path: str
    #: The newest steps, so many at most; None for all that are kept.
    steps: int | None = None
    #: The replica whose ranks are saved; None for all.
    replica: int | None = 0
    #: How the job runs, as far as the caller knows; rank 0's is written.
    job: TracedJob | None = None

    @classmethod
    def checked(
        cls,
        path: str | os.PathLike[str],
        steps: int | None,
        replica: int | Literal["all"],
        replicas: int,
        job: TracedJob | None = None,
    ) -> Self:
        text: Any = os.fspath(path) if isinstance(path, os.PathLike) else path
        if type(text) is not str or not text:
            raise ConfigError(f"path is {path!r}, must be the name of a file")
        steps = or_none(whole, "steps", steps, 1)
        if replica != "all" and (type(replica) is not int or not 0 <= replica < replicas):
            raise ConfigError(f"replica is {replica!r}, must be 0..{replicas - 1}, or 'all'")
        return cls(text, steps, None if replica == "all" else replica, job)


@dataclass(frozen=True, slots=True)
class TraceOffer:
    """The traces of a rank, before any is sent."""

    steps: int | None
    replica: int | None
    #: The oldest training step whose trace it has.
    first: int
    #: The newest one.
    last: int
    clock: str
    host: str
    #: The largest message that it takes.
    most_bytes: int


@dataclass(frozen=True, slots=True)
class TraceSize:
    """The bytes of a rank's packed trace, and its clock's offset."""

    num_bytes: int
    offset: ClockOffset


class TraceSaver:
    """Keeps the traces of the newest training steps of one rank, and saves those of all; every rank has one."""

    def __init__(self, context: RankContext, all_gather: TreeAllGather, executor: LaneExecutor) -> None:
        self._topology = context.topology
        self._all_gather = all_gather
        self._history = TraceHistory(context.settings.trace_steps)
        self._executor = executor
        self._now = context.lane.now
        self._graph = context.graph if context.graph.names else None
        self._most_bytes = context.transport.context.max_message_bytes
        self._clock = own_clock()
        #: Rounds of all calls so far, the same on all ranks.
        self._rounds = 0

    def keep(self, plan: StepPlan, trace: StepTrace) -> None:
        if plan.step.mode is Mode.TRAIN:
            self._history.add(replace(trace, step=plan.batch.training_step))

    @property
    def newest(self) -> StepTrace | None:
        """The newest trace that is kept. May be read on any thread."""
        return (self._history.traces or (None,))[-1]

    async def save(self, request: TraceRequest) -> str:
        """Save the traces; every rank calls it. Returns why nothing was written, the same on all ranks."""
        offers = await self._share(self._offer(request), "an offer of traces")
        if reason := _refusal(offers):
            return reason
        first, last = max(offer.first for offer in offers), min(offer.last for offer in offers)
        if request.steps is not None:
            first = max(first, last - request.steps + 1)
        savers = self._savers(request.replica)
        packed = b""
        if self._topology.rank in savers:
            traces = [trace for trace in self._history.traces if first <= trace.step <= last]
            packed = await self._executor.run_extra("the packing of its trace", partial(_pack, traces))
        offset = ClockOffset()
        if len({offer.clock for offer in offers}) > 1:
            offset = await measure_offset(self._now, self._ask_clock)
        sizes = await self._share(TraceSize(len(packed), offset), "the size of a trace")
        most = min(ROUND_BYTES, *(offer.most_bytes // 2 for offer in offers))
        pieces = await self._collect(packed, max(size.num_bytes for size in sizes), max(1, most // len(savers)))
        failure = ""
        if self._topology.rank == 0:
            owners = [(offer.clock, offer.host) for offer in offers]
            clocks = host_clocks(owners, [size.offset for size in sizes])
            own, job = {rank: pieces[rank] for rank in savers}, request.job
            if job is not None:
                job = replace(job, takes_offers=self._executor.takes_offers)
            write = partial(_write, request.path, own, clocks, self._topology, self._graph, job)
            failure = await self._executor.run_extra("the writing of the trace", write)
        return (await self._reduce(failure.encode(), lambda failures: failures[0])).decode()

    def _offer(self, request: TraceRequest) -> TraceOffer:
        traces = self._history.traces
        first, last = (traces[0].step, traces[-1].step) if traces else (0, -1)
        host = ProcessIdentity.own().host
        return TraceOffer(request.steps, request.replica, first, last, self._clock, host, self._most_bytes)

    def _savers(self, replica: int | None) -> list[int]:
        """The ranks whose traces are wanted: the leaders of their groups."""
        owners = [(rank, self._topology.place_of(rank)) for rank in range(self._topology.world)]
        return [rank for rank, owner in owners if owner.member == 0 and replica in (None, owner.replica)]

    async def _collect(self, packed: bytes, most: int, piece: int) -> list[bytes]:
        """Send this rank's trace to rank 0, which gets those of all ranks, by rank; empty ones elsewhere."""
        collected = [bytearray() for _ in range(self._topology.world)]

        def keep(pieces: Sequence[bytes]) -> bytes:
            for mine, new in zip(collected, pieces, strict=True):
                mine += new
            return b""

        for start in range(0, most, piece):
            await self._reduce(packed[start : start + piece], keep)
        return [bytes(mine) for mine in collected]

    async def _ask_clock(self) -> float:
        reading = await self._reduce(b"", lambda _: records.pack(ClockOffset(self._now())))
        return records.unpack(ClockOffset, reading, "a reading of rank 0's clock").seconds

    async def _share(self, own: T, name: str) -> list[T]:
        """Give ``own`` to all ranks, and get what each gives, by rank."""
        return await self._all_gather.share(_TOPIC, self._next_round(), own, name)

    async def _reduce(self, own: bytes, answer: Callable[[Sequence[bytes]], bytes]) -> bytes:
        return await self._all_gather.reduce(_TOPIC, self._next_round(), own, answer)

    def _next_round(self) -> int:
        self._rounds += 1
        return self._rounds


def _refusal(offers: Sequence[TraceOffer]) -> str:
    """Why no trace is written; empty if one is."""
    for name in ("steps", "replica"):
        values = [getattr(offer, name) for offer in offers]
        if len(set(values)) > 1:
            other = next(rank for rank, value in enumerate(values) if value != values[0])
            everything = "'all'" if name == "replica" else "None"
            ours, theirs = (everything if value is None else value for value in (values[0], values[other]))
            return f"{name} is {ours} on rank 0 and {theirs} on rank {other}, must be the same on all ranks"
    if max(offer.first for offer in offers) > min(offer.last for offer in offers):
        return "no training step is recorded on all ranks: save_trace goes after a step"
    return ""


def _pack(traces: Sequence[StepTrace]) -> bytes:
    return b"".join(msgpack.packb(to_plain(trace)) for trace in traces)


def _write(
    path: str,
    packed: dict[int, bytes],
    clocks: Sequence[HostClock],
    topology: Topology,
    graph: TaskGraph | None = None,
    job: TracedJob | None = None,
) -> str:
    """Write the file; returns the reason if that is not possible. On a thread that may wait for the disk."""
    offsets = {rank: clock.offset.seconds for clock in clocks for rank in clock.ranks}
    by_replica: dict[int, list[int]] = {}
    for rank in packed:
        by_replica.setdefault(topology.place_of(rank).replica, []).append(rank)
    runs = [
        (
            "pipeline" if topology.replicas == 1 else f"replica {replica}",
            *_steps([_unpack(rank, packed[rank], offsets[rank]) for rank in ranks]),
        )
        for replica, ranks in by_replica.items()
    ]
    origin = min(first.start for _, first, _ in runs)
    stages = range(topology.stages)
    try:
        chrome = [ChromeRun(name, stages, steps, origin, graph) for name, _, steps in runs]
        write_runs(path, chrome, {"clocks": _plain(clocks), **({} if job is None else {JOB: job.to_plain()})})
    except ConfigError as error:
        return f"save_trace on rank 0: {error}"
    return ""


def _steps(ranks: Sequence[Iterator[StepTrace]]) -> tuple[StepTrace, Iterator[StepTrace]]:
    """The first merged step of one replica, and all, each unpacked when its turn comes."""
    merged = _merged(ranks)
    first = next(merged, None)
    if first is None:
        raise ProtocolError("a rank sent a trace without the steps that it offered")
    return first, chain([first], merged)


def _merged(ranks: Sequence[Iterator[StepTrace]]) -> Iterator[StepTrace]:
    try:
        for parts in zip(*ranks, strict=True):
            yield merge(parts)
    except ValueError as error:
        raise ProtocolError(f"ranks sent traces of different steps: {error!s:.200}") from None


def _unpack(rank: int, packed: bytes, offset: float) -> Iterator[StepTrace]:
    """The steps in ``packed``, on the clock of rank 0."""
    unpacker = msgpack.Unpacker(max_buffer_size=len(packed))
    unpacker.feed(packed)
    try:
        for plain in unpacker:
            trace = from_plain(plain)
            yield shifted(trace, offset) if offset else trace
    except (KeyError, TypeError, ValueError, msgpack.UnpackException) as error:
        raise ProtocolError(f"rank {rank} sent a trace that cannot be read: {error!r:.200}") from None


def _plain(clocks: Sequence[HostClock]) -> list[dict[str, Any]]:
    return [{"host": clock.host, "ranks": clock.ranks, **asdict(clock.offset)} for clock in clocks]

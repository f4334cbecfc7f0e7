"""Decoders of what ranks say to each other once connected, and of what they publish before."""

from __future__ import annotations

import os
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass, replace
from random import Random
from tempfile import TemporaryDirectory
from types import UnionType
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

from fuzz.mutations import JSON, MSGPACK, pack, to_json
from fuzz.targets import Decode, Target, parts, plain
from fuzz.wire_targets import RUN_ID, as_case, context, message

from rrfp import Topology
from rrfp.commands.top import rows, table_of
from rrfp.compute.gradients.ties import CopySettings, Tie
from rrfp.compute.mailbox import Mailbox
from rrfp.core.usage import Peaks, WaitCause
from rrfp.errors import ConfigError, FrameError, PeerLostError, ProtocolError, StageError, TransportError
from rrfp.host import ProcessIdentity
from rrfp.lab.device_double import DoubleSharing
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Kind, Task
from rrfp.runtime import records
from rrfp.runtime.abort import origin_of
from rrfp.runtime.all_gather import TreeAllGather
from rrfp.runtime.context import ClosedPeers, RankActivity
from rrfp.runtime.core_driver import GROUP_KINDS, GroupLink
from rrfp.runtime.grad_clipping import NormShare
from rrfp.runtime.stall.status import JobStatus, RankAnswer, RankStatus
from rrfp.runtime.start.failed_start import FailedStart, FailedStarts
from rrfp.runtime.start.handshake import Handshake
from rrfp.runtime.status_socket import JobReport
from rrfp.runtime.steps.reports import StageReport
from rrfp.runtime.steps.step_report import LossShare, WeightShare
from rrfp.runtime.trace_saver import ClockOffset, HostClock, TraceOffer, TraceSize, _write
from rrfp.trace.plain import to_plain
from rrfp.trace.spans import MessageSpan, StepTrace, TaskSpan, WaitSpan
from rrfp.transports.base import MessageKind, TransportContext
from rrfp.transports.cuda_ipc.transport import _Trial
from rrfp.transports.rendezvous import LocalRendezvous
from rrfp.transports.shm.trial import Host
from rrfp.transports.wire.codec import Codec

WORLD = 7


def outcome(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine returns that never has to wait here."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    coroutine.close()
    raise AssertionError("it waits for what never comes")


# Records.

RECORDS: tuple[Any, ...] = (
    *(RankStatus, StageReport, LossShare, WeightShare, NormShare, ProcessIdentity, ClockOffset, HostClock),
    *(TraceOffer, TraceSize, CopySettings, Tie),
)


def _made(random: Random, kind: Any) -> Any:
    """A value of a record's type, or of a field's."""
    if is_dataclass(kind) and isinstance(kind, type):
        return kind(**{name: _made(random, hint) for name, hint in get_type_hints(kind).items()})
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (UnionType, Union):
        return _made(random, random.choice(arguments))
    if origin is tuple:
        return tuple(_made(random, arguments[0]) for _ in range(random.randint(0, 3)))
    if origin is not None:
        return {_made(random, arguments[0]): _made(random, arguments[1]) for _ in range(random.randint(0, 3))}
    return {
        int: random.randint(0, 5),
        float: random.random(),
        bool: random.random() < 0.5,
        str: random.choice(("", "F0@0", "text")),
        bytes: random.randbytes(random.randint(0, 8)),
    }.get(kind)


def _a_record(random: Random) -> Any:
    index = random.randrange(len(RECORDS))
    return [index, records.to_plain(_made(random, RECORDS[index]))]


def _as_record(tree: Any) -> bytes:
    if type(tree) is list and len(tree) == 2 and type(tree[0]) is int:
        return bytes([tree[0] % 256]) + pack(tree[1])
    return b"\x00" + pack(tree)


def _read_record(case: bytes) -> object:
    return records.unpack(RECORDS[case[0] % len(RECORDS)] if case else Tie, case[1:], "a record")


# Messages of the runtime.


def _a_body(random: Random) -> tuple[str, dict[str, Any]]:
    kind = random.choice(list(MessageKind))
    bodies: Mapping[str, tuple[dict[str, Any], ...]] = {
        "output": (
            {"structure": ["t", 0], "consumed": 3},
            {"structure": ["(", ["t", 0], ["v", 1.5]], "consumed": None},
            {"structure": ["{", ["a", "b"], ["t", 0], ["[", ["t", 1]]], "consumed": None},
            {"structure": ["n", "fuzz.runtime_targets:Pair", ["a", "b"], ["t", 0], ["v", None]], "consumed": None},
            {"parts": [[1, 1], [0, 2]], "consumed": None},
            {"parts": [[1, 1]], "consumed": 1},
        ),
        "tie": (
            {"tie": "a", "copy": None, "layout": 0, "requires_grad": True, "checksum": None, "piece": 0, "pieces": 1},
        ),
        "report": ({"topic": "step", "number": 1},),
        "result": ({"topic": "step", "number": 1},),
        "probe": ({},),
        "status_query": ({"number": 1, "asker": 0},),
        "status": ({"number": 1, "asker": 1, "rank": 3}, {"number": 1, "asker": 0, "rank": 4}),
        "verdict": ({"first": 2}, {"first": None}),
        "acknowledged": ({},),
        "unresponsive": ({"rank": 1, "seconds": 2.0},),
        "closed": ({"steps": 3, "gatherings": 0},),
        "abort": ({"stage": 1, "task": "F0@1", "cause": "ValueError: x", "rank": None},),
    }
    return kind, random.choice(bodies.get(kind, ({"numbers": [1, 2]}, {})))


def _a_message(random: Random) -> Any:
    kind, body = _a_body(random)
    if kind not in ("report", "result"):
        return message(random, body, kind)
    bundle = pack([[rank, bytes([rank])] for rank in (range(WORLD) if kind == "result" else (3, 7, 8))])
    sender = 0 if kind == "result" else random.choice((3, 4))
    tree = message(random, body, kind)
    tree["header"][3], tree["header"][9] = sender, [["uint8", [len(bundle)], False]]
    return {**tree, "frames": [bundle]}


class Pair(NamedTuple):
    """A named tuple that messages may name."""

    a: Any
    b: Any


@contextmanager
def _messages() -> Iterator[Decode]:
    """Rank 1 of seven in a chain; it has joined the all-gather of step 1."""
    reader = replace(context(), peers=tuple(rank for rank in range(WORLD) if rank != 1))
    codec, graph = Codec(reader), TaskGraph.chain(WORLD)

    def decode(case: bytes) -> object:
        header, *frames = parts(case)
        message = codec.decode(header, [memoryview(bytearray(frame)) for frame in frames])
        kind, body = message.kind, message.body
        if kind in (MessageKind.REPORT, MessageKind.RESULT):
            posted = list[Any]()
            all_gather = TreeAllGather(1, WORLD, lambda *args: posted.append(args))
            joined = all_gather.all_gather("step", 1, b"own")
            joined.send(None)
            try:
                all_gather.on_message(message)
                (future,) = all_gather._results.values()
                return all_gather_ends(joined) if future.done() else posted
            finally:
                joined.close()
        if kind is MessageKind.OUTPUT and message.task is not None and message.task.kind is not Kind.W:
            mailbox = Mailbox(graph, 1)
            mailbox.unpack(message.task, message.tensors, body)
            if message.task.kind is Kind.F:
                return mailbox._forward[message.task].unpack()
        if kind is MessageKind.CLOSED:
            ClosedPeers(RankActivity(lambda: 0.0)).on_message(message)
        if kind is MessageKind.ABORT:
            return origin_of(body)
        if kind.value in GROUP_KINDS:
            return GroupLink((0, 1, 2), lambda *_: None).read(message)
        return message

    yield decode


def all_gather_ends(joined: Coroutine[Any, Any, Any]) -> Any:
    """The values of all ranks, which are here."""
    try:
        joined.send(None)
    except StopIteration as end:
        return end.value
    raise AssertionError("its future is done, and it waits on")


# What ranks publish.

HOST = Host("boot", "0", "user:[1]", "net:[2]", "pid:[3]", address="rrfp-shm-0-1", sharing="double")
PROCESS = ProcessIdentity("a", 5)
COPIES = [records.to_plain(CopySettings("a", v, "(2, 3) of float", True, False, b"1")) for v in (0, 1)]


def _a_publication(random: Random) -> Any:
    settings = {
        "all": {"chunks": 1, "strict": None},
        "group": {},
        "copies": COPIES[1:] if random.random() < 0.5 else [],
    }
    verdict: Any = {"ties": [records.to_plain(Tie("a", (0, 1)))], "read": b"digest"}
    if random.random() < 0.4:
        verdict = {"error": random.choice(("ConfigError", "TransportError")), "text": "no", "read": b""}
    fields = {"process": 5, "descriptor": 7, "inode": 9, "size": 1 << 20}
    return random.choice(
        (
            ["host", asdict(HOST)],
            ["settings", settings],
            ["verdict", verdict],
            ["offer", ["", fields, 1 << 18, 5]],
            ["failed", records.to_plain(FailedStart(1, "ConfigError: no", PROCESS))],
        )
    )


def _as_publication(tree: Any) -> bytes:
    if type(tree) is list and len(tree) == 2 and isinstance(tree[0], str):
        return tree[0][:1].encode(errors="replace") + pack(tree[1])
    return b"h" + pack(tree)


def _read_publication(case: bytes) -> object:
    which, value = case[:1], case[1:]
    if which == b"t":
        return _shake(0, {"settings/run/0/1": value}, COPIES[:1])
    if which == b"v":
        return _shake(1, {"settings/run/0/verdict": value}, [])
    if which == b"f":
        return FailedStarts(Topology(0, 2), RUN_ID, _never, None)._read(value).process == PROCESS
    if which == b"o":
        reason = outcome(_Trial(context(), _Unreachable(), 0, 0.0)._try(value))  # type: ignore[arg-type]
        assert reason
        return reason
    published = Host.unpack(0, value)
    return published.pack(), published == HOST


async def _never(timeout_s: float) -> Any:
    raise AssertionError("nothing is looked up")


def _shake(rank: int, values: Mapping[str, bytes], copies: Sequence[Any]) -> tuple[Tie, ...]:
    met = LocalRendezvous()
    met._values.update(values)
    settings = tuple(records.from_plain(CopySettings, copy, "a copy") for copy in copies)
    hand = Handshake(
        {"chunks": 1, "strict": None}, Topology(rank, 2), TransportContext(rank, (), RUN_ID, met), {}, settings
    )
    outcome(hand.shake())
    return hand.ties


class _Unreachable:
    """A device that can open no memory of another process."""

    check_shared = staticmethod(DoubleSharing().check)

    async def open_shared(self, fields: Any, *, peer: int) -> Any:
        raise OSError("there is none")


# What a process reports to `rrfp top`.


def _a_report(random: Random) -> Any:
    answers = tuple(_made(random, RankAnswer) for _ in range(random.randint(1, 3)))
    survey = JobStatus(random.randrange(len(answers)), answers)
    return records.to_plain(JobReport(5, "2 stages, hint bf", survey if random.random() < 0.9 else None, "it ended"))


def _read_report(case: bytes) -> object:
    """As the command shows it, twice."""
    report = JobReport.read(case)
    if report.survey is None:
        return report.failure
    return table_of(report, rows(report.survey, report.survey), 120)


# Traces of other ranks.


def _a_trace(random: Random) -> Any:
    task = Task(random.choice(list(Kind)), random.randint(0, 3), 1)
    trace = StepTrace(
        *(random.randint(0, 3), 0.5, 2.5),
        (TaskSpan(1, task, 1.0, 2.0, random.choice((None, 0.75))),),
        (WaitSpan(1, random.choice(list(WaitCause)), 0.5, 1.0),),
        (MessageSpan(0, 1, task, random.choice((None, 0.25)), 0.5, 8),),
        peaks={1: Peaks(1, 2, 3, 4)},
    )
    return [random.randint(0, 1), to_plain(trace)]


def _as_traces(tree: Any) -> bytes:
    if type(tree) is list and len(tree) == 2 and type(tree[0]) is int:
        return bytes([tree[0] % 256]) + pack(tree[1])
    return b"\x00" + pack(tree)


@contextmanager
def _traces() -> Iterator[Decode]:
    """What rank 1 sends of its trace, beside rank 0's, is written to a file."""
    good = pack(_a_trace(Random(0))[1])
    clocks = [HostClock("here", (0, 1), ClockOffset()), HostClock("there", (2,), ClockOffset(0.25, 0.01))]
    with TemporaryDirectory(dir=_MEMORY) as folder:
        path = f"{folder}/trace.json"

        def decode(case: bytes) -> object:
            other = 1 + (case[0] % 2 if case else 0)
            if failure := _write(path, {0: good, other: case[1:]}, clocks, Topology(0, 3)):
                raise AssertionError(failure)
            return path

        yield decode


_MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

_BY_ALL = (ConfigError, ProtocolError, TransportError)

TARGETS: tuple[Target, ...] = (
    Target("records", (ProtocolError,), _a_record, _as_record, MSGPACK, plain(_read_record)),
    Target(
        *("messages", (FrameError, ProtocolError, PeerLostError, StageError), _a_message, as_case, MSGPACK),
        open=_messages,
    ),
    Target("publications", _BY_ALL, _a_publication, _as_publication, MSGPACK, plain(_read_publication)),
    Target("status-lines", (ProtocolError,), _a_report, to_json, JSON, plain(_read_report)),
    Target("traces-of-ranks", (ProtocolError,), _a_trace, _as_traces, MSGPACK, _traces),
)

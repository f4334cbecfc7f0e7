"""Checks of bad input: each bad frame is one FrameError that names the field, and good messages arrive.

The frames are written by hand, with msgpack alone, so that they test the format and not the code that writes it.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgpack
import torch

from rrfp.errors import FrameError
from rrfp.testing.checks import SkippedError
from rrfp.testing.transport_checks.pair import MakePair, Pair, PairOptions, data, index_of, pass_on, soon
from rrfp.transports.base import Channel, TransportContext
from rrfp.transports.rendezvous import LocalRendezvous
from rrfp.transports.wire.codec import MAX_HEADER_BYTES, VERSION, Codec

_MAX_MESSAGE_BYTES = 1 << 20


@dataclass(frozen=True)
class BadFrame:
    """A good header with some fields replaced."""

    #: The field that the error must name.
    fault: str
    #: Replaced header fields, by name.
    changes: Mapping[str, Any] = field(default_factory=dict)
    #: Tensor frames; by default the four bytes that the good header announces.
    frames: tuple[bytes, ...] = (b"abcd",)
    #: The whole header, in place of all fields.
    raw: bytes | None = None

    def header(self, run_id: str, sequence: int) -> bytes:
        if self.raw is not None:
            return self.raw
        fields: dict[str, Any] = {
            "version": VERSION,
            "run_id": run_id,
            "restart": 0,
            "sender": 0,
            "kind": "output",
            "channel": "forward",
            "sequence": sequence,
            "step": [3, "train", 8],
            "task": ["F", 0, 0],
            "tensors": [["uint8", [4], False]],
            "body": {},
        }
        packed: bytes = msgpack.packb(list({**fields, **self.changes}.values()))
        return packed


def _tensor(*entry: Any) -> dict[str, Any]:
    return {"tensors": [list(entry)]}


BAD_FRAMES: tuple[BadFrame, ...] = (
    BadFrame("header", raw=b"\xc1 not msgpack"),
    BadFrame("header", raw=b""),
    BadFrame("header", raw=msgpack.packb({"version": VERSION})),
    BadFrame("header", raw=b"\xdd\xff\xff\xff\xff"),
    BadFrame("header", raw=b"\x91" * 5000),
    BadFrame("header", raw=b"\x00" * (MAX_HEADER_BYTES + 1)),
    BadFrame("header", {"extra": 1}),
    BadFrame("version", {"version": VERSION + 1}),
    BadFrame("run_id", {"run_id": "another run"}),
    BadFrame("restart", {"restart": 1}),
    BadFrame("sender", {"sender": 99}),
    BadFrame("kind", {"kind": "attack"}),
    BadFrame("channel", {"channel": "sideways"}),
    BadFrame("sequence", {"sequence": -1}),
    BadFrame("step.mode", {"step": [3, "sleep", 8]}),
    BadFrame("step.microbatches", {"step": [3, "train", 0]}),
    BadFrame("task.kind", {"task": ["X", 0, 0]}),
    BadFrame("task.microbatch", {"task": ["F", -1, 0]}),
    BadFrame("tensors", {"tensors": "many"}),
    BadFrame("tensors[0].dtype", _tensor("object", [4], False)),
    BadFrame("tensors[0].shape", _tensor("uint8", [-4], False)),
    BadFrame("tensors[0].shape", _tensor("uint8", [1 << 62, 1 << 62, 0], False)),
    BadFrame("tensors[0].shape", _tensor("uint8", [1] * 65, False)),
    BadFrame("tensors[0].requires_grad", _tensor("uint8", [4], True)),
    BadFrame("tensors", _tensor("uint8", [1 << 40], False)),
    BadFrame("body", {"body": [1]}),
    BadFrame("header", {"body": {"time": msgpack.Timestamp(1)}}),
    BadFrame("body", {"body": {b"key": 1}}),
    BadFrame("frames", frames=(b"abc",)),
    BadFrame("frames", frames=(b"abcde",)),
    BadFrame("frames", frames=(b"ab", b"cd")),
)


async def check_bad_frames(make_pair: MakePair) -> None:
    """Malformed, oversized, foreign and wrong-run frames are dropped and named; messages between them arrive."""
    async with make_pair(PairOptions(max_message_bytes=_MAX_MESSAGE_BYTES)) as pair:
        if pair.inject is None:
            raise SkippedError("the pair has no `inject` to send bad frames")
        for count, bad in enumerate(BAD_FRAMES):
            await _inject(pair, pair.inject, bad, count)
            message = await pass_on(pair, data(torch.ones(2), index=count))
            assert index_of(message) == count, f"after bad {bad.fault}, message {index_of(message)} came, not {count}"
        dropped = pair.right.statistics().dropped_frames
        assert dropped == len(BAD_FRAMES), f"dropped_frames is {dropped}, must be {len(BAD_FRAMES)}"


async def _inject(
    pair: Pair, inject: Callable[[Channel, bytes, Sequence[bytes]], Awaitable[None]], bad: BadFrame, sequence: int
) -> None:
    await inject(Channel.FORWARD, bad.header(pair.run_id, sequence), bad.frames)
    try:
        await soon(pair.right.receive(), f"bad {bad.fault} is raised")
    except FrameError as error:
        _assert_names(error, bad)
        return
    raise AssertionError(f"bad {bad.fault} was received as a message")


def check_codec() -> None:
    """`rrfp.transports.Codec` refuses every bad frame: for transports that use its codec, beside `check_bad_frames`.

    Raises:
        AssertionError: naming the frame that it accepted.
    """
    for bad in BAD_FRAMES:
        _decode_alone(bad)


def _decode_alone(bad: BadFrame) -> None:
    context = TransportContext(1, (0,), "run", LocalRendezvous(), max_message_bytes=_MAX_MESSAGE_BYTES)
    try:
        Codec(context).decode(bad.header("run", 0), [memoryview(frame) for frame in bad.frames])
    except FrameError as error:
        _assert_names(error, bad)
        return
    raise AssertionError(f"bad {bad.fault} was decoded")


def _assert_names(error: FrameError, bad: BadFrame) -> None:
    assert error.field.startswith(bad.fault), f"bad {bad.fault} was reported as {error.field}: {error.reason}"
    assert error.reason, f"the error for {bad.fault} gives no reason"

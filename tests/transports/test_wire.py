"""The codec: what is written is read back, and no bytes whatever lead to anything but a message or a FrameError."""

from __future__ import annotations

import math
import tracemalloc
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import numpy as np
import pytest
import torch
from batches import examples
from hypothesis import given
from hypothesis import strategies as st

from rrfp.errors import ConfigError, FrameError
from rrfp.model.tasks import Kind, Mode, StepId, Task
from rrfp.testing.transport_checks.pair import assert_same, data
from rrfp.transports.base import Channel, Message, MessageKind, TransportContext
from rrfp.transports.rendezvous import LocalRendezvous
from rrfp.transports.wire.codec import MAX_HEADER_BYTES, VERSION, Codec
from rrfp.transports.wire.header_checks import MAX_BODY_DEPTH
from rrfp.transports.wire.tensor_bytes import ALIGNMENT, DTYPES, allocate, as_bytes, copied_from, from_buffer

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")

CAP_BYTES = 1 << 20
NUMBERS = st.integers(0, 2**63 - 1)


def codec(stage: int, **changes: Any) -> Codec:
    fields: dict[str, Any] = {"rank": stage, "peers": (1 - stage,), "run_id": "run", "rendezvous": LocalRendezvous()}
    return Codec(TransportContext(**(fields | {"max_message_bytes": CAP_BYTES} | changes)))


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor | None:
    if draw(st.booleans()) and draw(st.booleans()):
        return None
    dtype = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    raw = torch.randint(0, 2, (math.prod(shape) * dtype.itemsize,), dtype=torch.uint8)
    tensor = raw.view(dtype).view(shape) if raw.numel() else torch.empty(shape, dtype=dtype)
    if len(shape) > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, 1)
    grad = (dtype.is_floating_point or dtype.is_complex) and draw(st.booleans())
    return tensor.requires_grad_(grad)


PLAIN: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)

MESSAGES = st.builds(
    Message,
    channel=st.sampled_from(Channel),
    kind=st.sampled_from(MessageKind),
    step=st.none() | st.builds(StepId, NUMBERS, st.sampled_from(Mode), st.integers(1, 2**63 - 1)),
    task=st.none() | st.builds(Task, st.sampled_from(Kind), NUMBERS, NUMBERS),
    tensors=st.lists(tensors(), max_size=4).map(tuple),
    body=st.dictionaries(st.text(max_size=5), PLAIN, max_size=3),
    sequence=NUMBERS,
)


@given(MESSAGES)
@examples(150)
def test_what_is_written_is_read_back(message: Message) -> None:
    received = codec(1).decode(*codec(0).encode(message, message.sequence))
    assert received.sender == 0
    for field in ("channel", "kind", "step", "task", "body", "sequence"):
        assert getattr(received, field) == getattr(message, field)
    assert len(received.tensors) == len(message.tensors)
    for got, want in zip(received.tensors, message.tensors, strict=True):
        assert_same(got, want, "tensor")


@given(st.binary(max_size=200))
@examples(300)
def test_arbitrary_bytes_are_a_frame_error(header: bytes) -> None:
    with pytest.raises(FrameError):
        codec(1).decode(header, [])


@given(st.data())
@examples(400)
def test_damaged_headers_give_a_message_or_a_frame_error(source: st.DataObject) -> None:
    """Bytes of a good header are overwritten, cut and inserted: most changes get past msgpack to the field checks."""
    message = data(torch.ones(3), None, torch.zeros(2, dtype=torch.int64), index=3, text="x")
    good, frames = codec(0).encode(message)
    header = bytearray(good)
    for _ in range(source.draw(st.integers(1, 4))):
        at = source.draw(st.integers(0, len(header) - 1))
        piece = source.draw(st.binary(max_size=3))
        header[at : at + source.draw(st.integers(0, 3))] = piece
        if not header:
            break
    _decode_or_frame_error(bytes(header), frames, good)


@given(st.integers(0, 10), PLAIN)
@examples(400)
def test_any_value_in_any_field_gives_a_message_or_a_frame_error(position: int, value: Any) -> None:
    good, frames = codec(0).encode(data(torch.ones(3), index=3))
    fields = msgpack.unpackb(good)
    fields[position] = value
    _decode_or_frame_error(msgpack.packb(fields), frames, good)


def _decode_or_frame_error(header: bytes, frames: list[memoryview], knowing: bytes) -> None:
    """A codec that has read the header ``knowing`` gives the same as one that has read nothing."""
    experienced = codec(1)
    experienced.decode(knowing, frames)
    for _ in range(2):
        assert _outcome(experienced, header, frames) == _outcome(codec(1), header, frames)


def _outcome(reader: Codec, header: bytes, frames: list[memoryview]) -> str:
    """All fields and the tensors, with their types, or the error."""
    try:
        received = reader.decode(header, frames)
    except FrameError as error:
        return f"{error.peer} {error.field} {error}"
    return repr(
        (replace(received, tensors=()), [(t if t is None else (t.dtype, t.shape, t)) for t in received.tensors])
    )


TENSOR = ["float32", [2, 1], True]
STEP = [1, "train", 4]


@pytest.mark.parametrize(
    ("position", "value", "field"),
    [
        (7, [True, "train", 4], "step.number"),
        (7, [1.0, "train", 4], "step.number"),
        (7, [1, "train", 4.0], "step.microbatches"),
        (7, [1, "Train", 4], "step.mode"),
        (9, [["float32", [2, True], True]], "tensors[0].shape"),
        (9, [["float32", [2.0, 1], True]], "tensors[0].shape"),
        (9, [["float32", [2, 1], 1]], "tensors[0].requires_grad"),
        (9, [["float32", [2, 1], 1.0]], "tensors[0].requires_grad"),
        (9, [[b"float32", [2, 1], True]], "tensors[0].dtype"),
        (9, [TENSOR, TENSOR], "frames"),
        (9, [["float32", [1, 1], True]], "frames[0]"),
        (9, [["float64", [2, 1], True]], "frames[0]"),
        (6, True, "sequence"),
        (8, ["F", True, 0], "task.microbatch"),
        (4, "attack", "kind"),
        (5, "sideways", "channel"),
        (9, [[[]]], "tensors[0]"),
    ],
)
def test_a_header_that_python_calls_equal_to_a_known_one_is_checked_all_the_same(
    position: int, value: Any, field: str
) -> None:
    reader = codec(1)
    fields = [VERSION, "run", 0, 0, "output", "forward", 1, STEP, ["F", 1, 0], [TENSOR], {}]
    frames = [memoryview(bytearray(8))]
    reader.decode(msgpack.packb(fields), frames)
    fields[position] = value
    for _ in range(2):
        with pytest.raises(FrameError) as caught:
            reader.decode(msgpack.packb(fields), frames)
        assert caught.value.field == field


def test_what_a_codec_knows_is_bounded_however_many_shapes_a_peer_announces() -> None:
    writer, reader = codec(0), codec(1)
    tracemalloc.start()
    try:
        for size in range(1000):
            reader.decode(*writer.encode(data(torch.empty((0, size, *[1] * 60)))))
        assert tracemalloc.get_traced_memory()[0] < 512 << 10
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "header",
    [
        pytest.param(b"\xdd\x00\x10\x00\x00" * 1000, id="nested arrays that claim a million items"),
        pytest.param(b"\xc6\xff\xff\xff\xff", id="4 GiB of bytes"),
        pytest.param(b"\xdf\xff\xff\xff\xff", id="4 billion keys"),
        pytest.param(b"\xc9\xff\xff\xff\xff\x00", id="4 GiB of extension"),
        pytest.param(b"\x91" * 60000, id="deep"),
    ],
)
def test_claims_are_refused_before_memory_is_taken(header: bytes) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(FrameError):
            codec(1).decode(header, [])
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def test_announced_tensors_are_refused_before_memory_is_taken() -> None:
    header = codec(0, max_message_bytes=1 << 62).seal(
        "output", "forward", 0, None, None, [["float32", [1 << 40], False]], {}
    )
    with pytest.raises(FrameError, match="max_message_bytes"):
        codec(1).decode(header, [])


@pytest.mark.parametrize(
    ("changes", "field"), [({"run_id": "other"}, "run_id"), ({"restart": 2}, "restart")], ids=["run", "restart"]
)
def test_frames_of_another_life_are_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(FrameError) as caught:
        codec(1).decode(*codec(0, **changes).encode(data()))
    assert (caught.value.peer, caught.value.field) == (None, field)


def test_own_stage_is_not_a_peer() -> None:
    with pytest.raises(FrameError, match="sender"):
        codec(1).decode(*codec(1).encode(data()))


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 0


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        pytest.param(data(text="x" * MAX_HEADER_BYTES), "header", id="body too large"),
        pytest.param(data(thing=object()), "plain data", id="object"),  # type: ignore[arg-type]
        pytest.param(data(number=1 << 70), "plain data", id="huge number"),
        pytest.param(data(deep=nested(MAX_BODY_DEPTH)), "nested deeper than 16", id="body too deep"),
        pytest.param(data(map={1: 2}), "keys must be strings", id="integer key"),  # type: ignore[dict-item]
        pytest.param(data(map={b"x": 2}), "keys must be strings", id="bytes as key"),  # type: ignore[dict-item]
        pytest.param(data(items=[0] * 9000), "array or a map of 9000 items", id="long list"),
        pytest.param(data(time=msgpack.Timestamp(1)), "cannot be sent", id="extension type"),
        pytest.param(data(torch.zeros(2, device="meta")), "the CPU", id="other device"),
        pytest.param(data(torch.zeros((1,) * 65)), "65 dimensions", id="many dimensions"),
        pytest.param(data(*[None] * 9000), "9000 tensors", id="many tensors"),
    ],
)
def test_a_message_that_a_receiver_would_refuse_is_the_callers_error(message: Message, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        codec(0).encode(message)


def test_contiguous_tensors_are_sent_from_where_they_are() -> None:
    tensor = torch.arange(10)
    _, (frame,) = codec(0).encode(data(tensor))
    tensor[0] = 7
    assert frame[0] == 7


def test_aligned_memory_is_used_in_place_and_other_memory_copied() -> None:
    memory = allocate(68)
    memory[:] = bytes(68)
    aligned = from_buffer(memory[:64], torch.uint8, (64,), requires_grad=False)
    shifted = from_buffer(memory[4:], torch.uint8, (64,), requires_grad=False)
    memory[10] = 1
    assert (int(aligned[10]), int(shifted[6])) == (1, 0)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("make", [from_buffer, copied_from])
def test_a_tensor_is_made_over_memory_at_any_address(make: Callable[..., torch.Tensor], dtype: torch.dtype) -> None:
    """Small tensors follow a header, so their bytes begin anywhere; torch crashes on some that are not aligned."""
    content = bytes(range(3 * dtype.itemsize)) if dtype is not torch.bool else b"\1\0\1"
    for start in range(ALIGNMENT):
        memory = allocate(ALIGNMENT + len(content))
        memory[start : start + len(content)] = content
        tensor = make(memory[start : start + len(content)], dtype, (3,), requires_grad=False)
        assert bytes(as_bytes(tensor)) == content
        assert tensor.data_ptr() % ALIGNMENT == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(32,), (4, 8)])
def test_a_received_tensor_keeps_the_view_that_it_was_made_over(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """The end of a slot's or a buffer's view says that its memory may be used for another message."""
    view: Any = np.frombuffer(allocate(32 * dtype.itemsize), np.uint8).view()
    reference = weakref.ref(view)
    tensor = from_buffer(memoryview(view), dtype, shape, requires_grad=False)
    del view
    assert reference() is not None
    del tensor
    assert reference() is None


def test_read_only_memory_is_copied_without_a_warning() -> None:
    tensor = from_buffer(memoryview(bytes(range(16))), torch.uint8, (4, 4), requires_grad=False)
    tensor[0, 0] = 9
    assert bytes(as_bytes(tensor)) == bytes([9, *range(1, 16)])


def test_version_is_the_first_thing_in_a_header() -> None:
    assert msgpack.unpackb(codec(0).seal("bye"))[0] == VERSION


@pytest.mark.parametrize("depth", [300, 600, 990, 1010, 1023])
@pytest.mark.parametrize("position", range(11))
def test_values_nested_as_deep_as_msgpack_reads_them_are_frame_errors(position: int, depth: int) -> None:
    parts = [msgpack.packb(field) for field in msgpack.unpackb(codec(0).encode(data(torch.ones(3)))[0])]
    parts[position] = b"\x91" * depth + b"\xc0"
    with pytest.raises(FrameError):
        codec(1).decode(b"\x9b" + b"".join(parts), [])


def test_errors_name_the_rank_of_the_connection_and_no_claimed_one() -> None:
    seal = [VERSION, "run", 0, 0, "output"]
    for fields in ([*seal[:3], 5, "output"], [VERSION + 1, *seal[1:]], [*seal[:4], 7]):
        for peer in (None, 0):
            with pytest.raises(FrameError) as caught:
                codec(1).open(msgpack.packb(fields), peer)
            assert caught.value.peer == peer
    with pytest.raises(FrameError, match="rank 3: sender: is 0, but the connection is not that rank's"):
        codec(1, peers=(0, 3)).open(msgpack.packb(seal), 3)

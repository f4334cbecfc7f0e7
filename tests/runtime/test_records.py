"""Records that ranks exchange: what was packed is read again, and nothing else is taken for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack
import pytest

from rrfp.compute.gradients.ties import CopySettings, Tie
from rrfp.errors import ProtocolError
from rrfp.runtime.grad_clipping import NormShare
from rrfp.runtime.records import from_plain, pack, to_plain, unpack


@dataclass(frozen=True)
class Inner:
    number: float


@dataclass(frozen=True)
class Outer:
    count: int
    flag: bool
    text: str | None
    data: bytes
    inner: Inner
    names: tuple[str, ...] = ()
    values: Mapping[int, float] = field(default_factory=dict)


FULL = Outer(1, True, "x", b"y", Inner(0.5), ("a", "b"), {3: 0.25, 1: 1.0})
SETTINGS = CopySettings("a", 3, "(2, 3) of float", True, False, b"1")
TIES = (Tie("c", (0, 1)), Tie("a", (0, 3), True))


@pytest.mark.parametrize(
    "record", [FULL, Outer(0, False, None, b"", Inner(0.0)), SETTINGS, NormShare(1.0, 2.0, True, 0.0)]
)
def test_a_record_travels_as_bytes(record: Any) -> None:
    assert unpack(type(record), pack(record), "it") == record


def test_records_travel_inside_other_plain_data() -> None:
    carried = msgpack.unpackb(msgpack.packb({"ties": to_plain(TIES), "copies": to_plain([SETTINGS])}))
    assert from_plain(tuple[Tie, ...], carried["ties"], "ties") == TIES
    assert from_plain(tuple[CopySettings, ...], carried["copies"], "copies") == (SETTINGS,)


def test_an_integer_is_read_as_the_number_that_it_is_declared_as() -> None:
    read = from_plain(Inner, {"number": 3}, "it")
    assert type(read.number) is float
    assert read == Inner(3.0)


PLAIN: dict[str, Any] = to_plain(FULL)


@pytest.mark.parametrize(
    ("plain", "text"),
    [
        (None, "None is no record of count, flag"),
        ([], r"\[\] is no record of count, flag"),
        ({}, "{} is no record of count, flag"),
        ({**PLAIN, "extra": 1}, "is no record of count, flag"),
        ({**PLAIN, "count": True}, "True is no int"),
        ({**PLAIN, "count": 1.0}, "1.0 is no int"),
        ({**PLAIN, "flag": 1}, "1 is no bool"),
        ({**PLAIN, "text": b"x"}, "b'x' is no str"),
        ({**PLAIN, "data": None}, "None is no bytes"),
        ({**PLAIN, "inner": 5}, "5 is no record of number"),
        ({**PLAIN, "inner": {"number": "x"}}, "'x' is no float"),
        ({**PLAIN, "names": "ab"}, "'ab' is no list"),
        ({**PLAIN, "names": ["a", 1]}, "1 is no str"),
        ({**PLAIN, "values": [[1]]}, "not enough values"),
        ({**PLAIN, "values": [[[1], 2.0]]}, r"\[1\] is no int"),
        ({**PLAIN, "values": [1]}, "cannot unpack"),
    ],
)
def test_what_is_no_such_record_is_refused(plain: Any, text: str) -> None:
    with pytest.raises(ProtocolError, match=f"a test record cannot be read: .*{text}"):
        unpack(Outer, msgpack.packb(plain), "a test record")


def test_an_integer_longer_than_messages_carry_is_refused() -> None:
    """JSON has them."""
    for count in (-(2**63) - 1, 2**64, 10**400):
        with pytest.raises(ProtocolError, match=r"it cannot be read: .* is no integer of 64 bits"):
            from_plain(Outer, {**PLAIN, "count": count}, "it")
    for count in (-(2**63), 2**64 - 1):
        assert from_plain(Outer, {**PLAIN, "count": count}, "it").count == count


@pytest.mark.parametrize("depth", range(300, 1020, 40))
def test_no_depth_of_lists_escapes_as_another_error(depth: int) -> None:
    for start, end in ((b"", b""), (b"", b"more"), (b"\x93\x91", b""), (pack(FULL)[:1] + b"\xa5count", b"")):
        with pytest.raises(ProtocolError, match="a test record cannot be read"):
            unpack(Outer, start + b"\x91" * depth + b"\xc0" + end, "a test record")


def test_a_number_beyond_the_floats_is_refused() -> None:
    with pytest.raises(ProtocolError, match="a test record cannot be read"):
        from_plain(Inner, {"number": 10**400}, "a test record")


def test_the_error_does_not_repeat_all_of_a_long_record() -> None:
    with pytest.raises(ProtocolError) as caught:
        unpack(Outer, msgpack.packb(["x" * 10_000] * 100), "a test record")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("data", [b"", b"\xc1", pack(FULL)[:-1], pack(FULL) + b"\x00"])
def test_bytes_that_are_no_plain_data_are_refused(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="a test record cannot be read"):
        unpack(Outer, data, "a test record")

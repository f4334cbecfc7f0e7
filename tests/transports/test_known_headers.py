"""The memory for checked headers: bounded in bytes too, and nobody can change what it holds."""

from __future__ import annotations

import transports.makers as makers

from rrfp.transports.wire.codec import Codec


def codec() -> Codec:
    return Codec(makers.contexts()[1])


def header(tensors: list[object]) -> bytes:
    return Codec(makers.contexts()[0]).seal("output", "forward", 0, None, None, tensors, {})


def test_a_header_of_thousands_of_tensors_is_checked_but_not_kept() -> None:
    """Its checked fields would take up to fifteen times its bytes."""
    receiver = codec()
    for size in range(3):
        spec = ["uint8", [size], False]
        assert len(receiver.announcement(receiver.open(header([spec] * 4000))).specs) == 4000
    assert receiver._known._known == {}
    receiver.announcement(receiver.open(header([spec])))
    assert len(receiver._known._known) == 1


def test_checked_fields_that_messages_share_cannot_be_changed() -> None:
    receiver = codec()
    first, second = (receiver.announcement(receiver.open(header([["uint8", [7], False]]))) for _ in range(2))
    assert first.sizes is second.sizes
    assert first.specs is second.specs
    assert isinstance(hash((first.sizes, first.specs)), int)

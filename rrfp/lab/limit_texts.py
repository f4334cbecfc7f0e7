"""Limits of simulated hints that only the simulator takes."""

from __future__ import annotations

from rrfp.memory.admission import Limit, bytes_of

#: In front of a limit on microbatches: as many bytes on each stage as the hint holds there under that limit.
SAME_BYTES = "bytes:"


def counts_bytes(spec: Limit | int | str | None) -> bool:
    """Whether ``spec`` limits bytes, so that the cost table needs them."""
    if isinstance(spec, Limit):
        return spec.bytes is not None
    return isinstance(spec, str) and (spec.startswith(SAME_BYTES) or bytes_of(spec) is not None)

"""Limits of simulated hints: the default, and those that only the simulator takes."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rrfp.memory.admission import Limit

#: The limit of a simulated hint where none is given.
DEFAULT_LIMIT = "2n"

#: In front of a limit on microbatches: as many bytes on each stage as the hint holds there under that limit.
SAME_BYTES = "bytes:"


def counts_bytes(spec: Limit | int | str | None) -> bool:
    """Whether ``spec`` limits bytes, so that the cost table needs them."""
    from rrfp.memory.admission import Limit, bytes_of

    if isinstance(spec, Limit):
        return spec.bytes is not None
    return isinstance(spec, str) and (spec.startswith(SAME_BYTES) or bytes_of(spec) is not None)

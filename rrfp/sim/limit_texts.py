"""Limits of simulated hints that only the simulator takes: in bytes, as texts."""

from __future__ import annotations

import re

from rrfp.core.admission import Limit

#: In front of a limit on microbatches: as many bytes on each stage as the hint holds there under that limit.
SAME_BYTES = "bytes:"

_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(rf"(\d+)({'|'.join(_UNITS)})")
#: The forms of a text, for errors, beside those of `Limit.resolve`.
_OTHERS = ", or a size such as 8MB"


def limit_of(spec: Limit | int | str | None, stage: int, stages: int, distance: int | None = None) -> Limit:
    """The limit of ``stage`` that a caller's ``spec`` means: as `Limit.resolve`, or a size such as ``8MB``.

    Args:
        spec: without `SAME_BYTES`; a size is a whole number of B, kB, MB or GB (powers of 1000).
        stage: 0..stages-1.
        stages: N.
        distance: as in `Limit.resolve`.

    Raises:
        ConfigError: for anything else.
    """
    size = _SIZE.fullmatch(spec) if isinstance(spec, str) else None
    if size is None:
        return Limit.resolve(spec, stage, stages, _OTHERS if isinstance(spec, str) else "", distance=distance)
    return Limit(bytes=int(size[1]) * _UNITS[size[2]])


def counts_bytes(spec: Limit | int | str | None) -> bool:
    """Whether ``spec`` limits bytes, so that the cost table needs them.

    Args:
        spec: right by itself.
    """
    if isinstance(spec, Limit):
        return spec.bytes is not None
    return isinstance(spec, str) and (spec.startswith(SAME_BYTES) or _SIZE.fullmatch(spec) is not None)

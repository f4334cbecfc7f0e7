"""Memory rules that deadlock, kept so that the explorer can show how; nothing but the explorer may use them.

Each differs from `rrfp.core.admission.Admission` in how many slots a forward leaves free when it starts, and in nothing
else. What each deadlocks on is in docs/memory-rules.md.
"""

from __future__ import annotations

from rrfp.core.admission import Admission


class BackwardDrain(Admission):
    """Any forward while D < K*C, only backwards from there on: the paper's rule for C = 1, wrong for C > 1.

    This is what remains of the staircase when no slot is kept for the deeper chunks.
    """

    __slots__ = ()

    def kept_free(self, chunk: int, *, is_lowest: bool) -> int:
        """None; the reserve rule is left as it is."""
        return 0 if is_lowest else self._chunks


class Unreserved(Admission):
    """The staircase without the reserve rule, wrong as soon as an order is forced."""

    __slots__ = ()

    def kept_free(self, chunk: int, *, is_lowest: bool) -> int:
        """What the staircase keeps, for every microbatch."""
        return self._chunks - 1 - chunk


class LastSlotReserved(Admission):
    """The staircase with one reserved slot, the last: right for C = 1 in a forced order, wrong for C > 1."""

    __slots__ = ()

    def kept_free(self, chunk: int, *, is_lowest: bool) -> int:
        """What the staircase keeps, and the last slot for the lowest microbatch."""
        staircase = self._chunks - 1 - chunk
        return staircase if is_lowest else max(staircase, 1)


class StepReserved(Admission):
    """The staircase with one reserved slot on each of its steps; in a forced order wrong for C > 1 as well."""

    __slots__ = ()

    def kept_free(self, chunk: int, *, is_lowest: bool) -> int:
        """What the staircase keeps, and one slot more for the lowest microbatch of the chunk."""
        staircase = self._chunks - 1 - chunk
        return staircase if is_lowest else staircase + 1

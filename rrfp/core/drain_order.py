"""The order in which a full stage drains its microbatches under the paper's rule (Appendix C, several chunks)."""

from __future__ import annotations

from collections.abc import Sequence

from rrfp.core.tasks import Kind, Task
from rrfp.core.visits import Skipped, Visits


class DrainOrder:
    """Microbatch by microbatch, each F of the shallowest chunk to the deepest, then B, with its W, back.

    ``virtual_stages`` are in chunk order; ``kinds`` has, for each of them, what a microbatch that visits it runs.
    """

    __slots__ = ("_all", "_bits", "_lowest", "_order", "_ran")

    def __init__(self, virtual_stages: Sequence[int], kinds: Sequence[Sequence[Kind]], visits: Visits) -> None:
        forwards = [(Kind.F, v) for v in virtual_stages]
        returns = [
            (kind, v)
            for v, kinds_here in reversed(tuple(zip(virtual_stages, kinds, strict=True)))
            for kind in kinds_here
            if kind is not Kind.F
        ]
        self._order = (*forwards, *returns)
        self._bits = {pair: 1 << index for index, pair in enumerate(self._order)}
        self._all = (1 << len(self._order)) - 1
        #: By microbatch, what has run of it or is skipped.
        self._ran = [self._skipped(visits.skipped_by(microbatch)) for microbatch in range(visits.microbatches)]
        self._lowest = 0
        self._advance()

    def _skipped(self, skipped: Skipped) -> int:
        return sum(bit for (_, virtual_stage), bit in self._bits.items() if virtual_stage in skipped) if skipped else 0

    def note(self, task: Task) -> None:
        """``task`` was enqueued."""
        self._ran[task.microbatch] |= self._bits[task.kind, task.virtual_stage]
        self._advance()

    def _advance(self) -> None:
        while self._lowest < len(self._ran) and self._ran[self._lowest] == self._all:
            self._lowest += 1

    def due(self) -> Task | None:
        """The next task in this order, or None when all have been enqueued."""
        if self._lowest == len(self._ran):
            return None
        ran = self._ran[self._lowest]
        kind, virtual_stage = next(pair for pair, bit in self._bits.items() if not ran & bit)
        return Task(kind, self._lowest, virtual_stage)

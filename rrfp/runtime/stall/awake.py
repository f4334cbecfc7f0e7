"""Time in which this process ran: one that was suspended, with all its peers, was neither idle nor slow meanwhile."""

from __future__ import annotations

import asyncio
import math

from rrfp import timeouts

#: Slices of a limit: after each, the loop looks at its clock.
_SLICES = 4


class AwakeTime:
    """Sleeps in slices of ``limit``, and notices when one took far longer. Used on one loop only."""

    def __init__(self, limit: float) -> None:
        self._now = asyncio.get_running_loop().time
        self._slice = limit / _SLICES
        self._went_on_at = -math.inf

    def seconds(self) -> float:
        """Since the process last went on after a suspension, or its loop after a call that blocked it."""
        return self._now() - self._went_on_at

    async def sleep(self, seconds: float) -> None:
        """Sleep for a slice, or ``seconds`` if that is less."""
        seconds = min(seconds, self._slice)
        due = self._now() + seconds
        await asyncio.sleep(seconds)
        if self._now() - due > timeouts.ANSWER_S:
            self._went_on_at = self._now()

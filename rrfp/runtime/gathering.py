"""What all ranks give each other between two steps, because their callers ask for it."""

from __future__ import annotations

from rrfp.runtime.all_gather import TreeAllGather
from rrfp.runtime.departures import Departures
from rrfp.runtime.stall.progress import Progress


class Gathering:
    """One rank's part. Every rank gathers equally often.

    Args:
        all_gather: the all-gather over all ranks.
        departures: peers that left.
        progress: counts gatherings.
    """

    def __init__(self, all_gather: TreeAllGather, departures: Departures, progress: Progress) -> None:
        self._all_gather = all_gather
        self._departures = departures
        self._progress = progress

    async def gather(self, own: bytes) -> list[bytes]:
        """Give ``own`` to all ranks, and hear what each of them gives, by rank.

        Raises:
            PeerLostError: if a peer left before this gathering.
        """
        number = self._progress.gatherings_ended
        self._departures.check_gathering(number)
        self._progress.touch()
        self._progress.is_gathering = True
        told = await self._all_gather.all_gather("gather", number, own)
        self._progress.is_gathering = False
        self._progress.gatherings_ended += 1
        return told

"""A limit on bytes: which forwards fit. Owned by `rrfp.core.admission.Admission`, beside the ledger of what is held.

A forward of chunk c fits if all of this together is within the limit: what is held; what the backwards to come are
expected to add to that; and the largest size expected for each forward that runs, for each chunk from c on, and under
the reserve rule for a whole lowest microbatch. So the limit is passed by no more than what one forward turns out larger
than all that are remembered (`rrfp.core.seen_sizes`): while a forward is in flight whose signature none of them had, no
other one starts, and the next one starts from what it showed. Forwards of a known signature may surprise all the same
where that does not decide their size; then those that run at once do.

On the leader of a group a forward is in flight until all ranks have reported what it left behind: until then it counts
with what is expected.
"""

from __future__ import annotations

from collections.abc import Hashable

from rrfp.core.held_bytes import HeldBytes, Owner
from rrfp.core.seen_sizes import SeenSizes
from rrfp.core.tasks import B, F, Kind


class ByteLimit:
    """See the module's docstring. ``members`` counts this rank and the followers that report to it."""

    def __init__(self, most: int, held: HeldBytes, seen: SeenSizes, *, reserve: bool, members: int) -> None:
        self._most = most
        self._held = held
        self._seen = seen
        self._reserve = reserve
        self._members = members
        #: Microbatches that hold a slot, by chunk.
        self._holders: list[set[int]] = [set() for _ in seen.expected]
        #: Forwards in flight: the ranks that have not reported the bytes; and how many forwards there are by chunk.
        self._unreported: dict[Owner, int] = {}
        self._in_flight = [0] * len(seen.expected)
        #: Their signatures, and those among them whose signature no earlier one had.
        self._signatures: dict[Owner, Hashable] = {}
        self._measured: set[Owner] = set()
        #: Owners between forward and backward on this rank.
        self._before_backward: set[Owner] = set()

    def fits(self, chunk: int, *, is_lowest: bool) -> bool:
        """Whether a forward of ``chunk`` leaves room for those that must follow it; see `rrfp.core.admission`."""
        sizes = [largest.held for largest in self._seen.expected]
        running = sum(count * size for count, size in zip(self._in_flight, sizes, strict=True))
        needed = sum(sizes[chunk:]) + (0 if is_lowest else sum(sizes))
        return self._held.worst + self._growth_to_come() + running + needed <= self._most

    @property
    def is_measuring(self) -> bool:
        """Whether a forward runs, on some rank, whose size is not known and about to be."""
        return bool(self._measured)

    @property
    def measured(self) -> frozenset[Owner]:
        """Those forwards."""
        return frozenset(self._measured)

    def _growth_to_come(self) -> int:
        """What backwards are expected to add, for each chunk by the lesser of the two ways to expect it."""
        total = 0
        for chunk, largest in enumerate(self._seen.expected):
            if largest.growth:
                held = [self._held.worst_of(owner) for owner in self._before_backward if owner[0] == chunk]
                total += min(len(held) * largest.growth, int(sum(held) * largest.growth_share))
        return total

    def must_go_on(self, chunk: int, microbatch: int) -> bool:
        """Whether no memory held here will be freed before this forward has run."""
        holders = set[int]().union(*self._holders[chunk:])
        return not holders or (self._reserve and microbatch < min(holders))

    def start(self, owner: Owner, signature: Hashable) -> None:
        """The forward of ``owner`` was enqueued; see `rrfp.core.events.Enqueued` for its ``signature``."""
        chunk, microbatch = owner
        self._holders[chunk].add(microbatch)
        self._in_flight[chunk] += 1
        self._unreported[owner] = self._members
        self._signatures[owner] = signature
        if not self._seen.has_seen(chunk, signature):
            self._measured.add(owner)

    def complete(self, kind: Kind, owner: Owner, held: int, output: int, member: int = 0) -> None:
        """A task of ``owner`` completed on ``member``; called before the ledger has what it left."""
        chunk = owner[0]
        self._seen.saw(chunk, held + output)
        if kind is F:
            self._forwarded(owner)
        elif kind is B and self.is_in_work(owner):
            self._seen.saw_growth(chunk, self._held.of(owner, member), held + output)
        if member == 0:
            (self._before_backward.add if kind is F else self._before_backward.discard)(owner)

    def is_in_work(self, owner: Owner) -> bool:
        """Whether the microbatch is in work on this rank: not done, and nothing freed."""
        return owner[1] in self._holders[owner[0]]

    def _forwarded(self, owner: Owner) -> None:
        if owner not in self._unreported:
            return  # it is done and free on this rank already
        self._unreported[owner] -= 1
        if not self._unreported[owner]:
            self._seen.saw_signature(owner[0], self._signatures[owner])
            self._leave_flight(owner)

    def free(self, owner: Owner) -> None:
        """The microbatch is done on the chunk."""
        chunk, microbatch = owner
        self._holders[chunk].discard(microbatch)
        self._before_backward.discard(owner)
        if owner in self._unreported:
            self._leave_flight(owner)

    def _leave_flight(self, owner: Owner) -> None:
        del self._unreported[owner]
        del self._signatures[owner]
        self._measured.discard(owner)
        self._in_flight[owner[0]] -= 1

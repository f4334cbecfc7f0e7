"""A limit on bytes: which forwards fit. Owned by a `rrfp.memory.rules.MemoryRule`, beside the ledger of what is held.

A forward of chunk c fits if all of this together is within the limit: what is held; what the backwards to come are
expected to add to that; what the forwards that run and this one are expected to leave, each microbatch its own bytes
(`seen_sizes`); and room for one forward of each deeper chunk, the largest that is still to come there, as far
as the microbatches that hold that chunk now would not free as much. Under the reserve rule a later microbatch also
leaves room for a whole lowest one. So the limit is passed by no more than what one forward turns out larger than
expected: while a forward is in flight whose signature none before it had, no other one starts, and the next one starts
from what it showed; and one whose program tells no signature counts in flight as the largest. Forwards of a known
signature may surprise all the same where that does not decide their size; then those that run at once do.

Why deeper chunks count what they hold. Let H be what a chunk holds and R the largest to come on it, 0 for chunk 0. Each
forward keeps the sum over the chunks of max(H, R) within the limit. A forward that must start on chunk c, since nothing
is held from c on, needs at most R on each chunk from c on, and that much is free.

**Weight tasks before backwards.** A split backward may leave more than its forward did: inputs and output gradients,
for W. Room for what all backwards to come add would be much room, and most of it in vain, since W frees a microbatch
whole. So room is kept for the largest addition alone, and a backward that does not fit is held back while a weight task
is ready here, which makes room. Weight tasks wait for nothing but their own backward, so whatever the hint, a stage
with a backward to run has something to run; and once no weight task is left, what was kept free is enough for any
backward. W does not free what the backward sends, which takes the place of what the microbatch held; where it is larger
than that, room for the difference is kept for every microbatch, since a slow peer may leave all of them unsent.

Room for all backwards is kept where no chunk is split, where weight tasks may have to wait, or a hint may wait for a
certain task: under a forced order, in a group, and with a hint that may wait.

On the leader of a group a forward is in flight until all ranks have reported what it left behind: until then it counts
with what is expected.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from typing import ClassVar

from rrfp.memory.held_bytes import HeldBytes, Owner
from rrfp.memory.seen_sizes import KnownSizes, SeenSizes
from rrfp.model.tasks import ENDING_KINDS, F, Kind


class ByteLimit:
    """See the module's docstring. ``members`` counts this rank and the followers that report to it.

    ``sizes`` of the microbatches are those that the caller gave, if any; ``visitors`` has, for each chunk, those that
    visit it.
    """

    name: ClassVar[str] = "bytes"
    text: ClassVar[str] = "a forward starts while its expected bytes fit beside those held, or nothing is held"

    def __init__(
        self,
        most: int,
        held: HeldBytes,
        seen: SeenSizes,
        visitors: Sequence[Collection[int]],
        *,
        reserve: bool,
        members: int,
        sizes: Sequence[float] | None = None,
    ) -> None:
        self._most = most
        self._held = held
        self._seen = seen
        self._reserve = reserve
        self._members = members
        self._sizes = sizes
        #: Microbatches that hold a slot, by chunk.
        self._holders: list[set[int]] = [set() for _ in visitors]
        self._chunks = range(len(visitors))
        #: The ranks that have not reported the bytes of a forward in flight.
        self._unreported: dict[Owner, int] = {}
        #: Forwards in flight whose signature no earlier one had.
        self._measured: set[Owner] = set()
        #: What was known of each microbatch, from its preview to its end.
        self._previews: dict[Owner, KnownSizes] = {}
        #: Owners between forward and backward on this rank.
        self._before_backward: set[Owner] = set()
        self._to_come = [_LargestToCome(sizes, microbatches) for microbatches in visitors]
        #: Whether a backward is held back while it does not fit and a weight task is ready.
        self.defers_backwards = False
        #: What tasks in flight add to, and what they free; followed only if backwards are held back.
        self._growing: set[Owner] = set()
        self._shrinking: set[Owner] = set()

    @classmethod
    def validate(cls, most: int, held: int) -> str | None:
        """What is wrong with ``held`` bytes where every forward is as large as expected and fits alone, or None."""
        return f"holds {held} bytes, the most allowed is {most}" if held > most else None

    def preview(self, owner: Owner, input_bytes: int | None, signature: Hashable) -> None:
        """The forward of ``owner``, which has not started, is known better; see `rrfp.core.events.Previewed`."""
        self._previews[owner] = KnownSizes(self._size(owner), input_bytes, signature)

    def run_ahead(self, owner: Owner, signature: Hashable) -> None:
        """The forward of ``owner`` starts before its inputs are here: no other has its ``signature``."""
        self._previews.setdefault(owner, KnownSizes(self._size(owner), None, signature))

    def has_room(self, owner: Owner, claimed: Collection[Owner]) -> bool:
        """Whether the forward of ``owner`` may be claimed beside those ``claimed``, which have not begun."""
        return (not claimed and self.must_go_on(*owner)) or self._fits(owner, claimed)

    def fits(self, chunk: int, microbatch: int, *, is_lowest: bool) -> bool:
        """Whether a forward of ``chunk`` leaves room for those that must follow it; see `rrfp.memory.rules`."""
        return self._fits((chunk, microbatch), kept_free=0 if is_lowest else sum(map(self._room, self._chunks)))

    def _fits(self, starting: Owner, claimed: Collection[Owner] = (), kept_free: int = 0) -> bool:
        needed = sum(map(self._expected, (starting, *claimed))) + sum(map(self._expected_in_flight, self._unreported))
        needed += sum(max(0, self._room(deeper) - self._held_on(deeper)) for deeper in self._chunks[starting[0] + 1 :])
        return self._held.worst + self._growth_to_come(starting, claimed) + needed + kept_free <= self._most

    def fits_backward(self, owner: Owner) -> bool:
        """Whether what the backward of ``owner`` adds fits, once the tasks in flight have completed."""
        growth = self._growth_of(owner)
        if not growth:
            return True
        in_flight = sum(map(self._expected_in_flight, self._unreported)) + sum(map(self._growth_of, self._growing))
        freed = sum(map(self._held.worst_of, self._shrinking))
        return self._held.worst - freed + in_flight + growth <= self._most

    def start_backward(self, owner: Owner, *, is_last: bool) -> None:
        """A backward or weight task of ``owner`` was enqueued, the last one of them or not."""
        if self.defers_backwards:
            (self._shrinking if is_last else self._growing).add(owner)

    def _size(self, owner: Owner) -> float | None:
        return None if self._sizes is None else self._sizes[owner[1]]

    def _preview_of(self, owner: Owner) -> KnownSizes:
        known = self._previews.get(owner)
        return KnownSizes(self._size(owner)) if known is None else known

    def _expected(self, owner: Owner) -> int:
        return self._seen.expect(owner[0], self._preview_of(owner))

    def _expected_in_flight(self, owner: Owner) -> int:
        """The same of a forward that runs: unless its signature has shown it, no less than the largest.

        So of several that run at once only the last to start can surprise by what its numbers hid.
        """
        chunk, preview = owner[0], self._preview_of(owner)
        if preview.signature is not None and self._seen.has_seen(chunk, preview.signature):
            return self._seen.expect(chunk, preview)
        return max(self._seen.expected[chunk].held, self._seen.expect(chunk, preview))

    def _room(self, chunk: int) -> int:
        """What the largest forward still to come on ``chunk`` is expected to hold."""
        return self._seen.expect(chunk, KnownSizes(self._to_come[chunk].size))

    def _held_on(self, chunk: int) -> int:
        """What the microbatches hold that have run their forward on ``chunk``, and that their last task frees."""
        return sum(self._held.worst_of((chunk, microbatch)) for microbatch in self._holders[chunk])

    @property
    def is_measuring(self) -> bool:
        """Whether a forward runs, on some rank, whose size is not known and about to be."""
        return bool(self._measured)

    @property
    def measured(self) -> frozenset[Owner]:
        """Those forwards."""
        return frozenset(self._measured)

    def _growth_to_come(self, starting: Owner, claimed: Collection[Owner] = ()) -> int:
        """What backwards are expected to add, where the forward of ``starting`` starts; see the module's docstring."""
        if not self.defers_backwards:
            return self._growth_of_all()
        forwarded = {starting, *claimed, *self._unreported, *self._before_backward}
        left_over = sum(self._seen.left_over(chunk) for chunk, _ in forwarded)
        to_come = [self._growth(chunk, self._room(chunk)) for chunk in range(starting[0] + 1, len(self._holders))]
        largest = max([*to_come, *map(self._growth_of, forwarded - self._growing)], default=0)
        return left_over + sum(map(self._growth_of, self._growing)) + largest

    def _growth_of_all(self) -> int:
        """Of all microbatches before their backward, for each chunk by the lesser of the two ways to expect it."""
        total = 0
        for chunk, largest in enumerate(self._seen.expected):
            if largest.growth:
                held = [self._held.worst_of(owner) for owner in self._before_backward if owner[0] == chunk]
                total += min(len(held) * largest.growth, int(sum(held) * largest.growth_share))
        return total

    def _growth_of(self, owner: Owner) -> int:
        """What the backward of ``owner`` is expected to add."""
        if not self._seen.expected[owner[0]].growth:
            return 0
        held = self._held.worst_of(owner) if owner in self._before_backward else self._expected(owner)
        return self._growth(owner[0], held)

    def _growth(self, chunk: int, held: int) -> int:
        largest = self._seen.expected[chunk]
        return min(largest.growth, int(held * largest.growth_share))

    def must_go_on(self, chunk: int, microbatch: int) -> bool:
        """Whether no memory held here will be freed before this forward has run."""
        holders = set[int]().union(*self._holders[chunk:])
        return not holders or (self._reserve and microbatch < min(holders))

    def start(self, owner: Owner) -> None:
        chunk, microbatch = owner
        self._holders[chunk].add(microbatch)
        self._to_come[chunk].start(microbatch)
        self._unreported[owner] = self._members
        if not self._seen.has_seen(chunk, self._preview_of(owner).signature):
            self._measured.add(owner)

    def complete(self, kind: Kind, owner: Owner, held: int, output: int, member: int = 0) -> None:
        """A task of ``owner`` completed on ``member``; called before the ledger has what it left."""
        chunk, preview = owner[0], self._preview_of(owner)
        if kind is F:
            self._seen.judge(chunk, held + output, preview)
        if kind is F or not self.defers_backwards:  # or what backwards add is expected apart
            self._seen.saw(chunk, held + output, preview)
        if kind is F:
            self._forwarded(owner, held + output)
        elif kind not in ENDING_KINDS and self.is_in_work(owner):
            self._seen.saw_growth(chunk, self._held.of(owner, member), held + output, output)
        if member == 0 and kind is F:
            self._before_backward.add(owner)
        elif member == 0:
            self._before_backward.discard(owner)
            self._growing.discard(owner)

    def is_in_work(self, owner: Owner) -> bool:
        """Whether the microbatch is in work on this rank: not done, and nothing freed."""
        return owner[1] in self._holders[owner[0]]

    def _forwarded(self, owner: Owner, num_bytes: int) -> None:
        if owner not in self._unreported:
            return  # it is done and free on this rank already
        self._unreported[owner] -= 1
        if not self._unreported[owner]:
            self._seen.saw_signature(owner[0], self._preview_of(owner).signature, num_bytes)
            self._leave_flight(owner)

    def free(self, owner: Owner) -> None:
        """The microbatch is done on the chunk."""
        chunk, microbatch = owner
        self._holders[chunk].discard(microbatch)
        self._before_backward.discard(owner)
        self._growing.discard(owner)
        self._shrinking.discard(owner)
        if owner in self._unreported:
            self._leave_flight(owner)
        self._previews.pop(owner, None)

    def _leave_flight(self, owner: Owner) -> None:
        del self._unreported[owner]
        self._measured.discard(owner)


class _LargestToCome:
    """The largest size among the ``microbatches`` whose forward on a chunk has not started."""

    def __init__(self, sizes: Sequence[float] | None, microbatches: Collection[int]) -> None:
        self._sizes = sizes
        self._rising = [] if sizes is None else sorted(microbatches, key=sizes.__getitem__)
        self._started: set[int] = set()

    @property
    def size(self) -> float | None:
        """None: no sizes are given, or none is to come."""
        return self._sizes[self._rising[-1]] if self._sizes is not None and self._rising else None

    def start(self, microbatch: int) -> None:
        self._started.add(microbatch)
        while self._rising and self._rising[-1] in self._started:
            self._started.discard(self._rising.pop())

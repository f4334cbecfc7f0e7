"""One pool of forwards for the copies of a stage in all replicas: a copy runs what it has claimed.

Microbatches have one number over all replicas. For each forward one rank is its *holder*: the one that ran the forward
on the stage before, or, on the first stage, that whose caller has the microbatch. For each forward:

    holder -> all copies of the stage    offered    it may be claimed
    copy   -> holder                     claimed    by this copy
    holder -> all other copies           granted    to the copy that claimed first; this one gets the inputs instead

A copy claims before it needs the forward, so that the way there and back is hidden behind the task before, but at most
``depth`` that it has not begun, and only while these and what it holds fit into its slots. So an input that comes finds
a free slot, and the memory rule never blocks it.

Nothing starves, with one chunk a stage, and D keeps its limit on every rank: docs/memory-rules.md has the proof.

**Which one a copy claims**: the first of those offered, in the order that the hint has for the microbatches of each
replica, and of equal places that which its own replica holds. Where this holds none, it helps others only with those of
a slow copy, and once it has no ready task and all microbatches of its own caller have been granted: to help before
would take a forward from a copy that is about to run it. (A copy that is not slow always claims what its own replica
holds, and the quickest what a slow one's holds, so this starves nothing.)

**A slow copy declines** a forward that would keep it busy for longer than its peers need for all that is left: claimed
near the end of a step, it would be what the step waits for. The paces are those that all ranks measured in the steps
before; without them none counts as slow.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rrfp.core import events as ev
from rrfp.errors import ProtocolError
from rrfp.memory.rules import MemoryRule
from rrfp.model.tasks import F, Task

#: A slow copy may end so much later than its peers, in microbatches of the quickest for each stage from its own on.
SPARE = 0.5

#: A copy that takes no more than so much longer than the quickest is not slow: paces vary.
SLOW = 1.2

_NOBODY = -1


class _Line(NamedTuple):
    """Which of two offered forwards a copy would rather run: the lower."""

    #: In the order of the replica that has it.
    place: int
    #: From this copy to the one that holds it: copies begin with different ones.
    distance: int
    microbatch: int


class Claims:
    """The part of one copy of a stage in one step: what it may claim, and who runs what.

    ``spare`` is by how many microbatches of the quickest copy a slow one may end later than its peers.
    """

    __slots__ = (
        "_asked",
        "_is_slow",
        "_left",
        "_offered",
        "_own_left",
        "_pool",
        "_position_of",
        "_sizes",
        "_spare",
        "holders",
        "takers",
        "unbegun",
    )

    def __init__(
        self, pool: ev.Pool, position_of: Sequence[int], spare: float = 0.0, sizes: Sequence[float] | None = None
    ) -> None:
        count = len(pool.homes)
        self._pool = pool
        self._spare = spare
        self._position_of = position_of
        mean = sum(sizes) / count if sizes is not None else 0.0
        #: By microbatch, how large it is beside the average.
        self._sizes = [size / mean for size in sizes] if sizes is not None and mean else [1.0] * count
        best = min(pool.paces, default=0.0)
        self._is_slow = [0 < SLOW * best < pace for pace in pool.paces] or [False] * pool.copies
        #: By microbatch, the copy whose rank holds what its forward here reads, and the copy that runs it here.
        self.holders, self.takers = [_NOBODY] * count, [_NOBODY] * count
        #: Forwards that may be claimed, and those that were, without an answer so far.
        self._offered: set[int] = set()
        self._asked: set[int] = set()
        #: Forwards claimed and not begun.
        self.unbegun = 0
        #: The sizes of those that were granted to nobody.
        self._left = sum(self._sizes)
        #: How many of them are of this replica's caller.
        self._own_left = pool.homes.count(pool.copy)

    def is_own(self, microbatch: int) -> bool:
        """Whether this copy runs it."""
        return self.takers[microbatch] == self._pool.copy

    @property
    def state(self) -> tuple[tuple[int, ...], ...]:
        """By microbatch who holds and who runs it; what is asked for, and how much is not begun."""
        return (*self.holders,), (*self.takers,), (*sorted(self._asked),), (self.unbegun,)

    def is_asked(self, microbatch: int) -> bool:
        """Whether this copy has claimed it, and awaits the answer."""
        return microbatch in self._asked

    def offer(self, microbatch: int, holder: int) -> None:
        """``holder`` has its input."""
        if self.holders[microbatch] != _NOBODY:
            raise ProtocolError(f"microbatch {microbatch} was offered twice: by copy {self.holders[microbatch]}")
        self.holders[microbatch] = holder
        self._offered.add(microbatch)

    def next(self, held: int, slots: int | None, *, is_idle: bool) -> int | None:
        """The forward to claim now, if any; ``held`` is D, and a rank that ``is_idle`` has no ready task."""
        if not self._offered or self.unbegun >= self._pool.depth:
            return None
        if slots is not None and held + self.unbegun >= slots:
            return None
        found = self._chosen(may_help=is_idle and not self._own_left)
        return None if found is None or self._declines(found, held + self.unbegun) else found

    def _chosen(self, *, may_help: bool) -> int | None:
        """The offered forward that this copy should run, if any."""
        copies, own = self._pool.copies, self._pool.copy
        lines = [_Line(self._position_of[m] // copies, (self.holders[m] - own) % copies, m) for m in self._offered]
        if not may_help and all(line.distance for line in lines):
            lines = [line for line in lines if self._is_slow[self.holders[line.microbatch]]]
        return min(lines).microbatch if lines else None

    def _declines(self, microbatch: int, held: int) -> bool:
        """Whether this copy would end it, and what it holds, later than its peers all that is left."""
        pool = self._pool
        if not self._is_slow[pool.copy]:
            return False
        others = sum(1 / pace for copy, pace in enumerate(pool.paces) if copy != pool.copy)
        ends = pool.paces[pool.copy] * (held + self._sizes[microbatch])
        return ends > self._left / others + self._spare * min(pool.paces)

    def claim(self, microbatch: int) -> None:
        """This copy claims it."""
        self._offered.remove(microbatch)
        self._asked.add(microbatch)
        self.unbegun += 1

    def receive(self, microbatch: int) -> None:
        """Its input came, or may be taken: the answer to a claim; a ProtocolError if there was none."""
        if microbatch not in self._asked:
            raise ProtocolError(f"microbatch {microbatch} was granted to copy {self._pool.copy}, which did not ask")
        self._asked.remove(microbatch)
        self._take(microbatch, self._pool.copy)

    def grant(self, microbatch: int, copy: int) -> None:
        """Another copy runs it."""
        if copy == self._pool.copy or not 0 <= copy < self._pool.copies:
            raise ProtocolError(f"microbatch {microbatch} was granted to copy {copy}, as copy {self._pool.copy} heard")
        if self.holders[microbatch] == _NOBODY:
            raise ProtocolError(f"microbatch {microbatch} was granted before it was offered")
        if microbatch in self._asked:
            self._asked.remove(microbatch)
            self.unbegun -= 1
        self._offered.discard(microbatch)
        self._take(microbatch, copy)

    def _take(self, microbatch: int, copy: int) -> None:
        if (taker := self.takers[microbatch]) != _NOBODY:
            raise ProtocolError(f"microbatch {microbatch} was granted twice: to copy {taker} and copy {copy}")
        self.takers[microbatch] = copy
        self._left -= self._sizes[microbatch]
        self._own_left -= self._pool.homes[microbatch] == self._pool.copy

    def begin(self) -> None:
        """The lane takes a forward."""
        self.unbegun -= 1


class Grants:
    """What one rank holds for the copies of the stage that reads it."""

    __slots__ = ("_copies", "_held", "_seen", "takers")

    def __init__(self, copies: int, count: int) -> None:
        self._copies = copies
        self._held = bytearray(count)
        self._seen: set[tuple[int, int]] = set()
        #: By microbatch, the copy that it was given to.
        self.takers = [_NOBODY] * count

    def hold(self, microbatch: int) -> None:
        """It is here, and may be claimed."""
        self._held[microbatch] = True

    def unclaimed(self) -> list[int]:
        """What is here, and given to no copy."""
        return [m for m, is_held in enumerate(self._held) if is_held and self.takers[m] == _NOBODY]

    def claim(self, microbatch: int, copy: int) -> bool:
        """Whether ``copy``, which claims it, gets it; a ProtocolError where it cannot claim it."""
        if not 0 <= copy < self._copies or not 0 <= microbatch < len(self._held) or not self._held[microbatch]:
            raise ProtocolError(f"copy {copy} claimed microbatch {microbatch}, which is not here")
        if (microbatch, copy) in self._seen:
            raise ProtocolError(f"copy {copy} claimed microbatch {microbatch} twice")
        self._seen.add((microbatch, copy))
        if self.takers[microbatch] != _NOBODY:
            return False
        self.takers[microbatch] = copy
        return True


class Sharing:
    """One rank's part in a step whose replicas share forwards; its stage has one chunk.

    Args:
        pool: of the step.
        virtual_stage: the rank's.
        position_of: by microbatch, the place in the order of the hint.
        distance: of the stage to the last one, itself included: so many microbatches are under way behind a forward.
    """

    __slots__ = ("_inputs", "_is_first", "_outputs", "_virtual_stage", "claims", "pool")

    def __init__(
        self,
        pool: ev.Pool,
        virtual_stage: int,
        position_of: Sequence[int],
        distance: int,
        sizes: Sequence[float] | None = None,
    ) -> None:
        self.pool = pool
        self._virtual_stage = virtual_stage
        self._is_first = virtual_stage == 0
        self.claims = Claims(pool, position_of, SPARE * distance, sizes)
        #: What the rank holds for its own stage, of its caller's, and for the next one.
        self._inputs, self._outputs = (Grants(pool.copies, len(pool.homes)) for _ in range(2))
        for m, home in enumerate(pool.homes) if self._is_first else ():
            self.claims.offer(m, home)
            if home == pool.copy:
                self._inputs.hold(m)

    @property
    def state(self) -> tuple[tuple[int, ...], ...]:
        """What the order of events decides: who holds, claims and runs what."""
        given = (*self._inputs.takers, *self._outputs.takers)
        return (*self.claims.state, given)

    def unclaimed(self) -> Iterator[Task]:
        """Forwards of the next stage whose inputs are here, and which no copy has claimed."""
        for m in self._outputs.unclaimed():
            yield Task(F, m, self._virtual_stage + 1)

    def taker_of(self, forward: Task) -> int:
        """The copy that this rank, which holds the input of ``forward``, gave it to, or -1."""
        held = self._inputs if forward.virtual_stage == self._virtual_stage else self._outputs
        return held.takers[forward.microbatch]

    def claims_now(self, admission: MemoryRule, *, is_idle: bool) -> Iterator[ev.Claim | ev.Grant]:
        """What this rank claims now; of its own caller's it grants that itself."""
        claims, own = self.claims, self.pool.copy
        while (m := claims.next(admission.held, admission.slots, is_idle=is_idle)) is not None:
            claims.claim(m)
            task, holder = Task(F, m, self._virtual_stage), claims.holders[m]
            if self._is_first and holder == own:
                self._inputs.claim(m, own)
                claims.receive(m)
                yield ev.Grant(task, own)
            else:
                yield ev.Claim(task, holder)

    def offer(self, event: ev.Offered) -> None:
        """A rank of the stage before holds the input of a forward."""
        kind, m, virtual_stage = event.task
        if self._is_first or kind is not F or virtual_stage != self._virtual_stage:
            raise ProtocolError(f"copy {event.copy} offered {event.task}, which is no forward of this stage")
        self.claims.offer(m, event.copy)

    def claim(self, event: ev.Claimed) -> bool:
        """Whether a copy that claims a forward gets it."""
        kind, m, virtual_stage = event.task
        held = {self._virtual_stage + 1: self._outputs}
        if self._is_first:
            held[self._virtual_stage] = self._inputs
        if kind is not F or virtual_stage not in held:
            raise ProtocolError(f"copy {event.copy} claimed {event.task}, which this rank cannot hold")
        return held[virtual_stage].claim(m, event.copy)

    def arrive(self, producer: Task) -> None:
        """An output arrived: of a forward, the answer to a claim."""
        kind, m, _ = producer
        if kind is F:
            self.claims.receive(m)
        elif not self.claims.is_own(m):
            raise ProtocolError(f"{producer} arrived at copy {self.pool.copy}, which has not run the forward")

    def send(self, task: Task, peer: int) -> ev.Send | ev.Offer:
        """How the output of ``task``, which has completed, goes to the stage ``peer``."""
        kind, m, virtual_stage = task
        if kind is F:
            self._outputs.hold(m)
            return ev.Offer(Task(F, m, virtual_stage + 1))
        return ev.Send(task, peer, copy=self.claims.holders[m])

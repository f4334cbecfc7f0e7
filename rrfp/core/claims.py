"""One pool of forwards for the copies of a stage in all replicas: a copy runs what it has claimed.

Microbatches have one number over all replicas. A copy claims the forward of a chunk, and with it those of the next
chunks where they are on the same stage (as where a V turns), and runs their backwards. For each such forward one rank
is its *holder*: the one that ran the forward before it on another stage, or, of the first, that whose caller has the
microbatch. For each:

    holder -> all copies of the stage    offered    it may be claimed
    copy   -> holder                     claimed    by this copy
    holder -> all other copies           granted    to the copy that claimed first; this one gets the inputs instead

Where nothing tells the replicas apart (`are_even`), the first microbatch of each runs there on all stages, in the first
chunk, without a word: each rank knows that before the step, and no message is waited for until the pipeline is full.
It is the first forward of the chunk there: else what ran before it might keep it from bytes, and it the copies behind
from what frees these.

A copy claims before it needs the forward, so that the way there and back is hidden behind the task before. It claims
one of chunk c only while what it holds, with its claims of c and deeper chunks that have not begun, lets the memory
rule admit it, and while these claims are fewer than ``depth``. Claims of shallower chunks do not count: they must not
keep a copy from the deeper forward that frees what they wait for. Bytes are those expected; a forward that shows itself
to be larger waits until it fits, or nothing is held.

Nothing starves, and D keeps its limit on every rank: docs/memory-rules.md has the proof.

**Which one a copy claims**: of the deepest chunk that admits one the first of those offered, in the order that the hint
has for the microbatches of each replica, and of equal places that which its own replica holds. Those of others count as
later where copies claim far ahead, since news takes long, and where more than a few copies would find the same one
behind, and relieve it of too much (`FEW`). Where this holds none, it helps others only
with those of a slow copy, and once it has no ready task and of its own caller's microbatches none is left that may come
here by itself: to help before would take a forward from a copy that is about to run it.

**Near the end of a step** one forward in the wrong place is what the step waits for, and with equal durations chance
alone would tell where it goes. So two decline what would keep them busy for longer than their peers need for all that
is left: a copy that is slow, and one that still holds microbatches and would help one that is not slow, with the only
forward that this offers. And once all forwards of the stage have been offered, those of the holder that has most of
them go first, since that has most backwards to come. The paces are those that all ranks measured in the steps before;
without them none counts as slow.

(A copy that is not slow always claims what its own replica holds, and the quickest what a slow one's holds, so this
starves nothing.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

from rrfp.core import events as ev
from rrfp.errors import ProtocolError
from rrfp.memory.held_bytes import Owner
from rrfp.memory.rules import MemoryRule
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import F, Task

#: A slow copy, or one that helps, may end so much later than its peers: in microbatches of the quickest for each stage
#: from its own on.
SPARE = 0.5

#: A copy that takes no more than so much longer than the quickest is not slow: paces vary.
SLOW = 1.2

#: So many copies do not relieve one that is behind of too much. Of more that are even, each is left what is earlier by
#: no more places than there are more: it is behind by chance alone.
FEW = 4

_NOBODY = -1


def are_even(stages: Iterable[Sequence[float]]) -> bool:
    """Whether paces by stage, empty where they are not known, show no copy to be slow."""
    known = [*stages]
    return bool(known) and all(paces and max(paces) <= SLOW * min(paces) for paces in known)


class _Line(NamedTuple):
    """Which of two offered forwards a copy would rather run: the lower."""

    #: Near the end of a step the lower the more its holder has; 0 before.
    urgency: int
    #: In the order of the replica that has it.
    place: int
    #: From this copy to the one that holds it: copies begin with different ones.
    distance: int
    microbatch: int


class Claims:
    """One copy's part in the forwards of a chunk in one step: what it may claim, and who runs what.

    Args:
        pool: of the step.
        position_of: by microbatch, the place in the order of the hint.
        spare: by how many microbatches of the quickest copy one may end later than its peers, where it need not run
            more.
        sizes: of the microbatches; None: not known.
        has_gradients: whether holders get gradients: not those of what a caller passed.
        chunk: the local chunk.
        length: how many forwards of a microbatch are claimed together, this chunk's and those behind it.
    """

    __slots__ = (
        "_asked",
        "_claimed",
        "_first",
        "_has_gradients",
        "_is_slow",
        "_lead",
        "_left",
        "_num_offered",
        "_offered",
        "_own_left",
        "_paces",
        "_pool",
        "_position_of",
        "_sizes",
        "_spare",
        "_unoffered",
        "chunk",
        "holders",
        "length",
        "of_stage",
        "takers",
    )

    def __init__(
        self,
        pool: ev.Pool,
        position_of: Sequence[int],
        spare: float = 0.0,
        sizes: Sequence[float] | None = None,
        *,
        has_gradients: bool = True,
        chunk: int = 0,
        length: int = 1,
    ) -> None:
        count = len(pool.homes)
        self._pool = pool
        self.chunk, self.length = chunk, length
        #: Those of all chunks of the stage.
        self.of_stage: Sequence[Claims] = (self,)
        self._spare = spare
        self._position_of = position_of
        mean = sum(sizes) / count if sizes is not None else 0.0
        #: By microbatch, how large it is beside the average.
        self._sizes = [size / mean for size in sizes] if sizes is not None and mean else [1.0] * count
        self._paces = pool.paces if all(pool.paces) and pool.paces else (1.0,) * pool.copies
        self._is_slow = [SLOW * min(self._paces) < pace for pace in self._paces]
        #: Places by which another copy's forward may be earlier than an own one, and be left to it.
        self._lead = max(0, pool.copies - FEW) if pool.is_even else 0
        self._has_gradients = has_gradients
        #: By microbatch, the copy whose rank holds what its forward here reads, and the copy that runs it here.
        self.holders, self.takers = [_NOBODY] * count, [_NOBODY] * count
        #: Forwards that may be claimed; how many of them each copy holds; those claimed, without an answer so far.
        self._offered: set[int] = set()
        self._num_offered = [0] * pool.copies
        self._asked: set[int] = set()
        #: Forwards claimed and not begun; the one among them that comes before all others.
        self._claimed: set[int] = set()
        self._first = _NOBODY
        #: The sizes of those that were granted to nobody.
        self._left = sum(self._sizes) * length
        #: How many of them are of this replica's caller, and were not offered by another copy.
        self._own_left = pool.homes.count(pool.copy)
        #: How many forwards have not been offered.
        self._unoffered = count

    def is_own(self, microbatch: int) -> bool:
        """Whether this copy runs it."""
        return self.takers[microbatch] == self._pool.copy

    @property
    def state(self) -> tuple[tuple[int, ...], ...]:
        """By microbatch who holds and who runs it; what is asked for, and what is not begun."""
        return (*self.holders,), (*self.takers,), (*sorted(self._asked),), (*sorted(self._claimed),)

    @property
    def unbegun(self) -> list[Owner]:
        """What is claimed and not begun."""
        return [(self.chunk, m) for m in self._claimed]

    def is_asked(self, microbatch: int) -> bool:
        """Whether this copy has claimed it, and awaits the answer."""
        return microbatch in self._asked

    def offer(self, microbatch: int, holder: int) -> None:
        """``holder`` has its input."""
        if self.holders[microbatch] != _NOBODY:
            raise ProtocolError(f"microbatch {microbatch} was offered twice: by copy {self.holders[microbatch]}")
        self.holders[microbatch] = holder
        self._offered.add(microbatch)
        self._num_offered[holder] += 1
        self._unoffered -= 1
        self._own_left -= self._pool.homes[microbatch] == self._pool.copy != holder

    def next(self, admission: MemoryRule, deeper: Sequence[Owner] = (), *, is_idle: bool) -> int | None:
        """The forward to claim now, if any, beside those claimed on ``deeper`` chunks; see `Sharing.claims_now`."""
        unbegun = len(deeper) + len(self._claimed)
        if not self._offered or unbegun >= self._pool.depth or self._first in self._claimed:
            return None
        held, limit = admission.held + unbegun, admission.byte_limit
        if admission.slots is not None and held >= admission.slots - admission.kept_free(self.chunk, is_lowest=True):
            return None
        found = self._chosen(held, may_help=is_idle and not self._own_left)
        if found is None or limit is None:
            return found
        return found if limit.has_room((self.chunk, found), [*deeper, *self.unbegun]) else None

    def _chosen(self, held: int, *, may_help: bool) -> int | None:
        """The offered forward that this copy should run, if any, beside so many that it holds."""
        copies, own, holders, counts = self._pool.copies, self._pool.copy, self.holders, self._num_offered
        longest, is_near_end = self._longest(held), self._has_gradients and not self._unoffered
        ahead, lines = self._pool.depth - 1, []
        for m in self._offered:
            holder = holders[m]
            if self._sizes[m] * self.length <= longest or self._is_due(holder, held):
                later = ahead if holder != own else 0  # others may have claimed so much before that is heard here
                urgency = later - counts[holder] if is_near_end else 0
                later += self._lead if holder != own else 0
                lines.append(_Line(urgency, self._position_of[m] // copies + later, (holder - own) % copies, m))
        if not may_help and all(line.distance for line in lines):
            lines = [line for line in lines if self._is_slow[holders[line.microbatch]]]
        return min(lines).microbatch if lines else None

    def _is_due(self, holder: int, held: int) -> bool:
        """Whether this copy, if it helps ``holder`` at all, does so however long its peers need."""
        if self._is_slow[self._pool.copy]:
            return False
        is_behind = self._has_gradients and self._num_offered[holder] > 1
        return not held or is_behind or holder == self._pool.copy or self._is_slow[holder]

    def _longest(self, held: int) -> float:
        """The size that this copy ends, with what it holds, no later than its peers all that is left."""
        paces, own = self._paces, self._pool.copy
        others = sum(1 / pace for copy, pace in enumerate(paces) if copy != own)
        left = sum([each._left for each in self.of_stage])
        return (left / others + self._spare * min(paces)) / paces[own] - held if others else math.inf

    def keep(self, microbatch: int) -> None:
        """This copy runs it before all others, without a claim."""
        self.claim(microbatch)
        self._first = microbatch

    def claim(self, microbatch: int) -> None:
        """This copy claims it."""
        self._withdraw(microbatch)
        self._asked.add(microbatch)
        self._claimed.add(microbatch)

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
            self._claimed.remove(microbatch)
        elif microbatch in self._offered:
            self._withdraw(microbatch)
        self._take(microbatch, copy)

    def _withdraw(self, microbatch: int) -> None:
        """It may no longer be claimed."""
        self._offered.remove(microbatch)
        self._num_offered[self.holders[microbatch]] -= 1

    def _take(self, microbatch: int, copy: int) -> None:
        if (taker := self.takers[microbatch]) != _NOBODY:
            raise ProtocolError(f"microbatch {microbatch} was granted twice: to copy {taker} and copy {copy}")
        self.takers[microbatch] = copy
        self._left -= self._sizes[microbatch] * self.length
        self._own_left -= self._pool.homes[microbatch] == self._pool.copy == self.holders[microbatch]

    def begin(self, microbatch: int) -> None:
        """The lane takes a forward."""
        self._claimed.remove(microbatch)


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
    """One rank's part in a step whose replicas share forwards.

    Args:
        pool: of the step.
        graph: a chain without skip edges.
        stage: the rank's.
        position_of: by microbatch, the place in the order of the hint.
        sizes: of the microbatches, where the caller gives them.
    """

    __slots__ = ("_deeper_first", "_first_of", "_firsts", "_grants", "_kept", "_shallowest", "claims", "pool")

    def __init__(
        self,
        pool: ev.Pool,
        graph: TaskGraph,
        stage: int,
        position_of: Sequence[int],
        sizes: Sequence[float] | None = None,
    ) -> None:
        own, stage_of = graph.placement.virtual_stages(stage), graph.stage_of
        self.pool = pool
        #: By virtual stage of this one, that whose claims it is in.
        self._first_of: dict[int, int] = {}
        for v in own:
            self._first_of[v] = self._first_of.get(v - 1, v)
        spare = SPARE * graph.distance_to_sink(stage)  # so many microbatches are under way behind a forward
        #: By the virtual stage whose forwards are claimed, with those behind them on this stage.
        self.claims = {
            v: Claims(pool, position_of, spare, sizes, has_gradients=v > 0, chunk=own.index(v), length=length)
            for v, length in Counter(self._first_of.values()).items()
        }
        for claims in self.claims.values():
            claims.of_stage = [*self.claims.values()]
        self._deeper_first = [(v, self.claims[v]) for v in sorted(self.claims, reverse=True)]
        self._shallowest = own[0]
        #: What the rank holds, by the virtual stage that reads it: of its caller's, and for other stages.
        readers = {v + 1 for v in own if v + 1 < len(stage_of) and stage_of[v + 1] != stage} | ({*own} & {0})
        self._grants = {v: Grants(pool.copies, len(pool.homes)) for v in sorted(readers)}
        for m, home in enumerate(pool.homes) if 0 in self.claims else ():
            self.claims[0].offer(m, home)
            if home == pool.copy:
                self._grants[0].hold(m)
        #: By copy the first microbatch of its caller, and the virtual stages on which it runs there without a claim.
        self._firsts = {home: m for m, home in reversed([*enumerate(pool.homes)])} if pool.is_even else {}
        self._kept = range(_first_chunks(stage_of))

    @property
    def state(self) -> tuple[tuple[int, ...], ...]:
        """What the order of events decides: who holds, claims and runs what."""
        given = (taker for grants in self._grants.values() for taker in grants.takers)
        return (*(part for claims in self.claims.values() for part in claims.state), (*given,))

    @property
    def unbegun(self) -> list[Owner]:
        """Forwards claimed and not begun."""
        return [owner for claims in self.claims.values() for owner in claims.unbegun]

    def unclaimed(self) -> Iterator[Task]:
        """Forwards of other stages whose inputs are here, and which no copy has claimed."""
        for v, grants in self._grants.items():
            for m in grants.unclaimed() if v else ():
                yield Task(F, m, v)

    def of(self, virtual_stage: int) -> Claims:
        """The claims that ``virtual_stage``, one of this stage, is in."""
        return self.claims[self._first_of[virtual_stage]]

    def claimed_with(self, virtual_stage: int) -> list[int]:
        """The virtual stages whose forwards are claimed with that of ``virtual_stage``, itself among them."""
        return [v for v, first in self._first_of.items() if first == virtual_stage]

    def whole(self) -> list[int]:
        """The microbatches of which this copy runs all forwards of its stage."""
        return [m for m in range(len(self.pool.homes)) if all(each.is_own(m) for each in self.claims.values())]

    def taker_of(self, forward: Task) -> int:
        """The copy that this rank, which holds the input of ``forward``, gave it to, or -1."""
        return self._grants[forward.virtual_stage].takers[forward.microbatch]

    def claims_now(self, admission: MemoryRule, *, is_idle: bool) -> Iterator[ev.Claim | ev.Grant]:
        """What this rank claims now, where it ``is_idle`` without a ready task; its own caller's it grants itself."""
        own, deeper = self.pool.copy, tuple[Owner, ...]()
        for v, claims in self._deeper_first:
            while (m := claims.next(admission, deeper, is_idle=is_idle)) is not None:
                claims.claim(m)
                task, holder = Task(F, m, v), claims.holders[m]
                if v == 0 and holder == own:
                    self._grants[0].claim(m, own)
                    claims.receive(m)
                    yield ev.Grant(task, own)
                else:
                    yield ev.Claim(task, holder)
            if v != self._shallowest:
                deeper = (*deeper, *claims.unbegun)

    def keep_firsts(self) -> Iterator[tuple[Task, int]]:
        """The step begins: the forwards here that nobody claims, and the copies that run them."""
        for (v, claims), (copy, m) in product(self.claims.items(), self._firsts.items()):
            if v not in self._kept:
                continue
            if v:
                claims.offer(m, copy)
            if copy != self.pool.copy:
                claims.grant(m, copy)
            else:
                claims.keep(m)
                if not v:
                    self._grants[v].claim(m, copy)
                    claims.receive(m)
            yield Task(F, m, v), copy

    def offer(self, event: ev.Offered) -> None:
        """A rank of the stage before holds the input of a forward."""
        kind, m, virtual_stage = event.task
        if not virtual_stage or kind is not F or virtual_stage not in self.claims:
            raise ProtocolError(f"copy {event.copy} offered {event.task}, which is no forward of this stage")
        self.claims[virtual_stage].offer(m, event.copy)

    def claim(self, event: ev.Claimed) -> bool:
        """Whether a copy that claims a forward gets it."""
        kind, m, virtual_stage = event.task
        if kind is not F or virtual_stage not in self._grants:
            raise ProtocolError(f"copy {event.copy} claimed {event.task}, which this rank cannot hold")
        return self._grants[virtual_stage].claim(m, event.copy)

    def arrive(self, producer: Task) -> None:
        """An output of another stage arrived: of a forward, the answer to a claim."""
        kind, m, virtual_stage = producer
        if kind is F:
            self.claims[virtual_stage + 1].receive(m)
        elif not self.of(virtual_stage - 1).is_own(m):
            raise ProtocolError(f"{producer} arrived at copy {self.pool.copy}, which has not run the forward")

    def begin(self, forward: Task) -> None:
        """The lane takes ``forward``."""
        if (claims := self.claims.get(forward.virtual_stage)) is not None:
            claims.begin(forward.microbatch)

    def send(self, task: Task, peer: int) -> ev.Send | ev.Offer:
        """How the output of ``task``, which has completed, goes to the stage ``peer``."""
        kind, m, virtual_stage = task
        if kind is not F:
            return ev.Send(task, peer, copy=self.claims[virtual_stage].holders[m])
        reader, own = virtual_stage + 1, self.pool.copy
        self._grants[reader].hold(m)
        if reader in self._kept and m == self._firsts.get(own):
            self._grants[reader].claim(m, own)
            return ev.Send(task, peer, copy=own)
        return ev.Offer(Task(F, m, reader))


def _first_chunks(stage_of: Sequence[int]) -> int:
    """How many virtual stages lie before the first that comes back to a stage, or is claimed with the next one."""
    seen = set[int]()
    for v, stage in enumerate(stage_of):
        if stage in seen or stage in stage_of[v + 1 : v + 2]:
            return v
        seen.add(stage)
    return len(stage_of)

"""A limit on bytes: what counts against it, and which forwards fit. Owned by `rrfp.core.admission.Admission`.

A forward of chunk c fits if all of this together is within the limit: what is held; what the backwards to come are
expected to add to that; and the largest size expected for each forward that runs, for each chunk from c on, and under
the reserve rule for a whole lowest microbatch. So the limit is passed by no more than what one forward turns out larger
than all that are remembered (`rrfp.core.seen_sizes`), times the forwards that run at once: the next one starts from
what these showed.

On the leader of a group the worst rank counts. For each microbatch and chunk that is the most that any rank told, and
the same for each output while the leader keeps its own: when a follower lets go of one, nobody tells. A forward is in
flight until all ranks have told what it left behind: until then it counts with what is expected.
"""

from __future__ import annotations

from rrfp.core.seen_sizes import SeenSizes
from rrfp.core.tasks import B, F, Kind, Task

#: A local chunk and a microbatch: what holds bytes.
Owner = tuple[int, int]


class ByteLimit:
    """See the module's docstring.

    Args:
        most: the limit.
        seen: sizes of microbatches so far; updated here.
        reserve: whether the reserve rule applies.
        ranks: ranks that tell what they hold: this one and its followers.
    """

    def __init__(self, most: int, seen: SeenSizes, *, reserve: bool, ranks: int) -> None:
        self._most = most
        self._seen = seen
        self._reserve = reserve
        self._ranks = ranks
        #: Bytes counted against the limit.
        self._counted = 0
        #: Microbatches that hold a slot, by chunk.
        self._holders: list[set[int]] = [set() for _ in seen.expected]
        #: Forwards whose bytes not every rank has told: on how many ranks that is so, and how many there are by chunk.
        self._untold: dict[Owner, int] = {}
        self._in_flight = [0] * len(seen.expected)
        #: By chunk, whether every rank has told what some forward left behind.
        self._is_known = [largest.held > 0 for largest in seen.expected]
        #: What each rank told after the forward of an owner, and owners between forward and backward on this rank.
        self._after_forward: dict[Owner, dict[int, int]] = {}
        self._before_backward: set[Owner] = set()
        #: By owner and by output: what each rank told, and the most of it. Outputs count while this rank keeps them.
        self._held: dict[Owner, dict[int, int]] = {}
        self._outputs: dict[Task, dict[int, int]] = {}
        self._kept: dict[Task, int] = {}

    def fits(self, chunk: int, *, is_lowest: bool) -> bool:
        """Whether a forward of ``chunk`` leaves room for those that must follow it; see `rrfp.core.admission`."""
        sizes = [largest.held for largest in self._seen.expected]
        if self._in_flight[chunk] and not self._is_known[chunk]:
            return False  # the first of its chunk is still running, on some rank: its size is about to be known
        running = sum(count * size for count, size in zip(self._in_flight, sizes, strict=True))
        needed = sum(sizes[chunk:]) + (0 if is_lowest else sum(sizes))
        return self._counted + self._growth_to_come() + running + needed <= self._most

    def _growth_to_come(self) -> int:
        """What backwards are expected to add, for each chunk by the lesser of the two ways to expect it."""
        total = 0
        for chunk, largest in enumerate(self._seen.expected):
            if largest.growth:
                held = [max(self._held[owner].values()) for owner in self._before_backward if owner[0] == chunk]
                total += min(len(held) * largest.growth, int(sum(held) * largest.growth_share))
        return total

    def must_go_on(self, chunk: int, microbatch: int) -> bool:
        """Whether no memory held here will be freed before this forward has run."""
        holders = set[int]().union(*self._holders[chunk:])
        return not holders or (self._reserve and microbatch < min(holders))

    def take(self, owner: Owner) -> None:
        """The forward of ``owner`` was enqueued."""
        chunk, microbatch = owner
        self._holders[chunk].add(microbatch)
        self._in_flight[chunk] += 1
        self._untold[owner] = self._ranks

    def complete(self, rank: int, kind: Kind, owner: Owner, held: int, output: int) -> None:
        """A task of ``owner`` has left so much on ``rank``: for what is expected. `hold` and `free` tell it again."""
        chunk, microbatch = owner
        self._seen.saw(chunk, held + output)
        if kind is F:
            self._forwarded(owner)
            if microbatch in self._holders[chunk]:
                self._after_forward.setdefault(owner, {})[rank] = held
        elif kind is B and rank in (told := self._after_forward.get(owner, {})):
            self._seen.saw_growth(chunk, told[rank], held + output)
        if rank == 0:
            (self._before_backward.add if kind is F else self._before_backward.discard)(owner)

    def _forwarded(self, owner: Owner) -> None:
        if owner not in self._untold:
            return  # it is done and free on this rank already
        self._untold[owner] -= 1
        if not self._untold[owner]:
            self._is_known[owner[0]] = True
            self._land(owner)

    def hold(self, rank: int, owner: Owner, num_bytes: int) -> None:
        """``owner`` now holds ``num_bytes`` on ``rank`` of the group."""
        chunk, microbatch = owner
        if microbatch not in self._holders[chunk]:
            return  # it is done and free on this rank already
        told = self._held.setdefault(owner, {})
        before = max(told.values(), default=0)
        told[rank] = num_bytes
        self._counted += max(told.values()) - before

    def keep_output(self, rank: int, task: Task, num_bytes: int, *, is_own: bool) -> None:
        """The output of ``task`` takes ``num_bytes`` on ``rank``; it counts while this rank keeps its own."""
        told = self._outputs.setdefault(task, {})
        told[rank] = num_bytes
        if is_own or task in self._kept:
            worst = max(told.values())
            self._counted += worst - self._kept.get(task, 0)
            self._kept[task] = worst

    def drop_output(self, task: Task) -> None:
        """Nobody reads or sends this rank's output of ``task`` any longer."""
        if task in self._kept:
            self._counted -= self._kept.pop(task)
            del self._outputs[task]

    def free(self, owner: Owner) -> None:
        """The microbatch is done on the chunk."""
        chunk, microbatch = owner
        self._holders[chunk].discard(microbatch)
        self._counted -= max(self._held.pop(owner, {}).values(), default=0)
        self._after_forward.pop(owner, None)
        self._before_backward.discard(owner)
        if owner in self._untold:
            self._land(owner)

    def _land(self, owner: Owner) -> None:
        del self._untold[owner]
        self._in_flight[owner[0]] -= 1

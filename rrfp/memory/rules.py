"""Memory rules: which forwards a stage may start, so that no hint can break its limit.

A forward takes a slot when it is enqueued; the microbatch's last task on that virtual stage (B, or W where backward is
split) releases it when it is enqueued: a lane runs its tasks in order, so whatever is enqueued behind it starts when it
has completed. Forward only, the slot is free when every successor has consumed the output. D counts taken slots, in
chunk tasks; there are K * C. Backwards and weight tasks free memory: only the paper's rule ever blocks both.

Each rule is a class with its statement, the most that D reaches, a check of who holds slots, and what stands in for it
on stages that it is not right for. `rrfp.memory.admission` has one row for each.

- **Bytes** (`rrfp.memory.byte_limit`, beside any rule but the paper's): a forward of chunk c starts only while the
  bytes held fit together with those that it is expected to hold, with room for one forward of each deeper chunk (and,
  under the reserve rule, for a whole lowest microbatch), and with what backwards are expected to add: a split one may
  hold more than its forward did, and may have to let weight tasks go first. That can be wrong, so one forward is always
  admitted when no chunk from c on holds anything (under the reserve rule: the lowest one, when they hold later ones
  only). While a forward runs whose size no earlier one has shown, none starts behind it, however deep the lane is.
- **Groups**: the leader decides for all, so its byte rule counts the rank that holds the most. A follower starts a
  forward that was ordered once a slot is free on itself, so that D keeps its bound on every rank. The slots that the
  leader saw free become so there too: by tasks that are in the log before it, and by successors that run those.

Rejected, each with a deadlock that `rrfp check admission --rule` prints (`rrfp.lab.explore.cases`):

- D < K*C for every forward, and only backwards from there on. It is what the paper says for one chunk; with two, the
  shallow chunk takes all slots and the deep one, whose backward would free them, gets none.
- The staircase alone in a forced order. Later microbatches fill the memory while the one that all stages wait for
  stays outside.
- One reserved slot instead of C: enough for one chunk, and not for more, since the lowest microbatch needs a slot on
  each of its chunks before its first backward frees one.

docs/memory-rules.md proves that nothing starves and how large D gets, and says what was model-checked.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar

from rrfp.memory.branches import plain_stages
from rrfp.memory.byte_limit import ByteLimit
from rrfp.memory.held_bytes import HeldBytes, Owner
from rrfp.memory.seen_sizes import SeenSizes
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Kind, Mode, Task
from rrfp.model.visits import Visits


@dataclass(frozen=True, slots=True)
class RuleContext:
    """What decides which rule a stage follows in a step, beside the one that its limit asks for."""

    graph: TaskGraph
    stage: int
    visits: Visits
    mode: Mode
    #: Whether any task of any stage has to run in microbatch order.
    is_forced: bool

    @property
    def is_chain(self) -> bool:
        return self.graph.is_chain and not self.visits.are_partial


class SlotCounts:
    """Who holds slots on one stage in one step; counted anew by those who check a rule.

    ``visitors`` has, for each local chunk, the microbatches that visit it.
    """

    def __init__(self, visitors: Sequence[Collection[int]]) -> None:
        count = 1 + max((microbatch for microbatches in visitors for microbatch in microbatches), default=-1)
        #: Slots held, by chunk and by microbatch; and forwards to start, by microbatch.
        self.by_chunk = [0] * len(visitors)
        self.by_microbatch = [0] * count
        self.to_start = [sum(m in microbatches for microbatches in visitors) for m in range(count)]

    @property
    def held(self) -> int:
        return sum(self.by_chunk)

    def take(self, chunk: int, microbatch: int) -> None:
        self.by_chunk[chunk] += 1
        self.by_microbatch[microbatch] += 1
        self.to_start[microbatch] -= 1

    def give_back(self, chunk: int, microbatch: int) -> None:
        self.by_chunk[chunk] -= 1
        self.by_microbatch[microbatch] -= 1


class MemoryRule:
    """What one stage holds in one step, and which forwards may start: the base of all rules.

    ``slots`` is K * C and ``most_bytes`` the limit on bytes, None where unlimited. ``seen`` has the sizes of
    microbatches so far, for a limit on bytes; it is updated here. ``followers`` are the ranks of the group that report
    what they hold, beside this one. ``sizes`` of the microbatches are the caller's; ``visitors`` has, for each local
    chunk, the microbatches that visit it.
    """

    __slots__ = (
        "_below",
        "_below_later",
        "_chunks",
        "byte_limit",
        "bytes",
        "held",
        "is_draining",
        "most_bytes",
        "peak_held",
        "roomy_below",
        "slots",
    )

    #: What a limit, an option or a report calls it, and its statement.
    name: ClassVar[str]
    text: ClassVar[str]
    #: Whether a limit may ask for it; others stand in for one that does.
    is_offered: ClassVar[bool] = False
    #: Whether a limit on bytes may stand beside it; and whether it is proved for tasks that run in microbatch order.
    counts_bytes: ClassVar[bool] = True
    fits_forced_order: ClassVar[bool] = True
    #: Whether slots are kept for the lowest microbatch that was not forwarded on its chunk.
    reserves: ClassVar[bool] = False
    #: Whether, of the forwards that are present, the one of the lowest microbatch may start if any may.
    is_by_number: ClassVar[bool] = False
    #: Whether a full stage runs the tasks of its lowest unfinished microbatch only, in the order of `DrainOrder`.
    drains_in_order: ClassVar[bool] = False
    _byte_rule: ClassVar[type[ByteLimit]] = ByteLimit

    def __init__(
        self,
        slots: int | None,
        most_bytes: int | None,
        visitors: Sequence[Collection[int]],
        *,
        seen: SeenSizes,
        followers: int,
        sizes: Sequence[float] | None = None,
    ) -> None:
        self.slots = slots
        self._chunks = len(visitors)
        #: Whether the stage is full and drains.
        self.is_draining = False
        #: By chunk: a forward starts while D is below this; the same for microbatches that are not the lowest.
        self._below = [self._bound(chunk, is_lowest=True) for chunk in range(self._chunks)]
        self._below_later = [self._bound(chunk, is_lowest=False) for chunk in range(self._chunks)]
        #: While D is below this `allows` is true of every forward.
        self.roomy_below = math.inf if slots is None else min(*self._below, *self._below_later)
        #: The bytes of microbatches in work, after the last completed task of each, and of outputs still in use.
        self.bytes = HeldBytes(1 + followers)
        #: What decides where bytes are limited.
        self.byte_limit: ByteLimit | None = None
        self.most_bytes = most_bytes
        if most_bytes is not None:
            self.roomy_below = 0
            self.byte_limit = self._byte_rule(
                most_bytes, self.bytes, seen, visitors, reserve=self.reserves, members=1 + followers, sizes=sizes
            )
        #: D: chunk tasks that hold a slot.
        self.held = 0
        self.peak_held = 0

    # The rule, apart from any state.

    @classmethod
    def stand_in(cls, context: RuleContext) -> str:
        """The name of the rule that a stage follows where this one is asked for."""
        return cls.name

    @classmethod
    def bound(cls, slots: int, chunks: int) -> int:
        """The most that D reaches on a stage."""
        return slots

    @classmethod
    def validate(cls, slots: int, counts: SlotCounts) -> str | None:
        """What is wrong with slots that are held so, or None."""
        most = cls.bound(slots, len(counts.by_chunk))
        return f"holds {counts.held} chunk tasks, the most allowed is {most}" if counts.held > most else None

    def kept_free(self, chunk: int, *, is_lowest: bool) -> int:
        """How many slots a forward on local ``chunk`` leaves free when it starts.

        ``is_lowest``: it is of the lowest microbatch not yet forwarded on its chunk, or nothing is reserved.
        """
        return 0

    def _bound(self, chunk: int, *, is_lowest: bool) -> int:
        return 0 if self.slots is None else self.slots - self.kept_free(chunk, is_lowest=is_lowest or not self.reserves)

    # What it admits, and what happens.

    @property
    def full_at(self) -> int | None:
        """The smallest D at which the forward of some chunk is blocked; None: unlimited, or D alone does not say."""
        return None if self.slots is None else min(self._below)

    def allows(self, chunk: int, microbatch: int, lowest_unforwarded: int) -> bool:
        """Whether the forward of ``microbatch`` on local ``chunk`` may start now.

        ``lowest_unforwarded`` is the lowest microbatch whose forward on this chunk has not been enqueued.
        """
        is_lowest = microbatch == lowest_unforwarded or not self.reserves
        if self.slots is not None and self.held >= (self._below if is_lowest else self._below_later)[chunk]:
            return False
        return self._has_bytes(chunk, microbatch, is_lowest=is_lowest)

    def _has_bytes(self, chunk: int, microbatch: int, *, is_lowest: bool) -> bool:
        """Whether the forward may start as far as bytes are concerned; see `allows`."""
        limit = self.byte_limit
        if limit is None:
            return True
        if limit.is_measuring:
            return False
        return limit.fits(chunk, microbatch, is_lowest=is_lowest) or (is_lowest and limit.must_go_on(chunk, microbatch))

    @property
    def measured(self) -> frozenset[Owner]:
        """Forwards that run, on some rank, and whose size no other forward may start before."""
        return frozenset() if self.byte_limit is None else self.byte_limit.measured

    def preview(self, owner: Owner, input_bytes: int | None, signature: Hashable) -> None:
        """The forward of ``owner`` is known better before it starts; see `rrfp.core.events.Previewed`."""
        if self.byte_limit is not None:
            self.byte_limit.preview(owner, input_bytes, signature)

    def acquire(self, chunk: int, microbatch: int) -> None:
        """The forward of ``microbatch`` on ``chunk`` was enqueued: it takes a slot."""
        self.held += 1
        if self.held > self.peak_held:
            self.peak_held = self.held
        if self.byte_limit is not None:
            self.byte_limit.start((chunk, microbatch))

    def release_slot(self, microbatch: int) -> None:
        """The slot of ``microbatch`` on one chunk is free for what the lane runs next."""
        self.held -= 1

    def complete(self, kind: Kind, owner: Owner, held: int, output: int, *, is_last: bool) -> None:
        """A task of ``owner`` completed: ``held`` bytes stay, and nothing after its last task; see `free`.

        Its ``output`` is in the ledger apart, while a task or a send uses it.
        """
        if self.byte_limit is not None:
            self.byte_limit.complete(kind, owner, 0 if is_last else held, output)
        if is_last:
            self.free(owner)
        else:
            self.bytes.hold(owner, held)

    def complete_elsewhere(self, member: int, chunk: int, task: Task, held: int, output: int) -> None:
        """A task completed on follower ``member``: what stays there counts as well, where bytes are limited."""
        if (limit := self.byte_limit) is None:
            return
        owner = (chunk, task.microbatch)
        limit.complete(task.kind, owner, held, output, member)
        if limit.is_in_work(owner):
            self.bytes.hold(owner, held, member)
        self.bytes.keep_output_elsewhere(task, output, member)

    def free(self, owner: Owner) -> None:
        """``owner`` holds no bytes any more. Its slot is released apart, when its last task is enqueued."""
        self.bytes.drop(owner)
        if self.byte_limit is not None:
            self.byte_limit.free(owner)


class Staircase(MemoryRule):
    """The deepest chunk can always use the last slot, so the chain that frees memory never starves."""

    __slots__ = ()

    name = "staircase"
    text = "a forward of chunk c starts while D < K*C - (C-1-c)"
    is_offered = True

    @classmethod
    def stand_in(cls, context: RuleContext) -> str:
        """The reserve rule where an order is forced; the banker where branches of the graph join."""
        # The staircase holds back least, and is right where no two virtual stages are beside each other: on chains,
        # with or without skip edges. The banker is right on every graph and leaves less freedom, so only the stages
        # that need it take it; where an order is forced, these are all stages of a graph that is no chain.
        if context.is_chain:
            return "reserve" if context.is_forced else cls.name
        is_plain = context.stage in plain_stages(context.graph, context.visits.patterns)
        return cls.name if is_plain and not context.is_forced else "banker"

    @classmethod
    def validate(cls, slots: int, counts: SlotCounts) -> str | None:
        """Those of chunk c and above hold no more than the step of c."""
        if (wrong := super().validate(slots, counts)) is not None:
            return wrong
        chunks = len(counts.by_chunk)
        for chunk, held in enumerate(accumulate(counts.by_chunk)):
            if held > (most := slots - (chunks - 1 - chunk)):
                return f"holds {held} chunk tasks up to chunk {chunk}, the most allowed is {most}"
        return None

    def kept_free(self, chunk: int, *, is_lowest: bool) -> int:
        """One slot for each deeper chunk. With one chunk it is plainly D < K."""
        return self._chunks - 1 - chunk


class Reserve(Staircase):
    """The staircase, and C slots for the lowest microbatch that was not forwarded: for a forced order."""

    __slots__ = ()

    name = "reserve"
    text = "as the staircase; but for the lowest microbatch not yet forwarded on its chunk, while D < K*C - C"
    is_offered = False
    reserves = True

    def kept_free(self, chunk: int, *, is_lowest: bool) -> int:
        """The staircase's for the lowest microbatch, C slots for others."""
        return super().kept_free(chunk, is_lowest=is_lowest) if is_lowest else self._chunks


class Paper(MemoryRule):
    """The paper's Appendix C: a full stage drains.

    It runs nothing but the tasks of its lowest unfinished microbatch, F from the shallowest chunk to the deepest and
    then B (each with its W) back, and waits for the next one. D passes K*C by C at most.
    """

    __slots__ = ()

    name = "paper"
    text = "any task starts while D < K*C; from there on the next of the lowest unfinished microbatch"
    is_offered = True
    counts_bytes = False
    fits_forced_order = False
    drains_in_order = True

    @classmethod
    def stand_in(cls, context: RuleContext) -> str:
        """It is right on any graph in training for stages of several chunks; for one chunk it is plainly D < K."""
        # Draining bounds D only where what is drained frees memory; forward only, that is up to the successors.
        if context.mode is Mode.FORWARD:
            return Staircase.stand_in(context)
        placement = context.graph.placement
        if placement.chunks_of(context.stage) > 1:
            return cls.name
        has_even_chunks = len({placement.chunks_of(stage) for stage in range(placement.stages)}) == 1
        # D < K is right only on a chain of such stages.
        return Staircase.stand_in(context) if context.is_chain and has_even_chunks else "banker"

    @classmethod
    def bound(cls, slots: int, chunks: int) -> int:
        """What is drained may be forwards, one of each chunk."""
        return slots + chunks

    def acquire(self, chunk: int, microbatch: int) -> None:
        """The forward of ``microbatch`` on ``chunk`` was enqueued: it takes a slot."""
        super().acquire(chunk, microbatch)
        self.is_draining = self.slots is not None and self.held >= self.slots

    def release_slot(self, microbatch: int) -> None:
        """The slot of ``microbatch`` on one chunk is free for what the lane runs next."""
        super().release_slot(microbatch)
        self.is_draining = self.slots is not None and self.held >= self.slots

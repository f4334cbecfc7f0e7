"""Admission: the hard memory limit of a stage, which no hint can break.

A forward takes a slot when it is enqueued; the microbatch's last task on that virtual stage (B, or W where backward is
split) releases it when it is enqueued: a lane runs its tasks in order, so whatever is enqueued behind it starts when it
has completed. Forward only, the slot is free when every successor has consumed the output. D counts taken slots, in
chunk tasks; there are K * C. Backwards and weight tasks free memory: only the paper's rule ever blocks both.

- **Staircase** (C chunks): the forward of local chunk c may start iff D < K*C - (C-1-c). The deepest chunk can always
  use the last slot, so the chain that frees memory never starves. With C = 1 it is plainly D < K.
- **Paper** (Appendix C, instead of the staircase): while D < K*C any task may start. At D = K*C or above the stage
  drains: it runs nothing but the tasks of its lowest unfinished microbatch, F from the shallowest chunk to the deepest
  and then B (each with its W) back, and waits for the next one. D passes K*C by C at most. In forward-only steps, where
  draining frees nothing, the staircase holds instead.
- **Reserve** (beside the staircase, when any order is forced): the last C slots admit only the lowest microbatch that
  has not been forwarded on its chunk.
- **Bytes**: a forward of chunk c starts only while the bytes held fit together with those that it is expected to hold,
  with room for one forward of each deeper chunk (and, under the reserve rule, for a whole lowest microbatch), and with
  what backwards are expected to add: a split one may hold more than its forward did, and may have to let weight tasks
  go first. `byte_limit` says how much is expected; that can be wrong, so one forward is always admitted when
  no chunk from c on holds anything (under the reserve rule: the lowest one, when they hold later ones only). While a
  forward runs whose size no earlier one has shown, none starts behind it, however deep the lane is.
- **Graphs that are no chains**: the staircase is wrong above joins, and the reserve rule anywhere; there the in-order
  banker applies (`rrfp.memory.banker`). `rrfp.memory.memory_rule` chooses for each stage.
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
import operator
import re
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, get_args

from rrfp.errors import ConfigError
from rrfp.memory.byte_limit import ByteLimit
from rrfp.memory.held_bytes import HeldBytes, Owner
from rrfp.memory.seen_sizes import SeenSizes
from rrfp.model.tasks import Kind, Task

LIMIT_PRESETS = ("1f1b", "n", "2n")

_UNITS = {"B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(rf"([0-9]+)({'|'.join(_UNITS)})")

#: How chunks of a stage share its slots; see the module's docstring.
AdmissionRule = Literal["staircase", "paper"]


@dataclass(frozen=True, slots=True)
class Limit:
    """How much a stage may hold.

    Attributes:
        microbatches: K, at least 1: K * C slots for chunk tasks. None: unlimited.
        bytes: bytes held by microbatches in work and by outputs on their way out, at least 1. None: unlimited.
        rule: how the chunks of a stage share the slots: ``"staircase"``, or ``"paper"`` for the paper's Appendix C. The
            two are one rule where a stage has one chunk.

    Raises:
        ConfigError: on a value that is no whole number >= 1, an unknown rule, or bytes under the paper's rule.
    """

    microbatches: int | None = None
    bytes: int | None = None
    rule: AdmissionRule = "staircase"

    def __post_init__(self) -> None:
        for field, value in (("microbatches", self.microbatches), ("bytes", self.bytes)):
            if value is not None and (isinstance(value, bool) or not hasattr(value, "__index__")):
                size = bytes_of(value)
                text = "" if size is None else f", such as {size}; limit={value!r} takes the text"
                raise ConfigError(f"limit: {field} is {value!r}, must be a whole number >= 1{text}")
            if value is not None and value < 1:
                raise ConfigError(f"limit: {field} is {value}, must be at least 1")
        if self.rule not in get_args(AdmissionRule):
            raise ConfigError(f"limit: rule is {self.rule!r}, must be one of: {', '.join(get_args(AdmissionRule))}")
        if self.rule == "paper" and self.bytes is not None:
            raise ConfigError("limit: bytes must be None with rule 'paper', which counts microbatches only")

    def slots(self, chunks: int) -> int | None:
        """K * C, the chunk tasks that a stage may hold; None: unlimited.

        Args:
            chunks: the stage's.
        """
        return None if self.microbatches is None else self.microbatches * chunks

    @classmethod
    def resolve(
        cls, spec: Limit | int | str | None, stage: int, stages: int, others: str = "", *, distance: int | None = None
    ) -> Limit:
        """The limit of ``stage`` that a caller's ``spec`` means.

        Args:
            spec: a Limit; K as a number or its text; ``"1f1b"`` (K = N - stage: what 1F1B holds); ``"n"`` (K = N: what
                its fullest stage holds); ``"2n"`` (K = 2 N); bytes as a text, a whole number of B, kB, MB or GB (powers
                of 1000) such as ``"8GB"``; None for unlimited.
            stage: 0..stages-1.
            stages: N.
            others: ends the error, for a caller whose users may pass a Limit.
            distance: the stage's `Graph.distance_to_sink`, which stands for N - stage in ``"1f1b"``; None: a chain's.

        Raises:
            ConfigError: for anything else; lists the choices.
        """
        if isinstance(spec, Limit):
            return spec
        if spec is None:
            return cls()
        if spec == "1f1b":
            return cls(stages - stage if distance is None else distance)
        if spec == "n":
            return cls(stages)
        if spec == "2n":
            return cls(2 * stages)
        if (size := bytes_of(spec)) is not None:
            return cls(bytes=size)
        try:
            if isinstance(spec, bool):
                raise TypeError
            microbatches = int(spec) if isinstance(spec, str) else operator.index(spec)
        except (TypeError, ValueError):
            raise ConfigError(
                f"limit is {spec!r}, must be a number of microbatches or one of: {', '.join(LIMIT_PRESETS)}, or a size "
                f"such as 8GB{others}"
            ) from None
        return cls(microbatches)


def bytes_of(spec: object) -> int | None:
    """The bytes of a text such as ``8GB``; None for anything else."""
    size = _SIZE.fullmatch(spec) if isinstance(spec, str) else None
    return None if size is None else int(size[1]) * _UNITS[size[2]]


class Admission:
    """What one stage holds in one step, and which forwards may start.

    ``seen`` has the sizes of microbatches so far, for a limit on bytes; it is updated here. ``followers`` are the ranks
    of the group that report what they hold, beside this one. ``sizes`` of the microbatches are the caller's;
    ``visitors`` has, for each local chunk, the microbatches that visit it.
    """

    __slots__ = (
        "_below",
        "_below_later",
        "_chunks",
        "byte_limit",
        "bytes",
        "drains_in_order",
        "held",
        "is_draining",
        "most_bytes",
        "peak_held",
        "reserve",
        "roomy_below",
        "slots",
    )

    #: Whether, of the forwards that are present, the one of the lowest microbatch may start if any may.
    is_by_number: ClassVar[bool] = False
    _byte_rule: ClassVar[type[ByteLimit]] = ByteLimit

    def __init__(
        self,
        limit: Limit,
        visitors: Sequence[Collection[int]],
        *,
        reserve: bool,
        seen: SeenSizes,
        followers: int,
        sizes: Sequence[float] | None = None,
    ) -> None:
        num_chunks = len(visitors)
        #: K * C, or None: unlimited.
        self.slots = limit.slots(num_chunks)
        self._chunks = num_chunks
        #: Whether the reserve rule applies, and whether the paper's rule does.
        self.reserve = reserve
        self.drains_in_order = limit.rule == "paper" and num_chunks > 1
        #: Paper's rule: the stage is full, and runs the tasks of its lowest unfinished microbatch only, in order.
        self.is_draining = False
        #: By chunk: a forward starts while D is below this; the same for those that the reserve rule holds back.
        self._below = [self._bound(chunk, is_lowest=True) for chunk in range(num_chunks)]
        self._below_later = [self._bound(chunk, is_lowest=False) for chunk in range(num_chunks)]
        #: While D is below this `allows` is true of every forward.
        self.roomy_below = math.inf if self.slots is None else min(*self._below, *self._below_later)
        #: The bytes of microbatches in work, after the last completed task of each, and of outputs still in use.
        self.bytes = HeldBytes(1 + followers)
        #: What decides where bytes are limited.
        self.byte_limit: ByteLimit | None = None
        #: The limit on bytes, or None: unlimited.
        self.most_bytes = limit.bytes
        if limit.bytes is not None:
            self.roomy_below = 0
            self.byte_limit = self._byte_rule(
                limit.bytes, self.bytes, seen, visitors, reserve=reserve, members=1 + followers, sizes=sizes
            )
        #: D: chunk tasks that hold a slot.
        self.held = 0
        self.peak_held = 0

    def kept_free(self, chunk: int, *, is_lowest: bool) -> int:
        """How many slots a forward on local ``chunk`` leaves free when it starts: the staircase, and the reserve rule.

        ``is_lowest``: it is of the lowest microbatch not yet forwarded on its chunk, or nothing is reserved.
        """
        if self.drains_in_order:
            return 0
        return self._chunks - 1 - chunk if is_lowest else self._chunks

    def _bound(self, chunk: int, *, is_lowest: bool) -> int:
        return 0 if self.slots is None else self.slots - self.kept_free(chunk, is_lowest=is_lowest)

    def allows(self, chunk: int, microbatch: int, lowest_unforwarded: int) -> bool:
        """Whether the forward of ``microbatch`` on local ``chunk`` may start now.

        ``lowest_unforwarded`` is the lowest microbatch whose forward on this chunk has not been enqueued.
        """
        is_lowest = microbatch == lowest_unforwarded or not self.reserve
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
        if self.drains_in_order:
            self.is_draining = self.slots is not None and self.held >= self.slots
        if self.byte_limit is not None:
            self.byte_limit.start((chunk, microbatch))

    def release_slot(self, microbatch: int) -> None:
        """The slot of ``microbatch`` on one chunk is free for what the lane runs next."""
        self.held -= 1
        if self.drains_in_order:
            self.is_draining = self.slots is not None and self.held >= self.slots

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

"""Ways in which replicas that share forwards could go wrong; what checks them must find each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rrfp.core import events as ev
from rrfp.core.claims import Claims, Grants
from rrfp.core.stage_core import StageCore
from rrfp.errors import ProtocolError
from rrfp.memory.byte_limit import ByteLimit
from rrfp.memory.rules import MemoryRule
from rrfp.model.tasks import F

#: What an event leads to, and what that is instead; ``core`` has taken the event in.
Instead = Callable[[StageCore, ev.Event, tuple[ev.Instruction, ...]], tuple[ev.Instruction, ...]]


def _answering(patch: pytest.MonkeyPatch, instead: Instead) -> None:
    apply = StageCore.apply
    patch.setattr(StageCore, "apply", lambda self, event: instead(self, event, apply(self, event)))


def gives_twice(patch: pytest.MonkeyPatch) -> None:
    """A holder gives a forward to every copy that asks."""

    def claim(self: Grants, microbatch: int, copy: int) -> bool:
        self.takers[microbatch] = copy
        return True

    patch.setattr(Grants, "claim", claim)


def skips_the_limit(patch: pytest.MonkeyPatch) -> None:
    """A copy claims what it has no slot for."""
    following: Any = Claims.next

    def unlimited(self: Claims, admission: MemoryRule, *deeper: Any, **options: Any) -> int | None:
        slots, admission.slots = admission.slots, None
        try:
            return following(self, admission, *deeper, **options)  # type: ignore[no-any-return]
        finally:
            admission.slots = slots

    patch.setattr(Claims, "next", unlimited)


def counts_no_claims(patch: pytest.MonkeyPatch) -> None:
    """A copy claims as if it had claimed nothing so far."""
    following: Any = Claims.next

    def forgetful(self: Claims, *arguments: Any, **options: Any) -> int | None:
        claimed, self._claimed = self._claimed, set()
        try:
            return following(self, *arguments, **options)  # type: ignore[no-any-return]
        finally:
            self._claimed = claimed

    patch.setattr(Claims, "next", forgetful)


def fits_or_nothing(patch: pytest.MonkeyPatch) -> None:
    """A copy that holds nothing claims no forward that is larger than its limit either."""
    patch.setattr(ByteLimit, "has_room", ByteLimit._fits)


def keeps_a_lost_claim(patch: pytest.MonkeyPatch) -> None:
    """A forward that went to another copy keeps its place among the claimed."""
    grant = Claims.grant

    def keeping(self: Claims, microbatch: int, copy: int) -> None:
        kept = {microbatch} if self.is_asked(microbatch) else set()
        grant(self, microbatch, copy)
        self._claimed |= kept

    patch.setattr(Claims, "grant", keeping)


def helps_nobody(patch: pytest.MonkeyPatch) -> None:
    """A copy runs its own replica's alone."""
    chosen = Claims._chosen

    def own(self: Claims, held: int, *, may_help: bool) -> int | None:
        found = chosen(self, held, may_help=may_help)
        return None if found is None or self.holders[found] != self._pool.copy else found

    patch.setattr(Claims, "_chosen", own)


def tells_nobody(patch: pytest.MonkeyPatch) -> None:
    """A holder gives a forward away, and the other copies do not hear of it."""
    _answering(patch, lambda core, event, given: tuple(each for each in given if not isinstance(each, ev.Grant)))


def leaves_gradients_in_its_replica(patch: pytest.MonkeyPatch) -> None:
    """A gradient goes to the sender's own replica, whichever copy ran the forward."""

    def own(core: StageCore, event: ev.Event, given: tuple[ev.Instruction, ...]) -> tuple[ev.Instruction, ...]:
        return tuple(
            ev.Send(each.task, each.peer) if isinstance(each, ev.Send) and each.task.kind is not F else each
            for each in given
        )

    _answering(patch, own)


def drops_what_it_holds(patch: pytest.MonkeyPatch) -> None:
    """An output is dropped as soon as it has been offered."""

    def dropped(core: StageCore, event: ev.Event, given: tuple[ev.Instruction, ...]) -> tuple[ev.Instruction, ...]:
        return (*given, *(ev.Release(event.task) for each in given if isinstance(each, ev.Offer)))  # type: ignore[union-attr]

    _answering(patch, dropped)


def refuses_late_claims(patch: pytest.MonkeyPatch) -> None:
    """A claim that comes after the holder's step is taken for wrong."""

    def refused(core: StageCore, event: ev.Event, given: tuple[ev.Instruction, ...]) -> tuple[ev.Instruction, ...]:
        if isinstance(event, ev.Claimed) and core.step is not None and core.step.finished and not core._is_aborted:
            raise ProtocolError(f"{event.task} was claimed after the step")
        return given

    _answering(patch, refused)


def takes_what_comes_twice(patch: pytest.MonkeyPatch) -> None:
    """What is said of a forward for the second time is dropped without a word."""
    apply = StageCore.apply

    def once(self: StageCore, event: ev.Event) -> tuple[ev.Instruction, ...]:
        try:
            return apply(self, event)
        except ProtocolError:
            if isinstance(event, ev.Offered | ev.Claimed | ev.Granted):
                return ()
            raise

    patch.setattr(StageCore, "apply", once)


def goes_on_when_aborted(patch: pytest.MonkeyPatch) -> None:
    """A core does not care about failures elsewhere."""
    apply = StageCore.apply
    patch.setattr(StageCore, "apply", lambda self, event: () if isinstance(event, ev.Aborted) else apply(self, event))


def answers_when_aborted(patch: pytest.MonkeyPatch) -> None:
    """A core begins nothing more after a failure, and still gives forwards away."""
    apply = StageCore.apply

    def answered(self: StageCore, event: ev.Event) -> tuple[ev.Instruction, ...]:
        was_aborted = self._is_aborted
        self._is_aborted = was_aborted and not isinstance(event, ev.Claimed)
        try:
            return apply(self, event)
        finally:
            self._is_aborted |= was_aborted

    patch.setattr(StageCore, "apply", answered)


def refuses_when_aborted(patch: pytest.MonkeyPatch) -> None:
    """A core that was aborted has another error to report."""

    def refused(core: StageCore, event: ev.Event, given: tuple[ev.Instruction, ...]) -> tuple[ev.Instruction, ...]:
        if isinstance(event, ev.Claimed) and core._is_aborted:
            raise ProtocolError(f"{event.task} was claimed after an abort")
        return given

    _answering(patch, refused)

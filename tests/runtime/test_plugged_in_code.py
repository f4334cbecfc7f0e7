"""Hints, loss functions and stage programs that go wrong: each is named on every rank."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from runtime.ranks import ThreadedRanks, step, two_steps
from runtime.toys import Hold, Ones, Trap, stages
from torch import Tensor

import rrfp
from rrfp.core import events as ev
from rrfp.errors import Origin


def test_a_loss_function_that_raises_is_named() -> None:
    def bad_loss(output: Tensor, target: Tensor) -> Tensor:
        raise Trap("no loss today")

    for outcome in ThreadedRanks(stages(3), step, loss_fn=bad_loss).join():
        assert outcome.abort.origin == Origin(2, "F0@2", "Trap: no loss today")


class Choosing(rrfp.Hint):
    """A hint that goes wrong at its fifth choice, in the way that `how` says."""

    def __init__(self, how: str) -> None:
        self.how, self.choices = how, 0

    def choose(self, ready: rrfp.ReadySet, view: rrfp.View) -> rrfp.Task | None:
        self.choices += 1
        if view.stage == 1 and self.choices == 5:
            if self.how == "raises":
                raise Trap("cannot choose")
            if self.how == "exits":
                raise SystemExit(3)
            if self.how == "none":
                return None
            if self.how == "nonsense":
                return rrfp.Task(rrfp.Kind.F, 77, 1)
        return next(iter(ready))


@pytest.mark.parametrize(
    ("how", "cause"),
    [
        ("raises", "Trap: cannot choose"),
        ("exits", "SystemExit: 3"),
        ("none", "HintError: hint Choosing chose None on stage 1; ready are: ReadySet("),
        ("nonsense", "HintError: hint Choosing chose F77@1 on stage 1; ready are: ReadySet("),
    ],
)
def test_a_hint_that_goes_wrong_is_named(how: str, cause: str) -> None:
    for outcome in ThreadedRanks(stages(3), two_steps, hint=Choosing(how)).join():
        assert outcome.abort.origin.stage == 1
        assert outcome.abort.origin.cause.startswith(cause)


class Observing(Choosing):
    """Its `observe` raises at every event from the first completed task on, the abort included."""

    def __init__(self, error: BaseException) -> None:
        super().__init__("")
        self.error = error

    def observe(self, event: Any) -> None:
        if self.choices:
            raise self.error


class Opening(Choosing):
    """Refuses to open a step, and is not asked about tasks of it then."""

    def __init__(self, stage: int, error: BaseException) -> None:
        super().__init__("")
        self.stage, self.error, self.is_open = stage, error, False

    def open_step(self, view: rrfp.View) -> None:
        if view.stage == self.stage:
            raise self.error
        self.is_open = True

    def choose(self, ready: rrfp.ReadySet, view: rrfp.View) -> rrfp.Task | None:
        if not self.is_open:
            raise Trap("asked before it was opened")
        return super().choose(ready, view)


@pytest.mark.parametrize(
    ("hint", "cause"),
    [
        (Observing(Trap("seen too much")), "Trap: seen too much"),
        (Observing(SystemExit(3)), "SystemExit: 3"),
        (Observing(asyncio.CancelledError()), "LocalError: plugged-in code raised CancelledError on the loop"),
        (Opening(0, Trap("closed today")), "Trap: closed today"),
        (Opening(2, Trap("closed today")), "Trap: closed today"),
        (Opening(2, SystemExit(3)), "SystemExit: 3"),
        (Opening(2, asyncio.CancelledError()), "LocalError: plugged-in code raised CancelledError on the loop"),
    ],
)
def test_a_hint_that_raises_while_it_listens_is_named_on_every_rank(hint: rrfp.Hint, cause: str) -> None:
    for outcome in ThreadedRanks(stages(3), step, hint=hint).join():
        assert outcome.abort.origin.cause == cause


class Unsized(Ones):
    """Cannot say how large a forward is."""

    def __init__(self, **said: Any) -> None:
        self.said = said

    def _say(self, method: str) -> Any:
        if isinstance(value := self.said.get(method), Exception):
            raise value
        return value

    def signature(self, task: rrfp.Task, inputs: tuple[rrfp.Payload, ...]) -> Any:
        return self._say("signature")

    def input_bytes(self, task: rrfp.Task, inputs: tuple[rrfp.Payload, ...]) -> int | None:
        size: int | None = self._say("input_bytes")
        return size


@pytest.mark.parametrize(
    ("said", "cause"),
    [
        ({"signature": Trap("unknown")}, "signature of F0@1 raised Trap: unknown"),
        ({"signature": []}, "signature of F0@1 raised TypeError: "),
        ({"input_bytes": Trap("unknown")}, "input_bytes of F0@1 raised Trap: unknown"),
    ],
)
def test_a_program_that_cannot_say_how_large_a_forward_is_is_named(said: dict[str, Any], cause: str) -> None:
    programs: Any = [Ones(), Unsized(**said)]
    for outcome in ThreadedRanks(programs, step, limit=rrfp.Limit(bytes=100)).join():
        assert outcome.abort.origin.stage == 1
        assert outcome.abort.origin.cause.startswith(f"StageError: Unsized.{cause}")


class Hearing(Choosing):
    """Its `observe` raises when an input arrives, which is where the transport reads its sockets."""

    def __init__(self, error: BaseException) -> None:
        super().__init__("")
        self.error = error

    def observe(self, event: Any) -> None:
        if isinstance(event, ev.Arrived):
            raise self.error


@pytest.mark.parametrize("transport", ["shm", "zmq"])
@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (Trap("heard too much"), "Trap: heard too much"),
        (SystemExit(3), "SystemExit: 3"),
        (asyncio.CancelledError(), "LocalError: plugged-in code raised CancelledError on the loop"),
        (StopIteration(), "RuntimeError: plugged-in code raised StopIteration"),
    ],
    ids=repr,
)
def test_a_hint_that_raises_when_a_message_is_delivered_is_named_on_every_rank(
    transport: str, error: BaseException, cause: str
) -> None:
    for outcome in ThreadedRanks(stages(3), step, hint=Hearing(error), transport=transport).join():
        # A message that came before the step opened is delivered when that does, where Python itself names the error.
        assert outcome.abort.origin.cause in (cause, cause.replace("plugged-in code", "generator"))


class Raising(Ones):
    """Raises in the method that is named."""

    def __init__(self, method: str) -> None:
        self._method = method

    def _enter(self, method: str) -> None:
        if method == self._method:
            raise Trap(method)

    def finish(self, virtual_stage: int) -> None:
        self._enter("finish")

    def held_bytes(self, microbatch: int, virtual_stage: int) -> int:
        self._enter("held_bytes")
        return 0

    def losses(self) -> Any:
        self._enter("losses")
        return {}


@pytest.mark.parametrize("method", ["held_bytes", "finish", "losses"])
def test_a_stage_program_that_raises_anywhere_is_named(method: str) -> None:
    modules: Any = [Ones(), Raising(method)]
    for outcome in ThreadedRanks(modules, step).join():
        assert outcome.abort.origin.cause == f"Trap: {method}"


def test_a_stage_program_whose_outputs_exit_is_named() -> None:
    class Exiting(Ones):
        def outputs(self) -> Any:
            raise SystemExit(3)

    modules: Any = [Ones(), Exiting()]
    outcomes = ThreadedRanks(modules, two_steps).join(5.0)
    assert [outcome.abort.origin for outcome in outcomes] == [Origin(1, None, "SystemExit: 3")] * 2


@pytest.mark.parametrize(
    ("kind", "returned", "cause"),
    [
        ("F", None, "StageError: Careless.forward returned a NoneType, must return a Payload"),
        ("B", [rrfp.Payload()], "StageError: Careless.backward must return a tuple of Payloads"),
        ("B", (torch.ones(1),), "StageError: Careless.backward must return a tuple of Payloads"),
        ("B", (), "StageError: 0 input gradients, must be one for each predecessor: 1"),
    ],
)
def test_a_stage_program_that_returns_nonsense_is_named(kind: str, returned: Any, cause: str) -> None:
    class Careless(Ones):
        def forward(self, task: rrfp.Task, inputs: tuple[rrfp.Payload, ...]) -> rrfp.Payload:
            output: rrfp.Payload = returned if kind == "F" else super().forward(task, inputs)
            return output

        def backward(self, task: rrfp.Task, grads: tuple[rrfp.Payload, ...]) -> tuple[rrfp.Payload, ...]:
            gradients: tuple[rrfp.Payload, ...] = returned
            return gradients

    modules: Any = [Ones(), Careless()]
    for outcome in ThreadedRanks(modules, step).join():
        assert outcome.abort.origin == Origin(1, f"{kind}0@1", cause)


def test_an_abort_does_not_wait_for_losses_that_a_lane_is_reading() -> None:
    hold = Hold()

    class Reading(Ones):
        def losses(self) -> Any:
            hold(0)
            return {}

    class Failing(Ones):
        def finish(self, virtual_stage: int) -> None:
            hold.begun.wait(10)
            raise Trap("unreadable")

    modules: Any = [Failing(), Reading()]
    outcomes = ThreadedRanks(modules, step).join(5.0)
    hold.release.set()
    assert [outcome.abort.origin.cause for outcome in outcomes] == ["Trap: unreadable"] * 2

"""The conformance suite for hints: every hint that we ship passes it, and it finds every kind of lie."""

from __future__ import annotations

import itertools
import random

import pytest

from rrfp import Hint, View
from rrfp.core.ready_set import ReadySet
from rrfp.errors import ConfigError
from rrfp.hints.registry import create_hint, create_strict, hint_names
from rrfp.model.tasks import Kind, Task
from rrfp.schedules.registry import schedule_names
from rrfp.testing.hint_checks import ALL_CHECKS, Check, run_hint_checks


@pytest.mark.parametrize("check", ALL_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", hint_names())
def test_every_hint_by_name_passes(name: str, check: Check) -> None:
    check(lambda: create_hint(name))


@pytest.mark.parametrize("name", schedule_names())
def test_every_strict_schedule_passes(name: str) -> None:
    run_hint_checks(lambda: create_strict(name))


class Unready(Hint):
    """Names a task that no pipeline has."""

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        return Task(Kind.F, 99, 0)


class Silent(Hint):
    """Answers nothing although it may not wait."""

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        return None


class Forever(Silent):
    """Waits for ever."""

    may_wait = True


class Dice(Hint):
    """Depends on something outside its history."""

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        return random.SystemRandom().choice(list(ready))


class Fickle(Hint):
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self._asked = itertools.count()

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        return list(ready)[next(self._asked) % len(ready)]


class Sticky(Hint):
    """Goes on with the kind of its last answer, as if that had been followed."""

    def __init__(self) -> None:
        self._last = Kind.F

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        task = ready.first(self._last) or next(iter(ready))
        self._last = task.kind
        return task


class Picky(Hint):
    """Takes no pipeline at all."""

    def open_step(self, view: View) -> None:
        raise ConfigError("not this one")


@pytest.mark.parametrize(
    ("liar", "complaint"),
    [
        (Unready, "check_answers_are_ready_and_every_run_ends: training: hint Unready chose F99@0 on stage"),
        (Silent, "check_answers_are_ready_and_every_run_ends: training: hint Silent chose None on stage"),
        (Forever, "check_answers_are_ready_and_every_run_ends: training: nothing can happen any longer: stage 0 waits"),
        (Dice, "check_same_history_same_choices: training: two runs of the same events differ"),
        (Fickle, "check_choosing_changes_nothing: training: called more often in one state"),
        (Sticky, "check_choosing_changes_nothing: training: after answers that were not followed"),
        (Picky, "check_answers_are_ready_and_every_run_ends: the hint refuses every pipeline"),
    ],
)
def test_a_hint_that_breaks_the_contract_is_found_out(liar: type[Hint], complaint: str) -> None:
    with pytest.raises(AssertionError) as caught:
        run_hint_checks(liar)
    assert str(caught.value).startswith(complaint)

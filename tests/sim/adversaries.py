"""Hints and limits that random pipelines run under: as unhelpful as the contracts allow."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from sim.tp_cases import AnyReady

from rrfp import Hint, View
from rrfp.core.events import Event
from rrfp.core.ready_set import ReadySet
from rrfp.hints.registry import create_hint
from rrfp.memory.admission import Limit
from rrfp.model.tasks import Task


class Worst(Hint):
    """Fills the memory with what is needed last: forwards first, shallow chunks and late microbatches first."""

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        return min(ready, key=lambda task: ("FWB".index(task.kind), task.virtual_stage, -task.microbatch))


class LastInFirstOut(Hint):
    """Takes what became ready last."""

    def __init__(self) -> None:
        self._age: dict[Task, int] = {}

    def open_step(self, view: View) -> None:
        self._age.clear()

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        for task in ready:
            self._age.setdefault(task, len(self._age))
        return max(ready, key=self._age.__getitem__)

    def observe(self, event: Event) -> None:
        """Told of everything, and makes nothing of it."""


class Hesitant(AnyReady):
    """Prefers any wait to a backward."""

    def reports_begun(self, view: View) -> bool:
        return True

    def awaits(self, task: Task, view: View) -> bool:
        return True


def holding_back(hint: Any) -> Any:
    """``hint``, but it holds back every forward of an encoder chunk that it may."""
    hint._run_ahead._most_ahead = lambda stage, view: 0
    return hint


ADVERSARIES: Sequence[Callable[[random.Random], Hint]] = (
    lambda rng: AnyReady(rng.randrange(2**32)),
    lambda rng: Worst(),
    lambda rng: LastInFirstOut(),
    lambda rng: create_hint(rng.choice(["bf", "fb", "b-priority", "f-priority", "bfw"])),
    lambda rng: Hesitant(rng.randrange(2**32)),
)


def random_limit(rng: random.Random, microbatches: int) -> Limit:
    count = rng.choice([1, 1, rng.randint(1, microbatches), None])
    return Limit(count, rng.randint(1, 30) if rng.random() < 0.25 else None)

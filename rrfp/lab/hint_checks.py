"""The contract of hints as checks, for authors of hints: ``run_hint_checks(MyHint)``.

The checks run small pipelines on the real cores, without time, in many orders of events, and need no test framework. A
check that fails raises `AssertionError`, which names the pipeline and the breach.

A hint for some pipelines only, such as a schedule for one chunk a stage, raises `ConfigError` in ``open_step`` on the
others; these are then left out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rrfp.core.events import Event
from rrfp.core.hint import Hint, View
from rrfp.core.ready_set import ReadySet
from rrfp.errors import ConfigError, HintError
from rrfp.lab.cluster.random_run import Delivery, RandomRun
from rrfp.memory.admission import Limit
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import TablePlacement
from rrfp.model.tasks import Mode, Task
from rrfp.model.visits import Visits

__all__ = ["ALL_CHECKS", "Check", "HintFactory", "run_hint_checks"]

HintFactory = Callable[[], Hint]
"""Makes a fresh hint for one stage, such as the hint's class."""

_SEEDS = range(4)


@dataclass(frozen=True, slots=True)
class HintCase:
    """One small pipeline and the steps that it runs."""

    name: str
    graph: TaskGraph
    #: (mode, M) of each step.
    steps: tuple[tuple[Mode, int], ...]
    #: The limit of every stage, in any form that `Limit.resolve` takes.
    limit: int | str | None = None
    #: The most tasks of a stage that are enqueued and not completed.
    depth: int = 1
    #: A task may begin on an answer that did not know the last events.
    takes_offers: bool = False
    #: By step, what each microbatch visits; empty: all visit everything.
    visits: tuple[Visits, ...] = ()


def _encoders(*stages: int) -> TaskGraph:
    """Two encoders on the first of ``stages``, and a model that reads both."""
    return TaskGraph(TablePlacement(stages), ((0, 2), (1, 2), (2, 3)))


_BOTH, _NO_SOUND, _NEITHER = frozenset[int](), frozenset({1}), frozenset({0, 1})
_TRAIN, _FORWARD = Mode.TRAIN, Mode.FORWARD
CASES = (
    HintCase("training", TaskGraph.chain(3), ((_TRAIN, 4),)),
    HintCase("one stage", TaskGraph.chain(1), ((_TRAIN, 3),)),
    HintCase("one microbatch", TaskGraph.chain(3), ((_TRAIN, 1),)),
    HintCase("1F1B's memory", TaskGraph.chain(3), ((_TRAIN, 5),), limit="1f1b"),
    HintCase("room for one microbatch", TaskGraph.chain(3), ((_TRAIN, 3),), limit=1),
    HintCase("split backward", TaskGraph.chain(3, split=True), ((_TRAIN, 4),), limit=2),
    HintCase("two chunks, looped", TaskGraph.chain(2, chunks=2), ((_TRAIN, 4),), limit=2),
    HintCase("two chunks, V, split", TaskGraph.chain(2, chunks=2, layout="v", split=True), ((_TRAIN, 3),), limit=1),
    HintCase("forward only", TaskGraph.chain(3), ((_FORWARD, 4),), limit=2),
    HintCase("two tasks in flight", TaskGraph.chain(3), ((_TRAIN, 4),), limit=3, depth=2),
    HintCase("offered tasks", TaskGraph.chain(3, split=True), ((_TRAIN, 5),), limit=3, takes_offers=True),
    HintCase("two branches", _encoders(0, 1, 2, 2), ((_TRAIN, 4),), limit=1),
    HintCase(
        "optional parts on the stages of their reader",
        _encoders(0, 1, 0, 1),
        ((_TRAIN, 4), (_FORWARD, 2)),
        limit=1,
        visits=(Visits(4, (_BOTH, _NEITHER, _NO_SOUND, _BOTH)), Visits(2, (_NO_SOUND, _NEITHER))),
    ),
    HintCase("train, evaluate, train", TaskGraph.chain(2), ((_TRAIN, 3), (_FORWARD, 2), (_TRAIN, 4))),
)


Check = Callable[[HintFactory], None]
"""A check: raises `AssertionError` if its docstring does not hold for the hints of a factory."""


def run_hint_checks(factory: HintFactory) -> None:
    """Run every check on hints that ``factory`` makes.

    Args:
        factory: makes a fresh hint for one stage, such as the hint's class.

    Raises:
        AssertionError: of the first check that failed, with its name.
    """
    for check in ALL_CHECKS:
        try:
            check(factory)
        except AssertionError as error:
            raise AssertionError(f"{check.__name__}: {error}") from error


def check_answers_are_ready_and_every_run_ends(factory: HintFactory) -> None:
    """Every answer is a ready task (None only with ``may_wait``), and every task of every step runs once."""
    accepted = [_orders(factory, case, seed) for case in CASES for seed in _SEEDS]
    if not any(accepted):
        raise AssertionError("the hint refuses every pipeline")


def check_extreme_delays_are_survived(factory: HintFactory) -> None:
    """Every run also ends when the oldest message, or the newest, is always delivered first."""
    for case in CASES:
        _orders(factory, case, 0, "oldest")
        _orders(factory, case, 0, "newest")


def check_same_history_same_choices(factory: HintFactory) -> None:
    """Two fresh hints choose alike after the same events: no clock, no global randomness, no shared state."""
    for case in CASES:
        first, second = _orders(factory, case, 1), _orders(factory, case, 1)
        if first != second:
            raise AssertionError(f"{case.name}: two runs of the same events differ: {first} and {second}")


def check_choosing_changes_nothing(factory: HintFactory) -> None:
    """Only ``observe`` and ``open_step`` change its state: answers that are not followed change nothing."""
    for case in CASES:
        asked_once = _orders(factory, case, 2)
        if asked_once != _orders(lambda: _AskedAgain(factory()), case, 2):
            raise AssertionError(f"{case.name}: called more often in one state, the hint chooses otherwise")
        if asked_once != _orders(lambda: _AskedAtEachEvent(factory()), case, 2):
            raise AssertionError(f"{case.name}: after answers that were not followed, the hint chooses otherwise")


ALL_CHECKS: tuple[Check, ...] = (
    check_answers_are_ready_and_every_run_ends,
    check_extreme_delays_are_survived,
    check_same_history_same_choices,
    check_choosing_changes_nothing,
)
"""Every check."""


class _Wrapped(Hint):
    """Does what the inner hint does."""

    def __init__(self, inner: Hint) -> None:
        self._inner = inner
        self.may_wait = inner.may_wait

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        return self._inner.choose(ready, view)

    def open_step(self, view: View) -> None:
        self._inner.open_step(view)
        self.may_wait = self._inner.may_wait

    def microbatch_order(self, view: View) -> Sequence[int] | None:
        return self._inner.microbatch_order(view)

    def reports_begun(self, view: View) -> bool:
        return self._inner.reports_begun(view)

    def awaits(self, task: Task, view: View) -> bool:
        return self._inner.awaits(task, view)

    def observe(self, event: Event) -> None:
        self._inner.observe(event)


class _AskedAgain(_Wrapped):
    """Asks the inner hint three times, and returns the last answer."""

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        for _ in range(2):
            self._inner.choose(ready, view)
        return self._inner.choose(ready, view)


class _AskedAtEachEvent(_Wrapped):
    """Also asks after each event, and does not follow the answer."""

    def __init__(self, inner: Hint) -> None:
        super().__init__(inner)
        self._stage: tuple[ReadySet, View] | None = None

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        self._stage = ready, view
        return super().choose(ready, view)

    def open_step(self, view: View) -> None:
        self._stage = None
        super().open_step(view)

    def observe(self, event: Event) -> None:
        super().observe(event)
        if self._stage is not None and self._stage[0]:
            self._inner.choose(*self._stage)


def _orders(factory: HintFactory, case: HintCase, seed: int, delivery: Delivery = "any") -> list[list[list[Task]]]:
    """The tasks that ran, by stage and step; empty if refused."""
    stages = case.graph.placement.stages
    distances = map(case.graph.distance_to_sink, range(stages))
    limits = [Limit.resolve(case.limit, stage, stages, distance=own) for stage, own in enumerate(distances)]
    hints = [factory() for _ in range(stages)]
    if any(hint.may_wait for hint in hints):
        limits = [Limit()] * stages  # a hint that waits for one task must never find it kept out by memory
    network = RandomRun(
        case.graph,
        hints,
        limits,
        seed=seed,
        depth=case.depth,
        delivery=delivery,
        takes_offers=case.takes_offers,
        visits=case.visits,
    )
    try:
        network.run(case.steps)
    except ConfigError:
        return []
    except (HintError, AssertionError) as error:
        raise AssertionError(f"{case.name}: {error}") from error
    return network.orders

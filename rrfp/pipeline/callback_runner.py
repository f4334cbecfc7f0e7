"""Brings the events of a run to its callbacks, on a thread of their own.

What happens is noted where it happens, which takes microseconds: by the caller's thread, or by the runtime's loop for
stalls and aborts. A step's figures come after its call has returned; the events behind it wait for them here, and no
one else does.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import astuple, dataclass, replace

from rrfp import timeouts
from rrfp.callbacks.base import (
    Callback,
    Event,
    RunAborted,
    RunBegun,
    RunEnded,
    StageFigures,
    Stall,
    StepBegun,
    StepEnded,
)
from rrfp.core.usage import Peaks
from rrfp.errors import Origin, RrfpError
from rrfp.log import get_logger
from rrfp.model.tasks import Mode
from rrfp.model.topology import Topology
from rrfp.plugins import name_of
from rrfp.runtime.abort import Failure, lost_rank
from rrfp.runtime.context import Observer
from rrfp.runtime.steps.plan import StepPlan
from rrfp.runtime.steps.reports import StepFigures
from rrfp.runtime.steps.result import StepResult

logger = get_logger(__name__)

#: Events that may wait for a slow callback: minutes of the fastest steps, and some megabytes.
MOST_WAITING = 1024


@dataclass(frozen=True, slots=True)
class _Entry:
    method: str
    #: Makes it; None: it does not take place.
    event: Callable[[], Event | None]
    #: Has to be done first.
    figures: Future[StepFigures | Failure] | None = None

    @property
    def is_due(self) -> bool:
        return self.figures is None or self.figures.done()


class CallbackRunner(Observer):
    """The events of one run, and the thread ``rrfp-callbacks``, which there is while a run with callbacks lasts.

    All methods may be called on any thread, and all but `wait` return at once. ``finishes``: the others finish the step
    in which a rank is lost.
    """

    def __init__(
        self,
        callbacks: Sequence[Callback] = (),
        topology: Topology | None = None,
        method: str = "",
        *,
        finishes: bool = False,
    ) -> None:
        self._callbacks = tuple(callbacks)
        self._topology = Topology(0, 1) if topology is None else topology
        self._method = method
        self._changed = threading.Condition()
        self._entries: deque[_Entry] = deque()
        #: Come before all entries: those may wait for the very rank that a stall names.
        self._stalls: deque[_Entry] = deque()
        self._thread: threading.Thread | None = None
        self._finishes = finishes
        self._abort: RunAborted | None = None
        #: The abort comes behind the end of a step that may be finished.
        self._is_held_back = False
        self._has_ended = False
        #: The training step that runs, or comes next; the sizes of its microbatches; whether its events are dropped.
        self._step = 0
        self._sizes: tuple[float, ...] | None = None
        self._drops = False
        self._dropped = 0
        #: The callback and method that runs, and since when; errors of each.
        self._running: tuple[str, float] | None = None
        self._errors: Counter[str] = Counter()
        for callback in self._callbacks:
            callback.check(self._topology)

    # What happens.

    def begin(self, step: int) -> None:
        """The pipeline was entered; ``step`` is the next training step."""
        if not self._callbacks:
            return
        with self._changed:
            self._step = step
            self._post("run_begun", RunBegun(time.time(), step, self._topology, self._method))
            if self._abort is not None and not self._is_held_back:
                self._post("aborted", self._abort)
            self._thread = threading.Thread(target=self._deliver, name="rrfp-callbacks", daemon=True)
            self._thread.start()

    def step_begun(self, plan: StepPlan) -> None:
        if not self._callbacks:
            return
        is_training = plan.step.mode is Mode.TRAIN
        with self._changed:
            self._step, self._sizes = plan.batch.training_step, plan.sizes
            is_over = self._abort is not None and not self._is_held_back
            self._drops = is_over or len(self._entries) >= MOST_WAITING
            if self._drops:
                self._drop(1 + is_training)
            elif is_training:
                self._post("step_begun", StepBegun(time.time(), self._step, plan.step.microbatches))

    def step_ended(self, result: StepResult) -> None:
        """A step has returned; its reports come later, or never if the others have finished it."""
        if not self._callbacks:
            return
        pending = result.pending
        with self._changed:
            is_training = result.mode is Mode.TRAIN
            self._step = result.step + is_training
            if self._drops or not (result.lost or (self._abort is None and pending is not None)):
                self._post_held_back()
                return
            known = StepEnded(
                time.time(),
                result.mode,
                result.step,
                result.microbatches,
                self._sizes,
                self._topology.summands,
                result.loss,
                seconds=result.seconds if result.lost else 0.0,
                stages=(),
            )
            method = "step_ended" if is_training else "evaluation_ended"
            if result.lost:
                self._post(method, known)
                self._post_held_back()
                return
            assert pending is not None
            outcome = pending.outcome
            self._entries.append(_Entry(method, lambda: _whole(known, outcome, self._topology), outcome))
        outcome.add_done_callback(self._wake)

    def stalled(self, text: str) -> None:
        with self._changed:
            if self._thread is None or self._has_ended or self._abort is not None:
                return
            if len(self._stalls) >= MOST_WAITING:
                self._drop(1)
                return
            event = Stall(time.time(), self._step, text)
            self._stalls.append(_Entry("stall", lambda: event))
            self._changed.notify()

    def aborted(self, origin: Origin) -> None:
        with self._changed:
            if self._abort is None and not self._has_ended:
                self._abort = RunAborted(time.time(), self._step, origin)
                self._is_held_back = self._finishes and lost_rank(origin) not in (None, self._topology.rank)
                if self._thread is not None and not self._is_held_back:
                    self._post("aborted", self._abort)

    def call_failed(self, origin: Origin) -> None:
        """A call has raised the failure: no step is finished any more."""
        with self._changed:
            if self._is_held_back and self._abort is not None:
                self._abort = replace(self._abort, origin=origin)
            self._post_held_back()

    def end(self) -> None:
        """The pipeline was left; may be called twice."""
        with self._changed:
            if self._thread is not None and not self._has_ended:
                self._has_ended = True
                self._post_held_back()
                self._post("run_ended", RunEnded(time.time(), self._step, self._dropped))

    def wait(self) -> None:
        """Wait, after `end`, until all events are delivered; after an abort for `CALLBACKS_END_S` at most."""
        thread = self._thread
        if thread is None:
            return
        thread.join(timeouts.CALLBACKS_END_S if self._abort is not None else timeouts.STALL_AFTER_S)
        while thread.is_alive():
            with self._changed:
                waiting = len(self._entries) + len(self._stalls)
                name, since = self._running or ("the delivery", time.monotonic())
            seconds = time.monotonic() - since
            if self._abort is not None:
                text = "%s has not returned for %.1f s: left without it, and without %d event(s) that wait for it"
                logger.error(text, name, seconds, waiting)
                return
            text = "leaving waits for %s, which has not returned for %.1f s; %d event(s) wait for it"
            logger.warning(text, name, seconds, waiting)
            thread.join(timeouts.STALL_AFTER_S)

    async def delivered(self) -> None:
        """As `wait`, without blocking the caller's loop."""
        if self._thread is not None and self._thread.is_alive():
            await asyncio.to_thread(self.wait)

    def _post(self, method: str, event: Event) -> None:
        self._entries.append(_Entry(method, lambda: event))
        self._changed.notify()

    def _post_held_back(self) -> None:
        """The abort, if it was held back."""
        if self._is_held_back and self._abort is not None:
            self._is_held_back = False
            self._post("aborted", replace(self._abort, step=self._step))

    def _drop(self, count: int) -> None:
        """An event that does not follow an abort is counted, and the first one is logged."""
        if self._abort is not None:
            return
        if not self._dropped:
            name, since = self._running or ("a callback", time.monotonic())
            logger.warning(
                "callbacks are %d events behind, and %s has not returned for %.1f s: events of further steps are "
                "dropped while so many wait, and counted in RunEnded.dropped",
                len(self._entries) + len(self._stalls),
                name,
                time.monotonic() - since,
            )
        self._dropped += count

    def _wake(self, _: object) -> None:
        with self._changed:
            self._changed.notify()

    # On the thread.

    def _deliver(self) -> None:
        entry = self._entries.popleft()
        self._call(entry)
        while entry.method != "run_ended":
            with self._changed:
                self._changed.wait_for(lambda: self._stalls or (self._entries and self._entries[0].is_due))
                entry = (self._stalls or self._entries).popleft()
            self._call(entry)
        for name, count in self._errors.items():
            if count > 1:
                logger.warning("callback %s raised %d times in this run; the first error was logged", name, count)

    def _call(self, entry: _Entry) -> None:
        if (event := entry.event()) is None:
            return
        for callback in self._callbacks:
            name = f"{name_of(callback)}.{entry.method}"
            self._running = (name, time.monotonic())
            try:
                getattr(callback, entry.method)(event)
            except BaseException as error:
                self._errors[name] += 1
                if self._errors[name] == 1:
                    text = "callback %s raised %s: %s; it is called again for later events, and training goes on"
                    logger.error(text, name, type(error).__name__, error, exc_info=error)
            self._running = None


def _whole(known: StepEnded, outcome: Future[StepFigures | Failure], topology: Topology) -> StepEnded | None:
    """The event of a step with its figures, which are here; None if they never come."""
    try:
        figures = outcome.result()
    except (RrfpError, CancelledError):  # the loop ended first
        return None
    if isinstance(figures, Failure):
        return None
    by_rank: tuple[dict[int, Peaks], ...] = tuple({} for _ in figures.peaks)
    for rank, peaks in enumerate(figures.rank_peaks):
        by_rank[topology.place_of(rank).stage][rank] = peaks
    stages = zip(figures.breakdown, figures.peaks, figures.resources, by_rank, strict=True)
    return replace(
        known,
        seconds=figures.seconds,
        stages=tuple(
            StageFigures(stage, parts, peaks, ranks, *astuple(own))
            for stage, (parts, peaks, own, ranks) in enumerate(stages)
        ),
    )

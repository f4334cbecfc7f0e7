"""The result of a step: what its ranks know when it ends, and what the reports of all ranks add."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Self

from rrfp.core.usage import Peaks
from rrfp.errors import RrfpError
from rrfp.model.tasks import Mode
from rrfp.runtime.steps.reports import PendingReports, StepFigures
from rrfp.trace.breakdown import Breakdown
from rrfp.trace.spans import StepTrace, merge

#: The fields that the reports fill.
_REPORTED = frozenset(("seconds", "breakdown", "peaks", "slots"))


class _Reported:
    """Room beside the fields of `StepResult`, which copies and pickles do not need: they are complete."""

    __slots__ = ("_reports",)

    _reports: PendingReports


@dataclass(frozen=True, slots=True)
class StepResult(_Reported):
    """The outcome of a step, the same on every rank (but for ``trace`` and ``outputs``).

    A step returns once this rank has done its part and the loss is known. ``seconds``, ``breakdown``, ``slots`` and
    ``peaks`` (and ``peak_held`` and ``peak_bytes``) need the reports of all ranks, which are exchanged meanwhile. The
    first read of one of them waits for the reports: it blocks its thread, and raises `PipelineAborted` if the pipeline
    fails before they are here. On an event loop, ``await result.complete()`` first. So do copies, pickles and
    ``print(result)``, a table with a row for each stage; ``repr`` never waits.

    With several replicas, ``losses``, ``breakdown`` and ``peaks`` are those of this rank's replica.

    Attributes:
        step: the number of the training step, counted from the pipeline's ``first_step`` on (0 by default); of an
            evaluation, that of the training step after it.
        mode: training or forward only.
        microbatches: M, on this rank's replica.
        loss: the weighted loss of the step, over all replicas and without microbatches of weight 0; None where no loss
            was computed.
        losses: the loss of every microbatch, in microbatch order; where several parts of a graph have losses, the sum
            over those that the microbatch visits.
        part_losses: where several parts have losses, the loss of the step by part; a microbatch that skips a part adds
            0 to its mean. Their sum is ``loss``. Empty elsewhere.
        seconds: the longest time that any rank took, from its own call on: where ranks call at different times, as
            between two pipelines in turns, it includes the wait for the last to call.
        breakdown: for each stage, where the time of its group's leader went; each sums to ``seconds``.
        peaks: for each stage, the most that any rank of its group held.
        slots: for each stage, the chunk tasks that it might hold in this step, which ``limit="auto"`` changes from step
            to step; None: any number.
        dealt: where replicas have shared the step, the microbatches that each of them ran; empty elsewhere.
        trace: the spans of this rank (with `rrfp.local`: of all).
        lost: with ``on_lost_rank="finish"``, the ranks that were lost, if the others have finished the step without
            them: save a checkpoint and end. ``breakdown``, ``peaks`` and ``slots`` may be empty then. Else empty.
        outputs: of an evaluation, on the rank of the last virtual stage: outputs by microbatch, where
            ``return_outputs`` asks for them, by default where there is no loss. Where several parts have losses, each
            is a dict with the outputs of this rank's parts.
    """

    step: int
    mode: Mode
    microbatches: int
    loss: float | None
    losses: tuple[float, ...]
    seconds: float
    breakdown: tuple[Breakdown, ...] = field(repr=False)
    peaks: tuple[Peaks, ...]
    trace: StepTrace = field(repr=False)
    outputs: Mapping[int, Any] = field(default_factory=dict, repr=False)
    part_losses: Mapping[str, float] = field(default_factory=dict)
    slots: tuple[int | None, ...] = ()
    dealt: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()

    @classmethod
    def awaiting(cls, reports: PendingReports, **known: Any) -> Self:
        """A result of which ``reports`` will fill the fields that are not ``known``."""
        result = object.__new__(cls)
        for name, value in {**known, "_reports": reports}.items():
            object.__setattr__(result, name, value)
        return result

    @property
    def pending(self) -> PendingReports | None:
        """The reports that it waits for; None once they are here."""
        try:
            object.__getattribute__(self, "seconds")
        except AttributeError:
            return self._reports
        return None

    @property
    def peak_held(self) -> tuple[int, ...]:
        """For each stage, the most chunk tasks whose forward had started and whose memory was not free again."""
        return tuple(peak.held for peak in self.peaks)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """For each stage, the most bytes held by microbatches in work and by outputs on their way out."""
        return tuple(peak.num_bytes for peak in self.peaks)

    def complete(self) -> Coroutine[Any, Any, Self]:
        """Wait for the reports of all ranks without blocking the event loop: to be awaited.

        Returns:
            This result; no attribute waits any more.

        Raises:
            PipelineAborted: if the pipeline failed before they came.
            RrfpError: if the pipeline was left, and its loop did not run any more; or where no event loop runs.
        """
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            raise RrfpError(
                "complete() of a result was called where no event loop runs: read its attributes, which wait, or, in a "
                "coroutine, await result.complete()"
            ) from None
        return self._complete()

    async def _complete(self) -> Self:
        if (pending := self.pending) is not None:
            self._fill(await pending.arrive())
        return self

    def joined(self, others: Sequence[StepResult]) -> StepResult:
        """This result, with the spans and outputs of ``others`` too, which belong to ranks of the same process."""
        results = (self, *others)
        known = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _REPORTED}
        known["trace"] = merge(result.trace for result in results)
        known["outputs"] = outputs = dict(self.outputs)
        for m, output in ((m, output) for other in others for m, output in other.outputs.items()):
            outputs[m] = {**outputs[m], **output} if m in outputs else output  # each has the parts of its rank
        return StepResult.awaiting(self._reports, **known)

    def __str__(self) -> str:
        """One line with the loss and the time, and where the time of each stage went; waits for the reports."""
        from rrfp.trace.breakdown_table import breakdown_text, duration

        name = f"step {self.step}" if self.mode is Mode.TRAIN else f"evaluation before step {self.step}"
        loss = "" if self.loss is None else f", loss {self.loss:.6g}"
        without = f", without rank {' and '.join(map(str, self.lost))}" if self.lost else ""
        head = f"{name}{loss}, {self.microbatches} microbatches, {duration(self.seconds)}{without}"
        if not self.breakdown:
            return head
        return f"{head}\n{breakdown_text(self.breakdown, peak_held=self.peak_held, peak_bytes=self.peak_bytes)}"

    def __repr__(self) -> str:
        pending = self.pending
        hidden = frozenset() if pending is None or pending.has_come else _REPORTED
        shown = (each.name for each in fields(self) if each.repr and each.name not in hidden)
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    if not TYPE_CHECKING:  # or every misspelt attribute would pass the type checker

        def __getattr__(self, name: str) -> Any:
            """The first read of a field that the reports fill."""
            if name not in _REPORTED:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            self._fill(self._reports.wait())
            return getattr(self, name)

    def _fill(self, figures: StepFigures) -> None:
        for name in _REPORTED:
            object.__setattr__(self, name, getattr(figures, name))

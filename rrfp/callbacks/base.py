"""Code that watches a run, and the small records that it receives. Times are in seconds, sizes in bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rrfp.core.usage import Peaks
from rrfp.errors import Origin
from rrfp.model.tasks import Mode
from rrfp.model.topology import Topology
from rrfp.trace.breakdown import Breakdown


@dataclass(frozen=True, slots=True)
class RunBegun:
    """The pipeline was entered, and all ranks are connected.

    Attributes:
        time: of the event, in seconds since 1970.
        step: the number of the first training step of this run.
        topology: of this rank; of the first rank of a process with several.
        method: hint, limit and split in words.
    """

    time: float
    step: int
    topology: Topology
    method: str


@dataclass(frozen=True, slots=True)
class StepBegun:
    """`step` was called with arguments that fit.

    Attributes:
        time: of the call, in seconds since 1970.
        step: the number of the training step.
        microbatches: M, on this rank's replica.
    """

    time: float
    step: int
    microbatches: int


@dataclass(frozen=True, slots=True)
class StageFigures:
    """One stage in one step.

    Attributes:
        stage: its number, 0..N-1.
        breakdown: where the time of its group's leader went, in seconds; ``breakdown.by_cause`` has the blocked ones.
        peaks: the most that any rank of its group held, in chunk tasks and bytes.
        peaks_by_rank: the most that each rank of the stage held, those of other replicas included.
        slots: the limit of ``peaks.held``, in chunk tasks; None: no limit.
        byte_limit: the limit of ``peaks.num_bytes``, in bytes; None: no limit.
        sent_bytes: tensor bytes that all ranks of its group sent to other ranks since the step before, those of the
            losses and reports included (some hundred bytes a rank).
        received_bytes: tensor bytes that they received, counted alike.
    """

    stage: int
    breakdown: Breakdown
    peaks: Peaks
    peaks_by_rank: Mapping[int, Peaks]
    slots: int | None = None
    byte_limit: int | None = None
    sent_bytes: int = 0
    received_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StepEnded:
    """A training step or an evaluation is over on all ranks. With several replicas, the stages are this replica's.

    Attributes:
        time: when the call returned on this rank, in seconds since 1970.
        mode: training or forward only.
        step: the number of the training step; of an evaluation, that of the training step after it.
        microbatches: M, on this rank's replica.
        sizes: the sizes of the microbatches that the call passed on this rank; None where it passed none.
        replicas: copies of the pipeline, each with microbatches of its own; those of a dim in ``reduce`` count too.
        loss: over all replicas; None where no loss was computed.
        seconds: the longest time that any rank took, from its own call on.
        stages: one entry for each stage, in order; none of a step that was finished without a lost rank.
    """

    time: float
    mode: Mode
    step: int
    microbatches: int
    sizes: tuple[float, ...] | None
    replicas: int
    loss: float | None
    seconds: float
    stages: tuple[StageFigures, ...]

    @property
    def completed(self) -> int:
        """Training steps completed with it, earlier runs included: the number of a checkpoint that is saved then."""
        return self.step + (self.mode is Mode.TRAIN)


@dataclass(frozen=True, slots=True)
class Stall:
    """A rank has made no progress, or its event loop has not run, for ``stall_after`` seconds; the run may recover.

    Attributes:
        time: when this rank noticed it, in seconds since 1970.
        step: the number of the training step that runs, or comes next.
        text: which rank is waited for, what it does, and for how long; Python stacks may follow, line by line.
    """

    time: float
    step: int
    text: str


@dataclass(frozen=True, slots=True)
class RunAborted:
    """The pipeline is aborted on all ranks. Only `RunEnded` follows.

    With ``on_lost_rank="finish"`` the step in which a rank was lost ends before, if the others finish it.

    Attributes:
        time: when this rank noticed it, in seconds since 1970.
        step: the number of the training step that ran, or would have come next.
        origin: the rank, task and cause of the failure.
    """

    time: float
    step: int
    origin: Origin


@dataclass(frozen=True, slots=True)
class RunEnded:
    """The pipeline was left; the last event.

    Attributes:
        time: of the event, in seconds since 1970.
        step: the number of the training step that would have come next.
        dropped: events that were not delivered, because callbacks were too far behind.
    """

    time: float
    step: int
    dropped: int


Event = RunBegun | StepBegun | StepEnded | Stall | RunAborted | RunEnded
"""Any of them."""


class Callback:
    """Watches a run: ``rrfp.Pipeline(..., callbacks=[MyCallback()])``. Override what you need; the rest does nothing.

    All methods but `check` are called on a thread of their own, one after the other, in the order of the events: never
    on the runtime's loop, the compute thread or the caller's. Each process calls its own callbacks: look at
    ``event.topology.rank`` in `run_begun` to act on one rank only.

    - **Order**: `run_begun` first; then for each step `step_begun` and `step_ended`, for each evaluation
      `evaluation_ended`; `aborted` at most once, and nothing but `run_ended` after it. A `stall` comes at once,
      anywhere between the first and the last. A step whose reports had not come when the run was aborted does not end,
      unless the others have finished it without a lost rank: then its `step_ended` comes before `aborted`.
    - **An error** is logged with the names of callback and method, and the callback is called again for the next event;
      the number of further errors is logged at the end of the run. Training goes on with the same bits. To end it,
      raise in the training loop.
    - **A slow callback** delays neither the runtime nor the caller's steps. Once 1024 events wait, those of further
      steps are dropped: the first time is logged, and `RunEnded.dropped` has their number.
    - **At the end** leaving the pipeline waits until all events are delivered, and logs every 10 seconds for which
      callback; after a failure it waits 2 seconds at most, and logs the callback and the number of events given up.

    Python runs one thread at a time: long computations in a callback take time from the runtime's loop all the same.
    """

    def check(self, topology: Topology) -> None:
        """Look for mistakes before the run. Called once, by `rrfp.Pipeline` or `rrfp.local`, on the caller's thread.

        Args:
            topology: of this rank; of the first rank of a process with several.

        Raises:
            ConfigError: for what cannot work, such as a folder that does not exist; the pipeline is then not built.
        """

    def run_begun(self, event: RunBegun) -> None:
        """All ranks are connected.

        Args:
            event: the layout, the method, and the number of the first step.
        """

    def step_begun(self, event: StepBegun) -> None:
        """A training step begins.

        Args:
            event: its number and M.
        """

    def step_ended(self, event: StepEnded) -> None:
        """A training step has ended, and the figures of all stages are here.

        Args:
            event: its loss and figures.
        """

    def evaluation_ended(self, event: StepEnded) -> None:
        """An evaluation has ended, and the figures of all stages are here.

        Args:
            event: its loss and figures.
        """

    def stall(self, event: Stall) -> None:
        """Nothing has happened for ``stall_after`` seconds.

        Args:
            event: names the rank that is waited for.
        """

    def aborted(self, event: RunAborted) -> None:
        """The pipeline failed.

        Args:
            event: names the rank, the task and the cause.
        """

    def run_ended(self, event: RunEnded) -> None:
        """The pipeline was left, in order or after a failure.

        Args:
            event: the number of the step that would have been next.
        """

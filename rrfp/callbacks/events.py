"""What callbacks receive: one small record for each event of a run. Times are in seconds, sizes in bytes."""

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
        stages: one entry for each stage, in order.
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

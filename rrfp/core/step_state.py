"""The state of one stage in one step: what is ready, held, in flight and done. Mutated by `StageCore` only."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from rrfp.core.admission import Admission
from rrfp.core.order_log import OrderLog
from rrfp.core.outputs import Outputs
from rrfp.core.readiness import Readiness
from rrfp.core.ready_set import ReadySet
from rrfp.core.tasks import Kind, StepId, Task


class WaitCause(StrEnum):
    """Why a stage runs nothing."""

    INPUT = "input"  # no task has all its inputs (or a strict schedule waits for its next one)
    MEMORY = "memory"  # a forward has its inputs, and the limit keeps it out
    ORDER = "order"  # a task has its inputs here, and the group's order does not have it yet
    DRAINED = "drained"  # every task of the step was enqueued


@dataclass(frozen=True, slots=True)
class Peaks:
    """The most that a stage held in one step.

    Attributes:
        held: largest D, chunk tasks.
        num_bytes: largest sum of bytes held by microbatches in work.
        received: most outputs of other stages that had arrived and whose task had not started.
    """

    held: int = 0
    num_bytes: int = 0
    received: int = 0


@dataclass(slots=True)
class StepState:
    """See the module's docstring."""

    id: StepId
    readiness: Readiness
    admission: Admission
    ready: ReadySet
    outputs: Outputs
    #: Tasks of this stage in the step.
    num_tasks: int
    #: Tasks not complete, by virtual stage.
    unfinished: dict[int, int]
    log: OrderLog = field(default_factory=OrderLog)
    #: Enqueued tasks by kind and local chunk.
    enqueued: dict[Kind, list[int]] = field(default_factory=dict)
    num_enqueued: int = 0
    #: Enqueued and not complete, in lane order.
    in_flight: list[Task] = field(default_factory=list)
    last_kind: Kind | None = None
    #: Virtual stages whose gradients are not final.
    unreduced: set[int] = field(default_factory=set)
    #: By peer: its forward outputs that this stage has started to use.
    consumed_of: dict[int, int] = field(default_factory=dict)
    #: By peer: this stage's forward outputs that it has started to use, as last reported.
    consumed_by: dict[int, int] = field(default_factory=dict)
    finished: bool = False

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to do or to wait for."""
        return (
            self.num_enqueued == self.num_tasks
            and not self.in_flight
            and not self.unreduced
            and self.outputs.is_settled
        )

    def peaks(self) -> Peaks:
        """The peaks so far."""
        return Peaks(self.admission.peak_held, self.admission.peak_bytes, self.outputs.peak_received)

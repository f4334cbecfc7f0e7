"""The contracts between the core and a hint policy.

A hint prioritizes; it never decides alone. It sees a read-only :class:`View` of its stage and the ready set, and names
one ready task. It does no I/O and reads no clock; it may keep state, fed through ``observe``. The core refuses an
answer that is not ready.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rrfp.core.events import Event
from rrfp.core.ready_set import ReadySet
from rrfp.model.graph import TaskGraph
from rrfp.model.placement import Placement, TablePlacement
from rrfp.model.tasks import Kind, Mode, Task
from rrfp.model.visits import Visits


class View(Protocol):
    """What a hint may know about its stage, read only."""

    @property
    def stage(self) -> int:
        """This stage, 0..N-1."""

    @property
    def graph(self) -> TaskGraph:
        """The dependency graph: which virtual stages feed which, and whose backward is split into B and W."""

    @property
    def placement(self) -> Placement | TablePlacement:
        """Where virtual stages live."""

    @property
    def mode(self) -> Mode:
        """Training or forward only."""

    @property
    def microbatches(self) -> int:
        """M of the current step; where replicas share forwards, of all replicas."""

    @property
    def forwards_here(self) -> int:
        """The forwards of the current step that run on this rank, those of all its chunks.

        Where replicas share forwards it begins with all that this rank might run, and falls with each that another one
        takes.
        """

    @property
    def sizes(self) -> tuple[float, ...] | None:
        """How large each microbatch of the current step is, in any unit, where the caller says so; else None."""

    @property
    def size_correlation(self) -> float | None:
        """The least correlation of sizes with the times of any stage in an earlier step; None: not known.

        The same on every rank. -1 to 1: at 1 one number orders the microbatches of all stages.
        """

    @property
    def byte_rooms(self) -> tuple[float | None, ...] | None:
        """By stage, how many average microbatches its limit on bytes had room for in an earlier step.

        The same on every rank. None, for a stage or for all: not known, several chunks, or bytes are not limited.
        """

    @property
    def visits(self) -> Visits:
        """Which virtual stages of the pipeline each microbatch visits: it runs no task on others."""

    @property
    def slots(self) -> int | None:
        """K * C, the most chunk tasks this stage may hold, or None if unlimited."""

    @property
    def full_at(self) -> int | None:
        """The smallest D at which the limit blocks the forward of some chunk: what the stage's memory rule says.

        None: unlimited, or D alone does not say it, as where branches of the graph join.
        """

    @property
    def held(self) -> int:
        """D, the chunk tasks held when the lane has run what is enqueued."""

    @property
    def held_bytes(self) -> int:
        """Bytes held now by microbatches in work."""

    @property
    def most_bytes(self) -> int | None:
        """The most bytes that microbatches in work may hold on this stage, or None if unlimited."""

    @property
    def last_kind(self) -> Kind | None:
        """The kind enqueued last in this step, None at the start."""

    @property
    def consumed_downstream(self) -> int | None:
        """Forward outputs that successors have started to use, as last reported; None before the first report."""

    def num_enqueued(self, kind: Kind, chunk: int | None = None) -> int:
        """Tasks of ``kind`` enqueued so far in this step.

        Args:
            kind: F, B or W.
            chunk: one local chunk, 0..C-1; None: all of them together.
        """

    @property
    def num_enqueued_total(self) -> int:
        """Tasks of any kind enqueued so far in this step."""

    def mean_seconds(self, kind: Kind, chunk: int) -> float | None:
        """Mean measured duration in this run, in seconds; None before the first.

        Args:
            kind: F, B or W.
            chunk: the local chunk, 0..C-1.
        """


def _announces(reports_begun: Callable[[Any, View], bool]) -> Callable[[Any, View], bool]:
    """The old name of ``reports_begun``."""

    def announces(self: Any, view: View) -> bool:
        warnings.warn("Hint.announces is now Hint.reports_begun", DeprecationWarning, stacklevel=2)
        return reports_begun(self, view)

    return announces


class Hint(Protocol):
    """A policy that prioritizes ready tasks. Subclass it and implement ``choose``; one instance serves one stage.

    Attributes:
        may_wait: True lets ``choose`` return None although tasks are ready. Only strict baselines want that.
        wants_split: the hint prioritizes weight tasks, so it is at its best with ``split=True``. Without, it works by
            its other rules.
        wants_sizes: the hint reads ``view.sizes``, so it is at its best where the caller of ``step`` passes ``sizes``.
    """

    may_wait: bool = False
    wants_split: bool = False
    wants_sizes: bool = False

    def choose(self, ready: ReadySet, view: View) -> Task | None:
        """The task to run next.

        It is asked more often than a task is enqueued: while a task runs its answer is only offered to the lane, and
        each event asks again. So it must not change state; which tasks were enqueued `observe` and ``view`` say.

        Args:
            ready: what may run now; never empty.
            view: the stage as it is now.

        Returns:
            One task out of ``ready``; None only with ``may_wait``.
        """
        ...

    def open_step(self, view: View) -> None:
        """A step began: forget what belongs to the last one.

        Args:
            view: the stage at the start of the step.

        Raises:
            ConfigError: if the hint cannot serve this pipeline.
        """
        return None

    def reports_begun(self, view: View) -> bool:
        """Whether this stage reports the forwards that it begins to the stages that read them, for `awaits` there.

        Asked once a step, after `open_step`; training only.

        Args:
            view: the stage at the start of the step.
        """
        return False

    announces: Callable[..., bool] = _announces(reports_begun)

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        own = vars(cls)
        if "reports_begun" in own:
            cls.announces = own.get("announces", _announces(own["reports_begun"]))
        elif "announces" in own:
            text = f"{cls.__module__}.{cls.__qualname__}.announces is now reports_begun: rename it"
            warnings.warn(text, DeprecationWarning, stacklevel=3)
            cls.reports_begun = own["announces"]  # type: ignore[method-assign]

    def awaits(self, task: Task, view: View) -> bool:
        """Whether the stage is to idle a moment for a forward on its way here rather than begin the backward ``task``.

        Asked only where such a forward was reported as begun, and while the one wait before a backward is not over.
        The core bounds the wait: `rrfp.core.step`.

        Args:
            task: the answer of `choose`.
            view: the stage as it is now.
        """
        return False

    def microbatch_order(self, view: View) -> Sequence[int] | None:
        """The order in which microbatches of one kind and chunk have priority; asked after `open_step`.

        Not followed where any task has to run in microbatch order: the two orders would fill the memory.

        Args:
            view: the stage at the start of the step.

        Returns:
            Every microbatch once, the highest priority first; None for 0, 1, 2, ...
        """
        return None

    def observe(self, event: Event) -> None:
        """Called with every event after the core has taken it in.

        Args:
            event: the event; one of a kind that the hint does not know must be ignored.
        """
        return None

"""Hint policies: the priorities of ready tasks. The names below are those that hints outside this package rely on."""

from rrfp.core.events import (
    Aborted,
    Arrived,
    BegunReported,
    ChunkReduced,
    Completed,
    Consumed,
    Enqueued,
    Event,
    HeldReported,
    Ordered,
    PauseBegun,
    PauseEnded,
    Previewed,
    ReadyReported,
    SendReleased,
    StepOpened,
)
from rrfp.core.hint import Hint, View
from rrfp.core.ready_set import ReadySet
from rrfp.hints.registry import create_hint, hint_names
from rrfp.lazy_names import renamed
from rrfp.model.graph import TaskGraph as Graph
from rrfp.model.placement import Placement
from rrfp.model.tasks import Kind, Mode, Task
from rrfp.model.visits import Visits

__all__ = [
    "Aborted",
    "Arrived",
    "BegunReported",
    "ChunkReduced",
    "Completed",
    "Consumed",
    "Enqueued",
    "Event",
    "Graph",
    "HeldReported",
    "Hint",
    "Kind",
    "Mode",
    "Ordered",
    "PauseBegun",
    "PauseEnded",
    "Placement",
    "Previewed",
    "ReadyReported",
    "ReadySet",
    "SendReleased",
    "StepOpened",
    "Task",
    "View",
    "Visits",
    "create_hint",
    "hint_names",
]

#: Names of before, which still work, and those of now.
_RENAMED = {"Announced": "BegunReported"}

__getattr__ = renamed(__name__, _RENAMED)

"""Code that watches a run: `Callback` is the base class; `Progress`, `JsonLines`, `Csv` and `TensorBoard` are ready."""

from __future__ import annotations

from rrfp.callbacks.base import Callback
from rrfp.callbacks.events import Aborted, Event, RunBegun, RunEnded, StageFigures, Stall, StepBegun, StepEnded
from rrfp.callbacks.files import Csv, JsonLines, TensorBoard
from rrfp.callbacks.metrics import metric_names, metrics
from rrfp.callbacks.progress import Progress

__all__ = [
    "Aborted",
    "Callback",
    "Csv",
    "Event",
    "JsonLines",
    "Progress",
    "RunBegun",
    "RunEnded",
    "StageFigures",
    "Stall",
    "StepBegun",
    "StepEnded",
    "TensorBoard",
    "metric_names",
    "metrics",
]

"""Code that watches a run: the base class `Callback`, and those that are ready, from `Progress` to `Prometheus`."""

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
from rrfp.callbacks.files import Csv, JsonLines, TensorBoard
from rrfp.callbacks.progress import Progress
from rrfp.callbacks.prometheus import Prometheus
from rrfp.callbacks.step_metrics import metric_names, metrics
from rrfp.lazy_names import renamed

__all__ = [
    "Callback",
    "Csv",
    "Event",
    "JsonLines",
    "Progress",
    "Prometheus",
    "RunAborted",
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

#: Names of before, which still work, and those of now.
_RENAMED = {"Aborted": "RunAborted"}

__getattr__ = renamed(__name__, _RENAMED)

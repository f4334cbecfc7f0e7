"""Code that watches a run: the base class `Callback`, and those that are ready, from `Progress` to `Prometheus`."""

import warnings
from typing import Any

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


def __getattr__(name: str) -> Any:
    if name not in _RENAMED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"rrfp.callbacks.{name} is now rrfp.callbacks.{_RENAMED[name]}", DeprecationWarning, stacklevel=2)
    return globals()[_RENAMED[name]]

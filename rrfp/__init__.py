"""RRFP: pipeline-parallel training in which a schedule is a hint, never a command.

Public names are loaded when first used, so that the pure core can be imported without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rrfp.compute.lanes.base import Lane
    from rrfp.compute.payload import Payload
    from rrfp.compute.program import Batch, StageProgram
    from rrfp.core.admission import Limit
    from rrfp.core.hint import Hint, View
    from rrfp.core.ready_set import ReadySet
    from rrfp.core.tasks import Kind, Mode, Task
    from rrfp.core.topology import Topology
    from rrfp.errors import ConfigError, PipelineAborted, RrfpError
    from rrfp.pipeline.api import Pipeline, local
    from rrfp.runtime.result import StepResult
    from rrfp.runtime.statistics import RankStatistics
    from rrfp.transports.base import Message, Transport
    from rrfp.version import __version__


_HOMES = {
    "Batch": "rrfp.compute.program",
    "ConfigError": "rrfp.errors",
    "Hint": "rrfp.core.hint",
    "Kind": "rrfp.core.tasks",
    "Lane": "rrfp.compute.lanes.base",
    "Limit": "rrfp.core.admission",
    "Message": "rrfp.transports.base",
    "Mode": "rrfp.core.tasks",
    "Payload": "rrfp.compute.payload",
    "Pipeline": "rrfp.pipeline.api",
    "PipelineAborted": "rrfp.errors",
    "RankStatistics": "rrfp.runtime.statistics",
    "ReadySet": "rrfp.core.ready_set",
    "RrfpError": "rrfp.errors",
    "StageProgram": "rrfp.compute.program",
    "StepResult": "rrfp.runtime.result",
    "Task": "rrfp.core.tasks",
    "Topology": "rrfp.core.topology",
    "Transport": "rrfp.transports.base",
    "View": "rrfp.core.hint",
    "__version__": "rrfp.version",
    "local": "rrfp.pipeline.api",
}

__all__ = [
    "Batch",
    "ConfigError",
    "Hint",
    "Kind",
    "Lane",
    "Limit",
    "Message",
    "Mode",
    "Payload",
    "Pipeline",
    "PipelineAborted",
    "RankStatistics",
    "ReadySet",
    "RrfpError",
    "StageProgram",
    "StepResult",
    "Task",
    "Topology",
    "Transport",
    "View",
    "__version__",
    "local",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rrfp' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)

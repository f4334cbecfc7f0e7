"""RRFP: pipeline-parallel training in which a schedule is a hint, never a command.

Public names are loaded when first used, so that the pure core can be imported without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

# For type checkers, which do not run __getattr__: `as` marks a public name.
if TYPE_CHECKING:
    from rrfp import callbacks as callbacks
    from rrfp import checkpoint as checkpoint
    from rrfp import hints as hints
    from rrfp import transports as transports
    from rrfp.compute.caller_context import CallerModes as CallerModes
    from rrfp.compute.gradients.adopted import AdoptedGradients as AdoptedGradients
    from rrfp.compute.lanes.base import Execution as Execution
    from rrfp.compute.lanes.base import Lane as Lane
    from rrfp.compute.lanes.base import OfferSlot as OfferSlot
    from rrfp.compute.payload import Payload as Payload
    from rrfp.compute.program import Batch as Batch
    from rrfp.compute.program import StageProgram as StageProgram
    from rrfp.compute.split.backward import SplitBackward as SplitBackward
    from rrfp.core.hint import Hint as Hint
    from rrfp.core.hint import View as View
    from rrfp.core.ready_set import ReadySet as ReadySet
    from rrfp.errors import ConfigError as ConfigError
    from rrfp.errors import PipelineAborted as PipelineAborted
    from rrfp.errors import RrfpError as RrfpError
    from rrfp.integrations.splitting.split import split as split
    from rrfp.integrations.splitting.stages import merge_state_dict as merge_state_dict
    from rrfp.memory.admission import Limit as Limit
    from rrfp.model.declared import Graph as Graph
    from rrfp.model.tasks import Kind as Kind
    from rrfp.model.tasks import Mode as Mode
    from rrfp.model.tasks import StepId as StepId
    from rrfp.model.tasks import Task as Task
    from rrfp.model.topology import Topology as Topology
    from rrfp.pipeline.api import Pipeline as Pipeline
    from rrfp.pipeline.api import local as local
    from rrfp.runtime.statistics import RankStatistics as RankStatistics
    from rrfp.runtime.steps.result import StepResult as StepResult
    from rrfp.transports.base import Message as Message
    from rrfp.transports.base import Transport as Transport
    from rrfp.version import __version__ as __version__

#: Every public name, by the module that defines it.
_PUBLIC = {
    "rrfp.compute.caller_context": ("CallerModes",),
    "rrfp.compute.gradients.adopted": ("AdoptedGradients",),
    "rrfp.compute.lanes.base": ("Execution", "Lane", "OfferSlot"),
    "rrfp.compute.payload": ("Payload",),
    "rrfp.compute.program": ("Batch", "StageProgram"),
    "rrfp.compute.split.backward": ("SplitBackward",),
    "rrfp.memory.admission": ("Limit",),
    "rrfp.core.hint": ("Hint", "View"),
    "rrfp.core.ready_set": ("ReadySet",),
    "rrfp.model.tasks": ("Kind", "Mode", "StepId", "Task"),
    "rrfp.model.topology": ("Topology",),
    "rrfp.errors": ("ConfigError", "PipelineAborted", "RrfpError"),
    "rrfp.model.declared": ("Graph",),
    "rrfp.integrations.splitting.stages": ("merge_state_dict",),
    "rrfp.integrations.splitting.split": ("split",),
    "rrfp.pipeline.api": ("local", "Pipeline"),
    "rrfp.runtime.steps.result": ("StepResult",),
    "rrfp.runtime.statistics": ("RankStatistics",),
    "rrfp.transports.base": ("Message", "Transport"),
    "rrfp.version": ("__version__",),
}

#: Public packages, which are attributes without an import of their own.
_PACKAGES = ("callbacks", "checkpoint", "hints", "transports")

_HOMES = {name: home for home, names in _PUBLIC.items() for name in names}

__all__ = sorted([*_HOMES, *_PACKAGES])


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"rrfp.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'rrfp' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return list(__all__)

"""RRFP: pipeline-parallel training in which a schedule is a hint, never a command.

Public names are loaded when first used, so that the pure core can be imported without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rrfp.lazy_names import homes_of, lazy_names

# For type checkers: `as` marks a public name.
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
    from rrfp.errors import RankLostError as RankLostError
    from rrfp.errors import RrfpError as RrfpError
    from rrfp.integrations.splitting.split import split as split
    from rrfp.integrations.splitting.stages import merge_state_dict as merge_state_dict
    from rrfp.memory.admission import Limit as Limit
    from rrfp.model.declared import Graph as Graph
    from rrfp.model.microbatches import Microbatches as Microbatches
    from rrfp.model.microbatches import microbatches as microbatches
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

_HOMES = homes_of(
    {
        "rrfp.callbacks": "callbacks",
        "rrfp.checkpoint": "checkpoint",
        "rrfp.compute.caller_context": "CallerModes",
        "rrfp.compute.gradients.adopted": "AdoptedGradients",
        "rrfp.compute.lanes.base": "Execution Lane OfferSlot",
        "rrfp.compute.payload": "Payload",
        "rrfp.compute.program": "Batch StageProgram",
        "rrfp.compute.split.backward": "SplitBackward",
        "rrfp.core.hint": "Hint View",
        "rrfp.core.ready_set": "ReadySet",
        "rrfp.errors": "ConfigError PipelineAborted RankLostError RrfpError",
        "rrfp.hints": "hints",
        "rrfp.integrations.splitting.split": "split",
        "rrfp.integrations.splitting.stages": "merge_state_dict",
        "rrfp.memory.admission": "Limit",
        "rrfp.model.declared": "Graph",
        "rrfp.model.microbatches": "Microbatches microbatches",
        "rrfp.model.tasks": "Kind Mode StepId Task",
        "rrfp.model.topology": "Topology",
        "rrfp.pipeline.api": "Pipeline local",
        "rrfp.runtime.statistics": "RankStatistics",
        "rrfp.runtime.steps.result": "StepResult",
        "rrfp.transports": "transports",
        "rrfp.transports.base": "Message Transport",
        "rrfp.version": "__version__",
    }
)

__all__, __getattr__, __dir__ = lazy_names(__name__, _HOMES)

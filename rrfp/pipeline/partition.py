"""The cut of a model into stages and chunks, and the forced orders of its gradients. The same on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from rrfp.compute.buffers import writes_buffers_in_forward
from rrfp.compute.loss_module import class_name, with_loss
from rrfp.compute.program import StageProgram
from rrfp.core.graph import Graph
from rrfp.core.readiness import ForcedOrder
from rrfp.core.tasks import Kind
from rrfp.errors import ConfigError
from rrfp.pipeline.options import Options

_ALLOWED = "an nn.Module, a list of them (one for each chunk), or an rrfp.StageProgram"

#: The part of a rank: one module, one for each of its chunks, or the caller's own program.
StagePart = nn.Module | Sequence[nn.Module] | StageProgram


@dataclass(frozen=True, slots=True)
class Partition:
    """See the module's docstring.

    Attributes:
        graph: virtual stages, their placement, and which of them are split.
        deterministic: whether gradients are added in microbatch order.
        loss_fn: the loss; if it is a module, it belongs to the last virtual stage.
    """

    graph: Graph
    deterministic: bool = False
    loss_fn: Callable[[Any, Any], Any] | None = None

    @classmethod
    def of(cls, options: Options, stages: int, parts: Sequence[StagePart]) -> Partition:
        """The partition of ``stages`` stages that the complete ``options`` and the parts of this process describe.

        Parts with different numbers of chunks are a ConfigError.
        """
        counts = {len(chunks_of(part)) for part in parts if not isinstance(part, StageProgram)}
        numbers = " and ".join(map(str, sorted(counts)))
        if len(counts) > 1:
            raise ConfigError(f"modules have {numbers} chunks a stage, must have the same number on all")
        if (chunks := options["chunks"]) is not None and not counts <= {chunks}:
            raise ConfigError(
                f"chunks is {chunks}, but modules have {numbers} a stage: must be the same, or None to count the "
                "modules"
            )
        chunks = chunks or max(counts, default=1)
        graph = Graph.chain(stages, chunks=chunks, layout=options["placement"], split=options["split"])
        return cls(graph, options["deterministic"], options["loss_fn"])

    def modules(self, part: StagePart, stage: int) -> dict[int, nn.Module]:
        """The modules of ``stage`` by virtual stage, with a loss that is a module (`with_loss`).

        Errors as in `chunks`.
        """
        return with_loss(self.chunks(part, stage), self.graph, self.loss_fn)

    def chunks(self, part: StagePart, stage: int) -> dict[int, nn.Module]:
        """The modules of ``stage`` by virtual stage; none for a program, which has its own.

        Raises:
            ConfigError: if ``part`` is not a `StagePart`, or its number of chunks is not the graph's.
        """
        if isinstance(part, StageProgram):
            return {}
        chunks = chunks_of(part)
        if len(chunks) != self.graph.placement.chunks:
            raise ConfigError(
                f"module has chunks: {len(chunks)}, must have {self.graph.placement.chunks}, as on all ranks"
            )
        return dict(zip(self.graph.placement.virtual_stages(stage), chunks, strict=True))

    def check_shared(self, modules: Mapping[int, nn.Module]) -> None:
        """Raise a ConfigError for a written buffer that two virtual stages of one process share, if ``deterministic``.

        Writes are in order within a virtual stage; between two the order depends on timing. (Parameters may be shared:
        each virtual stage has its own gradient, see `rrfp.compute.gradients.shared`.)
        """
        owners: dict[int, int] = {}
        for v, module in sorted(modules.items()) if self.deterministic else ():
            for name, buffer in module.named_buffers() if writes_buffers_in_forward(module) else ():
                if (other := owners.setdefault(id(buffer), v)) != v:
                    raise ConfigError(
                        f"deterministic is True, but virtual stages {other} and {v} share {name!r}: must be False, or "
                        "each virtual stage must have its own"
                    )

    def check_program(self, program: StageProgram) -> None:
        """Raise a ConfigError if backward is split and ``program`` has no ``weight``."""
        if any(self.graph.split) and type(program).weight is StageProgram.weight:
            raise ConfigError(
                f"{type(program).__name__} has no weight(), needed where backward is split: implement it, or leave "
                "split=False"
            )

    def in_order(self, modules: Mapping[int, nn.Module]) -> frozenset[ForcedOrder]:
        """The forced orders of a rank with ``modules``: tasks that add gradients, and forwards that write buffers."""
        if not self.deterministic:
            return frozenset()
        graph = self.graph
        adds = {(Kind.W if split else Kind.B, v) for v, split in enumerate(graph.split)}
        forwards = {(Kind.F, v) for v, module in modules.items() if writes_buffers_in_forward(module)}
        return frozenset(adds | forwards)


def chunks_of(part: StagePart) -> tuple[nn.Module, ...]:
    """The modules in ``part``, one for each chunk; a ConfigError if it is neither a module nor a list of modules."""
    if isinstance(part, nn.Module) and not isinstance(part, nn.ModuleList):  # that one has no forward
        return (part,)
    if not isinstance(part, list | tuple | nn.ModuleList):
        raise ConfigError(f"module is of type {type(part).__name__}, must be {_ALLOWED}")
    chunks = tuple(part)
    for index, chunk in enumerate(chunks):
        if isinstance(chunk, StageProgram):
            raise ConfigError(
                f"module[{index}] is a StageProgram, must be passed alone: one serves all chunks of a rank"
            )
        if not isinstance(chunk, nn.Module):
            raise ConfigError(f"module[{index}] is of type {type(chunk).__name__}, must be an nn.Module")
    if not chunks:
        raise ConfigError(f"module is an empty {type(part).__name__}, must be {_ALLOWED}")
    return chunks


def check_modules(modules: object) -> None:
    """Raise a ConfigError for an object that is not a list of stages, or is empty."""
    if not isinstance(modules, list | tuple | nn.ModuleList | nn.Sequential):
        remedy = ": write [module] for a pipeline of one stage" if isinstance(modules, nn.Module | StageProgram) else ""
        raise ConfigError(
            f"modules is of type {type(modules).__name__}, must be a list with one module a stage{remedy}"
        )
    if not modules:
        raise ConfigError("modules is empty, must hold one module a stage")


def check_initialised(modules: Mapping[int, nn.Module]) -> None:
    """Raise a ConfigError for a parameter or buffer of a lazy module, which torch creates at the first forward."""
    for v, module in sorted(modules.items()):
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if is_lazy(tensor):
                raise ConfigError(
                    f"{name!r} of {class_name(module)} on virtual stage {v} is lazy, must have a shape: run one "
                    "forward of the module before the pipeline and the optimizer are made"
                )

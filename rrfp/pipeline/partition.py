"""The cut of a model into stages and chunks, and the forced orders of its gradients. The same on all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from torch import nn
from torch.nn.parameter import is_lazy

from rrfp.compute.buffers import writes_buffers_in_forward
from rrfp.compute.loss import LossFunction, class_name, losses_by_stage, with_loss
from rrfp.compute.program import StageProgram
from rrfp.compute.without_values import without_values
from rrfp.core.ready_set import ForcedOrder, MicrobatchOrder, forced_by
from rrfp.errors import ConfigError
from rrfp.model.declared import Graph as PartGraph
from rrfp.model.graph import TaskGraph, TextOf, named
from rrfp.model.model_graph import Feeds, ModelGraph
from rrfp.model.placement import Placement, TablePlacement
from rrfp.model.tasks import KINDS, Kind, Mode
from rrfp.pipeline.options import Options

_ALLOWED = "an nn.Module, a list of them (one for each chunk), or an rrfp.StageProgram"

#: The part of a rank: one module, one for each of its chunks, by part of a graph, or the caller's own program.
StagePart = nn.Module | Sequence[nn.Module] | Mapping[str, nn.Module | Sequence[nn.Module]] | StageProgram


@dataclass(frozen=True, slots=True)
class Partition:
    """How one model is cut, and what orders that forces."""

    #: Virtual stages, their placement, and which of them are split.
    graph: TaskGraph
    #: Whether gradients are added in microbatch order.
    deterministic: bool = False
    #: Of the microbatches of each kind on each virtual stage.
    order: MicrobatchOrder = "free"
    #: The loss of each virtual stage that computes one; if it is a module, it belongs to that stage.
    losses: Mapping[int, LossFunction] = field(default_factory=dict)
    #: Of the model's parts, if it has any.
    model: ModelGraph | None = None

    @classmethod
    def of(cls, options: Options, stages: int, parts: Sequence[StagePart], graph: PartGraph | None = None) -> Partition:
        """The partition of ``stages`` stages that the complete ``options`` and the parts of this process describe.

        Parts with different numbers of chunks are a ConfigError, and so is a ``graph`` that does not fit.
        """
        if graph is not None:
            return cls._of_graph(options, stages, graph)
        if isinstance(loss_fn := options.loss_fn, Mapping):
            raise ConfigError("loss_fn is a dict, must be a function: without graph there are no parts")
        if not isinstance(options.placement, str):
            chain = _placed(options.placement, stages, options)
            return cls(chain, options.deterministic, options.order, losses_by_stage(loss_fn, chain))
        counts = {len(chunks_of(part)) for part in parts if not isinstance(part, StageProgram)}
        numbers = " and ".join(map(str, sorted(counts)))
        if len(counts) > 1:
            raise ConfigError(
                f"modules have {numbers} chunks a stage, must have the same number on all, or placement must be a list "
                "with the stage of each virtual stage"
            )
        if (chunks := options.chunks) is not None and not counts <= {chunks}:
            raise ConfigError(
                f"chunks is {chunks}, but modules have {numbers} a stage: must be the same, or None to count the "
                "modules"
            )
        chunks = chunks or max(counts, default=1)
        chain = TaskGraph.chain(stages, chunks=chunks, layout=options.placement, split=options.split)
        return cls(chain, options.deterministic, options.order, losses_by_stage(loss_fn, chain))

    @classmethod
    def _of_graph(cls, options: Options, stages: int, graph: PartGraph) -> Partition:
        if options.chunks is not None:
            raise ConfigError(f"chunks is {options.chunks}, must be None with graph, which places the parts")
        if options.placement != "looped":
            raise ConfigError(f"placement is {options.placement!r}, must not be passed with graph")
        model = ModelGraph.of(graph, split=options.split)
        if (placed := model.tasks.placement.stages) != stages:
            raise ConfigError(f"graph has {placed} stages, must have {stages}, as the pipeline has")
        return cls(model.tasks, options.deterministic, options.order, _losses(options.loss_fn, model), model)

    @property
    def feeds(self) -> Feeds:
        """What each virtual stage is called with."""
        return Feeds() if self.model is None else self.model.feeds

    @property
    def text_of(self) -> TextOf:
        """What errors call a virtual stage."""
        return named(self.graph.names)

    def modules(self, part: StagePart, stage: int) -> dict[int, nn.Module]:
        """The `chunks` of ``stage``, with a loss that is a module (`with_loss`)."""
        return with_loss(self.chunks(part, stage), self.losses)

    def chunks(self, part: StagePart, stage: int) -> dict[int, nn.Module]:
        """The modules of ``stage`` by virtual stage; none for a program, which has its own."""
        if isinstance(part, StageProgram):
            return {}
        if self.model is not None:
            return _of_parts(part, self.model.parts_of(stage), stage)
        chunks, placement = chunks_of(part), self.graph.placement
        if len(chunks) != placement.chunks_of(stage):
            where = "on all ranks" if isinstance(placement, Placement) else f"placement has them on stage {stage}"
            raise ConfigError(f"module has chunks: {len(chunks)}, must have {placement.chunks_of(stage)}, as {where}")
        return dict(zip(placement.virtual_stages(stage), chunks, strict=True))

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
                        f"deterministic is True, but {self.text_of(other)} and {self.text_of(v)} share {name!r}: must "
                        "be False, or each must have its own"
                    )

    def check_program(self, program: StageProgram) -> None:
        """Raise a ConfigError if ``program`` cannot run an optional kind, such as W where backward is split."""
        for row in KINDS.values():
            cannot = getattr(type(program), row.name) is getattr(StageProgram, row.name)
            if row.option is not None and any(getattr(self.graph, row.option)) and cannot:
                raise ConfigError(
                    f"{type(program).__name__} has no {row.name}(), needed for {row.label}s of their own: implement "
                    f"it, or leave {row.option}=False"
                )

    def in_order(self, modules: Mapping[int, nn.Module]) -> frozenset[ForcedOrder]:
        return self.writes_in_order(modules) | forced_by(self.order, self.graph)

    def writes_in_order(self, modules: Mapping[int, nn.Module]) -> frozenset[ForcedOrder]:
        """Those that ``deterministic`` forces: tasks that add gradients, and forwards that write buffers."""
        if not self.deterministic:
            return frozenset()
        graph = self.graph
        adds = {(graph.last_kind(v, Mode.TRAIN), v) for v in range(graph.placement.num_virtual_stages)}
        forwards = {(Kind.F, v) for v, module in modules.items() if writes_buffers_in_forward(module)}
        return frozenset(adds | forwards)


def _placed(table: Sequence[int], stages: int, options: Options) -> TaskGraph:
    """The chain whose virtual stages ``table`` places."""
    if options.chunks is not None:
        raise ConfigError(f"chunks is {options.chunks}, must be None with a list as placement, which says how many")
    placement = TablePlacement(tuple(table))
    if placement.stages != stages:
        raise ConfigError(f"placement is {list(table)}, must have the stages 0..{stages - 1}, as the pipeline has")
    return TaskGraph(placement, split=(options.split,) * len(table))


def chunks_of(part: object, name: str = "module") -> tuple[nn.Module, ...]:
    """The modules in ``part``, one for each chunk; a ConfigError if it is neither a module nor a list of modules.

    Errors call it ``name``.
    """
    if isinstance(part, nn.Module) and not isinstance(part, nn.ModuleList):  # that one has no forward
        return (part,)
    if not isinstance(part, list | tuple | nn.ModuleList):
        by_part = "; modules by part go with graph=" if isinstance(part, Mapping) else ""
        raise ConfigError(f"{name} is of type {type(part).__name__}, must be {_ALLOWED}{by_part}")
    chunks = tuple(part)
    for index, chunk in enumerate(chunks):
        if isinstance(chunk, StageProgram):
            raise ConfigError(
                f"{name}[{index}] is a StageProgram, must be passed alone: one serves all chunks of a rank"
            )
        if not isinstance(chunk, nn.Module):
            raise ConfigError(f"{name}[{index}] is of type {type(chunk).__name__}, must be an nn.Module")
    if not chunks:
        raise ConfigError(f"{name} is an empty {type(part).__name__}, must be {_ALLOWED}")
    return chunks


def _losses(loss_fn: object, model: ModelGraph) -> Mapping[int, LossFunction]:
    """The losses by virtual stage; a ConfigError where they are not those of the parts that no other reads."""
    sinks, names = model.sinks, " and ".join(map(repr, model.sinks))
    if not isinstance(loss_fn, Mapping):
        if loss_fn is not None and len(sinks) > 1:
            raise ConfigError(
                f"graph: no part reads {names}, and loss_fn is one function: must be a dict with a function for each "
                "of them; or another part must read all but one"
            )
        return losses_by_stage(cast("LossFunction | None", loss_fn), model.tasks)
    if len(sinks) == 1:
        raise ConfigError(f"loss_fn is a dict, must be a function: only part {names} has a loss, as no part reads it")
    if loss_fn.keys() != set(sinks):
        raise ConfigError(
            f"loss_fn names {', '.join(map(repr, loss_fn)) or 'no part'}, must have a function for each part that no "
            f"other reads: {names}"
        )
    return {model.numbers[name][-1]: loss for name, loss in loss_fn.items()}


def _of_parts(modules: object, parts: Mapping[str, Sequence[int]], stage: int) -> dict[int, nn.Module]:
    """The modules of ``stage``, which has ``parts``, by virtual stage; a ConfigError where they do not fit."""
    names = ", ".join(map(repr, parts))
    if not isinstance(modules, Mapping):
        raise ConfigError(
            f"module is of type {type(modules).__name__}, must be a dict with the modules of stage {stage} by part: "
            f"{names}"
        )
    if modules.keys() != parts.keys():
        raise ConfigError(
            f"module has the parts {', '.join(map(repr, modules)) or 'none'}, must have those of stage {stage}: {names}"
        )
    placed: dict[int, nn.Module] = {}
    for name, virtual_stages in parts.items():
        own = chunks_of(modules[name], f"module[{name!r}]")
        if len(own) != len(virtual_stages):
            raise ConfigError(
                f"module[{name!r}] has {len(own)} modules, must have {len(virtual_stages)}: the part has so many on "
                f"stage {stage}"
            )
        placed.update(zip(virtual_stages, own, strict=True))
    return dict(sorted(placed.items()))


def check_modules(modules: object) -> None:
    """Raise a ConfigError for an object that is not a list of stages, or is empty."""
    if not isinstance(modules, list | tuple | nn.ModuleList | nn.Sequential):
        remedy = ": write [module] for a pipeline of one stage" if isinstance(modules, nn.Module | StageProgram) else ""
        raise ConfigError(
            f"modules is of type {type(modules).__name__}, must be a list with one module a stage{remedy}"
        )
    if not modules:
        raise ConfigError("modules is empty, must hold one module a stage")


def check_initialised(modules: Mapping[int, nn.Module], text_of: TextOf) -> None:
    """Raise a ConfigError for a parameter or buffer without values, or of a lazy module, which has no shape yet."""
    for v, module in sorted(modules.items()):
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if is_lazy(tensor):
                raise ConfigError(
                    f"{name!r} of {class_name(module)} on {text_of(v)} is lazy, must have a shape: run one "
                    "forward of the module before the pipeline and the optimizer are made"
                )
        for name, what in without_values(module):
            raise ConfigError(
                f"{name!r} of {text_of(v)} {what}, must have values: load or compute them "
                "before the pipeline and the optimizer are made (a stage of rrfp.split: stage.load_pretrained(folder))"
            )

"""The result of `rrfp.split`: the stages of a model, each with the modules, ties and loss that a pipeline needs."""

from __future__ import annotations

import json
import os
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import Tensor, nn

from rrfp.atomic_files import write_atomically
from rrfp.errors import ConfigError
from rrfp.hints import Placement
from rrfp.integrations.splitting.layered import Layered, MeasuredLayers
from rrfp.integrations.splitting.weights import Weights, compute_buffers, entries_of, load
from rrfp.model.topology import Topology
from rrfp.pipeline.api import LocalPipeline, Pipeline, local
from rrfp.pipeline.plan_file import PLAN, Plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


#: Under this name a state dict's ``_metadata`` says which stage of which split it is.
METADATA = "rrfp.split"

LossFunction = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, slots=True)
class SplitStage:
    """One stage of a model. It keeps nothing of the others: ``del`` the model and the split to free those."""

    #: Of this stage, 0..N-1.
    index: int
    stages: int
    #: Its modules, shallowest first; one, unless the split has several chunks a stage.
    chunks: tuple[nn.Module, ...] = field(repr=False)
    #: Parameters of which other virtual stages have copies too, by name.
    ties: dict[str, nn.Parameter] = field(repr=False)
    #: Which virtual stages a stage holds: ``"looped"`` or ``"v"``.
    placement: Literal["looped", "v"]
    #: The model's own loss, ``loss_fn(output, labels)``; None if it has none.
    loss_fn: LossFunction | None = field(repr=False)
    #: The model's class, its number of layers and the cuts, as text: the same for all stages.
    partition: str = field(repr=False)
    #: The layers of each chunk, as the whole model numbers them.
    layers: tuple[range, ...]
    #: The entries of the whole model, and how folders of the Hub have them.
    weights: Weights = field(repr=False)
    plan: Plan | None = field(default=None, repr=False)

    def pipeline(self, topology: Topology | None = None, *, mesh: DeviceMesh | None = None, **options: Any) -> Pipeline:
        """This rank's part of a pipeline.

        Args:
            topology: this rank's; from torchrun's environment by default.
            mesh: instead of ``topology``: a mesh with named dims, one of them ``pp``.
            options: of `rrfp.Pipeline`; ``loss_fn`` is the model's own by default, ``plan`` the one by which it was
                split. Ranks compare ``partition`` at the start.
        """
        own = _topology(topology, mesh, options)
        if (own.stage, own.stages) != (self.index, self.stages):
            way = "split the model" if self.plan is None else "record and plan the model split"
            rest = f": start {self.stages} ranks a replica, or {way} into {own.stages}"
            raise ConfigError(
                f"topology is stage {own.stage} of {own.stages}, must be stage {self.index} of {self.stages}, as this "
                f"part of the split{rest if own.stages != self.stages else ''}"
            )
        defaults = {
            "placement": self.placement,
            "loss_fn": self.loss_fn,
            "ties": self.ties,
            "partition": self.partition,
        }
        planned = _planned([self], self.plan, options)
        return Pipeline(self.chunks, topology=topology, mesh=mesh, **{**defaults, **options, **planned})

    def parameters(self) -> list[nn.Parameter]:
        """Each parameter once, for an optimizer."""
        return list({id(each): each for chunk in self.chunks for each in chunk.parameters()}.values())

    def train(self, mode: bool = True) -> None:
        """Put all modules into train mode, or into eval mode."""
        for chunk in self.chunks:
            chunk.train(mode)

    def eval(self) -> None:
        """Put all modules into eval mode."""
        self.train(False)

    def state_dict(self) -> dict[str, Any]:
        """Parameters and saved buffers, under the names that the whole model has for them.

        Beside the modules' versions, torch's ``_metadata`` says which stage this is: see `rrfp.merge_state_dict`.
        """
        state: OrderedDict[str, Any] = OrderedDict()
        vars(state)["_metadata"] = OrderedDict()  # as torch makes it
        for chunk in self.chunks:
            chunk.state_dict(destination=state)
        vars(state)["_metadata"][METADATA] = {"stage": self.index, "stages": self.stages, "partition": self.partition}
        return state

    def load_state_dict(self, state: Mapping[str, Any], *, assign: bool = False) -> None:
        """Load this stage's parameters and buffers.

        Args:
            state: of the whole model, or of this stage; the entries of other stages are passed over. Of tied entries
                one is enough.
            assign: whether to take the tensors of ``state`` instead of copying their values, as a stage needs whose
                model is on the meta device. Buffers that no state has are then computed anew where the model tells
                how. Make the optimizer afterwards.

        Raises:
            ConfigError: if ``state`` lacks an entry, naming it.
        """
        own = OrderedDict(state)
        vars(own)["_metadata"] = getattr(state, "_metadata", None)
        for entry in self.state_dict():
            name = next((name for name in (entry, *self.weights.tied(entry)) if name in state), None)
            if name is None:
                raise ConfigError(f"state lacks {entry!r}, must have all entries of stage {self.index}")
            own[entry] = state[name]
        places = _places(self.chunks) if assign else {}
        for chunk in self.chunks:
            chunk.load_state_dict(own, strict=False, assign=assign)
        if assign:
            self._tie_anew(places)
            compute_buffers(self.chunks, self.weights, next(iter(entries_of(self.chunks).values())).device)

    def _tie_anew(self, places: Mapping[int, Sequence[tuple[nn.Module, str]]]) -> None:
        """Make one object again of what was one: torch assigns one for each name. ``places`` are those before."""
        moved: dict[int, nn.Parameter] = {}
        for key, holders in places.items():
            module, name = holders[0]
            moved[key] = getattr(module, name)
            for other, own_name in holders[1:]:
                setattr(other, own_name, moved[key])
        for name, parameter in list(self.ties.items()):
            self.ties[name] = moved[id(parameter)]

    def load_pretrained(self, folder: str | os.PathLike[str], *, device: torch.device | str | None = None) -> None:
        """Load this stage's parameters and buffers from a folder of the Hub, and read nothing else of it.

        What lies on the meta device gets memory: split a model that was built under ``torch.device("meta")``, and no
        rank holds more than its part. Dtypes stay the model's. Of tied entries one is enough. Buffers that no folder
        has, such as the frequencies of rotary embeddings, are computed anew. Parameters stay the objects that they
        are, those of the whole model too.

        Args:
            folder: with ``model.safetensors``, or with ``model.safetensors.index.json`` and its files.
            device: for what is on the meta device; the CPU by default. All else stays where it is.

        Raises:
            ConfigError: if the folder cannot be read, lacks an entry or has another shape or an unfit dtype for it, or
                a buffer remains that nothing has filled; names it.
        """
        load(self.chunks, self.weights, folder, f"stage {self.index}", device)


@dataclass(frozen=True, slots=True)
class Split(Sequence[SplitStage]):
    """All stages of a model, by index; an index that there is not is an ``IndexError``.

    Parameters are the model's own objects: in one process the model trains with its parts.
    """

    all_stages: tuple[SplitStage, ...]
    #: The first layer of each virtual stage but the first.
    cuts: tuple[int, ...]
    #: The model's own loss, ``loss_fn(output, labels)``; None if it has none.
    loss_fn: LossFunction | None = field(repr=False)
    #: What each layer takes, where that was measured.
    measured: MeasuredLayers | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        parts: Sequence[nn.Module],
        placement: Placement,
        cuts: tuple[int, ...],
        layered: Layered,
        measured: MeasuredLayers | None = None,
        plan: Plan | None = None,
    ) -> Split:
        """The stages that hold ``parts``, in the order of virtual stages."""
        ties, loss_fn, weights = _ties(layered.model, parts), layered.loss_fn, layered.weights()
        stages: list[SplitStage] = []
        partition = f"{type(layered.model).__name__} of {len(layered.layers)} layers, cut at {layered.named_cuts(cuts)}"
        layers = [range(*bounds) for bounds in pairwise((0, *cuts, len(layered.layers)))]
        for stage in range(placement.stages):
            virtual_stages = placement.virtual_stages(stage)
            chunks = tuple(parts[v] for v in virtual_stages)
            own = {id(each) for chunk in chunks for each in chunk.parameters()}
            tied = {name: each for name, each in ties.items() if id(each) in own}
            own_layers = tuple(layers[v] for v in virtual_stages)
            stages.append(
                SplitStage(
                    index=stage,
                    stages=placement.stages,
                    chunks=chunks,
                    ties=tied,
                    placement=placement.layout,
                    loss_fn=loss_fn,
                    partition=partition,
                    layers=own_layers,
                    weights=weights,
                    plan=plan,
                )
            )
        return cls(tuple(stages), cuts, loss_fn, measured)

    def local(self, **options: Any) -> LocalPipeline:
        """All stages in this process.

        Args:
            options: of `rrfp.local`; ``loss_fn`` is the model's own by default, ``plan`` the one by which it was split.

        Returns:
            The pipeline, not entered.

        Raises:
            ConfigError: as `rrfp.local`.
        """
        defaults = {"placement": self[0].placement, "loss_fn": self.loss_fn, "ties": [each.ties for each in self]}
        planned = _planned(self, self[0].plan, options)
        return local([each.chunks for each in self], **{**defaults, **options, **planned})

    def save_layers(self, path: str | os.PathLike[str]) -> None:
        """Write what ``measure=True`` has measured, and the cuts, for `rrfp plan`.

        Args:
            path: of the file, which is replaced.

        Raises:
            ConfigError: if nothing was measured, or the file cannot be written.
        """
        if self.measured is None:
            raise ConfigError("nothing was measured: rrfp.split(..., measure=True) measures the layers")
        layout = {"stages": len(self), "chunks": len(self[0].chunks), "placement": self[0].placement}
        document = {**layout, "cuts": list(self.cuts), **self.measured.to_plain()}
        write_atomically(path, json.dumps(document, indent=1) + "\n")

    def load_pretrained(self, folder: str | os.PathLike[str], *, device: torch.device | str | None = None) -> None:
        """Load all stages from a folder of the Hub; see `SplitStage.load_pretrained`.

        Args:
            folder: as there.
            device: as there.

        Raises:
            ConfigError: as there.
        """
        chunks = [chunk for stage in self for chunk in stage.chunks]
        load(chunks, self[0].weights, folder, "the model", device)

    @overload
    def __getitem__(self, index: int) -> SplitStage: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[SplitStage, ...]: ...
    def __getitem__(self, index: int | slice) -> SplitStage | tuple[SplitStage, ...]:
        count = len(self)
        if not isinstance(index, slice) and not -count <= index < count:
            raise IndexError(f"stage {index} of a model that is split into {count}, must be in {-count}..{count - 1}")
        return self.all_stages[index]

    def __repr__(self) -> str:
        stages = (f"stage {each.index}: {' and '.join(map(_shown, each.layers))}" for each in self)
        return f"Split({'; '.join([self[0].partition, *stages])})"

    def __iter__(self) -> Iterator[SplitStage]:
        return iter(self.all_stages)

    def __len__(self) -> int:
        return len(self.all_stages)


def _topology(topology: Topology | None, mesh: DeviceMesh | None, options: Mapping[str, Any]) -> Topology:
    if topology is not None or mesh is None:
        return topology or Topology.from_env()
    coordinate = {name: options[name] for name in ("coordinate", "reduce") if options.get(name) is not None}
    return Topology.from_mesh(mesh, **coordinate)


def _planned(stages: Iterable[SplitStage], plan: Plan | None, options: Mapping[str, Any]) -> dict[str, Any]:
    """The option ``plan``, if there is any; a ConfigError where the stages are cut otherwise."""
    if options.get("plan") is not None:
        plan = Plan.read(options["plan"])
    if plan is None:
        return {}
    for stage in stages:
        planned = plan.layers_of(stage.index) if stage.index < plan.stages else None
        if planned is not None and planned != stage.layers:
            has, wanted = (" and ".join(map(_shown, each)) for each in (stage.layers, planned))
            raise ConfigError(
                f"plan has the layers {wanted} on stage {stage.index}, and the split has {has} there: must be "
                "the same, as rrfp.split(plan=...) makes them"
            )
    return {"plan": {PLAN: plan.to_plain()}}


def _shown(layers: range) -> str:
    return f"{layers[0]}..{layers[-1]}" if len(layers) > 1 else str(layers[0])


def _places(chunks: Sequence[nn.Module]) -> dict[int, list[tuple[nn.Module, str]]]:
    """By the id of each parameter and buffer, where it is held."""
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in dict.fromkeys(module for chunk in chunks for module in chunk.modules()):
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                places.setdefault(id(tensor), []).append((module, name))
    return places


def _ties(model: nn.Module, parts: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters that several parts have, by their names in the model."""
    holders = Counter(id(parameter) for part in parts for parameter in part.parameters())
    return {name: parameter for name, parameter in model.named_parameters() if holders[id(parameter)] > 1}


def merge_state_dict(states: Iterable[Mapping[str, Any]], model: nn.Module | None = None) -> dict[str, Any]:
    """The state dict of the whole model from those of its parts, for ``save_pretrained(..., state_dict=)``.

    Those of stages, also as ``torch.save`` has written them, say which stages there are; so one that is missing is
    noticed. Those that other ways of saving have written, and those of single modules, do not: pass ``model``.

    Args:
        states: ``stage.state_dict()`` of every stage, or ``module.state_dict()`` of every part.
        model: the whole model, whose names the result must have; it may be on the meta device.

    Returns:
        All entries, under their names. An entry that several parts have must be the same in all.

    Raises:
        ConfigError: if ``states`` is no list of state dicts, lacks a stage or an entry of ``model``, is of several
            splits, or has two values of one name.
    """
    parts = _checked(states)
    _check_complete(parts)
    merged: dict[str, Any] = {}
    for state in parts:
        for name, value in state.items():
            if name in merged and not _equal(merged[name], value):
                raise ConfigError(f"states have two values of {name!r}, must have one: are the parts of one model?")
            merged.setdefault(name, value)
    if model is not None and (different := model.state_dict().keys() ^ merged.keys()):
        name = min(different)
        problem = f"have {name!r}, which model lacks" if name in merged else f"lack {name!r}"
        raise ConfigError(f"states {problem}, must have all entries of model and no others")
    return merged


def _checked(states: Any) -> list[Mapping[str, Any]]:
    wanted = "must be a list of state dicts, one of each stage"
    if isinstance(states, Mapping | str) or not isinstance(states, Iterable):
        raise ConfigError(f"states is a {type(states).__name__}, {wanted}")
    parts = list(states)
    for index, state in enumerate(parts):
        if not isinstance(state, Mapping):
            raise ConfigError(f"states[{index}] is a {type(state).__name__}, {wanted}: load files first")
    if not parts:
        raise ConfigError(f"states is empty, {wanted}")
    return parts


def _check_complete(parts: Sequence[Mapping[str, Any]]) -> None:
    """Refuse stages of several splits, and a missing one if known."""
    marks = [(getattr(part, "_metadata", None) or {}).get(METADATA) for part in parts]
    known = [mark for mark in marks if mark is not None]
    splits = list(dict.fromkeys(f"{mark['partition']}, {mark['stages']} stages" for mark in known))
    if len(splits) > 1:
        raise ConfigError(f"states are of {splits[0]!r} and of {splits[1]!r}, must be of one split")
    if known and len(known) == len(marks):
        stages = known[0]["stages"]
        if missing := sorted({*range(stages)} - {mark["stage"] for mark in known}):
            raise ConfigError(f"states lack stage {missing[0]}, must have all stages of the model, 0..{stages - 1}")


def _equal(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) and isinstance(other, Tensor):
        return value is other or torch.equal(value, other)
    return bool(value == other)

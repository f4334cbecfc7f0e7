"""The result of `rrfp.split`: the stages of a model, each with the modules, ties and loss that a pipeline needs."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal, overload

from torch import Tensor, nn

from rrfp.core.topology import Topology
from rrfp.errors import ConfigError
from rrfp.hints import Placement
from rrfp.integrations.splitting.layered import Layered
from rrfp.pipeline.api import LocalPipeline, Pipeline, local

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: Under this name a state dict's ``_metadata`` says which stage of which split it is.
METADATA = "rrfp.split"

#: Compares an output with a target.
LossFunction = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, slots=True)
class SplitStage:
    """One stage of a model. It keeps nothing of the others: ``del`` the model and the split to free those.

    Attributes:
        index: of this stage, 0..N-1.
        stages: N.
        chunks: its modules, shallowest first; one, unless the split has several chunks a stage.
        ties: parameters of which other virtual stages have copies too, by name.
        placement: which virtual stages a stage holds: ``"looped"`` or ``"v"``.
        loss_fn: the model's own loss, ``loss_fn(output, labels)``; None if it has none.
        partition: the model's class, its number of layers and the cuts, as text: the same for all stages.
        layers: the layers of each chunk, as the whole model numbers them.
    """

    index: int
    stages: int
    chunks: tuple[nn.Module, ...] = field(repr=False)
    ties: Mapping[str, nn.Parameter] = field(repr=False)
    placement: Literal["looped", "v"]
    loss_fn: LossFunction | None = field(repr=False)
    partition: str = field(repr=False)
    layers: tuple[range, ...]

    def pipeline(self, topology: Topology | None = None, *, mesh: DeviceMesh | None = None, **options: Any) -> Pipeline:
        """This rank's part of a pipeline.

        Args:
            topology: this rank's; from torchrun's environment by default.
            mesh: instead of ``topology``: a mesh with named dims, one of them ``pp``.
            options: of `rrfp.Pipeline`; ``loss_fn`` is the model's own by default. Ranks compare ``partition`` at the
                start.

        Returns:
            The pipeline, not entered.

        Raises:
            ConfigError: as `rrfp.Pipeline`, and where the topology places this rank elsewhere.
        """
        own = _topology(topology, mesh, options)
        if (own.stage, own.stages) != (self.index, self.stages):
            raise ConfigError(
                f"topology is stage {own.stage} of {own.stages}, must be stage {self.index} of {self.stages}, as this "
                "part of the split"
            )
        defaults = {
            "placement": self.placement,
            "loss_fn": self.loss_fn,
            "ties": self.ties,
            "partition": self.partition,
        }
        return Pipeline(self.chunks, topology=topology, mesh=mesh, **{**defaults, **options})

    def parameters(self) -> list[nn.Parameter]:
        """Each parameter once, for an optimizer."""
        return list({id(each): each for chunk in self.chunks for each in chunk.parameters()}.values())

    def train(self, mode: bool = True) -> None:
        """Put all modules into train mode, or into eval mode.

        Args:
            mode: False for eval mode.
        """
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

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this stage's parameters and buffers.

        Args:
            state: of the whole model, or of this stage; the entries of other stages are passed over.

        Raises:
            ConfigError: if an entry of this stage is missing.
        """
        for chunk in self.chunks:
            if missing := chunk.load_state_dict(state, strict=False).missing_keys:
                raise ConfigError(f"state lacks {missing[0]!r}, must have all entries of stage {self.index}")


@dataclass(frozen=True, slots=True)
class Split(Sequence[SplitStage]):
    """All stages of a model, by index; an index that there is not is an ``IndexError``.

    Parameters are the model's own objects: in one process the model trains with its parts.

    Attributes:
        all_stages: the stages, in order.
        cuts: the first layer of each virtual stage but the first.
        loss_fn: the model's own loss, ``loss_fn(output, labels)``; None if it has none.
    """

    all_stages: tuple[SplitStage, ...]
    cuts: tuple[int, ...]
    loss_fn: LossFunction | None = field(repr=False)

    @classmethod
    def of(cls, parts: Sequence[nn.Module], placement: Placement, cuts: tuple[int, ...], layered: Layered) -> Split:
        """The stages that hold ``parts``, which are in the order of virtual stages."""
        ties, loss_fn, stages = _ties(layered.model, parts), layered.loss_fn, []
        partition = f"{type(layered.model).__name__} of {len(layered.layers)} layers, cut at {list(cuts)}"
        layers = [range(*bounds) for bounds in pairwise((0, *cuts, len(layered.layers)))]
        for stage in range(placement.stages):
            virtual_stages = placement.virtual_stages(stage)
            chunks = tuple(parts[v] for v in virtual_stages)
            own = {id(each) for chunk in chunks for each in chunk.parameters()}
            tied = {name: each for name, each in ties.items() if id(each) in own}
            own_layers = tuple(layers[v] for v in virtual_stages)
            stages.append(
                SplitStage(stage, placement.stages, chunks, tied, placement.layout, loss_fn, partition, own_layers)
            )
        return cls(tuple(stages), cuts, loss_fn)

    def local(self, **options: Any) -> LocalPipeline:
        """All stages in this process.

        Args:
            options: of `rrfp.local`; ``loss_fn`` is the model's own by default.

        Returns:
            The pipeline, not entered.

        Raises:
            ConfigError: as `rrfp.local`.
        """
        defaults = {"placement": self[0].placement, "loss_fn": self.loss_fn, "ties": [each.ties for each in self]}
        return local([each.chunks for each in self], **{**defaults, **options})

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
    coordinate = {name: options[name] for name in ("coordinate",) if options.get(name) is not None}
    return Topology.from_mesh(mesh, **coordinate)


def _shown(layers: range) -> str:
    return f"{layers[0]}..{layers[-1]}" if len(layers) > 1 else str(layers[0])


def _ties(model: nn.Module, parts: Sequence[nn.Module]) -> dict[str, nn.Parameter]:
    """The parameters that several parts have, by their names in the model."""
    holders = Counter(id(parameter) for part in parts for parameter in part.parameters())
    return {name: parameter for name, parameter in model.named_parameters() if holders[id(parameter)] > 1}

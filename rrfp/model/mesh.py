"""How the ranks of a job are laid out: named dimensions, and which of them have collectives inside a task.

One dimension, ``pp``, is the pipeline. Of the others, the *coordinated* ones (tensor parallelism, and whatever else
exchanges data in the middle of a forward or backward) together make a *group*: ranks that must run the same tasks in
the same order, or their collectives would not match. What is left makes *replicas*: copies of the pipeline that compute
on other data and meet only when gradients are reduced. Collectives over several dimensions chain ranks together, so a
group is the connected component over all coordinated dimensions; in a mesh that is their product.

Over a coordinated ``dp`` dimension the modules sum gradients themselves, as ``fully_shard`` does, or they are summed
once a step, as over replicas: then the dimension is in ``reduce`` too. A rank's *summand* is its index among all ranks
over which its gradients are summed once a step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from rrfp.errors import ConfigError
from rrfp.plain import whole

#: The pipeline's dimension.
PIPELINE = "pp"
#: Dimensions whose collectives run inside a task, whatever the model.
IN_TASK = ("tp", "cp", "ep", "sp")
#: Names of dimensions over which gradients are summed after their last task begin like this.
REPLICATED = "dp"


class MeshPosition(NamedTuple):
    """Where a rank is."""

    stage: int
    #: Which copy of the pipeline it belongs to.
    replica: int
    #: Which rank of its group it is; 0 leads.
    member: int


@dataclass(frozen=True, slots=True)
class Mesh:
    """The ranks of a job along named dimensions."""

    #: Name and size of each dimension, the slowest first: a rank is the row-major index of its coordinates.
    dims: tuple[tuple[str, int], ...]
    #: The coordinated dimensions; of those with a known name the mesh need not have all.
    coordinate: tuple[str, ...] = ("tp",)
    #: The coordinated ``dp`` dimensions over which gradients are summed once a step.
    reduce: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.dims]
        if len(set(names)) < len(names) or PIPELINE not in names:
            what = "each once" if PIPELINE in names else f"one named {PIPELINE!r}"
            raise ConfigError(f"mesh has the dims {', '.join(names) or 'none'}, must have {what}")
        if PIPELINE in self.coordinate:
            raise ConfigError(f"coordinate is {self.coordinate!r}, must not have {PIPELINE!r}")
        for name in self.coordinate:
            if name not in names and name not in IN_TASK and not name.startswith(REPLICATED):
                raise ConfigError(f"coordinate has {name!r}, must be dims of the mesh: {', '.join(names)}")
        for name in self.reduce:
            wanted = (*self.coordinate, name)
            if not name.startswith(REPLICATED):
                raise ConfigError(f"reduce has {name!r}, must be dims of the mesh that begin with {REPLICATED!r}")
            if name not in self.coordinate:
                raise ConfigError(
                    f"reduce has {name!r}, which is not coordinated, so gradients are summed over it in any case: "
                    f"leave it out, or if collectives over it run inside a task, coordinate must be {wanted!r}"
                )
        check_sizes(self.dims)
        for name, size in self.dims:
            if size > 1 and name not in self.coordinate:
                self._check_uncoordinated(name, size)

    def _check_uncoordinated(self, name: str, size: int) -> None:
        wanted = (*self.coordinate, name)
        if name in IN_TASK:
            raise ConfigError(
                f"mesh dim {name!r} has size {size} and its collectives run inside a task, in the order of the tasks: "
                f"coordinate is {self.coordinate!r}, must be {wanted!r}"
            )
        if name != PIPELINE and not name.startswith(REPLICATED):
            raise ConfigError(
                f"mesh dim {name!r} is neither {PIPELINE}, a replicated one ({REPLICATED}...) nor coordinated: if "
                f"collectives over it run inside a task, coordinate must be {wanted!r}"
            )

    @property
    def stages(self) -> int:
        """N."""
        return dict(self.dims)[PIPELINE]

    @property
    def members(self) -> int:
        """Ranks in a group."""
        return math.prod(size for name, size in self.dims if name in self.coordinate)

    @property
    def replicas(self) -> int:
        """Copies of the pipeline."""
        return self.size // (self.stages * self.members)

    @property
    def size(self) -> int:
        return math.prod(size for _, size in self.dims)

    @property
    def replicated(self) -> tuple[str, ...]:
        """The dimensions that make replicas."""
        return tuple(name for name, _ in self.dims if name != PIPELINE and name not in self.coordinate)

    @property
    def summands(self) -> int:
        """Over how many ranks a gradient is summed once a step."""
        return math.prod(self._size(name) for name in self._summed)

    @property
    def coordinates_replicas(self) -> bool:
        """Whether ranks of a group have data of their own, as under FSDP in every microbatch."""
        return any(size > 1 and name.startswith(REPLICATED) for name, size in self.dims if name in self.coordinate)

    def coordinates(self, rank: int) -> dict[str, int]:
        at: dict[str, int] = {}
        for name, size in reversed(self.dims):
            rank, at[name] = divmod(rank, size)
        return at

    def place_of(self, rank: int) -> MeshPosition:
        """The stage, replica and member of ``rank``."""
        at = self.coordinates(rank)
        return MeshPosition(at[PIPELINE], self._index(at, self.replicated), self._index(at, self._coordinated))

    def summand_of(self, rank: int) -> int:
        """The index of ``rank`` among its `counterparts`."""
        return self._index(self.coordinates(rank), self._summed)

    def data_rank_of(self, rank: int) -> int:
        """The index of ``rank`` among those of its stage that have data of their own: over all ``dp`` dims."""
        return self._index(self.coordinates(rank), [name for name, _ in self.dims if name.startswith(REPLICATED)])

    def counterparts(self, rank: int) -> list[int]:
        """The ranks over which the gradients of ``rank`` are summed once a step, itself included."""
        at, summed = self.coordinates(rank), self._summed
        rest = {name: index for name, index in at.items() if name not in summed}
        alike = (other for other in range(self.size) if rest.items() <= self.coordinates(other).items())
        return sorted(alike, key=self.summand_of)

    def is_first(self, rank: int) -> bool:
        """Whether ``rank`` is the first of the ranks of its stage that compute on the same microbatches."""
        at = self.coordinates(rank)
        return not any(at[name] for name in self._coordinated if name not in self.reduce)

    def rank(self, where: MeshPosition) -> int:
        at = {PIPELINE: where.stage}
        for index, names in ((where.replica, self.replicated), (where.member, self._coordinated)):
            for name in reversed(names):
                index, at[name] = divmod(index, self._size(name))
        return self._index(at, [name for name, _ in self.dims])

    def name(self, rank: int) -> str:
        """The display name of ``rank``: ``stage 1``, or ``stage 1, dp 0, tp 1 (rank 5)`` where a stage has several."""
        if self.size == self.stages:
            return f"stage {self.place_of(rank).stage}"
        at = self.coordinates(rank)
        others = "".join(f", {name} {at[name]}" for name, size in self.dims if name != PIPELINE and size > 1)
        return f"stage {at[PIPELINE]}{others} (rank {rank})"

    @property
    def _summed(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.dims if name in (*self.replicated, *self.reduce))

    @property
    def _coordinated(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.dims if name in self.coordinate)

    def _size(self, name: str) -> int:
        return dict(self.dims)[name]

    def _index(self, at: Mapping[str, int], names: Iterable[str]) -> int:
        index = 0
        for name in names:
            index = index * self._size(name) + at[name]
        return index


def check_sizes(dims: Iterable[tuple[str, Any]]) -> None:
    """Raise a ConfigError that names a dimension whose size is not a positive integer."""
    for name, size in dims:
        whole(f"mesh dim {name!r}", size, 1)

"""Where in the job a process is: its stage, its replica, and which member of its group it is."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rrfp.errors import ConfigError
from rrfp.model.mesh import PIPELINE, Mesh, MeshPosition, check_sizes
from rrfp.plain import whole

#: Stands for the mesh with one rank a stage until the number of stages is known.
_ONE_RANK_A_STAGE: Any = None


@dataclass(frozen=True, slots=True)
class Topology:
    """Where in the job this process is.

    Attributes:
        stage: this process's stage, 0..stages-1.
        stages: N.
        run_id: identifies the job; endpoints are published under it.
        restart: how often the launcher restarted the job; a restarted job never talks to its predecessor.
        local_world_size: ranks on this host; equal to all of them when the whole job is on one host.
        replica: which copy of the pipeline this process belongs to.
        member: which rank of its group it is; 0 leads.
        mesh: how all ranks are laid out; by default one rank a stage.

    Raises:
        ConfigError: if ``stage``, ``replica`` or ``member`` lies outside the mesh.
    """

    stage: int
    stages: int
    run_id: str = "local"
    restart: int = 0
    local_world_size: int | None = None
    replica: int = 0
    member: int = 0
    mesh: Mesh = _ONE_RANK_A_STAGE

    def __post_init__(self) -> None:
        object.__setattr__(self, "stages", whole("stages", self.stages, 1))
        if self.mesh is _ONE_RANK_A_STAGE:
            object.__setattr__(self, "mesh", Mesh(((PIPELINE, self.stages),)))
        if self.mesh.stages != self.stages:
            raise ConfigError(f"stages is {self.stages}, must be the mesh's: {self.mesh.stages}")
        for field, size in (("stage", self.stages), ("replica", self.replicas), ("member", self.members)):
            object.__setattr__(self, field, whole(field, getattr(self, field), 0, size - 1))

    @property
    def replicas(self) -> int:
        """Copies of the pipeline, which compute on other data."""
        return self.mesh.replicas

    @property
    def members(self) -> int:
        """Ranks of this process's group."""
        return self.mesh.members

    @property
    def summands(self) -> int:
        """Ranks over which this rank's gradients are summed once a step: replicas, and ``reduce``'s dims of a group."""
        return self.mesh.summands

    @property
    def summand(self) -> int:
        """This rank's index among those."""
        return self.mesh.summand_of(self.rank)

    @property
    def data_rank(self) -> int:
        """This rank's index among those of its stage that have data of their own, over replicas and ``dp`` dims."""
        return self.mesh.data_rank_of(self.rank)

    @property
    def world(self) -> int:
        """All ranks of the job."""
        return self.mesh.size

    @property
    def rank(self) -> int:
        """This process among all ranks of the job."""
        return self.rank_of(self.stage)

    @property
    def leader(self) -> int:
        """The rank that leads this process's group."""
        return self.group[0]

    @property
    def group(self) -> tuple[int, ...]:
        """The ranks of this process's group, by member."""
        places = (MeshPosition(self.stage, self.replica, member) for member in range(self.members))
        return tuple(map(self.mesh.rank, places))

    def rank_of(self, stage: int, replica: int | None = None) -> int:
        """The rank of ``stage`` that this process exchanges tensors with: of the same replica, and the same member.

        Args:
            stage: 0..stages-1.
            replica: another replica, where replicas share forwards.
        """
        own = self.replica if replica is None else replica
        return stage if self._has_one_rank_a_stage else self.mesh.rank(MeshPosition(stage, own, self.member))

    def place_of(self, rank: int) -> MeshPosition:
        """Where ``rank`` is."""
        return MeshPosition(rank, 0, 0) if self._has_one_rank_a_stage else self.mesh.place_of(rank)

    def name_of(self, rank: int) -> str:
        """The display name of ``rank``."""
        return self.mesh.name(rank)

    @property
    def name(self) -> str:
        """The display name of this rank."""
        return self.name_of(self.rank)

    @property
    def _has_one_rank_a_stage(self) -> bool:
        return len(self.mesh.dims) == 1  # asked for every message: arithmetic over the dims takes microseconds

    @property
    def single_host(self) -> bool:
        """True when every rank runs on this host, as far as the launcher says."""
        return self.local_world_size is None or self.local_world_size == self.world

    @classmethod
    def at(cls, rank: int, mesh: Mesh, run_id: str = "local") -> Topology:
        """``rank`` of a job of one host that is laid out as ``mesh``."""
        stage, replica, member = mesh.place_of(rank)
        return cls(stage, mesh.stages, run_id, replica=replica, member=member, mesh=mesh)

    @classmethod
    def from_env(
        cls,
        environ: Mapping[str, str] | None = None,
        *,
        dims: Mapping[str, int] | None = None,
        coordinate: Sequence[str] = ("tp",),
        reduce: Sequence[str] = (),
    ) -> Topology:
        """Read torchrun's environment.

        Args:
            environ: the environment to read; the process's own by default.
            dims: how ranks are laid out, slowest first, as in ``{"pp": 2, "dp": 2, "tp": 2}``. Without ``pp`` that is
                the slowest, and has what is left. None: one rank a stage, stage = RANK.
            coordinate: the dims whose collectives run inside a task.
            reduce: the coordinated ``dp`` dims over which gradients are summed once a step, as over replicas.

        Raises:
            ConfigError: if a variable is missing or not a number (the message says how to launch), or the number of
                ranks is not that of the mesh (it shows the arithmetic).
        """
        environ = os.environ if environ is None else environ
        if not isinstance(environ, Mapping):
            raise ConfigError(f"environ is {environ!r:.100}, must be a dict such as os.environ, or None for that")
        rank, world = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
        if not 0 <= rank < world:
            raise ConfigError(f"environment variable RANK is {rank}, must be below WORLD_SIZE, which is {world}")
        launch = _Launch(
            environ.get("TORCHELASTIC_RUN_ID", "local"),
            _number(environ, "TORCHELASTIC_RESTART_COUNT", "0"),
            _number(environ, "LOCAL_WORLD_SIZE", environ.get("WORLD_SIZE")),
        )
        if dims is None:
            return cls(rank, world, *launch)
        mesh = _mesh_of(dims, _names(coordinate), _names(reduce), world)
        stage, replica, member = mesh.place_of(rank)
        return cls(stage, mesh.stages, *launch, replica, member, mesh)

    @classmethod
    def from_mesh(cls, device_mesh: Any, coordinate: Sequence[str] = ("tp",), reduce: Sequence[str] = ()) -> Topology:
        """Where this process is in a ``torch.distributed.DeviceMesh`` with named dims, one of them ``pp``.

        Of a mesh's part (``mesh["pp", "tp"]``) each is a pipeline of its own, with its own run id.

        Args:
            device_mesh: such as ``init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))``.
            coordinate: the dims whose collectives run inside a task.
            reduce: the coordinated ``dp`` dims over which gradients are summed once a step, as over replicas.

        Raises:
            ConfigError: if the dims have no names or do not fit, or this process is not in the mesh.
        """
        names = getattr(device_mesh, "mesh_dim_names", ())
        if names == ():
            raise ConfigError(f"mesh is of type {type(device_mesh).__name__}, must be a torch.distributed DeviceMesh")
        at = device_mesh.get_coordinate()
        if names is None:
            raise ConfigError("mesh has no mesh_dim_names, must name its dims: pp, dp, tp, ...")
        if at is None:
            raise ConfigError("mesh lacks this process: every process that builds a pipeline must be in its mesh")
        mesh = Mesh(tuple(zip(names, map(int, device_mesh.shape), strict=True)), _names(coordinate), _names(reduce))
        rank = 0
        for (_, size), index in zip(mesh.dims, at, strict=True):
            rank = rank * size + index
        stage, replica, member = mesh.place_of(rank)
        launch = _launch_of_part(os.environ, mesh.size, int(device_mesh.mesh.min()))
        return cls(stage, mesh.stages, *launch, replica, member, mesh)


class _Launch(NamedTuple):
    run_id: str
    restart: int
    local_world_size: int


def _launch_of_part(environ: Mapping[str, str], size: int, first: int) -> _Launch:
    """The launch of ``size`` ranks of a job that make one mesh, of which ``first`` has the lowest number.

    Meshes without a common rank have different ``first``.
    """
    world = _number(environ, "WORLD_SIZE", str(size))
    local = _number(environ, "LOCAL_WORLD_SIZE", str(world))
    run_id = environ.get("TORCHELASTIC_RUN_ID", "local")
    return _Launch(
        f"{run_id}/from-{first}" if first else run_id,
        _number(environ, "TORCHELASTIC_RESTART_COUNT", "0"),
        # Where the job has several hosts, nothing says that all of these ranks are on one.
        size if local >= world else min(local, size - 1) or size,
    )


def _names(dims: Sequence[str]) -> tuple[str, ...]:
    """Names of dims; a bare text is one name, and not a sequence of letters."""
    names = (dims,) if isinstance(dims, str) else dims
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"coordinate or reduce is {dims!r:.100}, must be a list of names of dims")
    return tuple(names)


def _mesh_of(dims: Mapping[str, int], coordinate: tuple[str, ...], reduce: tuple[str, ...], world: int) -> Mesh:
    """The mesh of ``world`` ranks; another number of them is a ConfigError."""
    if not isinstance(dims, Mapping):
        raise ConfigError(f"dims is {dims!r}, must be a dict with the size of each dim, such as {{'pp': 2, 'dp': 2}}")
    sizes = dict(dims)
    check_sizes(sizes.items())
    if PIPELINE not in sizes:
        rest = math.prod(sizes.values())
        if world % rest:
            raise ConfigError(f"WORLD_SIZE is {world}, must be a multiple of {_product(sizes)}")
        sizes = {PIPELINE: world // rest, **sizes}
    mesh = Mesh(tuple(sizes.items()), coordinate, reduce)
    if mesh.size != world:
        raise ConfigError(f"WORLD_SIZE is {world}, must be {_product(sizes)}")
    return mesh


def _product(dims: Mapping[str, int]) -> str:
    return f"{' x '.join(f'{name} {size}' for name, size in dims.items())} = {math.prod(dims.values())}"


def _number(environ: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = environ.get(name, default)
    if text is None:
        raise ConfigError(
            f"environment variable {name} is not set; launch with: "
            "torchrun --standalone --nproc-per-node STAGES script.py"
        )
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"environment variable {name} is {text!r}, must be a whole number") from None

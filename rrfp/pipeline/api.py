"""`Pipeline`, what a trainer holds, and `local`, all of one in one process."""

from __future__ import annotations

import itertools
import uuid
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Unpack

from torch import nn

from rrfp.compute.gradients.own_reduction import check_wrappers
from rrfp.compute.gradients.process_groups import (
    check_replicas,
    check_sharded,
    global_ranks,
    replica_group,
    warn_of_unreduced,
)
from rrfp.compute.gradients.reducer import GradientReducer
from rrfp.compute.gradients.sparse import check_not_sparse
from rrfp.compute.gradients.tie_copies import Ties
from rrfp.compute.gradients.tied import ProcessTies
from rrfp.core.topology import Topology
from rrfp.errors import ConfigError
from rrfp.pipeline.build import Assembly
from rrfp.pipeline.handle import LoopChoice, PipelineHandle
from rrfp.pipeline.local_ranks import Ranks, together
from rrfp.pipeline.options import Options, check_rendezvous, pipeline_options
from rrfp.pipeline.partition import StagePart, check_initialised, check_modules
from rrfp.runtime.grad_clipping import GradientHolder
from rrfp.runtime.stage_runner import StageRunner
from rrfp.transports.base import Rendezvous
from rrfp.transports.rendezvous import LocalRendezvous, StoreRendezvous

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: Names travel in the headers of all messages.
MAX_NAME_LENGTH = 64

#: Counts the pipelines of this process by name; those without a name count together.
_numbers: defaultdict[str | None, Iterator[int]] = defaultdict(itertools.count)


class Pipeline(PipelineHandle):
    """This rank's part of a pipeline over several processes.

    It owns neither model nor optimizer. Every rank makes the same calls in the same order. After `PipelineAborted` it
    is of no further use.

    A rank's third pipeline talks to the third of the other ranks, unless a ``name`` says which belong together. Where
    one rank may skip a pipeline that the others make (a sweep that goes on after an error), give each a name. Ranks
    compare their options and topology when they enter.

    Where the layout has several replicas, ``torch.distributed`` sums their gradients: it must be initialised then, and
    making the pipeline waits for this rank's likes in the other replicas. Gradients that are summed in every step and
    not zeroed count once all the same; what is done to them between steps has to be the same on all replicas. A
    `StageProgram` sums its own in `finish`.

    Args:
        module: this rank's part of the model: a module, a list with one module for each chunk, or a `StageProgram`.
        topology: this rank's place; from torchrun's environment by default.
        mesh: instead of ``topology``: a mesh with named dims, one of them ``pp``; see `Topology.from_mesh`.
        coordinate: with ``mesh``: the dims whose collectives run inside a task, by default ``("tp",)``.
        rendezvous: where ranks find each other; torchrun's store by default.
        name: pairs this pipeline with those of the same name on the other ranks, the first of a name with the first.
            Up to 64 characters, no slash. By default pipelines pair in the order in which they are made.
        loop: where the runtime lives.
        ties: parameters of which other virtual stages have copies too, such as an embedding that is the head's weight:
            this rank's copy (or copies, where several of its chunks have one) by a name that all ranks use. Their
            values must be equal when the pipeline is entered. At the end of a step each copy's ``.grad`` is the sum of
            all copies' gradients, so optimizers that do the same keep them equal.
        options: see `PipelineOptions`.

    Raises:
        ConfigError: for an argument that does not exist or does not fit.
    """

    def __init__(
        self,
        module: StagePart,
        *,
        topology: Topology | None = None,
        mesh: DeviceMesh | None = None,
        coordinate: Sequence[str] | None = None,
        rendezvous: Rendezvous | None = None,
        name: str | None = None,
        loop: LoopChoice = "own",
        ties: Ties | None = None,
        **options: Unpack[Options],
    ) -> None:
        label = _label(name)  # first, so that a pipeline that is refused here still counts
        settings = pipeline_options(options, "topology, mesh, coordinate, rendezvous, name, loop, ties")
        check_rendezvous(rendezvous)
        place = _place(topology, mesh, coordinate)
        ranks = global_ranks(place, mesh)
        shape = settings.shape(place.stages, [module])
        modules = shape.modules(module, place.stage)
        check_initialised(modules)
        shape.check_shared(modules)
        check_wrappers(modules)
        check_sharded(modules, place, ranks)
        warn_of_unreduced(modules, place, ranks)
        tied = ProcessTies(ties, [modules])
        assembly = Assembly(settings, shape)
        program = assembly.program(module, place, tied.shared)
        run_id = f"{place.run_id}/{label}"
        reducer = _reducer(modules, place, ranks, deterministic=settings.deterministic)

        async def build() -> Sequence[StageRunner]:
            met = rendezvous if rendezvous is not None else await _meet(place, settings.connect_timeout)
            return [await assembly.runner(place, module, program, run_id, met, reducer, *tied.ranks)]

        reducers = () if reducer is None else (reducer,)
        holder = GradientHolder(modules, place, ranks, tied.repeated)
        ranks_here = Ranks([program], settings, build, holder, place.replicas, reducers, tied.ranks, [place])
        super().__init__(ranks_here, loop, f"rrfp-{place.rank}")


class LocalPipeline(PipelineHandle):
    """All stages in this process; see `local`."""

    def __init__(
        self,
        modules: Sequence[StagePart],
        *,
        loop: LoopChoice = "own",
        ties: Ties | Sequence[Ties] | None = None,
        **options: Unpack[Options],
    ) -> None:
        settings = pipeline_options({"transport": "inproc", "stack_timer": False, **options}, "loop, ties")
        check_modules(modules)
        shape = settings.shape(len(modules), modules)
        by_virtual_stage = shape.all_modules(modules)
        check_initialised(by_virtual_stage)
        shape.check_shared(by_virtual_stage)
        check_wrappers(by_virtual_stage)
        places = [Topology(stage, len(modules)) for stage in range(len(modules))]
        tied = ProcessTies(ties, [shape.modules(module, stage) for stage, module in enumerate(modules)])
        assembly = Assembly(settings, shape)
        programs = [assembly.program(module, place, tied.shared) for place, module in zip(places, modules, strict=True)]
        run_id = f"local-{uuid.uuid4().hex}"
        met = LocalRendezvous()

        async def build() -> Sequence[StageRunner]:
            stages = zip(places, modules, programs, tied.ranks, strict=True)
            return await together(
                assembly.runner(place, module, program, run_id, met, ties=own) for place, module, program, own in stages
            )

        holder = GradientHolder(by_virtual_stage, skip=tied.repeated)
        super().__init__(Ranks(programs, settings, build, holder, ties=tied.ranks), loop, "rrfp-local")


def local(
    modules: Sequence[StagePart],
    *,
    loop: LoopChoice = "own",
    ties: Ties | Sequence[Ties] | None = None,
    **options: Unpack[Options],
) -> LocalPipeline:
    """All stages of a pipeline in one process, over the ``inproc`` transport: for tests, debugging and small models.

    The CPU tasks of all stages share torch's one random generator, so they take one lock: nothing runs in parallel, but
    everything else (readiness, arbitration, messages, failures) is as between processes.

    Args:
        modules: one a stage, in order; with chunks, a list of modules for each stage.
        loop: where the runtime lives.
        ties: as in `Pipeline`, with all copies by name, or a list with one such dict for each stage. A parameter object
            that several modules share is tied by itself.
        options: see `PipelineOptions`.
    """
    return LocalPipeline(modules, loop=loop, ties=ties, **options)


def _place(topology: Topology | None, mesh: DeviceMesh | None, coordinate: Sequence[str] | None) -> Topology:
    """This rank's place, as the caller tells it."""
    if mesh is None:
        if coordinate is not None:
            raise ConfigError("coordinate goes with mesh; with topology, give it to Topology.from_env or from_mesh")
        return Topology.from_env() if topology is None else topology
    if topology is not None:
        raise ConfigError("topology and mesh both tell the place of this rank: must be one of them")
    if not hasattr(mesh, "mesh_dim_names"):
        raise ConfigError(f"mesh is a {type(mesh).__name__}, must be a torch.distributed DeviceMesh")
    return Topology.from_mesh(mesh) if coordinate is None else Topology.from_mesh(mesh, coordinate)


def _reducer(
    modules: Mapping[int, nn.Module], place: Topology, ranks: Sequence[int], *, deterministic: bool
) -> GradientReducer | None:
    """What sums the gradients of ``modules`` over replicas, where there are several."""
    if place.replicas == 1 or not modules:
        return None
    check_replicas(place, ranks)
    check_not_sparse(modules, "gradients are summed over replicas as dense ones")
    make_group = partial(replica_group, place, ranks)
    return GradientReducer(modules, make_group, replica=place.replica, deterministic=deterministic)


def _label(name: str | None) -> str:
    """Under which the ranks of a pipeline find each other; of another form with a name than without."""
    if name is None:
        return str(next(_numbers[None]))
    if type(name) is not str or not 0 < len(name) <= MAX_NAME_LENGTH or "/" in name:
        raise ConfigError(f"name is {name!r:.100}, must be a text of 1..{MAX_NAME_LENGTH} characters without '/'")
    return f"{name}.{next(_numbers[name])}"


async def _meet(place: Topology, timeout_s: float) -> Rendezvous:
    if place.world == 1:
        return LocalRendezvous()
    return await StoreRendezvous.from_env(place, timeout_s=timeout_s)

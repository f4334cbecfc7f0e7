"""`Pipeline`, one rank of a pipeline over several processes, and `local`, all stages in one process."""

from __future__ import annotations

import itertools
import os
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Unpack

from rrfp.compute.gradients.process_groups import global_ranks
from rrfp.compute.gradients.ties import Ties
from rrfp.compute.tracebacks import from_here
from rrfp.errors import ConfigError, Faults, RrfpError
from rrfp.model.declared import Graph
from rrfp.model.topology import Topology
from rrfp.pipeline.build import Job, RankBuilder
from rrfp.pipeline.faces import PipelineHandle
from rrfp.pipeline.loop_thread import LoopChoice, check_loop
from rrfp.pipeline.options import OptionArguments, complete
from rrfp.pipeline.partition import StagePart, check_modules
from rrfp.pipeline.plan_file import Plan, PlanSpec
from rrfp.runtime.start.failed_start import FailedStarts
from rrfp.transports.base import Rendezvous
from rrfp.transports.rendezvous import LocalRendezvous, StoreRendezvous
from rrfp.transports.secret import Secret, check_security

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

#: Names travel in the headers of all messages.
MAX_NAME_LENGTH = 64

#: Counts the pipelines of this process by name; those without a name count together.
_numbers: defaultdict[str | None, Iterator[int]] = defaultdict(itertools.count)


class Pipeline(PipelineHandle):
    """This rank's part of a pipeline over several processes.

    It owns neither model nor optimizer. Every rank must make the same calls in the same order. After `PipelineAborted`
    it cannot be used again.

    The third pipeline of a rank pairs with the third of every other rank, unless they have a ``name``. Where one rank
    may skip a pipeline that the others build (a sweep that continues after an error), give each a name. Ranks compare
    their options and topology when they enter.

    Where the mesh has several replicas, ``torch.distributed`` sums their gradients: it must be initialised, and
    entering the pipeline waits for this rank's counterparts in the other replicas. Gradients that stay over several
    steps without ``zero_grad`` are not summed twice; between steps, the caller must change them alike on all replicas.
    A `StageProgram` sums its own in `finish`.

    Args:
        module: this rank's part of the model: a module, a list with one module for each chunk, a dict of modules by
            part where there is a ``graph``, or a `StageProgram`.
        topology: this rank's; from torchrun's environment by default.
        mesh: instead of ``topology``: a mesh with named dims, one of them ``pp``; see `Topology.from_mesh`.
        coordinate: with ``mesh``: the dims whose collectives run inside a task, by default ``("tp",)``.
        reduce: with ``mesh``: the coordinated ``dp`` dims over which gradients are summed once a step, as over
            replicas. By default none: parameters are sharded over them, or the modules sum gradients themselves.
        rendezvous: the ranks' store of endpoints; torchrun's by default.
        name: pairs this pipeline with those of the same name on the other ranks, the first of a name with the first.
            Up to 64 characters, no slash. By default pipelines pair in the order in which they are built.
        loop: the runtime's event loop: ``"own"``, in its own thread, or ``"caller"``, the one that enters the pipeline
            (async only).
        ties: parameters of which other virtual stages have copies too, such as an embedding that is the head's weight:
            this rank's copy (or copies, where several of its chunks have one) by a name that all ranks use. Their
            values must be equal when the pipeline is entered. At the end of a step each copy's ``.grad`` is the sum of
            all copies' gradients, so optimizers that do the same keep them equal.
        graph: of a model whose parts form no chain; the same on all ranks.
        plan: a file that `rrfp plan` wrote, or the dict in it: the hint, limit, split and placement, which are then not
            passed. The module must have as many chunks as it says; that the model is cut as it says, `rrfp.split` sees
            to, which takes it too.
        options: see `rrfp.pipeline.options.Options`.

    Raises:
        ConfigError: for unknown arguments or values that do not fit; names all of them and the allowed values.
    """

    def __init__(
        self,
        module: StagePart,
        *,
        topology: Topology | None = None,
        mesh: DeviceMesh | None = None,
        coordinate: Sequence[str] | None = None,
        reduce: Sequence[str] | None = None,
        rendezvous: Rendezvous | None = None,
        name: str | None = None,
        loop: LoopChoice = "own",
        ties: Ties | None = None,
        graph: Graph | None = None,
        plan: PlanSpec | None = None,
        **options: Unpack[OptionArguments],
    ) -> None:
        label = ""
        own: Topology | None = None
        secret: Secret | None = None

        async def meet(timeout_s: float) -> Rendezvous:
            if rendezvous is not None:
                return rendezvous
            if own is None or own.world == 1:
                return LocalRendezvous()
            return await StoreRendezvous.from_env(own, timeout_s=timeout_s)

        try:
            with Faults() as faults:
                # A pipeline that is refused below still counts: otherwise a rank that catches the error would pair its
                # next pipeline with the others' last one.
                with faults.kept():
                    label = _label(name)
                with faults.kept():
                    own = _topology(topology, mesh, coordinate=coordinate, reduce=reduce)
                with faults.kept():
                    if plan is not None and own is not None:
                        options = Plan.read(plan).options(options, own.stages)
                    settings = complete(
                        options, "topology, mesh, coordinate, reduce, rendezvous, name, loop, ties, graph, plan"
                    )
                with faults.kept():
                    check_rendezvous(rendezvous)
                with faults.kept():
                    check_loop(loop)
                    if loop == "caller" and options.get("on_lost_rank") == "finish":
                        raise ConfigError("loop is 'caller', must be 'own' with on_lost_rank='finish'")
                with faults.kept():
                    secret = Secret.from_environment(os.environ)
            assert own is not None
            check_security(secret, allow_insecure=settings.allow_insecure)
            run_id = f"{own.run_id}/{label}"
            failed_starts = FailedStarts(own, run_id, meet, secret)
            meeting = partial(failed_starts.meet, settings.connect_timeout)
            job = Job(run_id, meeting, global_ranks(own, mesh), secret, failed_starts, name)
            ranks = RankBuilder(job, settings, [own], [module], options, ties, graph).ranks()
        except Exception as error:
            if own is not None and label:
                FailedStarts(own, f"{own.run_id}/{label}", meet, secret).report_now(error)
            if isinstance(error, RrfpError):
                raise from_here(error) from error.__cause__
            raise
        super().__init__(ranks, loop, f"rrfp-{own.rank}")


class LocalPipeline(PipelineHandle):
    """All stages in this process; see `local`."""


def local(
    modules: Sequence[StagePart],
    *,
    loop: LoopChoice = "own",
    ties: Ties | Sequence[Ties] | None = None,
    graph: Graph | None = None,
    plan: PlanSpec | None = None,
    **options: Unpack[OptionArguments],
) -> LocalPipeline:
    """All stages of a pipeline in one process, over the ``inproc`` transport: for tests, debugging and small models.

    The CPU tasks of all stages share torch's one random generator, and therefore one lock: no two run in parallel.
    Readiness, arbitration, messages and failures are the same as between processes.

    Args:
        modules: one module for each stage, in order; with chunks, a list of modules for each stage; with ``graph``, a
            dict of modules by part for each stage.
        loop: as in `Pipeline`.
        ties: as in `Pipeline`, with all copies by name, or a list with one such dict for each stage. A parameter object
            that several modules share is tied without being named.
        graph: as in `Pipeline`.
        plan: as in `Pipeline`.
        options: see `rrfp.pipeline.options.Options`; ``transport`` is ``"inproc"`` and ``lock_watch`` False by
            default.

    Returns:
        The pipeline, not entered.

    Raises:
        ConfigError: for unknown arguments or values that do not fit; names all of them and the allowed values.
    """
    rendezvous = LocalRendezvous()

    async def meet() -> Rendezvous:
        return rendezvous

    try:
        with Faults() as faults:
            with faults.kept():
                check_modules(modules)
                if plan is not None:
                    options = Plan.read(plan).options(options, len(modules))
            with faults.kept():
                passed: OptionArguments = {"transport": "inproc", "lock_watch": False, **options}
                settings = complete(passed, "loop, ties, graph, plan")
            with faults.kept():
                check_loop(loop)
        topologies = [Topology(stage, len(modules)) for stage in range(len(modules))]
        job = Job(f"local-{uuid.uuid4().hex}", meet)
        ranks = RankBuilder(job, settings, topologies, modules, options, ties, graph).ranks()
    except RrfpError as error:
        raise from_here(error) from error.__cause__
    return LocalPipeline(ranks, loop, "rrfp-local")


def _topology(topology: Topology | None, mesh: DeviceMesh | None, **dims: Sequence[str] | None) -> Topology:
    """The topology of this rank, from ``topology``, ``mesh`` or torchrun's environment."""
    named_dims = {name: value for name, value in dims.items() if value is not None}
    if mesh is None:
        if named_dims:
            raise ConfigError(
                f"{next(iter(named_dims))} goes with mesh; with topology, give it to Topology.from_env or from_mesh"
            )
        if topology is None:
            return Topology.from_env()
        if not isinstance(topology, Topology):
            raise ConfigError(f"topology is of type {type(topology).__name__}, must be an rrfp.Topology")
        return topology
    if topology is not None:
        raise ConfigError("topology and mesh both place this rank: must be one of them")
    return Topology.from_mesh(mesh, **named_dims)


def _label(name: str | None) -> str:
    """The key that pairs the pipelines of all ranks; named and unnamed ones never pair."""
    if name is None:
        return str(next(_numbers[None]))
    if type(name) is not str or not 0 < len(name) <= MAX_NAME_LENGTH or "/" in name:
        raise ConfigError(f"name is {name!r:.100}, must be a text of 1..{MAX_NAME_LENGTH} characters without '/'")
    return f"{name}.{next(_numbers[name])}"


def check_rendezvous(rendezvous: Rendezvous | None) -> None:
    """Raise a ConfigError for an object that is not a `Rendezvous`."""
    for method in ("publish", "lookup"):
        if rendezvous is not None and not callable(getattr(rendezvous, method, None)):
            raise ConfigError(f"rendezvous {type(rendezvous).__name__} has no method {method}()")

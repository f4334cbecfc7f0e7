"""From options, modules and topologies to the ranks of this process."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from rrfp.compute.buffers import CarriedState
from rrfp.compute.gradients.layout import as_dtensor
from rrfp.compute.gradients.module_checks import check_not_sparse, check_wrappers
from rrfp.compute.gradients.process_groups import (
    check_replicas,
    check_sharded,
    check_synchronised,
    check_world,
    replica_group,
    warn_of_unreduced,
)
from rrfp.compute.gradients.reducer import GradientReducer
from rrfp.compute.gradients.ties import ProcessTies, TiedGradients, Ties
from rrfp.compute.lanes.stream import StreamLane
from rrfp.compute.program import StageProgram
from rrfp.compute.rng import SeedNotice, replica_seed
from rrfp.compute.torch_stage import StageEnvironment, TorchStage
from rrfp.core.event_history import EventHistory
from rrfp.core.group_step import GroupMembership
from rrfp.core.ready_set import ForcedOrder
from rrfp.core.stage_core import StageCore
from rrfp.devices.base import Device
from rrfp.devices.copies import copies_of
from rrfp.errors import ConfigError, TransportError
from rrfp.log import get_logger
from rrfp.model.declared import Graph
from rrfp.model.graph import TaskGraph
from rrfp.model.mesh import Mesh
from rrfp.model.placement import Placement
from rrfp.model.topology import Topology
from rrfp.pipeline.callback_runner import CallbackRunner
from rrfp.pipeline.device_choice import check_on_device, choose_device, generator_devices, new_lane, stage_lane
from rrfp.pipeline.local_ranks import LocalRanks, together
from rrfp.pipeline.lost_rank.finishing import Finishing
from rrfp.pipeline.lost_rank.roll_call import Decision
from rrfp.pipeline.method import DispatchMethod, summary
from rrfp.pipeline.options import OptionArguments, Options, common_options, seed_of
from rrfp.pipeline.partition import Partition, StagePart, check_initialised
from rrfp.plugins import name_of
from rrfp.runtime.context import Observer, RankSettings
from rrfp.runtime.control_tree import Shares, data_peers, peers
from rrfp.runtime.grad_clipping import GradientHolder
from rrfp.runtime.stage_runner import StageRunner
from rrfp.runtime.start.failed_start import FailedStarts
from rrfp.runtime.start.handshake import Handshake, JobSettings, check_agreed
from rrfp.runtime.steps.plan import StepPlanner
from rrfp.trace.event_log import make_log_folder
from rrfp.transports.base import Rendezvous, TransportContext
from rrfp.transports.registry import create_transport
from rrfp.transports.secret import Secret
from rrfp.transports.tunnel.transport import staged
from rrfp.version import __version__

logger = get_logger(__name__)


def common_settings(
    options: Options, passed: OptionArguments, method: DispatchMethod, partition: Partition, topology: Topology
) -> JobSettings:
    """The values that must be the same on all ranks of the job.

    ``options`` are complete; ``passed`` are those that the caller passed.
    """
    placement, dims, model = partition.graph.placement, _dims_text(topology), partition.model
    common: dict[str, Any] = {name: getattr(options, name) for name in common_options()}
    if not isinstance(options.placement, str):
        common["placement"] = str(list(options.placement))
    if "seed" in passed and passed["seed"] is None:
        common["seed"] = f"torch.initial_seed() = {options.seed}"
    return {
        "stages": placement.stages,
        "chunks": placement.chunks if isinstance(placement, Placement) else None,
        "graph": "" if model is None else str(model.declared),
        "mesh": dims,
        "coordinate": ", ".join(topology.mesh.coordinate) if dims else "",
        "reduce": ", ".join(topology.mesh.reduce),
        **common,
        "check_replicas": options.check_replicas or 0,
        "hint": method.hint_name,
        "limit": method.limit_name,
        "transport": _transport_name(options),
        "version": __version__,
    }


def check_sharing(topology: Topology, *, has_parts: bool) -> None:
    """Raise a ConfigError where replicas cannot share microbatches."""
    if topology.members > 1:
        raise ConfigError(
            f"share_replicas is set, must be False where a group has {topology.members} ranks "
            f"({_dims_text(topology)}): groups of ranks cannot share microbatches yet"
        )
    if has_parts:
        raise ConfigError("share_replicas is set, must be False for a graph of parts, whose batches it cannot deal yet")


def check_finishing(
    topology: Topology, parts: Sequence[StagePart], modules: Mapping[int, nn.Module], *, has_parts: bool
) -> None:
    """Raise a ConfigError where no replica can finish a step without another's rank."""
    wrong = ""
    if topology.replicas == 1:
        wrong = "for one replica: another one finishes the step"
    elif topology.members > 1:
        wrong = f"where a group has {topology.members} ranks ({_dims_text(topology)})"
    elif has_parts:
        wrong = "for a graph of parts"
    elif any(isinstance(part, StageProgram) for part in parts):
        wrong = "for a StageProgram, whose steps are its own"
    elif any(as_dtensor(p) is not None for module in modules.values() for p in module.parameters()):
        wrong = "where parameters are DTensors"
    if wrong:
        raise ConfigError(f"on_lost_rank is 'finish', must be 'abort' {wrong}")


def announce(
    options: Options, method: DispatchMethod, graph: TaskGraph, topology: Topology, device: Device | None
) -> None:
    """Log one line: ranks, method, transport, this rank's device and versions."""
    dims = _dims_text(topology)
    logger.info(
        "%d rank(s)%s, %s, %s, backward %s, transport %s, rank 0 on %s; rrfp %s, torch %s, Python %s",
        topology.world,
        f" ({dims})" if dims else "",
        _chunks_text(graph),
        method,
        "split" if any(graph.split) else "whole",
        _transport_name(options),
        "cpu" if device is None else device.name,
        __version__,
        torch.__version__,
        platform.python_version(),
    )
    method.warn_unless_split()


def _chunks_text(graph: TaskGraph) -> str:
    if graph.names:
        return f"virtual stages {', '.join(graph.names)}"
    if isinstance(graph.placement, Placement):
        return f"{graph.placement.chunks} chunk(s) each"
    return f"virtual stages on stages {', '.join(map(str, graph.stage_of))}"


def _transport_name(options: Options) -> str:
    transport = options.transport
    return transport if isinstance(transport, str) else name_of(transport)


def _dims_text(topology: Topology) -> str:
    """The dimensions of the mesh; empty where a stage has one rank."""
    dims = topology.mesh.dims
    return ", ".join(f"{name} {size}" for name, size in dims) if len(dims) > 1 else ""


@dataclass(frozen=True, slots=True)
class _Rank:
    #: The rank's.
    topology: Topology
    #: Computes its tasks.
    program: StageProgram
    #: Where it computes; None for the CPU.
    device: Device | None
    in_order: frozenset[ForcedOrder]
    ties: TiedGradients
    #: Sums its gradients over the replicas; None with one replica.
    reducer: GradientReducer | None


@dataclass(frozen=True, slots=True)
class Job:
    """How the ranks of one pipeline find each other."""

    #: Identifies the pipeline.
    run_id: str
    #: Connects to the rendezvous; called on the loop on which the ranks will run.
    meet: Callable[[], Awaitable[Rendezvous]]
    #: For each rank its number in ``torch.distributed``; None where all ranks are in this process.
    torch_ranks: Sequence[int] | None = None
    secret: Secret | None = None
    #: Of this process's rank; None where all ranks are in this process.
    failed_starts: FailedStarts | None = None
    #: The name that the caller passed.
    name: str | None = None


class RankBuilder:
    """Checks the options and the modules of this process's ranks, and builds the ranks.

    ``passed`` are those options that the caller passed, as they were; ``topologies`` and ``parts`` are by rank.
    """

    def __init__(
        self,
        job: Job,
        options: Options,
        topologies: Sequence[Topology],
        parts: Sequence[StagePart],
        passed: OptionArguments,
        ties: Ties | Sequence[Ties] | None = None,
        graph: Graph | None = None,
    ) -> None:
        self._job = job
        self._options = options
        self._passed = passed
        torch_ranks = job.torch_ranks
        self._method = DispatchMethod(options)
        #: Whether all stages are in this process.
        self._is_alone = torch_ranks is None
        self._partition = partition = Partition.of(options, topologies[0].stages, parts, graph)
        self._method.check(partition.graph, topologies)
        if options.event_log is not None:
            make_log_folder(options.event_log)
        if options.share_replicas:
            check_sharing(topologies[0], has_parts=partition.model is not None)
        if options.share_replicas is True:
            self._method.check_claims(partition.graph)
        self._arguments = topologies, parts, ties
        by_rank = [partition.modules(part, topology.stage) for topology, part in zip(topologies, parts, strict=True)]
        modules = {v: module for own in by_rank for v, module in own.items()}
        check_initialised(modules, partition.text_of)
        partition.check_shared(modules)
        check_wrappers(modules, partition.text_of)
        check_synchronised(modules, topologies[0], torch_ranks, partition.text_of)
        if torch_ranks is not None:
            check_sharded(modules, topologies[0], torch_ranks, partition.text_of)
            warn_of_unreduced(modules, topologies[0], torch_ranks)
        self._finishing: Finishing | None = None
        if options.on_lost_rank == "finish":
            check_finishing(topologies[0], parts, modules, has_parts=partition.model is not None)
            assert torch_ranks is not None
            check_world(topologies[0])
            self._finishing = Finishing(
                topologies[0], job.run_id, job.secret, torch_ranks, seed_of(options), options.connect_timeout
            )
        self._ties = ProcessTies(ties, by_rank, partition.text_of, options.check_replicas or 0)
        self._holder = GradientHolder(
            modules,
            None if torch_ranks is None else topologies[0],
            torch_ranks,
            self._ties.repeated,
            partition.text_of,
        )
        devices = [choose_device(own, options.device, partition.text_of) for own in by_rank]
        for own, device in zip(by_rank, devices, strict=True):
            check_on_device(own, partition.losses, device, partition.text_of)
        self._carried = CarriedState()
        self._ranks = [
            _Rank(
                topology,
                self._program(part, topology, device),
                device,
                partition.in_order(own),
                rank_ties,
                None if torch_ranks is None else self._reducer(own, topology, torch_ranks, device),
            )
            for topology, part, own, rank_ties, device in zip(
                topologies, parts, by_rank, self._ties.ranks, devices, strict=True
            )
        ]
        for rank in self._ranks:
            self._method.check_order(rank.topology, rank.in_order)
        finishes = self._finishing is not None
        self._callbacks = CallbackRunner(options.callbacks, topologies[0], summary(options), finishes=finishes)
        self._rendezvous: Rendezvous | None = None

    def _program(self, part: StagePart, topology: Topology, device: Device | None) -> StageProgram:
        """The tasks of the rank's modules, or the caller's own program."""
        partition = self._partition
        if isinstance(part, StageProgram):
            partition.check_program(part)
            return part
        has_notice = "seed" not in self._passed and (topology.rank == 0 or self._is_alone)
        return TorchStage(
            partition.chunks(part, topology.stage),
            partition.graph,
            loss_fn=partition.losses,
            seed=replica_seed(seed_of(self._options), topology.summand),
            unsplittable=self._options.unsplittable,
            in_order=partition.writes_in_order(partition.modules(part, topology.stage)),
            environment=StageEnvironment(
                devices=generator_devices(device),
                shared=self._ties.shared,
                grouped=topology.mesh.coordinates_replicas,
                joined_losses=topology.summands > topology.replicas,
                feeds=partition.feeds,
                carried=self._carried,
                seed_notice=SeedNotice() if has_notice else None,
            ),
        )

    def _reducer(
        self, modules: dict[int, nn.Module], topology: Topology, torch_ranks: Sequence[int], device: Device | None
    ) -> GradientReducer | None:
        if topology.summands == 1 or not modules:
            return None
        check_replicas(topology, torch_ranks)
        check_not_sparse(modules, "gradients are summed over replicas as dense ones", self._partition.text_of)
        make_group = partial(replica_group, topology, torch_ranks)
        return GradientReducer(
            modules,
            make_group,
            new_lane(device, "rrfp-gradients", is_timed=False),
            replica=topology.summand,
            deterministic=self._options.deterministic,
            check_every=self._options.check_replicas or 0,
            names=[topology.name_of(rank) for rank in topology.mesh.counterparts(topology.rank)],
            text_of=self._partition.text_of,
        )

    def ranks(self) -> LocalRanks:
        """The ranks, not started."""
        topology = self._ranks[0].topology
        return LocalRanks(
            [rank.program for rank in self._ranks],
            self._options,
            self.runners,
            topologies=[rank.topology for rank in self._ranks],
            planner=StepPlanner(
                self._options.reduction, topology.stages, self._partition.model, is_shared=topology.summands > 1
            ),
            holder=self._holder,
            reducers=[rank.reducer for rank in self._ranks if rank.reducer is not None],
            ties=self._ties.ranks,
            devices=[rank.device for rank in self._ranks if rank.device is not None],
            virtual_stages=self._partition.graph.placement.num_virtual_stages,
            callbacks=self._callbacks,
            failed_starts=self._job.failed_starts,
            name=self._job.name,
            finishing=self._finishing,
            whole=self.whole,
        )

    def whole(self, decision: Decision, step: int) -> LocalRanks:
        """This process's rank in a pipeline of the whole replicas, which begins with training step ``step``."""
        ((here,), parts, ties), job = self._arguments, self._job
        torch_ranks, rendezvous = job.torch_ranks, self._rendezvous
        assert torch_ranks is not None
        assert rendezvous is not None
        ranks, replicas = decision.ranks(here), len(decision.whole)
        dims = (("pp", here.stages), ("dp", replicas)) if replicas > 1 else (("pp", here.stages),)
        topology = replace(
            Topology.at(ranks.index(here.rank), Mesh(dims), here.run_id),
            restart=here.restart,
            local_world_size=None if here.single_host else 0,  # nobody says that these are on one host
        )

        async def meet(timeout_s: float) -> Rendezvous:
            return rendezvous

        run_id = f"{job.run_id}/finish"
        failed_starts = FailedStarts(topology, run_id, meet, job.secret)
        smaller = Job(
            run_id,
            partial(failed_starts.meet, self._options.connect_timeout),
            [torch_ranks[rank] for rank in ranks],
            job.secret,
            failed_starts,
            job.name,
        )
        options = replace(
            self._options,
            first_step=step,
            share_replicas=False,
            on_lost_rank="abort",
            callbacks=(),
            event_log=None,
            lock_watch=False,
        )
        return RankBuilder(smaller, options, [topology], parts, self._passed, ties).ranks()

    async def runners(self, first_step: int) -> Sequence[StageRunner]:
        """Compare options with the other ranks of the job, and build the runners. On the loop that will run them."""
        rendezvous, options = await self._job.meet(), replace(self._options, first_step=first_step)
        self._rendezvous = rendezvous
        runners = await together(self._runner(rank, options, rendezvous) for rank in self._ranks)
        if self._finishing is not None:
            self._finishing.serve(runners[0], rendezvous)
        return runners

    async def _runner(self, rank: _Rank, options: Options, rendezvous: Rendezvous) -> StageRunner:
        graph, topology = self._partition.graph, rank.topology
        limit = self._method.limit(topology, graph)
        context = self._context(rank, rendezvous)
        settings = common_settings(options, self._passed, self._method, self._partition, topology)
        group_settings: JobSettings = {
            "in_order": " ".join(sorted(f"{kind}@{v}" for kind, v in rank.in_order)),
            "limit": str(limit),
            "depth": options.depth,
        }
        handshake = Handshake(settings, topology, context, group_settings, rank.ties.settings, self._partition.text_of)
        try:
            await handshake.shake()
        finally:
            if self._job.failed_starts is not None:
                self._job.failed_starts.is_known_to_all = handshake.is_decided
        placement = graph.placement
        own = placement.virtual_stages(topology.stage)
        check_agreed(handshake.ties, rank.ties.settings, own, placement.num_virtual_stages)
        if rank.reducer is not None:
            await _join(rank.reducer, options.connect_timeout)
        rank.ties.agree(handshake.ties, options.max_message_bytes)
        if topology.rank == 0:
            announce(options, self._method, graph, topology, rank.device)
        ties = handshake.ties
        seeds = self._replica_seeds(topology)
        shares = Shares.NOTHING if seeds is None else Shares(options.share_replicas)
        finishes = self._finishing is not None
        context = replace(
            context,
            peers=peers(graph, topology, ties, shares, copies=finishes),
            data_peers=data_peers(graph, topology, ties, shares, copies=finishes),
        )
        is_led = options.coordination == "leader"
        group = GroupMembership(topology.member, topology.members) if is_led else GroupMembership()
        return StageRunner(
            StageCore(
                graph,
                topology.stage,
                self._method.new_hint(topology),
                limit,
                group=group,
                in_order=rank.in_order,
                history=EventHistory(),
            ),
            rank.program,
            stage_lane(topology.stage, rank.device, options.lane, options.lane_nice),
            staged(create_transport(options.transport, context), context.copies),
            RankSettings(
                topology,
                options.coordination,
                options.depth,
                options.stall_after,
                options.abort_after,
                options.trace_steps,
                rank.device,
                self._callbacks if rank is self._ranks[0] else Observer(),  # all ranks notice the same
                self._partition.model,
                None if rank.reducer is None else rank.reducer.reduce,
                rank.ties,
                handshake.agreement,
                self._method.followed_limits(graph, claims=shares is Shares.FORWARDS),
                options.event_log,
                seeds,
                shares is Shares.FORWARDS,
                copies=finishes,
            ),
        )

    def _replica_seeds(self, topology: Topology) -> list[int] | None:
        """Of the random numbers of each replica, where replicas share microbatches."""
        if not self._options.share_replicas or topology.replicas == 1:
            return None
        return [replica_seed(seed_of(self._options), replica) for replica in range(topology.replicas)]

    def _context(self, rank: _Rank, rendezvous: Rendezvous) -> TransportContext:
        options, topology, device = self._options, rank.topology, rank.device
        return TransportContext(
            rank=topology.rank,
            peers=peers(self._partition.graph, topology),
            run_id=self._job.run_id,
            rendezvous=rendezvous,
            restart=topology.restart,
            single_host=topology.single_host,
            queue_bytes=options.queue_bytes,
            max_message_bytes=options.max_message_bytes,
            allow_insecure=options.allow_insecure,
            secret=self._job.secret,
            plain_data=options.data == "plain",
            connect_timeout_s=options.connect_timeout,
            heartbeat_s=options.heartbeat,
            patience_s=options.patience,
            copies=None if device is None else copies_of(device, StreamLane, f"rrfp-copies-{topology.rank}"),
        )


async def _join(reducer: GradientReducer, timeout_s: float) -> None:
    """Make the reducer's process group with the other replicas."""
    try:
        async with asyncio.timeout(timeout_s):
            await reducer.join()
    except TimeoutError:
        raise TransportError(
            f"the other replicas of this stage did not join its group within {timeout_s:g} s"
        ) from None

"""Puts the ranks of a pipeline together: from options, a shape and modules to programs and runners."""

from __future__ import annotations

import asyncio
import platform
from collections.abc import Iterable
from dataclasses import replace

import torch

from rrfp.compute.gradients.reducer import GradientReducer
from rrfp.compute.gradients.shared import SharedGradients
from rrfp.compute.gradients.tied import TiedGradients
from rrfp.compute.program import StageProgram
from rrfp.compute.rng import replica_seed
from rrfp.compute.torch_stage import TorchStage
from rrfp.core.admission import Limit
from rrfp.core.order_log import Group
from rrfp.core.readiness import ForcedOrder
from rrfp.core.stage_core import StageCore
from rrfp.core.topology import Topology
from rrfp.errors import TransportError
from rrfp.log import get_logger
from rrfp.pipeline.options import PipelineOptions
from rrfp.pipeline.partition import Shape, StagePart
from rrfp.runtime.control_tree import peers
from rrfp.runtime.handshake import Handshake, Terms
from rrfp.runtime.stage_runner import StageRunner
from rrfp.transports.base import Rendezvous, TransportContext
from rrfp.transports.registry import create_transport
from rrfp.version import __version__

logger = get_logger(__name__)


class Assembly:
    """Makes what the ranks of one pipeline consist of.

    Args:
        settings: the pipeline's options.
        shape: how the model is cut.
    """

    def __init__(self, settings: PipelineOptions, shape: Shape) -> None:
        self._settings = settings
        self._shape = shape

    def program(self, part: StagePart, place: Topology, shared: SharedGradients | None = None) -> StageProgram:
        """What the rank at ``place`` computes: its modules' tasks, or the caller's own program.

        Args:
            part: the rank's part of the model.
            place: the rank's.
            shared: what virtual stages of this process share.

        Raises:
            ConfigError: if ``part`` is neither, or does not fit the shape.
        """
        settings, shape = self._settings, self._shape
        if isinstance(part, StageProgram):
            shape.check_program(part)
            return part
        return TorchStage(
            shape.chunks(part, place.stage),
            shape.graph,
            loss_fn=settings.loss_fn,
            seed=replica_seed(settings.seed, place.replica),
            unsplittable=settings.unsplittable,
            in_order=shape.in_order(shape.modules(part, place.stage)),
            shared=shared,
            grouped=place.mesh.coordinates_replicas,
        )

    async def runner(
        self,
        place: Topology,
        part: StagePart,
        program: StageProgram,
        run_id: str,
        rendezvous: Rendezvous,
        reducer: GradientReducer | None = None,
        ties: TiedGradients | None = None,
    ) -> StageRunner:
        """Meet the other ranks, and make the runner of one.

        Args:
            place: the rank's.
            part: the rank's part of the model.
            program: what the rank computes.
            run_id: identifies this pipeline.
            rendezvous: where its ranks meet.
            reducer: sums gradients over the replicas; started, joins its group here.
            ties: the rank's copies of tied parameters, if it may have any.

        Raises:
            ConfigError: if the ranks do not have in common what they must; the same on all.
            TransportError: if a rank does not come.
        """
        settings, shape = self._settings, self._shape
        graph = shape.graph
        context = TransportContext(
            rank=place.rank,
            peers=peers(graph, place),
            run_id=run_id,
            rendezvous=rendezvous,
            restart=place.restart,
            single_host=place.single_host,
            queue_bytes=settings.queue_bytes,
            max_message_bytes=settings.max_message_bytes,
            allow_insecure=settings.allow_insecure,
            connect_timeout_s=settings.connect_timeout,
            heartbeat_s=settings.heartbeat,
            patience_s=settings.patience,
        )
        in_order = shape.in_order(shape.modules(part, place.stage))
        hint, limit = settings.new_hint(), settings.limit_of(place)
        group = Group(place.member, place.members) if settings.coordination == "leader" else Group()
        core = StageCore(graph, place.stage, hint, limit, group=group, in_order=in_order)
        copies = () if ties is None else ties.terms
        handshake = Handshake(self._terms(place), place, context, self._group_terms(limit, in_order), copies)
        await handshake.shake()
        if reducer is not None:
            await _joined(reducer, settings.connect_timeout)
        if ties is not None:
            ties.agree(handshake.ties, settings.max_message_bytes)
        context = replace(context, peers=peers(graph, place, handshake.ties))
        if place.rank == 0:
            self._say(place)
            settings.tell_unsplit()
        return StageRunner(
            core,
            program,
            settings.new_lane(place.stage),
            create_transport(settings.transport, context),
            place=place,
            coordination=settings.coordination,
            depth=settings.depth,
            reduce=None if reducer is None else reducer.reduce,
            stall_after=settings.stall_after,
            abort_after=settings.abort_after,
            ties=ties,
        )

    def _say(self, place: Topology) -> None:
        """Log in one line what runs."""
        told, graph = self._settings.terms(), self._shape.graph
        layout = "" if place.layout is None else f" ({', '.join(f'{n} {size}' for n, size in place.layout.dims)})"
        method = (
            f"strict {told['strict']}" if told["strict"] else f"hint {told['hint']}, limit {self._settings.limit_text}"
        )
        logger.info(
            "%d rank(s)%s, %d chunk(s) each, %s, backward %s, transport %s; rrfp %s, torch %s, Python %s",
            place.world,
            layout,
            graph.placement.chunks,
            method,
            "split" if any(graph.split) else "whole",
            told["transport"],
            __version__,
            torch.__version__,
            platform.python_version(),
        )

    def _terms(self, place: Topology) -> Terms:
        """What all ranks must have in common."""
        settings = self._settings
        return {
            **self._shape.terms(),
            "mesh": "" if place.layout is None else ", ".join(f"{name} {size}" for name, size in place.layout.dims),
            "coordinate": "" if place.layout is None else ", ".join(place.layout.coordinate),
            **settings.terms(),
            "version": __version__,
        }

    def _group_terms(self, limit: Limit, in_order: Iterable[ForcedOrder]) -> Terms:
        """What the ranks of a group must have in common."""
        return {
            "in_order": " ".join(sorted(f"{kind}@{v}" for kind, v in in_order)),
            "limit": str(limit),
            "depth": self._settings.depth,
        }


async def _joined(reducer: GradientReducer, timeout_s: float) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await reducer.join()
    except TimeoutError:
        raise TransportError(
            f"the other replicas of this stage did not join its group within {timeout_s:g} s"
        ) from None

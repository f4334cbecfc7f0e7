"""What a pipeline is built from, checked once, the same for one rank and for all ranks in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, TypedDict, get_args

from torch import nn

from rrfp.compute.base import StageProgram
from rrfp.compute.thread_lane import LOWEST_NICE, ThreadLane
from rrfp.compute.torch_stage import TorchStage
from rrfp.compute.weighting import Reduction
from rrfp.control.tree import peers
from rrfp.core.admission import Limit
from rrfp.core.graph import Graph
from rrfp.core.hint import Hint
from rrfp.core.stage_core import StageCore
from rrfp.core.topology import Topology
from rrfp.errors import ConfigError
from rrfp.hints.registry import HintSpec, create_hint, create_strict
from rrfp.stage import StageRunner
from rrfp.transports.base import DEFAULT_MAX_MESSAGE_BYTES, DEFAULT_QUEUE_BYTES, Rendezvous, TransportContext
from rrfp.transports.registry import TransportSpec, create_transport, transport_names

#: The hint and limit where the caller names none.
DEFAULT_HINT = "bf"
DEFAULT_LIMIT = "2n"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """The options that `rrfp.Pipeline` and `rrfp.local` share.

    Attributes:
        transport: a transport's name, class or factory.
        hint: a hint's name, class or instance; ``bf`` unless ``strict`` is given.
        strict: a schedule's name, to run it to the letter: the fixed-order baseline. Excludes ``hint`` and ``limit``.
        limit: microbatches that a stage may hold: a number, ``"1f1b"``, ``"2n"`` (the default) or a `rrfp.Limit`.
        loss_fn: ``loss_fn(output, target)``, the mean over a microbatch.
        reduction: how microbatches' losses combine: ``"mean"`` (weighted) or ``"sum"``.
        seed: of the random forks, one for each task; the same on all ranks.
        stall_after: seconds of idleness in a step after which all ranks are asked why.
        connect_timeout: seconds to wait for the peers at the start.
        queue_bytes: most bytes queued for one peer and channel before a send waits.
        max_message_bytes: larger messages are refused before anything is allocated.
        allow_insecure: permit connections beyond this host without authentication.
        lane_nice: niceness of the compute thread (Linux); a positive value lets messages overtake compute on busy
            cores.

    Raises:
        ConfigError: for a value that does not exist or does not fit.
    """

    transport: TransportSpec = "zmq"
    hint: HintSpec | None = None
    strict: str | None = None
    limit: Limit | int | str | None = None
    loss_fn: Callable[[Any, Any], Any] | None = None
    reduction: Reduction = "mean"
    seed: int = 0
    stall_after: float = 10.0
    connect_timeout: float = 60.0
    queue_bytes: int = DEFAULT_QUEUE_BYTES
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    allow_insecure: bool = False
    lane_nice: int = 0

    def __post_init__(self) -> None:
        self._check_values()
        if self.strict is not None and (self.hint is not None or self.limit is not None):
            raise ConfigError("strict runs a schedule to the letter: it goes with neither hint nor limit")
        self._new_hint()
        self._limit(Topology(0, 1))

    def _check_values(self) -> None:
        if self.reduction not in get_args(Reduction):
            raise ConfigError(f"reduction is {self.reduction!r}, must be one of: {', '.join(get_args(Reduction))}")
        for field in ("stall_after", "connect_timeout", "queue_bytes", "max_message_bytes"):
            value = getattr(self, field)
            if not isinstance(value, int | float) or not value > 0:
                raise ConfigError(f"{field} is {value!r}, must be a number above 0")
        for field, fits, wanted in (
            ("loss_fn", self.loss_fn is None or callable(self.loss_fn), "callable: loss_fn(output, target)"),
            ("lane_nice", self.lane_nice in range(LOWEST_NICE + 1), f"0..{LOWEST_NICE}"),
            ("seed", type(self.seed) is int, "a whole number"),
            (
                "transport",
                callable(self.transport) or self.transport in transport_names(),
                f"a factory or one of: {', '.join(transport_names())}",
            ),
        ):
            if not fits:
                raise ConfigError(f"{field} is {getattr(self, field)!r}, must be {wanted}")

    def runner(
        self, place: Topology, graph: Graph, program: StageProgram, run_id: str, rendezvous: Rendezvous
    ) -> StageRunner:
        """The runner of one rank.

        Args:
            place: the rank's.
            graph: the whole pipeline's.
            program: what the rank computes.
            run_id: identifies this pipeline.
            rendezvous: where its ranks meet.
        """
        context = TransportContext(
            stage=place.stage,
            peers=peers(graph, place.stage),
            run_id=run_id,
            rendezvous=rendezvous,
            restart=place.restart,
            single_host=place.single_host,
            queue_bytes=self.queue_bytes,
            max_message_bytes=self.max_message_bytes,
            allow_insecure=self.allow_insecure,
            connect_timeout_s=self.connect_timeout,
        )
        core = StageCore(graph, place.stage, self._new_hint(), self._limit(place))
        lane = ThreadLane(f"rrfp-lane-{place.stage}", nice=self.lane_nice)
        return StageRunner(core, program, lane, create_transport(self.transport, context), stall_after=self.stall_after)

    def _new_hint(self) -> Hint:
        if self.strict is not None:
            return create_strict(self.strict)
        return create_hint(DEFAULT_HINT if self.hint is None else self.hint)

    def _limit(self, place: Topology) -> Limit:
        if self.strict is not None:
            return Limit()
        return Limit.resolve(DEFAULT_LIMIT if self.limit is None else self.limit, place.stage, place.stages)

    def program(self, module: nn.Module | StageProgram, stage: int, graph: Graph) -> StageProgram:
        """What ``stage`` computes: a module's tasks, or the caller's own program.

        Raises:
            ConfigError: if ``module`` is neither.
        """
        if isinstance(module, StageProgram):
            return module
        if not isinstance(module, nn.Module):
            raise ConfigError(f"module is a {type(module).__name__}, must be an nn.Module or a rrfp.StageProgram")
        (virtual_stage,) = graph.placement.virtual_stages(stage)
        return TorchStage({virtual_stage: module}, graph, loss_fn=self.loss_fn, seed=self.seed)


class Options(TypedDict, total=False):
    """The keyword arguments that `rrfp.Pipeline` and `rrfp.local` pass on to `PipelineOptions`."""

    transport: TransportSpec
    hint: HintSpec | None
    strict: str | None
    limit: Limit | int | str | None
    loss_fn: Callable[[Any, Any], Any] | None
    reduction: Reduction
    seed: int
    stall_after: float
    connect_timeout: float
    queue_bytes: int
    max_message_bytes: int
    allow_insecure: bool
    lane_nice: int


def pipeline_options(options: Options) -> PipelineOptions:
    """The options out of keyword arguments.

    Raises:
        ConfigError: for an unknown name; lists the known ones.
    """
    names = [field.name for field in fields(PipelineOptions)]
    for name in options:
        if name not in names:
            raise ConfigError(f"unknown option {name!r}, must be one of: {', '.join(names)}")
    return PipelineOptions(**options)


def check_rendezvous(rendezvous: Rendezvous | None) -> None:
    """Refuse something that is no rendezvous.

    Raises:
        ConfigError: if a method is missing.
    """
    for method in ("publish", "lookup"):
        if rendezvous is not None and not callable(getattr(rendezvous, method, None)):
            raise ConfigError(f"rendezvous {type(rendezvous).__name__} has no method {method}()")

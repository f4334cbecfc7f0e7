"""What a pipeline is built from, checked once, the same for one rank and for all ranks in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict, get_args

from rrfp.compute.base import Lane, StageProgram
from rrfp.compute.split_backward import Unsplittable
from rrfp.compute.thread_lane import LOWEST_NICE, ThreadLane
from rrfp.compute.weighting import Reduction
from rrfp.core.admission import Limit
from rrfp.core.graph import Graph
from rrfp.core.hint import Hint
from rrfp.core.topology import Layout, Topology
from rrfp.errors import ConfigError
from rrfp.hints.registry import HintSpec, create_hint, create_strict
from rrfp.schedules.registry import schedule_names, schedule_needs
from rrfp.shape import Shape, StagePart, chunks_of
from rrfp.stage import Coordination
from rrfp.transports.base import DEFAULT_MAX_MESSAGE_BYTES, DEFAULT_QUEUE_BYTES, Rendezvous
from rrfp.transports.registry import TransportSpec, transport_names

#: Makes the lane of a stage.
LaneFactory = Callable[[int], Lane]

#: The hint and limit where the caller names none; docs/hints.md says why these.
DEFAULT_HINT = "slot-aware-pyramid"
DEFAULT_LIMIT = "2n"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """The options that `rrfp.Pipeline` and `rrfp.local` share.

    Attributes:
        transport: a transport's name, class or factory.
        hint: a hint's name, class or instance; ``slot-aware-pyramid`` unless ``strict`` is given.
        strict: a schedule's name, to run it to the letter: the fixed-order baseline. Excludes ``hint`` and ``limit``.
        limit: microbatches that a stage may hold: a number, ``"1f1b"``, ``"n"``, ``"2n"`` (the default) or a
            `rrfp.Limit`.
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
        lane: makes the lane of a stage, such as a `TimerLane` for virtual time; a compute thread by default.
        placement: where a rank's chunks are in the model: ``"looped"`` or ``"v"``.
        chunks: how many chunks a rank has; needed only for a `StageProgram`, a list of modules tells it.
        split: whether backward is split into input gradients (B) and weight gradients (W). None: for modules, if
            ``hint`` or ``strict`` names one that ranks weight tasks.
        unsplittable: what to do with a module that differentiates only as a whole where backward is split: ``"whole"``
            or ``"refuse"``; see `TorchStage`.
        deterministic: gradients are added in microbatch order and buffers written in order, so that a step's result is
            bitwise the same whatever the timing, and equal to `rrfp.testing.reference`'s. The sums of replicas are
            added in the order of replicas.
        coordination: how the ranks of a group (tensor parallelism) come to one order: ``"leader"``, or
            ``"agreement"``, the paper's all-gather with retries.
        depth: tasks that a rank has enqueued and not completed, at most; by default 1 on a CPU, and 2 where a group has
            a leader, so that its decisions travel while the task before is running.

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
    lane: LaneFactory | None = None
    placement: Layout = "looped"
    chunks: int | None = None
    split: bool | None = None
    unsplittable: Unsplittable = "whole"
    deterministic: bool = False
    coordination: Coordination = "leader"
    depth: int | None = None

    def __post_init__(self) -> None:
        self._check_values()
        if self.strict is not None and (self.hint is not None or self.limit is not None):
            raise ConfigError("strict runs a schedule to the letter: it goes with neither hint nor limit")
        self.new_hint()
        self.limit_of(Topology(0, 1))

    def _check_values(self) -> None:
        for field, choices in (
            ("reduction", get_args(Reduction)),
            ("unsplittable", get_args(Unsplittable)),
            ("coordination", get_args(Coordination)),
        ):
            if getattr(self, field) not in choices:
                raise ConfigError(f"{field} is {getattr(self, field)!r}, must be one of: {', '.join(choices)}")
        for field in ("stall_after", "connect_timeout", "queue_bytes", "max_message_bytes"):
            value = getattr(self, field)
            if not isinstance(value, int | float) or not value > 0:
                raise ConfigError(f"{field} is {value!r}, must be a number above 0")
        for field, fits, wanted in (
            ("loss_fn", self.loss_fn is None or callable(self.loss_fn), "callable: loss_fn(output, target)"),
            ("lane_nice", self.lane_nice in range(LOWEST_NICE + 1), f"0..{LOWEST_NICE}"),
            ("lane", self.lane is None or callable(self.lane), "callable: lane(stage)"),
            ("seed", type(self.seed) is int, "a whole number"),
            (
                "chunks",
                self.chunks is None or (type(self.chunks) is int and self.chunks >= 1),
                "a whole number from 1 on",
            ),
            (
                "depth",
                self.depth is None or (type(self.depth) is int and self.depth >= 1),
                "a whole number from 1 on",
            ),
            ("split", self.split is None or type(self.split) is bool, "True, False or None"),
            ("deterministic", type(self.deterministic) is bool, "True or False"),
            (
                "transport",
                callable(self.transport) or self.transport in transport_names(),
                f"a factory or one of: {', '.join(transport_names())}",
            ),
        ):
            if not fits:
                raise ConfigError(f"{field} is {getattr(self, field)!r}, must be {wanted}")

    def shape(self, stages: int, parts: Sequence[StagePart]) -> Shape:
        """The shape of a pipeline.

        Args:
            stages: N.
            parts: what the ranks of this process run.

        Raises:
            ConfigError: if parts differ in their number of chunks, or a schedule does not fit.
        """
        counts = {len(chunks_of(part)) for part in parts if not isinstance(part, StageProgram)}
        if self.chunks is not None:
            counts.add(self.chunks)
        if len(counts) > 1:
            told = " and ".join(map(str, sorted(counts)))
            raise ConfigError(f"modules have {told} chunks a stage, must have the same number on all")
        chunks = counts.pop() if counts else 1
        split = self._wants_split(parts) if self.split is None else self.split
        graph = Graph.chain(stages, chunks=chunks, layout=self.placement, split=split)
        if (schedule := self._schedule()) is not None:
            schedule_needs(schedule).check(schedule, graph)
        return Shape(graph, self.deterministic)

    def _schedule(self) -> str | None:
        """The schedule that orders tasks, to the letter or as a hint."""
        if self.strict is not None:
            return self.strict
        return self.hint if isinstance(self.hint, str) and self.hint in schedule_names() else None

    def _wants_split(self, parts: Sequence[StagePart]) -> bool:
        if (schedule := self._schedule()) is not None:
            return schedule_needs(schedule).split
        # Between B and W a microbatch holds memory: nobody gets that who asked for no hint.
        wanted = self.hint is not None and self.new_hint().wants_split
        return wanted and any(not isinstance(part, StageProgram) for part in parts)

    def new_lane(self, stage: int) -> Lane:
        """The lane of ``stage``."""
        if self.lane is not None:
            return self.lane(stage)
        return ThreadLane(f"rrfp-lane-{stage}", nice=self.lane_nice)

    def new_hint(self) -> Hint:
        """A fresh hint, or the strict schedule."""
        if self.strict is not None:
            return create_strict(self.strict)
        return create_hint(DEFAULT_HINT if self.hint is None else self.hint)

    def limit_of(self, place: Topology) -> Limit:
        """What the rank at ``place`` may hold; a strict schedule needs no limit.

        Raises:
            ConfigError: if it is a limit on bytes, which keeps the ranks of a group from agreeing without a leader.
        """
        if self.strict is not None:
            return Limit()
        limit = Limit.resolve(DEFAULT_LIMIT if self.limit is None else self.limit, place.stage, place.stages)
        if limit.bytes is not None and place.members > 1 and self.coordination == "agreement":
            raise ConfigError(
                f"limit: bytes is {limit.bytes}, must be None with coordination 'agreement': ranks of a group that "
                "hold different amounts would never agree; the leader (coordination 'leader') counts the worst of them"
            )
        return limit


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
    lane: LaneFactory | None
    placement: Layout
    chunks: int | None
    split: bool | None
    unsplittable: Unsplittable
    deterministic: bool
    coordination: Coordination
    depth: int | None


def pipeline_options(options: Options) -> PipelineOptions:
    """The options out of keyword arguments.

    Raises:
        ConfigError: for an unknown name; lists the known ones.
    """
    names = [field.name for field in fields(PipelineOptions)]
    for name in options:
        if name not in names:
            others = "topology, mesh, coordinate, rendezvous, loop, ties"
            raise ConfigError(f"unknown option {name!r}, must be one of: {', '.join(names)}; or an argument: {others}")
    return PipelineOptions(**options)


def check_rendezvous(rendezvous: Rendezvous | None) -> None:
    """Refuse something that is no rendezvous.

    Raises:
        ConfigError: if a method is missing.
    """
    for method in ("publish", "lookup"):
        if rendezvous is not None and not callable(getattr(rendezvous, method, None)):
            raise ConfigError(f"rendezvous {type(rendezvous).__name__} has no method {method}()")

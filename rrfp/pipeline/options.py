"""What a pipeline is built from, checked once, the same for one rank and for all ranks in one process."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypedDict, get_args

from rrfp.compute.lanes.thread import LOWEST_NICE, ThreadLane
from rrfp.compute.program import Lane, StageProgram
from rrfp.compute.split.backward import Unsplittable
from rrfp.compute.weighting import Reduction
from rrfp.core import timeouts
from rrfp.core.admission import LIMIT_PRESETS, Limit
from rrfp.core.graph import Graph
from rrfp.core.hint import Hint
from rrfp.core.topology import Layout, Topology
from rrfp.errors import ConfigError
from rrfp.hints.registry import HintSpec, create_hint, create_strict
from rrfp.log import get_logger
from rrfp.pipeline.partition import Shape, StagePart, chunks_of
from rrfp.runtime.stage_runner import Coordination
from rrfp.schedules.registry import schedule_names, schedule_needs
from rrfp.transports.base import DEFAULT_MAX_MESSAGE_BYTES, DEFAULT_QUEUE_BYTES, Rendezvous
from rrfp.transports.registry import TransportSpec, transport_names

logger = get_logger(__name__)

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
        loss_fn: ``loss_fn(output, target)``, the mean over a microbatch. The parameters of one that is a module belong
            to the last virtual stage; the other ranks do not use theirs.
        reduction: how microbatches' losses combine: ``"mean"`` (weighted) or ``"sum"``.
        seed: of the random forks, one for each task; the same on all ranks.
        first_step: the number of the first training step, for a run that resumes after as many. Random numbers depend
            on the number of the training step, and never on evaluations between.
        stall_after: seconds of idleness in a step after which all ranks are asked why.
        abort_after: seconds after which a task that has not returned, or a rank whose event loop does not run, ends the
            job; None (the default): never. Give it several times what the slowest task may take.
        stack_timer: whether a process whose event loop does not run may print its stacks with `faulthandler`'s timer,
            of which a process has one: False where the program uses that timer itself. `rrfp.local` never does.
        connect_timeout: seconds to wait for the peers at the start.
        heartbeat: seconds of silence after which a peer is asked for a sign of life.
        patience: seconds for which a connected peer may be silent, stopped by a debugger or a migration, before it is
            given up; at least three heartbeats. A process that has ended is noticed at once.
        queue_bytes: most bytes queued for one peer and channel before a send waits.
        max_message_bytes: larger messages are refused before anything is allocated.
        allow_insecure: permit connections beyond this host without authentication.
        lane_nice: niceness of the compute thread (Linux); a positive value lets messages overtake compute on busy
            cores.
        lane: makes the lane of a stage, such as a `TimerLane` for virtual time; a compute thread by default.
        placement: where a rank's chunks are in the model: ``"looped"`` or ``"v"``.
        chunks: how many chunks a rank has; needed only for a `StageProgram`, a list of modules tells it.
        split: whether backward is split into input gradients (B) and weight gradients (W). No hint turns it on: one
            that ranks weight tasks works by its other rules where there are none. A schedule that places them needs it.
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
    first_step: int = 0
    stall_after: float = timeouts.STALL_AFTER_S
    abort_after: float | None = None
    stack_timer: bool = True
    connect_timeout: float = timeouts.CONNECT_S
    heartbeat: float = timeouts.HEARTBEAT_S
    patience: float = timeouts.PATIENCE_S
    queue_bytes: int = DEFAULT_QUEUE_BYTES
    max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES
    allow_insecure: bool = False
    lane_nice: int = 0
    lane: LaneFactory | None = None
    placement: Layout = "looped"
    chunks: int | None = None
    split: bool = False
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
        for field in ("stall_after", "connect_timeout", "heartbeat", "patience", "queue_bytes", "max_message_bytes"):
            value = getattr(self, field)
            if not isinstance(value, int | float) or not value > 0:
                raise ConfigError(f"{field} is {value!r}, must be a number above 0")
        if not 3 * self.heartbeat <= self.patience < math.inf:
            least = f"at least three times heartbeat, which is {self.heartbeat:g}"
            raise ConfigError(f"patience is {self.patience:g}, must be finite and {least}")
        for field, fits, wanted in (
            ("loss_fn", self.loss_fn is None or callable(self.loss_fn), "callable: loss_fn(output, target)"),
            ("lane_nice", self.lane_nice in range(LOWEST_NICE + 1), f"0..{LOWEST_NICE}"),
            ("lane", self.lane is None or callable(self.lane), "callable: lane(stage)"),
            ("seed", type(self.seed) is int, "a whole number"),
            ("first_step", type(self.first_step) is int and self.first_step >= 0, "a whole number from 0 on"),
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
            ("split", type(self.split) is bool, "True or False"),
            (
                "abort_after",
                self.abort_after is None
                or (type(self.abort_after) in (int, float) and 0 < self.abort_after < math.inf),
                "a number above 0, or None for never",
            ),
            ("stack_timer", type(self.stack_timer) is bool, "True or False"),
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
        graph = Graph.chain(stages, chunks=chunks, layout=self.placement, split=self.split)
        if (schedule := self._schedule()) is not None:
            self._check_schedule(schedule, graph)
        if self.limit == "1f1b" and chunks > 1:
            raise ConfigError(
                f"limit is '1f1b' with {chunks} chunks a stage, must be 'n', '2n' (the default), a number or a "
                "rrfp.Limit: '1f1b' leaves the last stage one microbatch for all its chunks, which then run one after "
                "the other"
            )
        return Shape(graph, self.deterministic, self.loss_fn)

    def _check_schedule(self, schedule: str, graph: Graph) -> None:
        needs = schedule_needs(schedule)
        if needs.split and not self.split:
            raise ConfigError(
                f"split is False, must be True for the schedule {schedule!r}, which places weight tasks: add split=True"
            )
        needs.check(schedule, graph)

    def _schedule(self) -> str | None:
        """The schedule that orders tasks, to the letter or as a hint."""
        if self.strict is not None:
            return self.strict
        return self.hint if isinstance(self.hint, str) and self.hint in schedule_names() else None

    def new_lane(self, stage: int) -> Lane:
        """The lane of ``stage``."""
        if self.lane is not None:
            return self.lane(stage)
        return ThreadLane(f"rrfp-lane-{stage}", nice=self.lane_nice)

    @property
    def hint_spec(self) -> HintSpec:
        """The hint that the caller asked for, or the default."""
        return DEFAULT_HINT if self.hint is None else self.hint

    def new_hint(self) -> Hint:
        """A fresh hint, or the strict schedule."""
        return create_hint(self.hint_spec) if self.strict is None else create_strict(self.strict)

    def tell_unsplit(self) -> None:
        """Log that the hint ranks weight tasks, and there are none. The default hint is meant for both ways."""
        if self.split or self.strict is not None or not self.new_hint().wants_split:
            return
        level = logging.INFO if self.hint_spec == DEFAULT_HINT else logging.WARNING
        text = "the hint %s ranks weight tasks, and without split=True there are none: it works by its other rules"
        logger.log(level, text, self._hint_term())

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

    def terms(self) -> dict[str, str | int | None]:
        """The options that must be the same on all ranks, beside those that decide the shape.

        A limit is compared if it is a preset: ranks may hold different amounts of their own.
        """
        return {
            "strict": self.strict,
            "hint": self._hint_term(),
            "limit": self._limit_term(),
            "seed": self.seed,
            "first_step": self.first_step,
            "reduction": self.reduction,
            "coordination": self.coordination,
            "unsplittable": self.unsplittable,
            "transport": self.transport if isinstance(self.transport, str) else _name_of(self.transport),
        }

    def _hint_term(self) -> str | None:
        if self.strict is not None:
            return None
        return self.hint_spec if isinstance(self.hint_spec, str) else _name_of(self.new_hint())

    def _limit_term(self) -> str | None:
        if self.strict is not None:
            return None
        return self.limit_text if self.limit_text in LIMIT_PRESETS else "the rank's own"

    @property
    def limit_text(self) -> str:
        """The limit that the caller asked for, or the default."""
        return str(DEFAULT_LIMIT if self.limit is None else self.limit)


class Options(TypedDict, total=False):
    """The keyword arguments that `rrfp.Pipeline` and `rrfp.local` pass on to `PipelineOptions`."""

    transport: TransportSpec
    hint: HintSpec | None
    strict: str | None
    limit: Limit | int | str | None
    loss_fn: Callable[[Any, Any], Any] | None
    reduction: Reduction
    seed: int
    first_step: int
    stall_after: float
    abort_after: float | None
    stack_timer: bool
    connect_timeout: float
    heartbeat: float
    patience: float
    queue_bytes: int
    max_message_bytes: int
    allow_insecure: bool
    lane_nice: int
    lane: LaneFactory | None
    placement: Layout
    chunks: int | None
    split: bool
    unsplittable: Unsplittable
    deterministic: bool
    coordination: Coordination
    depth: int | None


def _is_finite(value: Any) -> bool:
    """Whether ``value`` is a number above 0 and below infinity."""
    return type(value) in (int, float) and 0 < value < math.inf


def pipeline_options(options: Options, arguments: str) -> PipelineOptions:
    """The options out of keyword arguments.

    Args:
        options: the keyword arguments.
        arguments: the names of those that are no options, for the error.

    Raises:
        ConfigError: for an unknown name; lists the known ones.
    """
    names = [field.name for field in fields(PipelineOptions)]
    for name in options:
        if name not in names:
            known = f"{', '.join(names)}; or an argument: {arguments}"
            raise ConfigError(f"unknown option {name!r}, must be one of: {known}")
    return PipelineOptions(**options)


def _name_of(plugged_in: object) -> str:
    """A class or function by its full name, anything else by that of its class."""
    named = plugged_in if hasattr(plugged_in, "__qualname__") else type(plugged_in)
    return f"{named.__module__}.{named.__qualname__}"


def check_rendezvous(rendezvous: Rendezvous | None) -> None:
    """Refuse something that is no rendezvous.

    Raises:
        ConfigError: if a method is missing.
    """
    for method in ("publish", "lookup"):
        if rendezvous is not None and not callable(getattr(rendezvous, method, None)):
            raise ConfigError(f"rendezvous {type(rendezvous).__name__} has no method {method}()")

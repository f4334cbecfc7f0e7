"""The method that orders a pipeline's tasks: a hint under a memory limit, or a strict schedule."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Sequence

from rrfp.core.hint import Hint
from rrfp.core.ready_set import ForcedOrder
from rrfp.errors import ConfigError
from rrfp.hints.registry import HintSpec, create_hint, create_strict, default_hint
from rrfp.log import get_logger
from rrfp.memory.admission import AUTO, DEFAULT_RULE, LIMIT_PRESETS, RULES, Limit
from rrfp.memory.round_trips import FollowedLimits, RoundTripRule
from rrfp.model.graph import TaskGraph
from rrfp.model.topology import Topology
from rrfp.pipeline.options import Options
from rrfp.plugins import name_of
from rrfp.schedules.executed import ExecutedSchedule
from rrfp.schedules.registry import schedule_names, schedule_needs
from rrfp.trace.event_log import read_executed
from rrfp.trace.job_data import REPLAY, TracedJob

logger = get_logger(__name__)

#: The default limit; docs/hints.md gives the reasons.
DEFAULT_LIMIT = "2n"


class DispatchMethod:
    """How the options order tasks: by a hint under a limit, or by a strict schedule."""

    def __init__(self, options: Options) -> None:
        self._replay = options.replay
        #: The schedule that is run strictly, by name.
        self.strict = options.strict if options.replay is None else REPLAY
        #: By replica and member, the logged step that is run again.
        self._executed: dict[tuple[int, int], ExecutedSchedule] = {}
        self._split = options.split
        self._coordination = options.coordination
        self._order = options.order
        self._default_hint = default_hint(options.order)
        self._hint: HintSpec = self._default_hint if options.hint is None else options.hint
        self._limit = DEFAULT_LIMIT if options.limit is None else options.limit

    def new_hint(self, topology: Topology) -> Hint:
        """A fresh hint for a rank, or the strict schedule as one."""
        if self._replay is not None:
            return create_strict(self._read(self._replay, topology))
        return create_hint(self._hint) if self.strict is None else create_strict(self.strict)

    def check_order(self, topology: Topology, in_order: Collection[ForcedOrder]) -> None:
        """Raise a ConfigError where a replayed step did not keep the orders that are forced on a rank."""
        if self._replay is not None:
            self._read(self._replay, topology).check_order(in_order)

    def _read(self, folder: str | os.PathLike[str], topology: Topology) -> ExecutedSchedule:
        place = (topology.replica, topology.member)
        if place not in self._executed:
            self._executed[place] = read_executed(folder, topology)
        return self._executed[place]

    def limit(self, topology: Topology, graph: TaskGraph) -> Limit:
        """The limit of one rank of a pipeline over ``graph``; a strict schedule needs none.

        A limit on bytes with coordination "agreement" is a ConfigError: members that hold different amounts would never
        agree.
        """
        if self.strict is not None:
            return Limit()
        distance = graph.distance_to_sink(topology.stage)
        limit = Limit.resolve(self._limit, topology.stage, topology.stages, distance=distance)
        if limit.auto:
            limit = limit.at(RoundTripRule(graph).base[topology.stage])
        if limit.bytes is not None and topology.members > 1 and self._coordination == "agreement":
            raise ConfigError(
                f"limit: bytes is {limit.bytes}, must be None with coordination 'agreement': ranks of a group that "
                "hold different amounts would never agree; the leader (coordination 'leader') counts the worst of them"
            )
        return limit

    def followed_limits(self, graph: TaskGraph, *, claims: bool = False) -> FollowedLimits | None:
        """The limits that ranks of a pipeline over ``graph`` agree on between steps; None where they never change."""
        limit = self._auto()
        return None if limit is None else FollowedLimits(graph, limit.microbatches, claims=claims)

    def _auto(self) -> Limit | None:
        """The limit, if it follows round trips."""
        if self.strict is not None:
            return None
        limit = Limit.resolve(self._limit, 0, 1)
        return limit if limit.auto else None

    def check_claims(self, graph: TaskGraph) -> None:
        """Raise a ConfigError where replicas cannot share the forwards of ``graph`` by claims."""
        if self.strict is not None:
            raise ConfigError(
                f"strict is {self.strict!r}, must be None with share_replicas=True: no order is known before"
            )
        limit = Limit.resolve(self._limit, 0, 1)
        if limit.auto:
            RoundTripRule(graph, claims=True)  # refuses what it knows nothing of
        # A full stage serves its lowest microbatch alone, which another copy may run.
        if RULES[limit.rule].drains_in_order and graph.placement.num_virtual_stages > graph.placement.stages:
            raise ConfigError(
                f"limit has rule {limit.rule!r}, must have {DEFAULT_RULE!r} for several chunks a stage with "
                "share_replicas=True"
            )

    def check(self, graph: TaskGraph, topologies: Sequence[Topology] = ()) -> None:
        """Raise a ConfigError where a schedule, or the limit, does not fit the graph and the ranks."""
        if self._replay is not None:
            for topology in topologies:
                executed = self._read(self._replay, topology)
                executed.for_step(graph, executed.visits.microbatches, executed.visits)
        if (schedule := self._schedule()) is not None:
            needs = schedule_needs(schedule)
            if needs.split and not self._split:
                raise ConfigError(
                    f"split is False, must be True for the schedule {schedule!r}, which places weight tasks: add "
                    "split=True"
                )
            needs.check(schedule, graph)
        if self._auto() is not None:
            RoundTripRule(graph)  # refuses what it knows nothing of
        most_chunks = max(map(graph.placement.chunks_of, range(graph.placement.stages)))
        if self._limit == "1f1b" and most_chunks > 1:
            raise ConfigError(
                f"limit is '1f1b' with {most_chunks} chunks a stage, must be 'n', '2n' (the default), a "
                "number or an rrfp.Limit: '1f1b' leaves the last stage one microbatch for all its chunks, which then "
                "run one after the other"
            )

    def _schedule(self) -> str | None:
        """The schedule that orders tasks, strict or as a hint."""
        if self._replay is not None:
            return None
        if self.strict is not None:
            return self.strict
        return self._hint if isinstance(self._hint, str) and self._hint in schedule_names() else None

    def warn_unless_split(self) -> None:
        """Log that the hint orders weight tasks without any; at INFO for the default hint, which serves both cases."""
        if self._split or self.strict is not None or not create_hint(self._hint).wants_split:
            return
        level = logging.INFO if self._hint == self._default_hint else logging.WARNING
        text = "the hint %s orders weight tasks, and without split=True there are none: its other rules apply"
        logger.log(level, text, self.hint_name)

    @property
    def hint_name(self) -> str | None:
        """The hint as ranks compare it; None beside a strict schedule."""
        if self.strict is not None:
            return None
        return self._hint if isinstance(self._hint, str) else name_of(create_hint(self._hint))

    @property
    def limit_name(self) -> str | None:
        """The limit as ranks compare it: only presets, since ranks may hold different amounts of their own."""
        if self.strict is not None:
            return None
        if self._auto() is not None:
            return AUTO
        return str(self._limit) if self._limit in LIMIT_PRESETS else "the rank's own"

    @property
    def limit_text(self) -> str | None:
        """The limit of this rank as text; None beside a strict schedule."""
        return None if self.strict is not None else str(self._limit)

    def traced(self, topology: Topology, *, is_serial: bool) -> TracedJob:
        limit = None if self.strict is not None else self._limit
        return TracedJob(
            self.hint_name,
            limit,
            self.strict,
            self._order,
            topology.members,
            self._coordination,
            is_serial=is_serial,
        )

    def __str__(self) -> str:
        if self._replay is not None:
            return f"replay {os.fspath(self._replay)}"
        return f"strict {self.strict}" if self.strict else f"hint {self.hint_name}, limit {self._limit}"


def summary(options: Options) -> str:
    """The method of complete options in a few words; makes no hint, so it runs no code of the caller."""
    if options.replay is not None:
        return f"replay {os.fspath(options.replay)}"
    if options.strict is not None:
        return f"strict {options.strict}"
    hint = default_hint(options.order) if options.hint is None else options.hint
    limit = DEFAULT_LIMIT if options.limit is None else options.limit
    return f"hint {hint if isinstance(hint, str) else name_of(hint)}, limit {limit}"

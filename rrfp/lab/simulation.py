"""`rrfp simulate` as a function: one method on one cost table, beside the lower bound."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from rrfp.core.ready_set import MicrobatchOrder, forced_by
from rrfp.core.usage import Peaks
from rrfp.costs.table import CostTable, Matrix, checked_sizes
from rrfp.engine.bound import lower_bound
from rrfp.engine.engine import graph_of, run
from rrfp.engine.record import EngineResult
from rrfp.errors import ConfigError
from rrfp.hints.registry import HintSpec, check_order, create_hint, create_strict
from rrfp.lab.limit_texts import DEFAULT_LIMIT, SAME_BYTES
from rrfp.memory.admission import Limit, rule_of
from rrfp.memory.round_trips import Pace, RoundTripRule, StageMeasure
from rrfp.memory.rules import RuleContext
from rrfp.memory.size_order import by_stage, followed, least
from rrfp.model.tasks import F, Mode
from rrfp.plain import json_fault, one_of
from rrfp.schedules.registry import ScheduleSpec, make_schedule

ORDERS: tuple[str, ...] = get_args(MicrobatchOrder)

#: How a strict schedule sends: a message leaves while its lane goes on, or sender and receiver wait for each other.
Sends = Literal["eager", "blocking"]
SENDS: tuple[str, ...] = get_args(Sends)
#: The only schedule with blocking sends: it is Megatron's.
BLOCKING_SCHEDULE = "1f1b"

#: A run below its bound by no more than this, relatively, is at it: the two add the same numbers in another order, and
#: each addition may lose the last bit. The first is for all of a small table, the second for each number of a large
#: one.
_ROUNDING, _ROUNDING_EACH = 1e-12, 4 * 2.0**-53


@dataclass(frozen=True, slots=True)
class Simulation:
    """One method on one cost table.

    Attributes:
        costs: the table, with the sizes that hints received.
        result: what happened.
        limits: K of each stage, None for a strict schedule and where bytes are limited.
        lower_bound: no method that holds as much can be faster; in seconds.
        limits_in_bytes: of each stage, or None.
    """

    costs: CostTable
    result: EngineResult
    limits: tuple[int, ...] | None
    lower_bound: float
    limits_in_bytes: tuple[int, ...] | None = None

    @property
    def makespan(self) -> float:
        """Seconds from the start to the end of the last task."""
        return self.result.makespan

    @property
    def ratio(self) -> float:
        """Makespan over lower bound; 1 when both are zero."""
        return self.makespan / self.lower_bound if self.lower_bound else 1.0

    @property
    def peaks(self) -> tuple[Peaks, ...]:
        return self.result.peaks

    def to_json(self) -> Mapping[str, Any]:
        """The stable interface of ``rrfp simulate --json``."""
        spans = self.result.spans
        in_bytes = {
            "limit_bytes": list(self.limits_in_bytes or ()),
            "peak_bytes": [peak.num_bytes for peak in self.peaks],
        }
        return {
            "makespan": self.makespan,
            "lower_bound": self.lower_bound,
            "ratio": self.ratio,
            "busy": list(self.result.busy),
            "peak": [peak.held for peak in self.peaks],
            "received_peak": [peak.received for peak in self.peaks],
            "limit": None if self.limits is None else list(self.limits),
            "order": [[str(span.task) for span in stage] for stage in spans],
            "start": [[span.start for span in stage] for stage in spans],
            **({} if self.limits_in_bytes is None else in_bytes),
        }


def simulate(
    costs: CostTable,
    *,
    hint: HintSpec | None = None,
    strict: ScheduleSpec | None = None,
    limit: Limit | int | str | None = None,
    admission: str | None = None,
    sends: Sends = "eager",
    sizes: Sequence[float] | None = None,
    order: MicrobatchOrder = "free",
) -> Simulation:
    """Simulate one training step with a hint, or with a schedule consumed strictly.

    Args:
        costs: what tasks and messages take.
        hint: a hint's name, class or instance.
        strict: a schedule's name, or a schedule file's text; its stages wait for their next task.
        limit: with a hint, how many microbatches a stage may hold (default ``2n``; ``auto`` goes by the latencies and
            times of the table, as a job does by what it measures), or, where the table has bytes, how many bytes:
            ``8MB`` on each stage; ``bytes:K``, ``bytes:1f1b`` ... limit the bytes of each stage to the most
            that it holds under that limit, so that both take the same memory. A strict schedule takes none, and its
            bound uses the memory that the schedule itself needs.
        admission: with a hint, how chunks share the limit's slots; None: the limit's own rule, ``staircase`` unless it
            says otherwise.
        sends: ``blocking`` makes strict 1f1b send as Megatron does, where sender and receiver wait for each other.
        sizes: how large each microbatch is, in any unit, for hints that ask; None: as the table says, if it does. Hints
            also know how closely the times follow them, as in every step of a job but the first.
        order: with a hint, ``natural`` runs the microbatches of each kind on each virtual stage as 0, 1, 2, ...

    Raises:
        ConfigError: unless exactly one of ``hint`` and ``strict`` is given, for an unknown name, for what does not go
            together, for a limit on bytes where the table has none, for times whose sum is no float, or for wrong
            sizes.
        DeadlockError: if the run deadlocks.
    """
    if (hint is None) == (strict is None):
        raise ConfigError("exactly one of hint and strict is needed")
    one_of(SENDS, "sends", sends)
    one_of(ORDERS, "order", order)
    _check_sum(costs)
    costs = costs if sizes is None else replace(costs, sizes=tuple(sizes))
    if strict is not None:
        if limit is not None or admission is not None:
            what = "limit" if limit is not None else "admission"
            raise ConfigError(f"{what} goes with a hint; a strict schedule holds what its order holds")
        if order != "free":
            raise ConfigError(f"order is {order!r}, must be free with strict: a schedule is the order of all tasks")
        return _strict(costs, strict, sends)
    assert hint is not None
    check_order(hint, order)
    if sends != "eager":
        raise ConfigError(f"sends is {sends!r}, must be eager with a hint: readiness-driven stages never wait to send")
    if isinstance(limit, str) and limit.startswith(SAME_BYTES):
        counted = resolve_limits(costs, limit.removeprefix(SAME_BYTES), admission)
        return _dispatched(costs, hint, _same_bytes(costs, hint, counted, order), order)
    return _dispatched(costs, hint, resolve_limits(costs, limit, admission), order)


def planned_sizes(costs: CostTable) -> list[float]:
    """The time that all tasks of each microbatch take together, in seconds: sizes for a hint that asks for them.

    No estimate made before a step can be better, since the table's own jitter is in them.
    """
    total: Matrix = sum(costs.durations.values(), start=np.zeros(()))
    sizes: list[float] = total.sum(axis=0).tolist()
    return sizes


def read_sizes(path: str | os.PathLike[str], microbatches: int) -> tuple[float, ...]:
    """Read the sizes of ``microbatches`` microbatches, in any unit: a JSON list of numbers.

    Anything else is a ConfigError of one line that names the file.
    """
    name = os.fspath(path)
    try:
        sizes = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"sizes is {name!r}, must be planned or a file ({error.strerror or error})") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"sizes: {name}: is not JSON ({json_fault(error)})") from None
    try:
        if not isinstance(sizes, list):
            raise ConfigError("not a list")
        return checked_sizes(sizes, microbatches)
    except ConfigError:
        raise ConfigError(
            f"sizes: {name}: must be a list of {microbatches} finite numbers >= 0, one a microbatch"
        ) from None


def shown_correlation(costs: CostTable) -> float | None:
    """How closely times follow sizes, as an equal step before shows it; None without sizes."""
    if costs.sizes is None:
        return None
    backward: Matrix = sum((rows for kind, rows in costs.durations.items() if kind is not F), start=np.zeros(()))
    by_stage = []
    for stage in range(costs.stages):
        own = list(costs.virtual_stages_of(stage))
        halves = (rows[own].sum(axis=0).tolist() for rows in (costs.forward, backward))
        by_stage.append(followed(costs.sizes, *halves))
    return least(by_stage)


def shown_rooms(costs: CostTable, limits: Sequence[Limit]) -> tuple[float | None, ...] | None:
    """By stage, how many average microbatches its limit on bytes has room for, as an equal step before shows it."""
    if costs.held is None:
        return None
    rooms: list[float | None] = []
    for stage, limit in enumerate(limits):
        own = list(costs.virtual_stages_of(stage))
        left = float(costs.held[own].sum())
        is_known = limit.bytes is not None and left and len(own) == 1
        rooms.append((limit.bytes or 0) * costs.microbatches / left if is_known else None)
    return by_stage(enumerate(rooms), costs.stages)


def sizes_known(costs: CostTable, limits: Sequence[Limit]) -> Mapping[str, Any]:
    """What hints know of sizes in any step but the first."""
    rooms = shown_rooms(costs, limits)
    return {"sizes": costs.sizes, "size_correlation": shown_correlation(costs), "byte_rooms": rooms}


def _strict(costs: CostTable, strict: ScheduleSpec, sends: Sends) -> Simulation:
    hints = [create_strict(strict) for _ in range(costs.stages)]
    _check_fits_strict(costs, strict)
    graph = graph_of(costs)
    schedule = make_schedule(strict, graph, costs.microbatches)
    # The bound counts microbatches, as a limit does; peaks are in chunk tasks.
    peaks = (schedule.peak_held(stage, graph) for stage in range(costs.stages))
    needed = [-(-peak // costs.chunks_of(stage)) for stage, peak in enumerate(peaks)]
    if sends == "blocking":
        if strict != BLOCKING_SCHEDULE:
            raise ConfigError(f"sends is 'blocking', must be eager with strict {strict}: only 1f1b has a blocking form")
        from rrfp.lab.blocking import run_blocking

        result = run_blocking(costs)
    else:
        result = run(costs, hints, [Limit()] * costs.stages)
    return beside_bound(costs, result, None, needed)


def _check_fits_strict(costs: CostTable, strict: ScheduleSpec) -> None:
    """Refuse orders that know nothing of the graph."""
    if costs.skipped:
        raise ConfigError("strict needs microbatches that visit every virtual stage, and some skip one: take a hint")
    if costs.graph is not None and isinstance(strict, str):
        raise ConfigError(f"strict is {strict!r}, must be a schedule file on a graph: named schedules are for chains")


def _same_bytes(costs: CostTable, hint: HintSpec, limits: Sequence[Limit], order: MicrobatchOrder) -> list[Limit]:
    """As many bytes on each stage as it holds under ``limits``."""
    _check_has_bytes(costs)
    counted = _run(costs, hint, limits, order)
    return [Limit(bytes=max(1, peaks.num_bytes)) for peaks in counted.peaks]


def _run(costs: CostTable, hint: HintSpec, limits: Sequence[Limit], order: MicrobatchOrder) -> EngineResult:
    hints, in_order = [create_hint(hint) for _ in limits], forced_by(order, graph_of(costs))
    return run(costs, hints, limits, in_order=in_order, **sizes_known(costs, limits))


def _dispatched(costs: CostTable, hint: HintSpec, limits: Sequence[Limit], order: MicrobatchOrder) -> Simulation:
    result = _run(costs, hint, limits, order)
    if any(limit.bytes is not None for limit in limits):
        # The bound of what holds as many microbatches as this run did.
        held = [max(1, -(-peaks.held // costs.chunks_of(stage))) for stage, peaks in enumerate(result.peaks)]
        in_bytes = tuple(limit.bytes or 0 for limit in limits)
        return replace(beside_bound(costs, result, None, held), limits_in_bytes=in_bytes)
    counts = tuple(costs.microbatches if limit.microbatches is None else limit.microbatches for limit in limits)
    return beside_bound(
        costs,
        result,
        counts,
        [_most_held(costs, stage, *each) for stage, each in enumerate(zip(limits, counts, strict=True))],
    )


def _most_held(costs: CostTable, stage: int, limit: Limit, count: int) -> int:
    """The microbatches that a stage holds at most; by some rules D may pass K * C."""
    graph, chunks = costs.to_graph(), costs.chunks_of(stage)
    rule = rule_of(limit.rule, RuleContext(graph, stage, costs.visits, Mode.TRAIN, is_forced=False))
    return -(-rule.bound(count * chunks, chunks) // chunks)


def resolve_limits(costs: CostTable, spec: Limit | int | str | None, admission: str | None = None) -> list[Limit]:
    """The limit of every stage of a simulated hint."""
    spec = DEFAULT_LIMIT if spec is None else spec
    graph, stages = graph_of(costs), costs.stages
    limits = [Limit.resolve(spec, stage, stages, distance=graph.distance_to_sink(stage)) for stage in range(stages)]
    if limits[0].auto:
        counts = RoundTripRule(graph).limits(pace_of(costs))
        limits = [limit.at(count) for limit, count in zip(limits, counts, strict=True)]
    if any(limit.bytes is not None for limit in limits):
        _check_has_bytes(costs)
    return limits if admission is None else [replace(limit, rule=admission) for limit in limits]


def pace_of(costs: CostTable) -> Pace:
    """What decides on ``limit="auto"`` in steps of this table."""
    return Pace.of(measures_of(costs))


def measures_of(costs: CostTable) -> list[StageMeasure]:
    """What each stage measures for ``limit="auto"`` in a step of this table."""
    graph, visits = graph_of(costs), costs.visits
    latencies = costs.latency_forward + costs.latency_backward
    trips: list[dict[int, float]] = [{} for _ in range(costs.stages)]
    assert graph.edges is not None
    for (u, v), seconds in zip(graph.edges, latencies, strict=True):
        one, other = graph.stage_of[u], graph.stage_of[v]
        if one != other and (both := sorted({*visits.visitors(u)} & {*visits.visitors(v)})):
            trips[one][other] = max(float(seconds[both].mean()), trips[one].get(other, 0.0))
    total: Matrix = sum(costs.durations.values(), start=np.zeros(()))
    own = [total[list(costs.virtual_stages_of(stage))].sum(axis=0) for stage in range(costs.stages)]
    return [StageMeasure.of([float(x) for x in times if x], by_peer) for times, by_peer in zip(own, trips, strict=True)]


def _check_has_bytes(costs: CostTable) -> None:
    if costs.held is None:
        raise ConfigError("the limit is in bytes, and the cost table has none: it needs the field bytes")


def _check_sum(costs: CostTable) -> None:
    """No step takes longer than the sum of everything in the table."""
    with np.errstate(over="ignore"):
        total = sum(float(matrix.sum()) for matrix in _matrices(costs))
    if not math.isfinite(total):
        raise ConfigError("the sum of all times is too large for a float")


def _matrices(costs: CostTable) -> list[Matrix]:
    return [*costs.durations.values(), costs.latency_forward, costs.latency_backward]


def beside_bound(
    costs: CostTable, result: EngineResult, limits: tuple[int, ...] | None, needed: Sequence[int]
) -> Simulation:
    """A result beside the bound of what holds ``needed`` on each stage."""
    bound = lower_bound(costs, needed)
    slack = max(_ROUNDING, _ROUNDING_EACH * sum(matrix.size for matrix in _matrices(costs)))
    if result.makespan < bound <= result.makespan * (1 + slack):
        bound = result.makespan
    assert bound <= result.makespan, f"a run of {result.makespan} s is below its lower bound of {bound} s"
    return Simulation(costs, result, limits, bound)

"""What a method's order alone would take: its hint and limit, or its schedule, in the engine on the same table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from benchmarks.integrations.settings import Place, Settings, Way
from benchmarks.shared.comparison import Runtime, Turn
from rrfp.core.ready_set import MicrobatchOrder, forced_by
from rrfp.costs import CostTable
from rrfp.engine.engine import graph_of, run
from rrfp.hints.registry import DEFAULT_HINT, create_hint, create_strict, default_hint
from rrfp.lab.simulation import resolve_limits, shown_correlation
from rrfp.memory.admission import Limit

#: Bytes are whole numbers, so that proportions are a byte off; a limit would be missed by that byte.
_SLACK = 1.001


def order_alone(settings: Settings, turn: Turn) -> float | None:
    """Seconds of the step where messages take no time; None for a peer, which always runs one order."""
    way, costs = settings.METHODS[turn.method], settings.table(turn)
    if way.runtime is not Runtime.RRFP:
        return None
    strict = way.options.get("strict")
    if strict is not None:
        return run(costs, [create_strict(strict) for _ in range(costs.stages)], [Limit()] * costs.stages).makespan
    order: MicrobatchOrder = "natural" if way.place is Place.CHUNKS else "free"
    hint, sizes = way.options.get("hint") or default_hint(order), settings.sizes(turn)
    return run(
        costs,
        [create_hint(hint) for _ in range(costs.stages)],
        _limits(settings, way, costs, sizes),
        sizes=sizes,
        # As in every step but the first, which a pipeline has behind it.
        size_correlation=None if sizes is None else shown_correlation(replace(costs, sizes=tuple(sizes))),
        shows_inputs=way.own_bytes,
        in_order=forced_by(order, graph_of(costs)),
    ).makespan


def _limits(settings: Settings, way: Way, costs: CostTable, sizes: Sequence[float] | None) -> list[Limit]:
    if way.own_bytes:
        return own_bytes(costs, sizes)
    if way.as_torch:
        return [Limit(settings.own_limit(way, stage)) for stage in range(costs.stages)]
    return resolve_limits(costs, way.options["limit"])


def own_bytes(costs: CostTable, sizes: Sequence[float] | None) -> list[Limit]:
    """For each stage, the most bytes that the default hint holds there within N microbatches, in the engine."""
    counted = [Limit.resolve("n", stage, costs.stages) for stage in range(costs.stages)]
    result = run(costs, [create_hint(DEFAULT_HINT) for _ in counted], counted, sizes=sizes)
    return [Limit(bytes=int(peaks.num_bytes * _SLACK)) for peaks in result.peaks]

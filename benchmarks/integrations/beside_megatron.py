"""RRFP beside Megatron's schedules and the engine, which runs the steps with each method's hint, limit and order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import median

from rich.table import Table

from benchmarks.integrations.settings import MEGATRON, MEGATRON_1F1B, MEGATRON_INTERLEAVED, Settings, Way
from benchmarks.shared.comparison import Cell, Runtime, Turn
from benchmarks.shared.figures import Aim, table_of
from benchmarks.shared.step_figures import Figures, Results
from benchmarks.shared.step_report import NOTHING, name_of
from benchmarks.shared.tables import Form
from rrfp.core.ready_set import natural_order
from rrfp.engine.engine import graph_of, run
from rrfp.hints.registry import create_hint, default_hint
from rrfp.lab.simulation import simulate
from rrfp.memory.admission import Limit

#: Percent of Megatron's time of a step without jitter, and microseconds of processor time a task beyond its own.
MOST_TIME, MOST_CPU = 102.0, 200.0


def engine_s(settings: Settings, turn: Turn) -> float:
    """Seconds of a step on the same table, where messages take no time; Megatron's 1F1B sends as it does."""
    way, table = MEGATRON[turn.method], settings.table(turn)
    if way.runtime is Runtime.MEGATRON:
        is_whole = way.form is Form.WHOLE
        strict, sends = ("1f1b", "blocking") if is_whole else ("interleaved-1f1b", "eager")
        return simulate(table, strict=strict, sends=sends).makespan  # type: ignore[arg-type]
    hints = [create_hint(default_hint("natural")) for _ in range(settings.stages)]
    limits = [_limit(settings, way, stage) for stage in range(settings.stages)]
    return run(table, hints, limits, in_order=natural_order(graph_of(table))).makespan


def _limit(settings: Settings, way: Way, stage: int) -> Limit:
    own = settings.own_limit(way, stage) if way.as_torch else way.options["limit"]
    return Limit.resolve(own, stage, settings.stages)


def peer_of(method: str) -> str:
    """The schedule of Megatron's on the same chunks."""
    return MEGATRON_1F1B if MEGATRON[method].form is Form.WHOLE else MEGATRON_INTERLEAVED


def beside_engine(settings: Settings, cell: Cell, figures: Mapping[str, Figures]) -> dict[str, dict[str, float]]:
    """By method: the engine's seconds, the ratios to Megatron's own schedule, and what a task costs beyond its."""
    planned = {
        name: {number: engine_s(settings, Turn(cell, number, name)) for number in one.used}
        for name, one in figures.items()
    }
    data = {}
    for name, one in figures.items():
        data[name] = {"engine_s": median(planned[name].values())}
        if (peer := peer_of(name)) in figures:
            ratios = [planned[name][n] / engine_s(settings, Turn(cell, n, peer)) for n in one.used]
            data[name] |= {
                "per_peer": one.per_peer[peer].value,
                "per_peer_in_engine": median(ratios),
                "cpu_s_beyond_peer": one.cpu_per_task - figures[peer].cpu_per_task,
            }
    return data


def engine_table(settings: Settings, cell: Cell, figures: Mapping[str, Figures]) -> Table:
    """The same, for people."""
    columns = ("ms", "engine ms", "/ engine", "/ Megatron", "in the engine", "CPU us a task", "beyond Megatron's")
    table = table_of(f"{cell}: beside the engine, and Megatron's schedule on the same chunks", "method", *columns)
    for name, each in beside_engine(settings, cell, figures).items():
        one, planned = figures[name], each["engine_s"]
        beside = [NOTHING] * 2
        beyond = NOTHING
        if "per_peer" in each:
            beside = [f"{each[column]:.3f}" for column in ("per_peer", "per_peer_in_engine")]
            beyond = f"{each['cpu_s_beyond_peer'] * 1e6:+,.0f}"
        times = f"{one.seconds * 1e3:,.0f}", f"{planned * 1e3:,.0f}", f"{one.seconds / planned:.3f}"
        table.add_row(name_of(name, one), *times, *beside, f"{one.cpu_per_task * 1e6:,.0f}", beyond)
    return table


def aims_of(settings: Settings, results: Results) -> Iterator[Aim]:
    """What RRFP should reach beside Megatron's schedule on the same chunks, where undisturbed steps say it."""
    for cell, figures in results.items() if settings.runs_megatron else ():
        for name, each in beside_engine(settings, cell, figures).items():
            peer = peer_of(name)
            if name == peer or "per_peer" not in each or figures[name].is_disturbed or figures[peer].is_disturbed:
                continue
            if cell.jitter == "J0":
                yield Aim(f"{name}, time, {cell}", 100 * each["per_peer"], MOST_TIME, unit="%")
            yield Aim(f"{name}, processor, {cell}", each["cpu_s_beyond_peer"] * 1e6, MOST_CPU, unit="us beyond")

"""Slow links between real processes: medians of the measured steps, and the aims."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.links.settings import AUTO, TIGHT, TORCH_1F1B, Settings
from benchmarks.links.simulated import LINKS
from benchmarks.links.trace import Aim
from benchmarks.shared.comparison import Cell
from benchmarks.shared.runs import steps_measured
from benchmarks.shared.steps import Step
from rrfp.lab.simulation import simulate


@dataclass(frozen=True, slots=True)
class Row:
    """One method with some links slow: medians of its undisturbed steps, or of all where none is.

    Milliseconds are PipeMorph's: those of the run, over its pace.
    """

    links: str
    delay: int
    method: str
    milliseconds: float
    #: Microbatches held, the sum over stages of the most.
    held: float
    is_disturbed: bool
    #: What the engine says of the same step, without the runtime's own time; None for torch.
    simulated: float | None = None


def measure(settings: Settings) -> list[Step]:
    """Run the processes."""
    steps = [step for _, steps in steps_measured(Path(__file__).with_name("worker.py"), [settings]) for step in steps]
    for step in steps:
        if step.turn.number > 0:  # torch's first step runs a forward twice, for its shapes
            step.check(settings.table(step.turn))
    return steps


def rows_of(settings: Settings, steps: Iterable[Step]) -> Iterator[Row]:
    """A row for each method of each cell."""
    by_method: Mapping[tuple[Cell, str], list[Step]] = defaultdict(list)
    for step in steps:
        if step.turn.number > 0:
            by_method[step.turn.cell, step.turn.method].append(step)
    for (cell, method), own in by_method.items():
        used = [step for step in own if not step.is_disturbed] or own
        milliseconds = 1e3 / settings.pace * median(step.seconds for step in used)
        held = median(sum(step.held) for step in used)
        simulated = _simulated(settings, own[0])
        yield Row(
            cell.profile,
            int(cell.jitter),
            method,
            milliseconds,
            held,
            used is own and own[0].is_disturbed,
            None if simulated is None else 1e3 / settings.pace * simulated,
        )


def _simulated(settings: Settings, step: Step) -> float | None:
    options = {name: each for name, each in step.method.options.items() if name in ("strict", "limit")}
    if not options:
        return None
    costs = settings.delayed_table(step.turn)
    if "limit" in options:
        options["hint"] = "slot-aware-pyramid"
    return simulate(costs, **options).makespan  # type: ignore[arg-type]


def aims_of(rows: Sequence[Row], stages: int) -> list[Aim]:
    """The aims, for the cells that were measured."""
    found = {(row.links, row.delay, row.method): row for row in rows}
    aims = []
    auto, tight = (found.get(("none", 0, method)) for method in (AUTO, TIGHT))
    if auto is not None and tight is not None:
        aims.append(Aim("nothing slow: auto over 1f1b", auto.milliseconds / tight.milliseconds, "at most", 1.01))
    for links in LINKS:
        auto, torch, own = (found.get(key) for key in ((links, 60, AUTO), (links, 60, TORCH_1F1B), ("none", 0, AUTO)))
        if len(LINKS[links]) > 1 or auto is None or own is None:
            continue
        aims.append(
            Aim(f"{links}: auto over its undisturbed step", auto.milliseconds / own.milliseconds, "at most", 1.2)
        )
        aims.append(Aim(f"{links}: microbatches held by auto over N^2", auto.held / stages**2, "at most", 1.5))
        if torch is not None:
            ratio = torch.milliseconds / auto.milliseconds
            aims.append(Aim(f"{links}: torch's 1F1B over auto", ratio, "at least", 2.3))
    return aims

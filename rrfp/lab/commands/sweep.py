"""`rrfp sweep`: every method on every workload and seed, a bar while they run; then a table, a CSV file, a picture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import nullcontext
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rrfp.commands.command_line import Json, print_json
from rrfp.errors import ConfigError, Faults
from rrfp.lab.commands import options
from rrfp.lab.commands.options import (
    METHOD,
    OUTPUT,
    PICTURE,
    WORKLOAD,
    Given,
    MethodCommand,
    as_parameter,
    check_picture,
    listed,
    option,
    options_of,
    progress_bar,
    with_options,
)
from rrfp.lab.sweep.experiment import RECORD_SPLIT, Experiment, SimulatedMethod
from rrfp.lab.sweep.workloads import PLANNED, CostFile, Workload, with_sizes
from rrfp.tables import Column, print_table, terminal

if TYPE_CHECKING:
    from rrfp.lab.sweep.runs import Skip, SweepResult, SweepRow
    from rrfp.lab.sweep.summary import MethodSummary, Spread

#: Lines on limits that gain nothing; a sweep of many workloads may have hundreds.
MOST_REASONS = 6


def show_sweep(result: SweepResult, *, json: bool, notes: Sequence[str] = ()) -> None:
    """Print runs and summary as JSON, or a table with ``notes`` below."""
    from rrfp.lab.sweep.summary import in_common, summarise

    groups = summarise(result.rows)
    if json:
        document = {"runs": list(map(asdict, result.rows)), "summary": [group.to_json() for group in groups]}
        print_json({**document, "skipped": list(map(_plain, result.skipped))})
        return
    console = terminal()
    console.print(in_common(result.rows), soft_wrap=True)
    _print_groups(result.rows, groups)
    for note in (*notes, *_useless_limits(result.rows, groups)):
        console.print(note, soft_wrap=True)
    methods = Counter(
        (skip.experiment.method.name, skip.experiment.method.kind, skip.reason) for skip in result.skipped
    )
    for (name, kind, reason), count in methods.items():
        runs = "1 run" if count == 1 else f"{count} runs"
        console.print(f"skipped {runs} of {kind} {name}: {reason}", soft_wrap=True)


def _plain(skip: Skip) -> dict[str, Any]:
    method = skip.experiment.method
    return {**asdict(skip.experiment.workload), "method": method.name, "kind": method.kind, "reason": skip.reason}


def _print_groups(rows: Sequence[SweepRow], groups: Sequence[MethodSummary]) -> None:
    """A row a group; an empty line between workloads."""
    from rrfp.lab.sweep.summary import changing, label, shown

    columns = changing(rows)
    over = {label(group.baseline[0]) for group in groups if group.baseline}
    figures = _figures(groups, has_speed_ups=bool(over))
    lines: list[tuple[str, ...]] = []
    before = None
    for group in groups:
        here = [shown(column, group.workload[column]) for column in columns]
        if before is not None and here != before:
            lines.append(("",) * (len(columns) + 1 + len(figures)))
        fresh = [""] * len(here) if here == before else here
        lines.append((*fresh, group.label, *(figure(group) for figure in figures.values())))
        before = here
    cells = list(zip(*lines, strict=True))
    names = [Column(head, each, "left") for head, each in zip((*columns, "method"), cells, strict=False)]
    print_table(names, [Column(head, each) for head, each in zip(figures, cells[len(names) :], strict=True)])
    if over:
        by_seed = ", seed by seed" if any(len(group.rows) > 1 for group in groups) else ""
        terminal().print(f"speed-up over {' or '.join(sorted(over))}{by_seed}", soft_wrap=True)


def _useless_limits(rows: Sequence[SweepRow], groups: Sequence[MethodSummary]) -> list[str]:
    """A line with the reason for each limit that gains nothing."""
    from rrfp.lab.sweep.summary import changing, label, named, useless_limits, why_useless

    columns, lines = changing(rows), list[str]()
    for smaller, larger in useless_limits(groups):
        where = ", ".join(named(column, smaller.workload[column]) for column in columns)
        what = f"{label(larger.rows[0])}{f' ({where})' if where else ''} gains nothing over {smaller.rows[0].limit}"
        lines.append(f"{what}: {why_useless(smaller, larger)}")
    more = len(lines) - MOST_REASONS
    return lines if more <= 0 else [*lines[:MOST_REASONS], f"{more} more limits gain nothing over smaller ones"]


def _figures(groups: Sequence[MethodSummary], *, has_speed_ups: bool) -> dict[str, Callable[[MethodSummary], str]]:
    """The columns that hold figures: head, and text of a group's cell."""
    figures: dict[str, Callable[[MethodSummary], str]] = {
        "makespan (s)": lambda g: _mean(g.spread("makespan"), "#.4g", ".2g")
    }
    if any(len(group.rows) > 1 for group in groups):
        figures["least - most"] = lambda group: _range(group.spread("makespan"), "#.4g")
    figures["/ bound"] = lambda group: f"{group.spread('ratio').mean:.3f}"
    figures["peak held"] = _held
    if has_speed_ups:
        figures["speed-up"] = lambda g: "-" if g.speed_up is None else _mean(g.speed_up, ".3f", ".3f")
    if any(group.has_groups for group in groups):
        figures["coordination"] = _of_groups("coordination_share", ".2%")
        figures["failed rounds a task"] = _of_groups("failed_rounds_per_task", ".3g")
        figures["messages a task"] = _of_groups("messages_per_task", ".3g")
    return figures


def _held(group: MethodSummary) -> str:
    peak = group.spread("peak_max")
    return f"{peak.max:.0f}" if peak.min == peak.max else _range(peak, ".0f")


def _of_groups(column: str, form: str) -> Callable[[MethodSummary], str]:
    return lambda group: _mean(group.spread(column), form, form) if group.has_groups else "-"


def _range(spread: Spread, form: str) -> str:
    return f"{spread.min:{form}} - {spread.max:{form}}"


def _mean(spread: Spread, mean: str, std: str) -> str:
    """The mean; with several seeds also the standard deviation."""
    text = f"{spread.mean:{mean}}"
    return text if spread.std is None else f"{text} ±{spread.std:{std}}"


_COSTS = "Cost files (JSON), instead of a profile; may be given several times."
_SEEDS = "Run this many seeds, from --seed on, and show mean and spread."
_JOBS = "Processes; default: usable cores, as far as there is work for them."
_PLOT = "Draw speed and memory of all runs; the suffix decides the format."
_SAVE = "Write the cost file of every workload of a profile into this folder."


class SweepCommand(MethodCommand):
    """Several methods on several workloads."""

    def check_together(self, named: Collection[str]) -> None:
        """Beside `MethodCommand`'s: a method, and either cost files or a profile."""
        with Faults() as faults:
            with faults.kept():
                _check_source(named)
            if not {"hint", "strict"} & set(named):
                faults.keep("at least one of --hint NAME and --strict NAME is needed (names: rrfp hints)")
            with faults.kept():
                super().check_together(named)


def _check_source(named: Collection[str]) -> None:
    """Refuse cost files beside options of a profile, and neither."""
    if ("costs" in named) == ("profile" in named):
        from rrfp.lab.generators.workloads import PROFILES

        raise ConfigError(f"exactly one of --costs FILE and --profile NAME is needed (profiles: {', '.join(PROFILES)})")
    if "costs" not in named and "sizes" in named:
        raise ConfigError("--sizes goes with --costs; a profile has sizes of its own")
    of_profile = {field.name for field in fields(Workload)} - {"tp"}
    with Faults() as faults:
        for name in (*(name for name in named if name in of_profile), "seeds", "save_costs"):
            if "costs" in named and name in named:
                with faults.kept():
                    option, how = name.replace("_", "-"), f"; for a split one {RECORD_SPLIT}" if name == "split" else ""
                    raise ConfigError(f"--{option} goes with --profile; a cost file is one workload by itself{how}")


_, _SIZES, _ = options_of(CostFile, WORKLOAD)
*_PROFILE, _TP = options_of(Workload, WORKLOAD)


@with_options(
    as_parameter("costs", list[str], option("costs", "FILE", _COSTS, WORKLOAD)),
    _SIZES,
    *_PROFILE,
    as_parameter("seeds", int, option("seeds", "K", _SEEDS, WORKLOAD, least=1)),
    _TP,
    *options_of(SimulatedMethod, METHOD),
)
def sweep(
    given: Given,
    jobs: Annotated[int | None, option("jobs", "P", _JOBS, OUTPUT, least=1)] = None,
    csv: Annotated[Path | None, option("csv", "FILE.csv", "Write a row a run.", OUTPUT)] = None,
    plot: Annotated[Path | None, option("plot", PICTURE, _PLOT, OUTPUT)] = None,
    save_costs: Annotated[Path | None, option("save-costs", "FOLDER", _SAVE, OUTPUT)] = None,
    json: Json = False,
) -> None:
    """Simulate every method on every workload and seed, and compare them with each other and the lower bound.

    Options of workload and method take several values with commas between them (--stages 4,8,16 --hint bf,fb
    --strict 1f1b --seeds 5): all combinations run.
    """
    from rrfp.lab.sweep.plot import plot_sweep

    workloads: Sequence[Workload | CostFile]
    with Faults() as faults:
        with faults.kept():
            methods = options.methods_of(given)
        with faults.kept():
            workloads = _profiles(given) if given["costs"] is None else _files(given)
        with faults.kept():
            options.check_outputs(given, csv)
    experiments = [Experiment(workload, method) for workload in workloads for method in methods]
    if plot is not None:
        _check_plot(plot, experiments)
    options.warn_of_serial_chunks(experiments)
    if save_costs is not None:
        _save_costs(save_costs, experiments)
    # The added rows are for readers: programs get what they ask for.
    pairs = [(each, None if json else each.with_planned_sizes()) for each in experiments]
    lacking = [each for each, planned in pairs if planned is not None]

    def is_asked(row: SweepRow) -> bool:
        return not lacking or row.sizes != PLANNED

    both = [each for pair in pairs for each in pair if each is not None]
    result = _run(both, len(experiments), jobs=jobs, csv=csv, is_asked=is_asked)
    if plot is not None:
        plot_sweep([row for row in result.rows if is_asked(row)], plot)
    show_sweep(result, json=json, notes=[options.without_sizes(lacking)] if lacking else [])


def _profiles(given: Given) -> list[Workload]:
    """Every combination of the listed values, seeds innermost."""
    first = given["seed"] or 0
    return [
        Workload(**values, seed=seed)
        for values in options.combinations(Workload, given, but=("seed",))
        for seed in range(first, first + (given["seeds"] or 1))
    ]


def _files(given: Given) -> list[CostFile]:
    paths = listed("costs", ",".join(given["costs"]))
    others = list(options.combinations(CostFile, given, but=("costs_file",)))
    return [CostFile(costs_file=path, **values) for path in paths for values in others]


def _save_costs(folder: Path, experiments: Sequence[Experiment]) -> None:
    from rrfp.costs import write_costs

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror or error})") from None
    # With bytes if a limit counts them, so that `rrfp simulate` can show that run.
    counts_bytes = any(experiment.method.counts_bytes for experiment in experiments)
    for workload in dict.fromkeys(experiment.workload for experiment in experiments):
        if isinstance(workload, Workload):
            write_costs(folder / f"{workload.short_name}.json", with_sizes(workload, sized=counts_bytes))


def _check_plot(path: Path, experiments: Sequence[Experiment]) -> None:
    from rrfp.lab.sweep.plot import check_size

    methods = {experiment.method for experiment in experiments}
    every = {experiment.workload for experiment in experiments}
    workloads = {replace(each, seed=0) if isinstance(each, Workload) else each for each in every}
    with Faults() as faults:
        with faults.kept():
            check_picture(path, "a plot")
        with faults.kept():
            check_size(len(methods), len(workloads))


def _run(
    experiments: Sequence[Experiment],
    num_asked: int,
    *,
    jobs: int | None,
    csv: Path | None,
    is_asked: Callable[[SweepRow], bool],
) -> SweepResult:
    """Run all with a progress bar, and write each row once it is known."""
    from rrfp.lab.sweep.runs import SweepFile, SweepRow
    from rrfp.lab.sweep.runs import sweep as run_sweep

    with nullcontext() if csv is None else SweepFile(csv) as file, progress_bar(len(experiments)) as advance:

        def on_outcome(outcome: SweepRow | Skip) -> None:
            if file is not None and isinstance(outcome, SweepRow) and is_asked(outcome):
                file.add(outcome)
            advance()

        try:
            result = run_sweep(experiments, jobs=jobs, progress=on_outcome)
        except KeyboardInterrupt:
            if file is not None and file.rows:
                typer.echo(f"{csv} has the first {file.rows} of {num_asked} runs", err=True)
            raise
    if not result.rows:
        raise ConfigError(result.skipped[0].reason)
    return result

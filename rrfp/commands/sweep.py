"""`rrfp sweep`: every method on every workload and seed, a bar while they run; then a table, a CSV file, a picture."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rrfp.commands import method_options as options
from rrfp.commands.command_line import listed, option
from rrfp.commands.known_names import known_jitter, known_latencies, known_profiles
from rrfp.commands.method_options import OUTPUT, PICTURE, WORKLOAD, MethodCommand, choice
from rrfp.commands.output import Json, check_picture
from rrfp.errors import ConfigError, Faults

if TYPE_CHECKING:
    from rrfp.sim.sweep.experiment import Experiment
    from rrfp.sim.sweep.rows import Row
    from rrfp.sim.sweep.runs import Skip, SweepResult
    from rrfp.sim.sweep.workloads import CostFile, Workload

_COSTS = "Cost files (JSON), instead of a profile; may be given several times."
_PROFILE = "A named, seeded workload: llm, mllm, modalities, video, zipf, bimodal, moe, straggler or head."
_PLACEMENT = "Where chunks live; default looped."
_JITTER = "How much tasks are delayed; default J0."
_SPLIT = "Split backward into input gradient and weight gradient; bfw on whole backwards is bf."
_LATENCY = "none, constant, constant:SECONDS, wire, spike or bimodal. Default none."
_SEEDS = "Run this many seeds, from --seed on, and show mean and spread."
_JOBS = "Processes; default: usable cores, as far as there is work for them."
_PLOT = "Draw speed and memory of all runs; the suffix decides the format."
_SAVE = "Write the cost file of every workload of a profile into this folder."
_PROFILE_DEFAULTS = {
    **{"profile": "", "stages": "8", "microbatches": "64", "chunks": "1", "placement": "looped"},
    **{"jitter": "J0", "latency": "none"},
}
_NUMBERS = ("stages", "microbatches", "chunks", "tp")
#: Options that describe a profile's workload.
_OF_PROFILE = (*_PROFILE_DEFAULTS, "split", "seed", "seeds", "save_costs")


class SweepCommand(MethodCommand):
    """Several methods on several workloads."""

    def check_together(self, named: Collection[str]) -> None:
        """Beside `MethodCommand`'s: a method, and either cost files or a profile."""
        with Faults() as faults:
            with faults.kept():
                _check_source(named)
            if not {"hint", "strict"} & set(named):
                with faults.kept():
                    raise ConfigError("at least one of --hint NAME and --strict NAME is needed (names: rrfp hints)")
            with faults.kept():
                super().check_together(named)


def _check_source(named: Collection[str]) -> None:
    """Refuse cost files beside the options of a profile, and neither of the two."""
    if ("costs" in named) == ("profile" in named):
        raise ConfigError(
            f"exactly one of --costs FILE and --profile NAME is needed (profiles: {', '.join(known_profiles())})"
        )
    if "costs" not in named and "sizes" in named:
        raise ConfigError("--sizes goes with --costs; a profile has sizes of its own")
    with Faults() as faults:
        for name in _OF_PROFILE:
            if "costs" in named and name in named:
                with faults.kept():
                    option = name.replace("_", "-")
                    raise ConfigError(f"--{option} goes with --profile; a cost file is one workload by itself")


def _of_workload(name: str) -> Callable[[str], None]:
    """The check of one value of an option that describes a workload."""

    def check(text: str) -> None:
        from rrfp.sim.sweep.workloads import Workload

        values: dict[str, Any] = {"profile": "llm", "stages": 1, "microbatches": 1}
        values[name] = _number(text) if name in _NUMBERS else text
        Workload(**values)

    return check


def sweep(
    costs: Annotated[list[str] | None, option("costs", "FILE", _COSTS, WORKLOAD)] = None,
    sizes: options.Sizes = None,
    profile: Annotated[
        str | None,
        option("profile", "NAME", _PROFILE, WORKLOAD, check=_of_workload("profile"), values=known_profiles),
    ] = None,
    stages: Annotated[
        str | None, option("stages", "N", "Stages; default 8.", WORKLOAD, check=_of_workload("stages"))
    ] = None,
    microbatches: Annotated[
        str | None,
        option("microbatches", "M", "Microbatches; default 64.", WORKLOAD, check=_of_workload("microbatches")),
    ] = None,
    chunks: Annotated[
        str | None, option("chunks", "C", "Chunks a stage; default 1.", WORKLOAD, check=_of_workload("chunks"))
    ] = None,
    placement: Annotated[
        str | None, choice("placement", "looped|v", _PLACEMENT, WORKLOAD, _of_workload("placement"))
    ] = None,
    split: Annotated[bool | None, typer.Option("--split/--no-split", help=_SPLIT, rich_help_panel=WORKLOAD)] = None,
    jitter: Annotated[
        str | None, option("jitter", "J0..J3", _JITTER, WORKLOAD, check=_of_workload("jitter"), values=known_jitter)
    ] = None,
    latency: Annotated[
        str | None,
        option("latency", "MODEL", _LATENCY, WORKLOAD, check=_of_workload("latency"), values=known_latencies),
    ] = None,
    seed: Annotated[int | None, option("seed", "S", "The first seed; default 0.", WORKLOAD, least=0)] = None,
    seeds: Annotated[int | None, option("seeds", "K", _SEEDS, WORKLOAD, least=1)] = None,
    tp: Annotated[str | None, option("tp", "T", options.TP_HELP, WORKLOAD, check=_of_workload("tp"))] = None,
    hint: options.HintName = None,
    strict: options.Strict = None,
    limit: options.LimitText = None,
    admission: options.Admission = None,
    sends: options.Sends = None,
    coordination: options.CoordinationName = None,
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
    from rrfp.commands.sweep_report import show_sweep
    from rrfp.sim.sweep.experiment import Experiment
    from rrfp.sim.sweep.plot import plot_sweep

    texts: options.Texts = {"hint": hint, "strict": strict, "limit": limit, "admission": admission, "sends": sends}
    texts = {**texts, "coordination": coordination, "tp": tp, "sizes": sizes}
    named: options.Texts = {"profile": profile, "stages": stages, "microbatches": microbatches, "chunks": chunks}
    named = {**named, "placement": placement, "split": split, "jitter": jitter, "latency": latency}
    named = {**named, "seed": seed, "seeds": seeds}
    workloads: Sequence[Workload | CostFile]
    with Faults() as faults:
        with faults.kept():
            methods = options.methods_of(texts)
        with faults.kept():
            workloads = _profiles(named, _ranks(tp)) if costs is None else _files(costs, sizes, _ranks(tp))
    experiments = [Experiment(workload, method) for workload in workloads for method in methods]
    if plot is not None:
        _check_plot(plot, experiments)
    options.warn_of_serial_chunks(experiments)
    if save_costs is not None:
        _save_costs(save_costs, experiments)
    result = _run(experiments, jobs=jobs, csv=csv)
    if plot is not None:
        plot_sweep(result.rows, plot)
    show_sweep(result, json=json)


def _profiles(texts: options.Texts, ranks: Sequence[Any]) -> list[Workload]:
    """Every combination of the listed values, seeds innermost."""
    from rrfp.sim.sweep.workloads import Workload

    lists: dict[str, Sequence[Any]] = {
        name: listed(name, texts[name] or default) for name, default in _PROFILE_DEFAULTS.items()
    }
    lists |= {name: [_number(text) for text in lists[name]] for name in _NUMBERS if name in lists}
    first = texts["seed"] or 0
    lists = {**lists, "split": [bool(texts["split"])], "tp": ranks}
    lists["seed"] = range(first, first + (texts["seeds"] or 1))
    return [Workload(**dict(zip(lists, values, strict=True))) for values in product(*lists.values())]


def _files(texts: Sequence[str], sizes: str | None, ranks: Sequence[Any]) -> list[CostFile]:
    """Every file with every number of ranks."""
    from rrfp.sim.sweep.workloads import CostFile

    paths = listed("costs", ",".join(texts))
    return [CostFile(costs_file=path, sizes_from=sizes, tp=tp) for path in paths for tp in ranks]


def _ranks(text: str | None) -> list[Any]:
    return [None] if text is None else [_number(value) for value in listed("tp", text)]


def _number(text: str) -> int | str:
    """A whole number where the text is one, else the text, which `whole` refuses."""
    try:
        return int(text)
    except ValueError:
        return text


def _save_costs(folder: Path, experiments: Sequence[Experiment]) -> None:
    """Write a cost file for each profile's workload, named by its values, into a folder that need not exist yet.

    Raises:
        ConfigError: if one cannot be written.
    """
    from rrfp.costs import write_costs
    from rrfp.sim.sweep.workloads import Workload

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: cannot be written ({error.strerror or error})") from None
    # With bytes if a limit counts them, so that `rrfp simulate` can show that run.
    counts_bytes = any(experiment.method.counts_bytes for experiment in experiments)
    for workload in dict.fromkeys(experiment.workload for experiment in experiments):
        if isinstance(workload, Workload):
            costs = workload.sized_costs() if counts_bytes else workload.costs()
            write_costs(folder / f"{workload.short_name}.json", costs)


def _check_plot(path: Path, experiments: Sequence[Experiment]) -> None:
    """Refuse a picture that could not be drawn, before anything runs.

    Raises:
        ConfigError: if there is nothing to draw with, too much to draw, or no folder to write to.
    """
    from rrfp.sim.sweep.plot import check_size

    methods = {experiment.method for experiment in experiments}
    workloads = {experiment.workload.without_seed() for experiment in experiments}
    with Faults() as faults:
        with faults.kept():
            check_picture(path, "a plot")
        with faults.kept():
            check_size(len(methods), len(workloads))


def _run(experiments: Sequence[Experiment], *, jobs: int | None, csv: Path | None) -> SweepResult:
    """Run all with a progress bar on the terminal, and write each row as soon as it is known.

    Raises:
        ConfigError: if no method fits, or the file cannot be written.
        DeadlockError, HintError: see `rrfp.sim.sweep.runs.sweep`.
    """
    from rrfp.sim.sweep.rows import Row, RowFile
    from rrfp.sim.sweep.runs import sweep as run_sweep

    with nullcontext() if csv is None else RowFile(csv) as file, _progress_bar(len(experiments)) as advance:

        def on_outcome(outcome: Row | Skip) -> None:
            if file is not None and isinstance(outcome, Row):
                file.add(outcome)
            advance()

        try:
            result = run_sweep(experiments, jobs=jobs, progress=on_outcome)
        except KeyboardInterrupt:
            if file is not None:
                typer.echo(f"{csv} has the first {file.rows} of {len(experiments)} runs", err=True)
            raise
    if not result.rows:
        raise ConfigError(result.skipped[0].reason)
    return result


@contextmanager
def _progress_bar(total: int) -> Iterator[Any]:
    """A bar on a terminal's stderr; gives what advances it by one."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.update(task, advance=1)

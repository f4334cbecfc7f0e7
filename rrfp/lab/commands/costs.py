"""`rrfp costs TRACE...`: a cost file from recorded steps."""

from __future__ import annotations

import json as json_format
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from rrfp.commands.command_line import Json, print_json
from rrfp.errors import ConfigError
from rrfp.lab.commands.options import at_least, check_output
from rrfp.tables import Column, print_table, terminal

if TYPE_CHECKING:
    from rrfp.costs.table import CostTable, Matrix
    from rrfp.lab.traces.chrome_reader import TracedRun
    from rrfp.lab.traces.measured_costs import Choice, MeasuredCosts

_TRACES = "Traces of one job, written by save_trace; their steps count together."
_OUT = "Write the cost file here, for `rrfp simulate` and `rrfp sweep`."
_RUN = "Only runs of this name, such as 'replica 1'; default: all."
_SKIP = "Training steps to leave out at the beginning of each run; default 2."
_STEP = "typical, the step whose time is the median; the step of a number; median or mean of all. Default typical."
_LATENCY = "none, constant, constant:SECONDS, wire, spike or bimodal instead of the recorded times of messages."


def costs(
    traces: Annotated[list[Path], typer.Argument(metavar="TRACE...", help=_TRACES)],
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help=_OUT)] = None,
    run: Annotated[str | None, typer.Option("--run", metavar="NAME", help=_RUN)] = None,
    skip_first: Annotated[
        int | None, typer.Option("--skip-first", metavar="N", help=_SKIP, callback=at_least("skip-first", 0))
    ] = None,
    step: Annotated[str, typer.Option("--step", metavar="typical|N|median|mean", help=_STEP)] = "typical",
    latency: Annotated[str | None, typer.Option("--latency", metavar="MODEL", help=_LATENCY)] = None,
    json: Json = False,
) -> None:
    """Make a cost file of recorded training steps: what each task and message of the job takes."""
    from rrfp.costs import write_costs
    from rrfp.lab.traces.measured_costs import WARM_UP_STEPS, check_choices, measured_costs

    if step.isdecimal() and skip_first is not None:
        raise ConfigError(f"--skip-first leaves steps out, --step {step} takes one: must be one of them")
    if out is not None:
        check_output(out, *traces)
    skip = WARM_UP_STEPS if skip_first is None else skip_first
    chosen = int(step) if step.isdecimal() else cast("Choice", step)
    check_choices(chosen, latency)
    measured = measured_costs(_runs(traces, run), skip_first=skip, step=chosen, latency=latency)
    if out is not None:
        write_costs(out, measured.table)
    if json:
        print_json(_document(measured, out, latency))
    else:
        _show(measured, out, latency)


def _runs(paths: list[Path], name: str | None) -> list[tuple[str, TracedRun]]:
    """The runs of all files, or those called ``name``, each labelled."""
    from rrfp.lab.traces.chrome_reader import read_chrome

    for path in paths:
        if paths.count(path) > 1:
            raise ConfigError(f"TRACE is {path} twice, must be named once")
    runs = [(f"{path}: {run.name}", run) for path in paths for run in read_chrome(path)]
    chosen = [(label, run) for label, run in runs if name in (None, run.name)]
    if not chosen:
        known = dict.fromkeys(run.name for _, run in runs)
        raise ConfigError(f"run is {name!r}, must be one of: {', '.join(known)}")
    return chosen


def _document(measured: MeasuredCosts, out: Path | None, latency: str | None) -> dict[str, Any]:
    from rrfp.costs import to_json

    return {
        "out": None if out is None else str(out),
        "step": measured.step,
        "steps": measured.steps,
        "left_out": list(measured.left_out),
        "step_seconds": measured.seconds,
        "latency": "measured" if latency is None else latency,
        "messages": {"measured": measured.measured, "filled": measured.filled},
        "clock_error": measured.clock_error,
        "costs": json_format.loads(to_json(measured.table)),
    }


def _show(measured: MeasuredCosts, out: Path | None, latency: str | None) -> None:
    console = terminal()
    table = measured.table
    left_out = f" (left out: {', '.join(measured.left_out)})" if measured.left_out else ""
    which = "costs of each task over all" if measured.step is None else f"costs of step {measured.step}"
    text = f"{measured.steps} training step(s) of {table.microbatches} microbatches{left_out}; {which}"
    console.print(f"{text}, {measured.seconds * 1e3:.1f} ms", soft_wrap=True)
    _print_table(measured)
    console.print("milliseconds a microbatch: mean, and least - most")
    console.print(_messages(measured, latency), soft_wrap=True)
    console.print(_sizes(measured), soft_wrap=True)
    if out is None:
        console.print("--out FILE writes the cost file", soft_wrap=True)
    else:
        console.print(f"{out} written: rrfp sweep --costs {shlex.quote(str(out))} {_methods(table)}", soft_wrap=True)


def _methods(table: CostTable) -> str:
    """Options of `rrfp sweep` that compare limits of the default hint and 1F1B."""
    from rrfp.hints.registry import DEFAULT_HINT

    options = f"--hint {DEFAULT_HINT} --limit"
    if table.graph is not None:
        return f"{options} n,2n"
    if table.chunks == 1:
        return f"{options} 1f1b,n,2n --strict 1f1b"
    if table.placement == "looped":
        return f"{options} n,2n --strict interleaved-1f1b"
    return f"{options} n,2n" + (" --strict zb-v" if table.chunks == 2 and table.split else "")


def _sizes(measured: MeasuredCosts) -> str:
    """Whether the file has sizes of microbatches, and what that means."""
    from rrfp.hints.registry import DEFAULT_HINT

    if measured.table.sizes is not None:
        return "sizes of microbatches: as step(sizes=...) had them; hints that read sizes get these"
    if measured.step is None and measured.has_sizes:
        return "sizes of microbatches: left out, as they differ between the steps"
    return (
        f"sizes of microbatches: none recorded; where all ranks pass sizes= to step(), {DEFAULT_HINT} orders "
        "microbatches by them"
    )


def _print_table(measured: MeasuredCosts) -> None:
    costs = measured.table
    numbers = range(costs.num_virtual_stages)
    is_plain = costs.chunks == 1 and costs.graph is None
    names = map(str, numbers) if costs.graph is None else costs.graph.names
    where = [name if is_plain else f"{name} (stage {costs.stage_of(v)})" for v, name in enumerate(names)]
    visited = costs.visited()
    columns = []
    for kind, rows in costs.durations.items():
        times = [rows[v][visited[v]] * 1e3 for v in numbers]
        columns.append(Column(kind, [f"{row.mean():.2f}" if len(row) else "-" for row in times]))
        columns.append(Column("least - most", [_range(row) for row in times]))
    print_table([Column("stage" if is_plain else "virtual stage", where, "left")], columns)


def _range(times: Matrix) -> str:
    return f"{times.min():.2f} - {times.max():.2f}" if len(times) else "-"


def _messages(measured: MeasuredCosts, latency: str | None) -> str:
    """How long messages take, and how that is known."""
    import numpy as np

    if latency is not None:
        return f"messages: latency {latency}"
    if not measured.measured:
        return "messages: none between stages"
    times = np.concatenate([rows[rows > 0] for rows in measured.table.acting_latencies()])  # 0: inside a stage
    median = float(np.median(times)) if len(times) else 0.0
    text = f"messages: {measured.measured} a step measured, median {median * 1e3:.3f} ms"
    if measured.filled:
        text += f"; {measured.filled} not recorded, for which the edge's median stands"
    if measured.clock_error:
        text += f"; clocks of hosts are known to {measured.clock_error * 1e3:.3f} ms"
    return text

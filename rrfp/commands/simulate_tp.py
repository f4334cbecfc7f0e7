"""`rrfp simulate --tp`: one method on one workload for groups of T ranks, over one seed or several.

Lists of values, CSV files and plots are of single ranks; here only the seeds vary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from rrfp.commands.output import print_json
from rrfp.commands.simulate_options import Texts
from rrfp.commands.simulate_show import shape
from rrfp.commands.simulate_sweep import progress_bar
from rrfp.errors import ConfigError, DeadlockError, HintError

if TYPE_CHECKING:
    from rich.table import Table

    from rrfp.costs.table import CostTable
    from rrfp.sim.cluster.simulation import TensorParallelSimulation
    from rrfp.sim.sweep.experiment import Cell, Method


@dataclass(frozen=True, slots=True)
class Groups:
    """What ``--tp`` and ``--coordination`` ask for.

    Attributes:
        ranks: T.
        coordination: how a group comes to one order; None: the default with a hint, nothing with a strict schedule.
    """

    ranks: int
    coordination: str | None

    def simulate(
        self, costs: CostTable, method: Method, sizes: Sequence[float] | None, latency: str | None, seed: int
    ) -> TensorParallelSimulation:
        """Run it once.

        Args:
            costs: what tasks take, and the messages of rank 0.
            method: one that `groups_of` let pass.
            sizes: of microbatches, for hints that ask.
            latency: what draws the other ranks' messages; None: the table's own, in another order.
            seed: of that draw.
        """
        from rrfp.costs.rank_latency import SHUFFLED
        from rrfp.sim.cluster.simulation import simulate_tensor_parallel

        model = SHUFFLED if latency is None else latency
        how: Any = {"latency": model, "seed": seed, "sizes": sizes}
        if method.hint is None:
            return simulate_tensor_parallel(costs, self.ranks, strict=method.strict, **how)
        how |= {"hint": method.hint, "limit": method.limit, "coordination": self.coordination}
        return simulate_tensor_parallel(costs, self.ranks, **how)

    def simulate_cell(self, cell: Cell) -> TensorParallelSimulation:
        """Run a profile's workload once; every rank draws its messages from the workload's own model.

        Raises:
            DeadlockError, HintError: the message begins with the run.
        """
        workload = cell.workload
        try:
            return self.simulate(workload.costs(), cell.method, workload.sizes(), workload.latency, workload.seed)
        except (DeadlockError, HintError) as error:
            raise type(error)(f"{cell}, tp={self.ranks}: {error}") from error


def groups_of(tp: int | None, coordination: str | None, methods: Texts) -> Groups | None:
    """What is asked for, None without ``--tp``.

    Args:
        tp: T.
        coordination: a name of `rrfp.sim.cluster.simulation.COORDINATIONS`.
        methods: values of hint, strict, limit, admission and sends.

    Raises:
        ConfigError: for an unknown name, and for what groups cannot do.
    """
    if coordination is not None:
        from rrfp.sim.cluster.simulation import COORDINATIONS

        if tp is None:
            raise ConfigError("--coordination goes with --tp; one rank agrees with itself")
        if methods["hint"] is None:
            raise ConfigError("--coordination goes with --hint; a strict schedule is one order on every rank")
        if coordination not in COORDINATIONS:
            raise ConfigError(f"coordination is {coordination!r}, must be one of: {', '.join(COORDINATIONS)}")
    if tp is None:
        return None
    for option, only in (("admission", "staircase"), ("sends", "eager")):
        if methods[option] not in (None, only):
            raise ConfigError(f"{option} is {methods[option]!r}, must be {only} with --tp")
    return Groups(tp, coordination)


def check_cells(cells: Sequence[Cell], outputs: Texts) -> None:
    """Refuse what goes with lists of values: with groups only the seeds may be several.

    Args:
        cells: what is to run.
        outputs: values of csv and png.

    Raises:
        ConfigError: naming what is too much.
    """
    for option, value in outputs.items():
        if value is not None:
            raise ConfigError(f"--{option} goes without --tp; --json has every figure of every seed")
    if len({cell.workload.seed for cell in cells}) < len(cells):
        raise ConfigError(f"--tp takes one value of every option but --seeds, these are {len(cells)} runs")


def shown(told: TensorParallelSimulation) -> str:
    """What being several ranks cost, in one line."""
    result, way = told.result, type(told.coordination).__name__.lower()
    return (
        f"{_ranks(result.ranks)} a stage, {way}: coordination {result.coordination_share:.2%} of the step, "
        f"{result.failed_rounds_per_task:.3g} failed rounds a task, {result.messages_per_task:.3g} messages a task"
    )


def _ranks(count: int) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


@dataclass(frozen=True, slots=True)
class SeedRow:
    """One seed's figures, under the names that ``--json`` gives them.

    Attributes:
        seed: the workload's and its messages'.
        makespan, lower_bound: seconds.
        ratio: makespan / lower_bound.
        peak_max: the largest D of any rank, in chunk tasks.
        coordination_share: part of the step that the mean stage lost to coordination.
        failed_rounds_per_task, messages_per_task: see `rrfp.sim.cluster.result.TensorParallelResult`.
    """

    seed: int
    makespan: float
    lower_bound: float
    ratio: float
    peak_max: int
    coordination_share: float
    failed_rounds_per_task: float
    messages_per_task: float

    @classmethod
    def of(cls, seed: int, told: TensorParallelSimulation) -> SeedRow:
        """The figures of one run."""
        one, result = told.simulation, told.result
        return cls(
            seed,
            one.makespan,
            one.lower_bound,
            one.ratio,
            max(peak.held for peak in one.peaks),
            result.coordination_share,
            result.failed_rounds_per_task,
            result.messages_per_task,
        )


#: The figures that have a spread, with what the table calls them and how it writes them.
_FIGURES = {
    "makespan": ("makespan (s)", "#.4g"),
    "ratio": ("makespan / bound", ".3f"),
    "peak_max": ("peak held", ".3g"),
    "coordination_share": ("coordination", ".2%"),
    "failed_rounds_per_task": ("failed rounds a task", ".3g"),
    "messages_per_task": ("messages a task", ".3g"),
}


def simulate_seeds(groups: Groups, cells: Sequence[Cell], title: str, *, jobs: int | None, json: bool) -> None:
    """Run every seed, and print mean and spread, or all of it as JSON.

    Args:
        groups: how many ranks, and how they come to one order.
        cells: one method on one workload, a cell a seed.
        title: of the table.
        jobs: processes; None: one for every usable core.
        json: print JSON.
    """
    from rrfp.sim.sweep.summary import Spread
    from rrfp.sim.sweep.workers import in_order, usable_cores

    def run(place: int) -> SeedRow:
        return SeedRow.of(cells[place].workload.seed, groups.simulate_cell(cells[place]))

    rows = []
    with progress_bar(len(cells)) as advance, closing(in_order(run, len(cells), jobs=jobs or usable_cores())) as found:
        for row in found:
            rows.append(row)
            advance()
    way = "independent" if cells[0].method.hint is None else groups.coordination or "leader"
    spreads = {name: Spread.of(getattr(row, name) for row in rows) for name in _FIGURES}
    if json:
        summary = {name: asdict(spread) for name, spread in spreads.items()}
        print_json(
            {"runs": [asdict(row) for row in rows], "summary": {"tp": groups.ranks, "coordination": way, **summary}}
        )
        return
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    size, ranks = shape(cells[0].workload.costs()), _ranks(groups.ranks)
    console.print(f"{title}: {size}, {ranks} a stage, {way}; {len(rows)} seeds", soft_wrap=True)
    console.print(_table(spreads))


def _table(spreads: Mapping[str, Any]) -> Table:
    """A row a figure."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for column in ("mean", "±", "least", "most"):
        table.add_column(column, justify="right")
    for name, (label, form) in _FIGURES.items():
        spread = spreads[name]
        table.add_row(label, *(f"{value:{form}}" for value in (spread.mean, spread.std, spread.min, spread.max)))
    return table

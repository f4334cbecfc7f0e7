"""One simulated run as plain data: a workload, a method, and the two together.

What `rrfp simulate` runs once, and what a sweep is made of. Everything that a caller can get wrong by itself is refused
when these are made; only whether a method fits a workload is seen when it runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, get_args

from rrfp.core.admission import AdmissionRule, Limit
from rrfp.core.placement import Layout
from rrfp.costs.files import read_costs, read_sizes
from rrfp.costs.profiles import make_costs, microbatch_sizes
from rrfp.costs.rank_latency import SHUFFLED
from rrfp.costs.streams import whole
from rrfp.costs.table import CostTable
from rrfp.errors import ConfigError
from rrfp.hints.registry import HintSpec, create_hint, create_strict
from rrfp.schedules.csv import CsvSchedule
from rrfp.schedules.registry import ScheduleSpec
from rrfp.sim.cluster.coordination import COORDINATIONS, CoordinationName
from rrfp.sim.cluster.simulation import TensorParallelSimulation, simulate_tensor_parallel
from rrfp.sim.simulation import DEFAULT_LIMIT, SAME_BYTES, SENDS, Sends, Simulation, planned_sizes, simulate

#: How chunks may share a limit's slots.
ADMISSIONS: tuple[str, ...] = get_args(AdmissionRule)
#: ``sizes`` of a cost file that stand for the table's own times.
PLANNED = "planned"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A named and seeded workload: the arguments of `rrfp.costs.make_costs`.

    Attributes:
        tp: T, ranks of a tensor-parallel group, each of which draws its messages from ``latency``; None: single ranks.

    Raises:
        ConfigError: a value is not allowed; one line naming it and the allowed values.
    """

    profile: str
    stages: int
    microbatches: int
    chunks: int = 1
    placement: Layout = "looped"
    split: bool = False
    jitter: str = "J0"
    latency: str = "none"
    seed: int = 0
    tp: int | None = None

    def __post_init__(self) -> None:
        for name, least in (("stages", 1), ("microbatches", 1), ("chunks", 1), ("seed", 0)):
            object.__setattr__(self, name, whole(name, getattr(self, name), least))
        _check_ranks(self)
        # A table for one task refuses every word that the real one would.
        make_costs(self.profile, 1, 1, placement=self.placement, jitter=self.jitter, latency=self.latency)

    def costs(self) -> CostTable:
        """The cost table."""
        return _made(self)

    def sized_costs(self) -> CostTable:
        """The same with bytes, in proportion to planned times; see `rrfp.costs.make_costs`."""
        return _made(self, sized=True)

    def sizes(self) -> Sequence[float]:
        """How large each microbatch is, as a trainer would know it before the step."""
        return microbatch_sizes(self.profile, self.stages, self.microbatches, seed=self.seed)

    @property
    def num_tasks(self) -> int:
        """Tasks of a step, of all ranks."""
        kinds = 3 if self.split else 2
        return self.stages * self.chunks * self.microbatches * kinds * (self.tp or 1)

    @property
    def rank_draws(self) -> Mapping[str, Any]:
        """How the further ranks of a group draw their latencies."""
        return {"latency": self.latency, "seed": self.seed}

    @property
    def short_name(self) -> str:
        """For a file of its costs."""
        chunks = () if self.chunks == 1 else (f"{self.chunks}chunks", self.placement)
        size, split = f"{self.stages}x{self.microbatches}", ("split",) if self.split else ()
        latency = self.latency.replace(":", "-")
        return "-".join((self.profile, size, *chunks, *split, self.jitter, latency, f"seed{self.seed}"))

    def without_seed(self) -> Workload:
        """The same for all seeds."""
        return replace(self, seed=0)

    def __str__(self) -> str:
        return _written(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostFile:
    """A workload that a cost file holds.

    Attributes:
        costs_file: its path.
        sizes_from: what hints receive as sizes of microbatches: nothing, the table's own sums of times
            (``planned``), or the numbers of a JSON file, by its path.
        tp: as of `Workload`; further ranks have the file's own latencies of an edge in another order.

    Raises:
        ConfigError: the file, or that of the sizes, cannot be read or holds a wrong value.
    """

    costs_file: str
    sizes_from: str | None = None
    tp: int | None = None

    def __post_init__(self) -> None:
        _check_ranks(self)
        self.sizes()

    def costs(self) -> CostTable:
        """The cost table."""
        try:
            file = os.stat(self.costs_file)
        except OSError:
            return read_costs(self.costs_file)  # which says what is wrong
        return _read(self.costs_file, (file.st_ino, file.st_mtime_ns, file.st_size))

    def sized_costs(self) -> CostTable:
        """The same: with bytes if the file has them."""
        return self.costs()

    def sizes(self) -> Sequence[float] | None:
        """How large each microbatch is; None: untold."""
        costs = self.costs()
        if self.sizes_from is None:
            return None
        return planned_sizes(costs) if self.sizes_from == PLANNED else read_sizes(self.sizes_from, costs.microbatches)

    @property
    def chunks(self) -> int:
        """Chunks a stage."""
        return self.costs().chunks

    @property
    def num_tasks(self) -> int:
        """Tasks of a step, of all ranks."""
        costs = self.costs()
        return costs.num_virtual_stages * costs.microbatches * (3 if costs.split else 2) * (self.tp or 1)

    @property
    def rank_draws(self) -> Mapping[str, Any]:
        """How the further ranks of a group draw their latencies."""
        return {"latency": SHUFFLED, "seed": 0}

    def without_seed(self) -> CostFile:
        """A file has no seed."""
        return self

    def __str__(self) -> str:
        return _written(self)


def _check_ranks(workload: Workload | CostFile) -> None:
    if workload.tp is not None:
        object.__setattr__(workload, "tp", whole("tp", workload.tp, 1))


def _written(workload: Workload | CostFile) -> str:
    values = {field.name: getattr(workload, field.name) for field in fields(workload)}
    return ", ".join(f"{name}={value}" for name, value in values.items() if value is not None)


@lru_cache(maxsize=4)
def _made(workload: Workload, *, sized: bool = False) -> CostTable:
    """The methods of one workload follow each other in a sweep and share its table."""
    return make_costs(
        workload.profile,
        workload.stages,
        workload.microbatches,
        chunks=workload.chunks,
        placement=workload.placement,
        split=workload.split,
        seed=workload.seed,
        jitter=workload.jitter,
        latency=workload.latency,
        sized=sized,
    )


@lru_cache(maxsize=2)
def _read(path: str, version: tuple[int, ...]) -> CostTable:
    """Read once for all methods, and again when the file has another version."""
    return read_costs(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """What decides: a hint within a limit, or a schedule consumed strictly.

    Attributes:
        hint: a hint's name, class or instance.
        strict: a schedule's name, or a schedule file's text. Exactly one of the two is given.
        limit: with a hint, the microbatches a stage may hold, see `rrfp.core.admission.Limit.resolve`; or the bytes
            that it holds under such a limit, see `rrfp.sim.simulation.simulate`.
        admission: with a hint, how chunks share the limit's slots.
        sends: of a strict schedule, see `rrfp.sim.simulation.simulate`.
        coordination: with a hint, how the ranks of a group agree on the same order; None: the default.
        name: what rows call it; by default the name of the hint, its class, or the schedule.

    Raises:
        ConfigError: an unknown name, or a value that is not allowed.
    """

    hint: HintSpec | None = None
    strict: ScheduleSpec | None = None
    limit: int | str = DEFAULT_LIMIT
    admission: AdmissionRule = "staircase"
    sends: Sends = "eager"
    coordination: CoordinationName | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if (self.hint is None) == (self.strict is None):
            raise ConfigError("exactly one of hint and strict is needed")
        allowed = {"admission": ADMISSIONS, "sends": SENDS, "coordination": (None, *COORDINATIONS)}
        for name, values in allowed.items():
            if (value := getattr(self, name)) not in values:
                raise ConfigError(f"{name} is {value!r}, must be one of: {', '.join(filter(None, values))}")
        if self.strict is not None:
            create_strict(self.strict)
        elif self.hint is not None:
            create_hint(self.hint)
            Limit.resolve(str(self.limit).removeprefix(SAME_BYTES) if self.counts_bytes else self.limit, 0, 1)
        if not self.name:
            chosen = self.hint if self.strict is None else self.strict
            is_text = isinstance(chosen, str | CsvSchedule)
            named = str(chosen) if is_text else getattr(chosen, "__name__", type(chosen).__name__)
            object.__setattr__(self, "name", named)

    @property
    def counts_bytes(self) -> bool:
        """Whether the limit is in bytes."""
        return isinstance(self.limit, str) and self.limit.startswith(SAME_BYTES)

    @property
    def kind(self) -> str:
        """``hint`` or ``strict``."""
        return "strict" if self.hint is None else "hint"

    def simulate(
        self, costs: CostTable, sizes: Sequence[float] | None = None, *, tp: int | None = None, **rank_draws: Any
    ) -> Simulation | TensorParallelSimulation:
        """Run it once: see `rrfp.sim.simulation.simulate`, and `simulate_tensor_parallel` where ``tp`` is given.

        Raises:
            ConfigError: if it does not fit the costs, or does not go with groups of ranks.
        """
        if tp is not None:
            return self._simulate_groups(costs, tp, {"sizes": sizes, **rank_draws})
        if self.coordination is not None:
            raise ConfigError(f"coordination is {self.coordination!r}, must be None without tp")
        if self.hint is None:
            return simulate(costs, strict=self.strict, sends=self.sends)
        return simulate(
            costs, hint=self.hint, limit=self.limit, admission=self.admission, sends=self.sends, sizes=sizes
        )

    def _simulate_groups(self, costs: CostTable, tp: int, how: Mapping[str, Any]) -> TensorParallelSimulation:
        if self.counts_bytes:
            raise ConfigError(f"limit is {self.limit!r}, must count microbatches with tp")
        for name, only in (("admission", "staircase"), ("sends", "eager")):
            if getattr(self, name) != only:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, must be {only} with tp")
        if self.hint is None:
            return simulate_tensor_parallel(costs, tp, strict=self.strict, **how)
        return simulate_tensor_parallel(
            costs, tp, hint=self.hint, limit=self.limit, coordination=self.coordination, **how
        )


@dataclass(frozen=True, slots=True)
class Experiment:
    """One run: a method on a workload."""

    workload: Workload | CostFile
    method: Method

    def simulate(self) -> Simulation | TensorParallelSimulation:
        """Run it.

        Raises:
            ConfigError: if the method does not fit the workload.
            DeadlockError, HintError: as `rrfp.sim.simulation.simulate`.
        """
        workload, method = self.workload, self.method
        costs = workload.sized_costs() if method.counts_bytes else workload.costs()
        return method.simulate(costs, workload.sizes(), tp=workload.tp, **workload.rank_draws)

    def __str__(self) -> str:
        return f"{self.method.name} ({self.method.kind}) on {self.workload}"

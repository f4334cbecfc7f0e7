"""One simulated run as plain data: a method on a workload.

What `rrfp simulate` runs once, and what a sweep is made of. Everything that a caller can get wrong by itself is refused
when these are made; only whether a method fits a workload is seen when it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from rrfp.core.ready_set import MicrobatchOrder
from rrfp.costs.table import CostTable
from rrfp.errors import ConfigError
from rrfp.hints.registry import HintSpec, check_order, create_hint, create_strict
from rrfp.lab.cluster.coordination import COORDINATIONS, CoordinationName
from rrfp.lab.cluster.simulation import TensorParallelSimulation, simulate_tensor_parallel
from rrfp.lab.limit_texts import SAME_BYTES, counts_bytes
from rrfp.lab.simulation import DEFAULT_LIMIT, ORDERS, SENDS, Sends, Simulation, simulate
from rrfp.lab.sweep.workloads import PLANNED, CostFile, MultimodalWorkload, Workload
from rrfp.memory.admission import AdmissionRule, Limit
from rrfp.schedules.csv import CsvSchedule
from rrfp.schedules.registry import ScheduleSpec, schedule_names, schedule_needs

#: How chunks may share a limit's slots.
ADMISSIONS: tuple[str, ...] = get_args(AdmissionRule)

#: How one gets a cost file whose backward is split.
RECORD_SPLIT = "record the job with split=True and make a cost file of that trace"


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedMethod:
    """What decides: a hint within a limit, or a schedule consumed strictly."""

    #: a hint's name, class or instance.
    hint: HintSpec | None = None
    #: a schedule's name, or a schedule file's text. Exactly one of the two is given.
    strict: ScheduleSpec | None = None
    #: With a hint, the microbatches a stage may hold, see `rrfp.memory.admission.Limit.resolve`; or bytes, see
    #: `rrfp.lab.simulation.simulate`.
    limit: int | str = DEFAULT_LIMIT
    #: With a hint, how chunks share the limit's slots.
    admission: AdmissionRule = "staircase"
    #: With a hint, the order of the microbatches of each kind on each virtual stage.
    order: MicrobatchOrder = "free"
    #: Of a strict schedule, see `rrfp.lab.simulation.simulate`.
    sends: Sends = "eager"
    #: With a hint, how the ranks of a group agree on the same order; None: the default.
    coordination: CoordinationName | None = None
    #: What rows call it; by default the name of the hint, its class, or the schedule.
    name: str = ""

    def __post_init__(self) -> None:
        if (self.hint is None) == (self.strict is None):
            raise ConfigError("exactly one of hint and strict is needed")
        allowed = {"admission": ADMISSIONS, "order": ORDERS, "sends": SENDS, "coordination": (None, *COORDINATIONS)}
        for name, values in allowed.items():
            if (value := getattr(self, name)) not in values:
                raise ConfigError(f"{name} is {value!r}, must be one of: {', '.join(filter(None, values))}")
        if self.strict is not None:
            create_strict(self.strict)
        elif self.hint is not None:
            check_order(self.hint, self.order)
            Limit.resolve(self.limit.removeprefix(SAME_BYTES) if isinstance(self.limit, str) else self.limit, 0, 1)
        if not self.name:
            chosen = self.hint if self.strict is None else self.strict
            is_text = isinstance(chosen, str | CsvSchedule)
            named = str(chosen) if is_text else getattr(chosen, "__name__", type(chosen).__name__)
            object.__setattr__(self, "name", named)

    @property
    def counts_bytes(self) -> bool:
        """Whether the limit is in bytes."""
        return counts_bytes(self.limit)

    @property
    def wants_sizes(self) -> bool:
        """Whether its hint orders microbatches by size."""
        return self.hint is not None and create_hint(self.hint).wants_sizes

    @property
    def kind(self) -> str:
        """``hint`` or ``strict``."""
        return "strict" if self.hint is None else "hint"

    def simulate(
        self, costs: CostTable, sizes: Sequence[float] | None = None, *, tp: int | None = None, **rank_draws: Any
    ) -> Simulation | TensorParallelSimulation:
        """Run it once: see `rrfp.lab.simulation.simulate`, and `simulate_tensor_parallel` where ``tp`` is given."""
        if tp is not None:
            return self._simulate_groups(costs, tp, {"sizes": sizes, **rank_draws})
        if self.coordination is not None:
            raise ConfigError(f"coordination is {self.coordination!r}, must be None without tp")
        if self.hint is None:
            return simulate(costs, strict=self.strict, sends=self.sends)
        if self.admission == "paper" and self.counts_bytes and not str(self.limit).startswith(SAME_BYTES):
            raise ConfigError(f"admission is 'paper', which counts microbatches, and limit is {self.limit!r}: bytes")
        how: Mapping[str, Any] = {"limit": self.limit, "admission": self.admission, "order": self.order}
        return simulate(costs, hint=self.hint, sends=self.sends, sizes=sizes, **how)

    def _simulate_groups(self, costs: CostTable, tp: int, how: Mapping[str, Any]) -> TensorParallelSimulation:
        if self.counts_bytes:
            raise ConfigError(f"limit is {self.limit!r}, must count microbatches with tp")
        for name, only in (("admission", "staircase"), ("sends", "eager")):
            if getattr(self, name) != only:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, must be {only} with tp")
        if self.hint is None:
            return simulate_tensor_parallel(costs, tp, strict=self.strict, **how)
        chosen: Mapping[str, Any] = {"limit": self.limit, "coordination": self.coordination, "order": self.order}
        return simulate_tensor_parallel(costs, tp, hint=self.hint, **chosen, **how)


@dataclass(frozen=True, slots=True)
class Experiment:
    """One run: a method on a workload."""

    workload: Workload | CostFile | MultimodalWorkload
    method: SimulatedMethod

    def simulate(self) -> Simulation | TensorParallelSimulation:
        """Run it."""
        workload, method = self.workload, self.method
        costs = workload.sized_costs() if method.counts_bytes else workload.costs()
        order = method.hint if method.strict is None else method.strict
        if isinstance(order, str) and order in schedule_names() and costs.graph is None:
            is_file = isinstance(workload, CostFile)
            schedule_needs(order).check(order, costs.to_graph(), RECORD_SPLIT if is_file else "--split splits it")
        return method.simulate(costs, workload.sizes(), tp=workload.tp, **workload.rank_draws)

    def with_planned_sizes(self) -> Experiment | None:
        """The same with the sums of the file's times as sizes, where the hint wants sizes and the file has none."""
        workload = self.workload
        if not (isinstance(workload, CostFile) and self.method.wants_sizes and workload.sizes() is None):
            return None
        planned = replace(workload, sizes_from=PLANNED)
        return None if len({*(planned.sizes() or ())}) < 2 else Experiment(planned, self.method)

    def __str__(self) -> str:
        return f"{self.method.name} ({self.method.kind}) on {self.workload}"

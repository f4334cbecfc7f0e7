"""One simulated run as plain data: a method on a workload.

What `rrfp simulate` runs once, and what a sweep is made of. Everything that a caller can get wrong by itself is refused
when these are made; only whether a method fits a workload is seen when it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args

from rrfp.core.admission import AdmissionRule
from rrfp.costs.table import CostTable
from rrfp.errors import ConfigError
from rrfp.hints.registry import HintSpec, create_hint, create_strict
from rrfp.schedules.csv import CsvSchedule
from rrfp.schedules.registry import ScheduleSpec
from rrfp.sim.cluster.coordination import COORDINATIONS, CoordinationName
from rrfp.sim.cluster.simulation import TensorParallelSimulation, simulate_tensor_parallel
from rrfp.sim.limit_texts import SAME_BYTES, counts_bytes, limit_of
from rrfp.sim.simulation import DEFAULT_LIMIT, SENDS, Sends, Simulation, simulate
from rrfp.sim.sweep.multimodal import MultimodalWorkload
from rrfp.sim.sweep.workloads import CostFile, Workload

#: How chunks may share a limit's slots.
ADMISSIONS: tuple[str, ...] = get_args(AdmissionRule)


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """What decides: a hint within a limit, or a schedule consumed strictly.

    Attributes:
        hint: a hint's name, class or instance.
        strict: a schedule's name, or a schedule file's text. Exactly one of the two is given.
        limit: with a hint, the microbatches a stage may hold, see `rrfp.core.admission.Limit.resolve`; or bytes, see
            `rrfp.sim.simulation.simulate`.
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
            limit_of(self.limit.removeprefix(SAME_BYTES) if isinstance(self.limit, str) else self.limit, 0, 1)
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

    workload: Workload | CostFile | MultimodalWorkload
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

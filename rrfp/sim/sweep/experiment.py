"""One simulated run as plain data: a workload, a method, and the two together.

What `rrfp simulate` runs without a cost file, and what a sweep is made of. Everything that a caller can get wrong by
itself is refused when these are made; only whether a method fits a workload is seen when it runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import get_args

from rrfp.core.admission import AdmissionRule, Limit
from rrfp.core.topology import Layout
from rrfp.costs.profiles import make_costs, microbatch_sizes
from rrfp.costs.streams import whole
from rrfp.costs.table import CostTable
from rrfp.errors import ConfigError, DeadlockError, HintError
from rrfp.hints.registry import HintSpec, create_hint, create_strict
from rrfp.sim.simulation import DEFAULT_LIMIT, SENDS, Sends, Simulation, simulate

#: How chunks may share a limit's slots.
ADMISSIONS: tuple[str, ...] = get_args(AdmissionRule)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A named and seeded workload: the arguments of `rrfp.costs.make_costs`.

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

    def __post_init__(self) -> None:
        for name, least in (("stages", 1), ("microbatches", 1), ("chunks", 1), ("seed", 0)):
            object.__setattr__(self, name, whole(name, getattr(self, name), least))
        # A table for one task refuses every word that the real one would.
        make_costs(self.profile, 1, 1, placement=self.placement, jitter=self.jitter, latency=self.latency)

    def costs(self) -> CostTable:
        """The cost table."""
        return _costs(self)

    def sizes(self) -> Sequence[float]:
        """How large each microbatch is, as a trainer would know it before the step."""
        return microbatch_sizes(self.profile, self.stages, self.microbatches, seed=self.seed)


@lru_cache(maxsize=2)
def _costs(workload: Workload) -> CostTable:
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
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """What decides: a hint within a limit, or a schedule consumed strictly.

    Attributes:
        hint: a hint's name, class or instance.
        strict: a schedule's name. Exactly one of the two is given.
        limit: with a hint, the microbatches a stage may hold; see `rrfp.core.admission.Limit.resolve`.
        admission: with a hint, how chunks share the limit's slots.
        sends: of a strict schedule, see `rrfp.sim.simulation.simulate`.
        name: what rows call it; by default the name of the hint, its class, or the schedule.

    Raises:
        ConfigError: an unknown name, or a value that is not allowed.
    """

    hint: HintSpec | None = None
    strict: str | None = None
    limit: int | str = DEFAULT_LIMIT
    admission: AdmissionRule = "staircase"
    sends: Sends = "eager"
    name: str = ""

    def __post_init__(self) -> None:
        if (self.hint is None) == (self.strict is None):
            raise ConfigError("exactly one of hint and strict is needed")
        for name, value, allowed in (("admission", self.admission, ADMISSIONS), ("sends", self.sends, SENDS)):
            if value not in allowed:
                raise ConfigError(f"{name} is {value!r}, must be one of: {', '.join(allowed)}")
        if self.strict is not None:
            create_strict(self.strict)
        elif self.hint is not None:
            create_hint(self.hint)
            Limit.resolve(self.limit, 0, 1)
        if not self.name:
            chosen = self.hint if self.strict is None else self.strict
            named = chosen if isinstance(chosen, str) else getattr(chosen, "__name__", type(chosen).__name__)
            object.__setattr__(self, "name", named)

    @property
    def kind(self) -> str:
        """``hint`` or ``strict``."""
        return "strict" if self.hint is None else "hint"

    def simulate(self, costs: CostTable, sizes: Sequence[float] | None = None) -> Simulation:
        """Run it once; see `rrfp.sim.simulation.simulate`."""
        if self.hint is None:
            return simulate(costs, strict=self.strict, sends=self.sends)
        return simulate(
            costs, hint=self.hint, limit=self.limit, admission=self.admission, sends=self.sends, sizes=sizes
        )


@dataclass(frozen=True, slots=True)
class Cell:
    """One run: a method on a workload."""

    workload: Workload
    method: Method

    def simulate(self) -> Simulation:
        """Run it.

        Raises:
            ConfigError: if the method does not fit the workload.
            DeadlockError, HintError: as `rrfp.sim.simulation.simulate`; the message begins with the run.
        """
        try:
            return self.method.simulate(self.workload.costs(), self.workload.sizes())
        except (DeadlockError, HintError) as error:
            raise type(error)(f"{self}: {error}") from error

    def __str__(self) -> str:
        values = ", ".join(f"{one.name}={getattr(self.workload, one.name)}" for one in fields(self.workload))
        return f"{self.method.name} ({self.method.kind}) on {values}"

"""One simulated run as plain data: a method on a workload.

What `rrfp simulate` runs once, and what a sweep is made of. Everything that a caller can get wrong by itself is refused
when these are made; only whether a method fits a workload is seen when it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rrfp.errors import ConfigError
from rrfp.lab.limit_texts import DEFAULT_LIMIT, SAME_BYTES, counts_bytes
from rrfp.lab.sweep.workloads import PLANNED, CostFile, MultimodalWorkload, Workload, as_option
from rrfp.memory.admission import DEFAULT_RULE, OFFERED_RULES, RULES

# What computes is imported where it is used: `rrfp --help` looks at the fields, and must not wait for numpy.
if TYPE_CHECKING:
    from rrfp.core.ready_set import MicrobatchOrder
    from rrfp.costs.table import CostTable
    from rrfp.hints.registry import HintSpec
    from rrfp.lab.cluster.coordination import CoordinationName
    from rrfp.lab.cluster.simulation import TensorParallelSimulation
    from rrfp.lab.simulation import Sends, Simulation
    from rrfp.schedules.registry import ScheduleSpec

#: How one gets a cost file whose backward is split.
RECORD_SPLIT = "record the job with split=True and make a cost file of that trace"

#: The accepted forms of a hint, for help texts.
HINT_FORMS = "a name that `rrfp hints` lists, module:attribute, or file.py:attribute"
_HINT = (
    f"Dispatch by this hint: {HINT_FORMS}. Default of rrfp simulate without --strict: slot-aware-pyramid, with "
    "--order natural slot-aware."
)
_STRICT = (
    "Run this schedule to the letter: a name that `rrfp hints` lists as one, a file in torch's grammar, or a folder "
    "that event_log= wrote, with the newest training step in it that ran whole."
)
_LIMIT = (
    "Microbatches a stage may hold: a number, 1f1b (N - i on stage i), n, 2n or auto (by latencies and the spread of "
    "times); bytes:LIMIT: as many bytes as it holds under that limit; SIZE: bytes, such as 8MB. Not with --strict; "
    "default {default}."
)
_LIMITS = ("1f1b", "n", "2n", "auto", "bytes:1f1b", "bytes:n", "bytes:2n")
_ADMISSION = "How chunks share the limit's slots. Not with --strict; default {default}."
_ORDER = (
    "natural: microbatches of one kind run as 0, 1, 2, ... on each virtual stage. Not with --strict; default {default}."
)
_SENDS = "blocking: 1f1b sends as Megatron does, sender and receiver wait for each other. With --strict only."
_COORDINATION = "How the ranks of a group agree on the same order. With --tp, not with --strict; default leader."

#: A value of an option is tried beside one of these.
_BF, _1F1B = {"hint": "bf"}, {"strict": "1f1b"}


def named_or_read_schedule(text: str) -> ScheduleSpec:
    """A schedule's name, the content of a .csv file, or the newest step in a folder of event logs."""
    from rrfp.schedules.csv import CsvSchedule
    from rrfp.trace.event_log import read_executed

    if Path(text).is_dir():
        return read_executed(text)
    if not text.endswith(".csv"):
        return text
    try:
        return CsvSchedule(text, Path(text).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"strict is {text!r}: cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError:
        raise ConfigError(f"strict is {text!r}: is not CSV (not UTF-8 text)") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedMethod:
    """What decides: a hint within a limit, or a schedule consumed strictly."""

    #: a hint's name, class or instance.
    hint: HintSpec | None = field(
        default=None,
        metadata=as_option(
            _HINT,
            "NAME",
            known="rrfp.hints.registry:hint_names",
            reads="rrfp.hints.registry:named_or_loaded_hint",
            beside={},
        ),
    )
    #: a schedule's name, or a schedule file's text. Exactly one of the two is given.
    strict: ScheduleSpec | None = field(
        default=None,
        metadata=as_option(
            _STRICT,
            "NAME|FILE.csv|FOLDER",
            known="rrfp.schedules.registry:schedule_names",
            reads="rrfp.lab.sweep.experiment:named_or_read_schedule",
            beside={},
        ),
    )
    #: With a hint, the microbatches a stage may hold, see `rrfp.memory.admission.Limit.resolve`; or bytes, see
    #: `rrfp.lab.simulation.simulate`.
    limit: int | str = field(
        default=DEFAULT_LIMIT, metadata=as_option(_LIMIT, "[bytes:]K|1f1b|n|2n|auto|SIZE", known=_LIMITS, beside=_BF)
    )
    #: With a hint, how chunks share the limit's slots.
    admission: str = field(default=DEFAULT_RULE, metadata=as_option(_ADMISSION, known=OFFERED_RULES, beside=_BF))
    #: With a hint, the order of the microbatches of each kind on each virtual stage.
    order: MicrobatchOrder = field(default="free", metadata=as_option(_ORDER, known=("free", "natural"), beside=_BF))
    #: Of a strict schedule, see `rrfp.lab.simulation.simulate`.
    sends: Sends = field(default="eager", metadata=as_option(_SENDS, known=("eager", "blocking"), beside=_1F1B))
    #: With a hint, how the ranks of a group agree on the same order; None: the default.
    coordination: CoordinationName | None = field(
        default=None, metadata=as_option(_COORDINATION, known=("leader", "agreement"), beside=_BF)
    )
    #: What rows call it; by default the name of the hint, its class, or the schedule.
    name: str = ""

    def __post_init__(self) -> None:
        from rrfp.hints.registry import check_order, create_strict
        from rrfp.lab.cluster.coordination import COORDINATIONS
        from rrfp.lab.simulation import ORDERS, SENDS
        from rrfp.memory.admission import Limit
        from rrfp.schedules.csv import CsvSchedule
        from rrfp.schedules.executed import ExecutedSchedule

        if (self.hint is None) == (self.strict is None):
            raise ConfigError("exactly one of hint and strict is needed")
        allowed = {"admission": OFFERED_RULES, "order": ORDERS, "sends": SENDS, "coordination": (None, *COORDINATIONS)}
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
            is_text = isinstance(chosen, str | CsvSchedule | ExecutedSchedule)
            named = str(chosen) if is_text else getattr(chosen, "__name__", type(chosen).__name__)
            object.__setattr__(self, "name", named)

    @property
    def counts_bytes(self) -> bool:
        return counts_bytes(self.limit)

    @property
    def wants_sizes(self) -> bool:
        """Whether its hint orders microbatches by size."""
        from rrfp.hints.registry import create_hint

        return self.hint is not None and create_hint(self.hint).wants_sizes

    @property
    def kind(self) -> str:
        """``hint`` or ``strict``."""
        return "strict" if self.hint is None else "hint"

    def simulate(
        self, costs: CostTable, sizes: Sequence[float] | None = None, *, tp: int | None = None, **rank_draws: Any
    ) -> Simulation | TensorParallelSimulation:
        """Run it once: see `rrfp.lab.simulation.simulate`, and `simulate_tensor_parallel` where ``tp`` is given."""
        from rrfp.lab.simulation import simulate

        if tp is not None:
            return self._simulate_groups(costs, tp, {"sizes": sizes, **rank_draws})
        if self.coordination is not None:
            raise ConfigError(f"coordination is {self.coordination!r}, must be None without tp")
        if self.hint is None:
            return simulate(costs, strict=self.strict, sends=self.sends)
        is_in_bytes = self.counts_bytes and not str(self.limit).startswith(SAME_BYTES)
        if is_in_bytes and not RULES[self.admission].counts_bytes:
            rule = repr(self.admission)
            raise ConfigError(f"admission is {rule}, which counts microbatches, and limit is {self.limit!r}: bytes")
        how: Mapping[str, Any] = {"limit": self.limit, "admission": self.admission, "order": self.order}
        return simulate(costs, hint=self.hint, sends=self.sends, sizes=sizes, **how)

    def _simulate_groups(self, costs: CostTable, tp: int, how: Mapping[str, Any]) -> TensorParallelSimulation:
        from rrfp.lab.cluster.simulation import simulate_tensor_parallel

        if self.counts_bytes:
            raise ConfigError(f"limit is {self.limit!r}, must count microbatches with tp")
        for name, only in (("admission", DEFAULT_RULE), ("sends", "eager")):
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
        from rrfp.schedules.registry import schedule_names, schedule_needs

        workload, method = self.workload, self.method
        costs = workload.costs(sized=method.counts_bytes)
        order = method.hint if method.strict is None else method.strict
        if isinstance(order, str) and order in schedule_names() and costs.graph is None:
            is_file = isinstance(workload, CostFile)
            schedule_needs(order).check(order, costs.to_graph(), RECORD_SPLIT if is_file else "--split splits it")
        return method.simulate(costs, workload.sizes(), tp=workload.tp, **workload.rank_draws)

    def with_planned_sizes(self) -> Experiment | None:
        """The same with planned sizes, where the hint lacks any."""
        workload = self.workload
        if not (isinstance(workload, CostFile) and self.method.wants_sizes and workload.sizes() is None):
            return None
        planned = replace(workload, sizes_from=PLANNED)
        return None if len({*(planned.sizes() or ())}) < 2 else Experiment(planned, self.method)

    def __str__(self) -> str:
        return f"{self.method.kind} {self.method.name} on {self.workload}"

"""A measured step: what all ranks reported, joined and checked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from benchmarks.shared.clocks import COPIER, GLOO, GROUPS, LANE, LOOP, ZMQ
from benchmarks.shared.comparison import Method, Runtime, Turn
from rrfp.costs import CostTable
from rrfp.model.schedule import Schedule
from rrfp.model.tasks import Kind, Task
from rrfp.trace.held import peak_held
from rrfp.trace.spans import StepTrace, TaskSpan

#: A step counts as disturbed if other processes took more than so many cores meanwhile.
DISTURBED_CORES = 0.3

_OF_RRFP = (LOOP, LANE, COPIER, ZMQ)
#: Threads of the runtime that does not run the step: they belong to no method.
_FOREIGN = {runtime: (GLOO,) if runtime is Runtime.RRFP else _OF_RRFP for runtime in Runtime}


@dataclass(frozen=True)
class Step:
    """One step of one method.

    Attributes:
        turn: whose it is.
        method: what ran.
        seconds: from the call on all ranks until the last one has returned.
        begin_s: from the call to the first task of stage 0.
        end_s: from the end of the last task until the last rank has returned.
        others: cores that other processes took meanwhile; None where it is not known.
        cpu: processor seconds of all ranks by group of threads, without those of the other runtime.
        spans: by rank, its tasks in the order in which they began, from the call on.
        gradients: by rank and chunk.
    """

    turn: Turn
    method: Method
    seconds: float
    begin_s: float
    end_s: float
    others: float | None
    cpu: Mapping[str, float]
    spans: Sequence[Sequence[TaskSpan]]
    gradients: Sequence[Sequence[float]]

    @classmethod
    def of(cls, line: Mapping[str, Any], methods: Mapping[str, Method]) -> Step:
        """Join a line of rank 0; ``methods`` by name."""
        turn, ranks = Turn.of(line["turn"]), line["ranks"]
        method = methods[turn.method]
        start = ranks[0]["started"]
        spans = [
            [TaskSpan(stage, Task.parse(text), began - start, ended - start) for text, began, ended in rank["spans"]]
            for stage, rank in enumerate(ranks)
        ]
        seconds = max(rank["returned"] for rank in ranks) - start
        foreign = _FOREIGN[method.runtime]
        return cls(
            turn,
            method,
            seconds,
            begin_s=min(span.start for span in spans[0]),
            end_s=seconds - max(span.end for stage in spans for span in stage),
            others=others_of(ranks),
            cpu={group: sum(rank["cpu"][group] for rank in ranks) for group in GROUPS if group not in foreign},
            spans=spans,
            gradients=[rank["gradients"] for rank in ranks],
        )

    @property
    def is_disturbed(self) -> bool:
        """Whether other processes may have changed its times."""
        return self.others is not None and self.others > DISTURBED_CORES

    @property
    def tasks(self) -> int:
        """How many ran."""
        return sum(map(len, self.spans))

    @property
    def cpu_per_task(self) -> float:
        """Processor seconds."""
        return sum(self.cpu.values()) / self.tasks

    @property
    def order(self) -> Schedule:
        """The tasks of each stage, as they began."""
        return Schedule("executed", tuple(tuple(span.task for span in stage) for stage in self.spans))

    @cached_property
    def held(self) -> tuple[float, ...]:
        """For each stage, the most microbatches that it held, from the start of F to the end of the last task."""
        every = tuple(span for stage in self.spans for span in stage)
        trace = StepTrace(self.turn.number, 0.0, self.seconds, every, (), ())
        return tuple(peak_held(trace, stage) / self.method.form.chunks for stage in range(len(self.spans)))

    def held_bytes(self, costs: CostTable) -> tuple[int, ...]:
        """For each stage, the most bytes of ``costs`` that it held, from the end of F to the end of the last task."""
        return tuple(_peak_bytes(spans, costs) for spans in self.spans)

    def check(self, costs: CostTable) -> None:
        """Refuse a step that has not done its work.

        Raises:
            SystemExit: if a task of ``costs`` did not run once, on its stage, or a gradient is wrong.
        """
        kinds = (Kind.F, Kind.B, Kind.W) if costs.split else (Kind.F, Kind.B)
        for stage, spans in enumerate(self.spans):
            owned = costs.virtual_stages_of(stage)
            expected = Counter(Task(kind, m, v) for kind in kinds for m in range(costs.microbatches) for v in owned)
            ran = Counter(span.task for span in spans)
            if ran != expected:
                wrong = sorted(map(str, (ran - expected) | (expected - ran)))
                raise SystemExit(f"{self._name}: on stage {stage} these tasks did not run once: {', '.join(wrong)}")
            gradient = costs.microbatches * (costs.microbatches + 1) / 2  # of microbatch m it is m + 1
            if list(self.gradients[stage]) != [gradient] * len(owned):
                raise SystemExit(
                    f"{self._name}: gradients on stage {stage} are {self.gradients[stage]}, not {gradient}"
                )

    @property
    def _name(self) -> str:
        return f"{self.turn.method}, {self.turn.cell}, round {self.turn.number}"


def _peak_bytes(spans: Sequence[TaskSpan], costs: CostTable) -> int:
    ends: dict[tuple[int, int], float] = {}
    changes = []
    for span in spans:
        key = span.task.microbatch, span.task.virtual_stage
        ends[key] = max(span.end, ends.get(key, span.end))
        if span.task.kind is Kind.F:
            changes.append((span.end, costs.held_bytes(*key)))
    changes += [(end, -costs.held_bytes(*key)) for key, end in ends.items()]
    return max(accumulate(num_bytes for _, num_bytes in sorted(changes)), default=0)


def others_of(ranks: Sequence[Mapping[str, Any]]) -> float | None:
    """Cores that processes other than the ranks took between rank 0's readings."""
    first = ranks[0]
    if first["machine"] is None:
        return None
    own = sum(sum(rank["cpu"].values()) for rank in ranks)
    return max(0.0, float(first["machine"] - own)) / float(first["window"])

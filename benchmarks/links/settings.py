"""What the processes of the benchmark run: PipeMorph's setting, on torch's schedules and on RRFP."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import numpy as np

from benchmarks.integrations import settings as integrations
from benchmarks.integrations.settings import Place, Way, torch_way
from benchmarks.links import trace
from benchmarks.links.simulated import LINKS, MILLISECONDS
from benchmarks.shared.comparison import Cell, Runtime, Turn
from benchmarks.shared.tables import Form
from rrfp.costs import CostTable
from rrfp.model.placement import Placement
from rrfp.pipeline.options import OptionArguments


def _rrfp(form: Form, **options: Any) -> Way:
    own = cast("OptionArguments", {**options, "split": form is Form.SPLIT})
    return Way(Runtime.RRFP, form, own, place=Place.PIPELINE)


TORCH_1F1B, TORCH_ZBV, STRICT, TIGHT, AUTO = "torch 1F1B", "torch ZBV", "strict 1f1b", "1f1b", "auto"

METHODS: Mapping[str, Way] = {
    TORCH_1F1B: torch_way("Schedule1F1B", Form.WHOLE),
    TORCH_ZBV: torch_way("ScheduleZBVZeroBubble", Form.V),
    STRICT: _rrfp(Form.WHOLE, strict="1f1b"),
    TIGHT: _rrfp(Form.SPLIT, limit="1f1b"),
    "n": _rrfp(Form.SPLIT, limit="n"),
    "2n": _rrfp(Form.SPLIT, limit="2n"),
    AUTO: _rrfp(Form.SPLIT, limit="auto"),
}

#: Steps of each method in each cell that are not measured: the limit follows within so many.
UNMEASURED = 5

#: The slow links by name: those of PipeMorph's trace, which change from step to step.
TRACE = "trace"


@dataclass(frozen=True, slots=True)
class Settings(integrations.Settings):
    """See `Comparison`: profiles are slow links by name, jitters their milliseconds.

    ``pace`` is by how much tasks and delays are longer than PipeMorph's; of its trace a step stands for so many
    ``iterations``.
    """

    METHODS: ClassVar[Mapping[str, Way]] = METHODS
    PEERS: ClassVar[tuple[str, ...]] = (TORCH_1F1B, TORCH_ZBV)

    pace: float = 1.0
    iterations: int = 10

    def turns(self) -> Iterator[Turn]:
        """All steps in order: in each cell those that are not measured (numbers up to 0), then alternating rounds."""
        for links in self.profiles:
            for delay in self.jitters if links in LINKS else ("0",):
                cell = Cell(self.stages, links, delay)
                for method in self.methods:
                    for number in range(-UNMEASURED if method == AUTO else -1, 0):
                        yield Turn(cell, number, method)
                for number in range(1, self.rounds + 1):
                    for method in self.methods:
                        yield Turn(cell, number, method)

    def delay_of(self, turn: Turn) -> tuple[tuple[int, ...], float]:
        """The slow links of a step, and their seconds."""
        cell = turn.cell
        if cell.profile == TRACE:
            links, milliseconds = trace.slow_in(turn.number, self.iterations)
        else:
            links, milliseconds = LINKS.get(cell.profile, ()), float(cell.jitter)
        return tuple(link for link in links if link < self.stages - 1), 1e-3 * self.pace * milliseconds

    def delayed_table(self, turn: Turn) -> CostTable:
        """The durations of a step, and the latencies of its cell."""
        table, (links, seconds) = self.table(turn), self.delay_of(turn)
        latency = table.latency_forward.copy()
        latency[list(links)] = seconds
        return replace(table, latency_forward=latency, latency_backward=latency)

    def table(self, turn: Turn, form: Form | None = None) -> CostTable:
        """The durations of a step."""
        form = self.METHODS[turn.method].form if form is None else form
        placement = Placement(self.stages, form.chunks, form.layout)
        shape = placement.num_virtual_stages, self.microbatches
        scale = 1e-3 * self.pace / form.chunks
        forward, backward, weight = (np.full(shape, scale * each) for each in MILLISECONDS.values())
        none = np.zeros((shape[0] - 1, shape[1]))
        if not form.is_split:
            backward, weight = backward + weight, cast("Any", None)
        return CostTable(
            self.stages, form.chunks, form.layout, self.microbatches, forward, backward, weight, none, none
        )

"""One rank of the forms of the multimodal model, started by torchrun: they alternate by step on emulated stages."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist

import rrfp
from benchmarks.graphs.forms import SCALE, Settings, Turn, declared, visits_of
from benchmarks.graphs.runs import CHAIN, LIMITS
from benchmarks.shared.turns import SILENT, report, timed
from rrfp.compute.payload import Payload
from rrfp.costs.table import CostTable
from rrfp.lab.emulated import EmulatedStage, table_durations
from rrfp.model.model_graph import ModelGraph
from rrfp.model.tasks import Task
from rrfp.pipeline.options import OptionArguments

#: The durations of a step that warms up, over a measured one's.
_WARM_UP = 0.1


class SizedStage(EmulatedStage):
    """Emulated stages whose forwards show what they will hold, as inputs of other shapes do."""

    def signature(self, task: Task, inputs: tuple[Payload, ...]) -> Hashable:
        """See `StageProgram.signature`."""
        return self.input_bytes(task, inputs)


class Form:
    """One form under one limit: its pipeline, and the table that its stages follow.

    Args:
        settings: of the run.
        turn: any of the form under its limit.
        stack: closes the pipeline.
    """

    def __init__(self, settings: Settings, turn: Turn, stack: ExitStack) -> None:
        self._table = table = settings.table(turn)
        graph = None if turn.form == CHAIN else declared(table)
        tasks = table.to_graph() if graph is None else ModelGraph.of(graph).tasks
        assert tasks.names == table.to_graph().names
        self._program = SizedStage(tasks, table_durations(table), settings.num_bytes, held=self._held)
        options: OptionArguments = {**SILENT, "limit": rrfp.Limit(bytes=SCALE * LIMITS[turn.limit])}
        self._pipe = stack.enter_context(rrfp.Pipeline(self._program, graph=graph, **options).blocking())
        self._has_graph = graph is not None
        #: By stage, the most that the last step held.
        self.peak_bytes: list[int] = []

    def _held(self, microbatch: int, virtual_stage: int) -> int:
        held = self._table.held
        return 0 if held is None else SCALE * int(held[virtual_stage, microbatch])

    def step_on(self, table: CostTable, pace: float) -> Callable[[Sequence[float] | None], Callable[[], object]]:
        """What runs a step on ``table``, whose durations count ``pace`` times."""
        self._table, durations = table, table_durations(table)
        self._program.durations = lambda task: durations(task) * pace
        visits = visits_of(table) if self._has_graph else None

        def step(sizes: Sequence[float] | None) -> Callable[[], object]:
            result = self._pipe.step(microbatches=table.microbatches, sizes=sizes, visits=visits)
            return lambda: self._settle(result)

        return step

    def _settle(self, result: rrfp.StepResult) -> None:
        self.peak_bytes = list(result.peak_bytes)


def main() -> None:
    """Entry point under torchrun."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    settings = Settings(**json.loads(sys.argv[1]))
    with ExitStack() as stack:
        forms: dict[tuple[str, str], Form] = {}
        for turn in settings.turns():
            key = (turn.limit, turn.form)
            if key not in forms:
                forms[key] = Form(settings, turn, stack)
            step = forms[key].step_on(settings.table(turn), 1.0 if turn.number else _WARM_UP)
            own = timed(step, settings.sizes(turn))
            report(turn, {**own, "peak_bytes": forms[key].peak_bytes})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""The method whose limit is on bytes: in each step, on each stage, as many as the same hint holds by count.

Messages are as large for every microbatch, as torch's schedules demand. So what a microbatch holds is said and not
allocated: `OwnBytesStage` tells the runtime the table's bytes, as shapes would tell them of a real module.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack

import torch

from benchmarks.peers.orders import own_bytes
from benchmarks.peers.settings import METHODS, OWN_BYTES, Settings
from benchmarks.shared.comparison import Turn
from benchmarks.shared.sleeping import Stages, loss_fn
from benchmarks.shared.tables import scaled
from benchmarks.shared.turns import SILENT, WARM_UP
from rrfp.compute.payload import Payload
from rrfp.compute.torch_stage import TorchStage
from rrfp.costs import CostTable
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Task
from rrfp.model.topology import Topology
from rrfp.pipeline.api import Pipeline
from rrfp.pipeline.faces import BlockingPipeline
from rrfp.pipeline.options import OptionArguments


class OwnBytesStage(TorchStage):
    """Holds what the table says, from the end of F to the end of the last task; its outputs are part of it.

    Attributes:
        costs: of the step; set before it opens.
    """

    costs: CostTable

    def held_bytes(self, microbatch: int, virtual_stage: int) -> int:
        """See `StageProgram.held_bytes`."""
        return self.costs.held_bytes(microbatch, virtual_stage)

    def held_output_bytes(self, microbatch: int, virtual_stage: int) -> int:
        """See `StageProgram.held_output_bytes`."""
        return self.held_bytes(microbatch, virtual_stage)

    def input_bytes(self, task: Task, inputs: tuple[Payload, ...]) -> int | None:
        """See `StageProgram.input_bytes`: in proportion to what it will hold."""
        return self.held_bytes(task.microbatch, task.virtual_stage)

    def signature(self, task: Task, inputs: tuple[Payload, ...]) -> Hashable:
        """See `StageProgram.signature`."""
        return self.held_bytes(task.microbatch, task.virtual_stage)


class OwnBytes:
    """The method on one rank. Each step has its own limit, and so a pipeline of its own.

    Args:
        settings: the run's.
        rank: 0..stages-1.
        stages: the rank's modules.
    """

    def __init__(self, settings: Settings, rank: int, stages: Stages) -> None:
        self._settings, self._rank, self._stages = settings, rank, stages
        self._method = METHODS[OWN_BYTES]
        self._open = ExitStack()
        self._pipe: BlockingPipeline | None = None

    def prepare(self, turn: Turn) -> None:
        """Open the pipeline of the method's next step, and warm it up with another step's microbatches."""
        if turn.method != OWN_BYTES:
            return
        self.close()
        costs, form = self._settings.table(turn), self._method.form
        (module,), placement = self._stages.of(form), self._stages.placement(form)
        graph = TaskGraph.chain(self._settings.stages, split=form.is_split)
        program = OwnBytesStage(
            dict(zip(placement.virtual_stages(self._rank), [module], strict=True)), graph, loss_fn=loss_fn
        )
        limit = own_bytes(costs, self._settings.sizes(turn))[self._rank]
        options: OptionArguments = {**SILENT, **self._method.options, "limit": limit}
        pipe = Pipeline(program, topology=Topology.from_env(), **options)
        self._pipe = self._open.enter_context(pipe.blocking())
        before = turn._replace(number=0)
        program.costs = self._settings.table(before)
        module.open_step(scaled(program.costs, WARM_UP))
        self.step(self._settings.sizes(before))
        module.zero_grad()
        program.costs = costs

    def step(self, sizes: Sequence[float] | None) -> Callable[[], object]:
        """One step; `turns.Step`."""
        assert self._pipe is not None
        count = self._settings.microbatches
        rows = [torch.zeros(1, 1) for _ in range(count)]
        inputs = rows if self._rank == 0 else None
        targets = rows if self._rank == self._settings.stages - 1 else None
        kwargs = [{"microbatch": torch.tensor([m])} for m in range(count)]
        result = self._pipe.step(inputs, targets, kwargs=kwargs, sizes=sizes)
        return lambda: result.breakdown

    def close(self) -> None:
        """Close the pipeline that is open, if there is one."""
        self._open.close()
        self._pipe = None

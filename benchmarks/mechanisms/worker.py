"""One rank of the benchmark of mechanisms, started by torchrun: all methods in one process, alternating by step."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.links.delays import Delays, delaying
from benchmarks.mechanisms.blocking import BlockingSchedule
from benchmarks.mechanisms.settings import BLOCKING, DEFAULT, DELAYED, LATE, LATE_BLOCKING, METHODS, STRICT, Settings
from benchmarks.shared.comparison import NUM_BYTES, Turn
from benchmarks.shared.sleeping import Stages, loss_fn
from benchmarks.shared.tables import Form
from benchmarks.shared.turns import SILENT, Step, run_turns
from rrfp.model.topology import Topology
from rrfp.pipeline.api import Pipeline
from rrfp.trace.plain import to_plain
from rrfp.trace.spans import StepTrace


class Methods:
    """The methods on one rank, and the messages of the steps that ran."""

    def __init__(self, settings: Settings, stages: Stages, stack: ExitStack) -> None:
        self._settings, self._stages, self._stack = settings, stages, stack
        self._rank = dist.get_rank()
        self._delays, self._turn = Delays(), Turn(next(settings.turns()).cell, 0, "")
        [module] = stages.of(Form.WHOLE)
        self._blocking = BlockingSchedule(module, self._rank, settings.stages, settings.microbatches, NUM_BYTES)
        self._traces: list[tuple[Turn, StepTrace]] = []
        self._waits: list[tuple[Turn, list[float]]] = []

    def steps(self) -> dict[str, Step]:
        """By name; what is late by different times is one pipeline."""
        late = None
        steps = dict[str, Step]()
        for name in self._settings.methods:
            if name in (BLOCKING, LATE_BLOCKING):
                steps[name] = self._run_blocking
            elif name in LATE:
                late = steps[name] = late or self._pipeline(name)
            else:
                steps[name] = self._pipeline(name)
        return steps

    def prepare(self, turn: Turn) -> None:
        """Before each step: its messages are late by what its method says."""
        self._turn = turn
        self._blocking.latency = DELAYED.get(turn.method, 0.0)
        self._delays.set(range(self._settings.stages - 1), DELAYED.get(turn.method, 0.0))

    def save(self) -> None:
        """Leave the times of messages in the settings' folder."""
        self._delays.set((), 0.0)
        bare = [(turn, replace(trace, tasks=(), waits=())) for turn, trace in self._traces]
        traces = [(turn, to_plain(trace)) for turn, trace in bare]
        plain = {"waits": self._waits, "traces": traces}
        (Path(self._settings.folder) / f"{self._rank}.json").write_text(json.dumps(plain))

    def _run_blocking(self, sizes: Sequence[float] | None) -> Callable[[], object]:
        settle = self._blocking(sizes)
        if self._turn.number and self._turn.method == BLOCKING:
            self._waits.append((self._turn, self._blocking.waits))
        return settle

    def _pipeline(self, name: str) -> Step:
        count, last = self._settings.microbatches, self._settings.stages - 1
        options: Any = {"loss_fn": loss_fn, **SILENT, **METHODS[name].options}
        if name in DELAYED:
            options["transport"] = delaying(self._delays)
        [module] = self._stages.of(Form.WHOLE)
        pipe = self._stack.enter_context(Pipeline(module, topology=Topology.from_env(), **options).blocking())
        rows = [torch.zeros(1, 1) for _ in range(count)]
        inputs, targets = rows if self._rank == 0 else None, rows if self._rank == last else None
        kwargs = [{"microbatch": torch.tensor([m])} for m in range(count)]

        def step(sizes: Sequence[float] | None) -> Callable[[], object]:
            result, turn = pipe.step(inputs, targets, kwargs=kwargs, sizes=sizes), self._turn

            def settle() -> None:
                assert result.breakdown is not None
                if turn.number and name in (STRICT, DEFAULT):
                    assert result.trace is not None
                    self._traces.append((turn, result.trace))

            return settle

        return step


def main() -> None:
    """Entry point under torchrun."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    settings = Settings.from_json(sys.argv[1])
    with ExitStack() as stack:
        stages = Stages(dist.get_rank(), settings.stages, NUM_BYTES)
        methods = Methods(settings, stages, stack)
        run_turns(settings, stages, methods.steps(), methods.prepare)
        methods.save()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""One rank of the demo, started by torchrun: trains the same model once per method, the methods alternating by step.

Rank 0 prints one line of JSON for each step; every rank writes its spans and its overrun to the run's folder.
"""

import hashlib
import json
import os
import sys
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rrfp import timeouts
from rrfp.compute.torch_stage import TorchStage
from rrfp.errors import PipelineAborted
from rrfp.lab.demo.model import GptConfig, build_stages, loss_fn
from rrfp.lab.demo.settings import (
    LAYERS,
    LEARNING_RATE,
    MICROBATCH_SIZE,
    SEQUENCE_LENGTH,
    DemoSettings,
    demo_transport,
)
from rrfp.lab.demo.text import batches, load_text
from rrfp.lab.emulated import PacedStage, table_durations
from rrfp.model.topology import Topology
from rrfp.pipeline.api import Pipeline
from rrfp.pipeline.faces import BlockingPipeline
from rrfp.pipeline.partition import Partition
from rrfp.runtime.steps.result import StepResult
from rrfp.trace.plain import to_plain


class MethodRun:
    """One method on this rank, with its own model, optimizer and pipeline."""

    def __init__(self, name: str, settings: DemoSettings, topology: Topology) -> None:
        self.name = name
        self.traces: list[dict[str, Any]] = []
        self._settings = settings
        self._stage = topology.stage
        self._method = method = settings.methods[name]
        partition = Partition(method.graph(topology.stages), settings.deterministic)
        placement = partition.graph.placement
        parts = build_stages(GptConfig(layers=LAYERS), placement.num_virtual_stages, settings.seed)
        self._modules = modules = {v: parts[v] for v in placement.virtual_stages(topology.stage)}
        parameters = [parameter for module in modules.values() for parameter in module.parameters()]
        self._optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE)
        program = TorchStage(modules, partition.graph, loss_fn=loss_fn, in_order=partition.writes_in_order(modules))
        self._paced = None if settings.real_compute else PacedStage(program, lambda task: 0.0)
        options = {**method.options(), "deterministic": settings.deterministic}
        options |= {"transport": demo_transport(settings.transport), "patience": timeouts.WORKERS_PATIENCE_S}
        self._pipeline = Pipeline(program if self._paced is None else self._paced, topology=topology, **options)
        self._pipe: BlockingPipeline | None = None

    def open(self, stack: ExitStack) -> None:
        """Connect; ``stack`` closes it."""
        self._pipe = stack.enter_context(self._pipeline.blocking())

    def step(self, number: int, inputs: list[Tensor], targets: list[Tensor]) -> StepResult:
        """One training step; returns when it has ended on all ranks."""
        # ``Pipeline.step`` alone returns with the loss, while later stages still run: then this rank would begin the
        # next method's step in the meantime, and its wait for the others would count as that method's time.
        assert self._pipe is not None
        if self._paced is not None:
            self._paced.durations = table_durations(self._settings.costs(number, self._method))
        result = self._pipe.step(inputs, targets, sizes=self._settings.sizes(number))
        self._optimizer.step()
        self._optimizer.zero_grad()
        if number >= self._settings.warm_up:
            self.traces.append(to_plain(result.trace))
        elif self._paced is not None:
            self._paced.reset_overrun()
        _ = result.seconds  # waits for the reports of all ranks
        return result

    def write(self, folder: Path) -> None:
        """Write spans and overrun of the measured steps for the command."""
        paced = self._paced
        overrun = None if paced is None else {"planned_s": paced.planned_s, "overrun_s": paced.overrun_s}
        weights = {v: weights_sha256(module) for v, module in self._modules.items()}
        part = {"traces": self.traces, "overrun": overrun, "weights_sha256": weights}
        (folder / f"{self.name}-{self._stage}.json").write_text(json.dumps(part))


def weights_sha256(module: nn.Module) -> list[str]:
    """A digest of all parameters; names, which depend on the cut, do not matter."""
    parameters = (parameter.detach().contiguous().view(torch.uint8) for parameter in module.parameters())
    return [hashlib.sha256(parameter.numpy().tobytes()).hexdigest() for parameter in parameters]


def train(settings: DemoSettings, topology: Topology) -> None:
    text = load_text(settings.text, at_least=SEQUENCE_LENGTH + 1)
    runs = [MethodRun(name, settings, topology) for name in settings.methods]
    data = batches(
        text,
        steps=settings.warm_up + settings.steps,
        microbatches=settings.microbatches,
        microbatch_size=MICROBATCH_SIZE,
        sequence_length=SEQUENCE_LENGTH,
        seed=settings.seed,
    )
    with ExitStack() as stack:
        for run in runs:
            run.open(stack)
        # Called first: while all these pipelines are left, torchrun may end this process.
        stack.push(lambda _, error, __: report_abort(error, topology))
        for number, batch in enumerate(data):
            inputs, targets = [pair[0] for pair in batch], [pair[1] for pair in batch]
            first = number % len(runs)
            for run in (*runs[first:], *runs[:first]):
                result = run.step(number, inputs, targets)
                if topology.stage == 0:
                    report(run.name, number, result)
    for run in runs:
        run.write(Path(settings.out) / "parts")


def report(method: str, number: int, result: StepResult) -> None:
    line = {
        "event": "step",
        "method": method,
        "step": number,
        "seconds": result.seconds,
        "loss": result.loss,
        "peak_held": result.peak_held,
        "peak_bytes": result.peak_bytes,
        "breakdown": [asdict(part) for part in result.breakdown],
    }
    print_line(line)


def report_abort(error: BaseException | None, topology: Topology) -> None:
    if isinstance(error, PipelineAborted):
        print_line({"event": "aborted", "stage": topology.stage, "origin": error.origin.stage, "error": str(error)})


def print_line(line: dict[str, Any]) -> None:
    """Print one line of JSON; raises when the reader is gone."""
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> int:
    torch.set_num_threads(1)
    settings = DemoSettings.from_json(sys.argv[1])
    topology = Topology.from_env()
    print_line({"event": "started", "pid": os.getpid()})
    try:
        train(settings, topology)
    except PipelineAborted as error:
        report_abort(error, topology)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

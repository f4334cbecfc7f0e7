"""Runs stage programs directly, in any order that the graph allows: no loop, no core, no transport."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from rrfp import Batch, StageProgram
from rrfp.compute.loss import gradient_weights
from rrfp.compute.payload import Payload
from rrfp.compute.torch_stage import TorchStage
from rrfp.model.graph import TaskGraph
from rrfp.model.tasks import Kind, Mode, StepId, Task

#: Picks one of the ready tasks.
Choose = Callable[[Sequence[Task]], Task]


def in_order(ready: Sequence[Task]) -> Task:
    return min(ready, key=lambda task: (task.microbatch, task.kind is not Kind.F, task.virtual_stage))


def shuffled(seed: int) -> Choose:
    return random.Random(seed).choice


def travelled(payload: Payload) -> Payload:
    """The payload as a transport between processes delivers it: copies that require grad where the sent tensors did."""

    def copy(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor.detach().clone().requires_grad_(tensor.requires_grad)

    return Payload(tuple(copy(tensor) for tensor in payload.tensors), payload.structure)


def shared(payload: Payload) -> Payload:
    """The payload as a transport within a process may deliver it: the sender's own tensors."""
    return payload


class Run:
    """One step over several programs, task by task."""

    def __init__(
        self,
        programs: Mapping[int, StageProgram],
        graph: TaskGraph,
        step: StepId,
        batch: Batch,
        *,
        wire: Callable[[Payload], Payload] = travelled,
    ) -> None:
        self.programs = programs
        self.graph = graph
        self.step = step
        self.done: dict[Task, Any] = {}
        self.wire = wire
        for program in set(programs.values()):
            program.open(step, batch)
        self.waiting = [
            task for stage in range(graph.placement.stages) for task in graph.tasks(stage, step.microbatches, step.mode)
        ]

    def ready(self) -> list[Task]:
        return [task for task in self.waiting if all(need in self.done for need in self.graph.inputs(task))]

    def execute(self, task: Task) -> None:
        kind, m, v = task
        program = self.programs[v]
        if kind is Kind.W:
            program.weight(task)
            self.done[task] = None
        elif kind is Kind.F:
            inputs = [self.done[Task(Kind.F, m, u)] for u in self.graph.predecessors[v]]
            self.done[task] = program.forward(task, tuple(map(self.wire, inputs)))
        else:
            grads = []
            for w in self.graph.successors[v]:
                position = self.graph.predecessors[w].index(v)
                grads.append(self.wire(self.done[Task(Kind.B, m, w)][position]))
            self.done[task] = program.backward(task, tuple(grads))
        self.waiting.remove(task)

    def finish(self, choose: Choose = in_order) -> None:
        while self.waiting:
            self.execute(choose(self.ready()))


def build(
    modules: Sequence[nn.Module],
    loss_fn: Callable[[Any, Any], Tensor] | None,
    *,
    stages: int | None = None,
    split: bool = False,
) -> tuple[dict[int, TorchStage], TaskGraph]:
    """A chain of stages; with fewer stages than modules, each stage has several chunks."""
    stages = stages or len(modules)
    graph = TaskGraph.chain(stages, chunks=len(modules) // stages, split=split)
    programs: dict[int, TorchStage] = {}
    for stage in range(stages):
        held = graph.placement.virtual_stages(stage)
        program = TorchStage({v: modules[v] for v in held}, graph, loss_fn=loss_fn)
        programs |= dict.fromkeys(held, program)
    return programs, graph


def train(
    modules: Sequence[nn.Module],
    inputs: Sequence[Any],
    targets: Sequence[Any],
    loss_fn: Callable[[Any, Any], Tensor],
    *,
    choose: Choose = in_order,
    stages: int | None = None,
    split: bool = False,
    step: int = 0,
    kwargs: Sequence[Mapping[str, Any]] | None = None,
    weights: Sequence[float] | None = None,
    reduction: str = "mean",
    wire: Callable[[Payload], Payload] = travelled,
) -> dict[int, float]:
    """One training step over fresh stages; returns the losses by microbatch."""
    programs, graph = build(modules, loss_fn, stages=stages, split=split)
    factors = gradient_weights(weights, len(inputs), reduction)
    batch = Batch(inputs, targets, kwargs, factors, training_step=step)
    run = Run(programs, graph, StepId(step, Mode.TRAIN, len(inputs)), batch, wire=wire)
    run.finish(choose)
    return dict(programs[len(modules) - 1].losses())


def gradients(modules: Iterable[nn.Module]) -> list[Tensor | None]:
    return [parameter.grad for module in modules for parameter in module.parameters()]


def assert_same_gradients(actual: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    assert [grad is None for grad in actual] == [grad is None for grad in expected]
    for left, right in zip(actual, expected, strict=True):
        if left is not None and right is not None:
            torch.testing.assert_close(left, right, rtol=1e-12, atol=1e-12)


TRAIN_2 = StepId(0, Mode.TRAIN, 2)
FORWARD_2 = StepId(0, Mode.FORWARD, 2)


def total(output: Tensor, target: Tensor) -> Tensor:
    return (output * target).sum()


def rows(count: int = 2) -> list[Tensor]:
    """Inputs or targets that differ by microbatch."""
    return [torch.ones(3, 4) * (m + 1) for m in range(count)]

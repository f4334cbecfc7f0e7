"""Ranks of a model whose parts form a graph, several a stage: replicas or groups, each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from graphs.graph_models import Model, model
from runtime.children import Children, End
from torch import nn
from torch.distributed import FileStore  # type: ignore[attr-defined]

import rrfp
from rrfp.model.mesh import Mesh
from rrfp.pipeline.faces import BlockingPipeline
from rrfp.testing.reference import reference
from rrfp.transports.rendezvous import StoreRendezvous

Visits = Mapping[str, Sequence[bool]]


@dataclass(frozen=True)
class Job:
    """What all ranks run.

    Attributes:
        model: the name of the model.
        mesh: how ranks are laid out.
        visits: of each replica, in each step; each step's gradients are added to those before.
        is_tied: whether the first weight of every part is the same parameter.
    """

    model: str
    mesh: Mesh
    visits: Sequence[Sequence[Visits]]
    is_tied: bool = False

    def own(self, stage: int | None = None) -> tuple[Model, dict[str, list[nn.Parameter]]]:
        """The model, and the ties of ``stage``; of all, without one."""
        own, first = model(self.model), None
        tied: list[nn.Parameter] = []
        for name, modules in own.modules.items() if self.is_tied else ():
            head: Any = modules[0]
            weight = head.linear.weight
            first = weight if first is None else first
            with torch.no_grad():
                weight.copy_(first)
            if stage in (None, own.graph.parts[name].stages[0]):
                tied.append(weight)
        return own, {"weight": tied} if tied else {}

    def expected(self) -> dict[str, Any]:
        """The gradients of one process that has the batches of all replicas in each step."""
        alone, ties = self.own()
        for step in zip(*self.visits, strict=True):
            together = {name: [visit for visits in step for visit in visits[name]] for name in step[0]}
            inputs = {name: [*own] * len(step) for name, own in alone.inputs.items()}
            targets: Any = [*alone.targets] * len(step)
            if isinstance(alone.targets, Mapping):
                targets = {name: [*own] * len(step) for name, own in alone.targets.items()}
            reference(alone.modules, inputs, targets, loss_fn=alone.loss_fn, graph=alone.graph, visits=together)
        for parameters in ties.values():
            grads = [parameter.grad for parameter in parameters if parameter.grad is not None]
            for parameter in parameters:
                parameter.grad = sum(grads[1:], grads[0]).clone()
        return {name: grad.numpy() for name, grad in alone.gradients().items() if grad is not None}


#: What a rank does inside the ``with`` block.
Program = Callable[[Job, Model, int, BlockingPipeline], Any]


class MeshRanks(Children):
    """One process a rank."""

    def __init__(self, folder: Path, job: Job, program: Program, **options: Any) -> None:
        super().__init__()
        for rank in range(job.mesh.size):
            self.start(f"rank-{rank}", _run, str(folder), rank, job, program, options)
        self._size = job.mesh.size

    def values(self) -> list[Any]:
        """What the program of each rank returned."""
        try:
            ends = [self.end(rank) for rank in range(self._size)]
            assert not any(end.error for end in ends), [end.text for end in ends if end.error]
            return [end.value for end in ends]
        finally:
            self.kill()


def _run(
    folder: str, rank: int, job: Job, program: Program, options: Mapping[str, Any], connection: Connection
) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)
    dist.init_process_group("gloo", init_method=f"file://{folder}/gloo", rank=rank, world_size=job.mesh.size)

    def train() -> Any:
        topology = rrfp.Topology.at(rank, job.mesh)
        own, ties = job.own(topology.stage)
        pipeline = rrfp.Pipeline(
            own.of_stage(topology.stage),
            graph=own.graph,
            topology=topology,
            rendezvous=StoreRendezvous(FileStore(f"{folder}/store", job.mesh.size), run_id="test"),
            loss_fn=own.loss_fn,
            lock_watch=False,
            ties=ties,
            **options,
        )
        with pipeline.blocking() as pipe:
            return program(job, own, topology.replica, pipe)

    connection.send(End.of(train))
    connection.close()
    dist.destroy_process_group()


def trains(job: Job, own: Model, replica: int, pipe: BlockingPipeline) -> Any:
    """The gradients of this rank after all steps, and their norm over the whole model."""
    for visits in job.visits[replica]:
        pipe.step(own.inputs, own.targets, visits=visits)
    gradients = {name: grad.numpy().copy() for name, grad in own.gradients().items() if grad is not None}
    return gradients, pipe.clip_grad_norm_(float("inf"))

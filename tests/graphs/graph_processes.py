"""Ranks of a model whose parts form a graph, each in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from graphs.graph_models import Model, model
from runtime.children import Children, End
from torch.distributed import FileStore  # type: ignore[attr-defined]

import rrfp
from rrfp.pipeline.faces import BlockingPipeline
from rrfp.transports.rendezvous import StoreRendezvous

#: Runs on each rank: its stage, its model, its pipeline and a connection to the test.
Program = Callable[[int, Model, BlockingPipeline, Connection], Any]

#: Makes the model that a rank has.
MakeModel = Callable[[int], Model]


class GraphRanks(Children):
    """One process a stage."""

    def __init__(self, folder: Path, name: str | MakeModel, program: Program, **options: Any) -> None:
        super().__init__()
        make: MakeModel = name if callable(name) else _Named(name)
        self.stages = make(0).stages
        for stage in range(self.stages):
            self.start(f"rank-{stage}", _run, str(folder / "store"), stage, make, program, options)


class _Named:
    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, stage: int) -> Model:
        return model(self._name)


def _run(
    store: str, stage: int, make: MakeModel, program: Program, options: Mapping[str, Any], connection: Connection
) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float64)

    def train() -> Any:
        own = make(stage)
        pipeline = rrfp.Pipeline(
            own.of_stage(stage),
            graph=own.graph,
            topology=rrfp.Topology(stage, own.stages),
            rendezvous=StoreRendezvous(FileStore(store, own.stages), run_id="test"),
            loss_fn=own.loss_fn,
            lock_watch=False,
            **options,
        )
        with pipeline.blocking() as pipe:
            return program(stage, own, pipe, connection)

    connection.send(End.of(train))
    connection.close()


def one_step(stage: int, own: Model, pipe: BlockingPipeline, connection: Connection) -> Any:
    """The loss, and the gradients of this stage by parameter, of one step."""
    result = pipe.step(own.inputs, own.targets, visits=own.visits)
    gradients = {name: grad.numpy() for name, grad in own.gradients().items() if grad is not None}
    return result.loss, gradients


def with_other_visits(stage: int, own: Model, pipe: BlockingPipeline, connection: Connection) -> Any:
    """The last stage is given other visits than the others."""
    assert own.visits is not None
    visits = dict(own.visits)
    if stage == own.stages - 1:
        name = next(iter(visits))
        visits[name] = [True] * len(visits[name])
    pipe.step(own.inputs, own.targets, visits=visits)


def with_other_weights(stage: int, own: Model, pipe: BlockingPipeline, connection: Connection) -> Any:
    """The last stage is given another weight than the others for one microbatch."""
    weights = [1.0, 2.0, 3.0, 4.0 if stage < own.stages - 1 else 5.0]
    pipe.step(own.inputs, own.targets, visits=own.visits, weights=weights)


def steps_for_ever(stage: int, own: Model, pipe: BlockingPipeline, connection: Connection) -> Any:
    """Steps until a rank is killed."""
    for number in range(10**6):
        pipe.step(own.inputs, own.targets, visits=own.visits)
        if number == 2:
            connection.send("stepping")


def declared_elsewhere(stage: int) -> Model:
    """On stage 1 the parts read each other by another name."""
    own = model("diamond")
    if stage != 1:
        return own
    graph = rrfp.Graph()
    root = graph.part("root", stages=[0])
    sides = {name: graph.part(name, stages=[at], reads={"y": root}) for name, at in (("left", 1), ("right", 2))}
    graph.part("end", stages=[3], reads={**sides, "root": root})
    return Model(graph, own.modules, own.inputs, own.visits, own.targets)

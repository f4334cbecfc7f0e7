"""A rank of a run that saves or resumes, on any layout; run by torchrun's variables. Prints one line of JSON."""

from __future__ import annotations

import hashlib
import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from runtime.toys import data, loss_fn
from torch import Tensor, nn

import rrfp
from rrfp import checkpoint
from rrfp.errors import ConfigError
from rrfp.model.placement import Layout, Placement

WIDTH, LAYERS = 6, 4


@dataclass(frozen=True)
class Run:
    """What a run is asked for.

    Attributes:
        folder: of its checkpoints.
        stages: N; what is left of the ranks are replicas.
        steps: to which it trains, from the newest checkpoint, if there is one.
        layout: of the chunks.
        virtual_stages: into which the layers are cut.
        dropout: of each layer.
        shared: whether replicas share the microbatches of one batch, or have one each.
        norm: whether each layer has a BatchNorm.
        save: "only": never, "save": after each step, "collide": with names of a stage alone.
    """

    folder: str
    stages: int
    steps: int
    layout: Layout = "looped"
    virtual_stages: int = LAYERS
    dropout: float = 0.25
    shared: bool = False
    norm: bool = False
    save: str = "only"

    def parts(self, stage: int) -> list[dict[str, nn.Module]]:
        """The layers of each chunk of a stage, by their names."""
        placement = Placement(self.stages, self.virtual_stages // self.stages, self.layout)
        count = LAYERS // self.virtual_stages
        return [
            {
                f"layers.{number}": layer(number, self.dropout, norm=self.norm)
                for number in range(v * count, (v + 1) * count)
            }
            for v in placement.virtual_stages(stage)
        ]


def layer(number: int, dropout: float, *, norm: bool = False) -> nn.Module:
    torch.manual_seed(number)
    more = [nn.BatchNorm1d(WIDTH)] if norm else []
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *more, nn.Tanh(), nn.Dropout(dropout)).double()


class Warnings(logging.Handler):
    """Keeps what RRFP warns of."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def adamw(parts: Mapping[str, nn.Module]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for part in parts.values() for p in part.parameters()], lr=0.01)


def microbatches(step: int, replica: int, replicas: int, *, shared: bool) -> tuple[list[Tensor], list[Tensor]]:
    """Inputs and targets of a replica."""
    batch = data(4, seed=step if shared else 10 * replica + step)
    own = slice(replica, None, replicas) if shared else slice(None)
    return batch.inputs[own], batch.targets[own]


def train(run: Run) -> dict[str, object]:
    """Train on this rank."""
    dist.init_process_group("gloo")
    topology = rrfp.Topology.from_env(dims={"pp": run.stages, "dp": dist.get_world_size() // run.stages})
    chunks = run.parts(topology.stage)
    parts = {name: part for chunk in chunks for name, part in chunk.items()}
    optimizer = adamw(parts)
    pipeline = rrfp.Pipeline(
        [nn.Sequential(*chunk.values()) for chunk in chunks],
        topology=topology,
        loss_fn=loss_fn,
        deterministic=True,
        placement=run.layout,
        transport="zmq",
    )
    folder = Path(run.folder)
    if run.save == "collide":
        with pytest.raises(ConfigError) as caught:
            checkpoint.save(folder, next(iter(parts.values())), pipe=pipeline)
        dist.destroy_process_group()
        return {"rank": topology.rank, "error": str(caught.value)}
    warnings = Warnings()
    logging.getLogger("rrfp").addHandler(warnings)
    loaded = checkpoint.load(folder, parts, optimizer, pipe=pipeline)
    logging.getLogger("rrfp").removeHandler(warnings)
    first, losses = 0 if loaded is None else loaded.step, []
    with pipeline.blocking() as pipe:
        for step in range(first, run.steps):
            inputs, targets = microbatches(step, topology.replica, topology.replicas, shared=run.shared)
            if run.norm:  # of one row there is no variance
                inputs, targets = [torch.cat([x, -x]) for x in inputs], [torch.cat([y, y]) for y in targets]
            losses.append(pipe.step(inputs, targets).loss)
            optimizer.step()
            optimizer.zero_grad()
            if run.save == "save":
                saving = checkpoint.async_save(folder, parts, optimizer, pipe=pipe, extra=topology.replica, keep=2)
        if run.save == "save":
            saving.result()
    digests, values = {}, {}
    for name, part in parts.items():
        # Sorted: a loaded state has its keys in the order of the checkpoint.
        states = [s for p in part.parameters() for s in (p, *(s for _, s in sorted(optimizer.state[p].items())))]
        values[name] = [float(value) for p in part.parameters() for value in p.detach().flatten()]
        digests[name] = hashlib.sha256(b"".join(s.detach().numpy().tobytes() for s in states)).hexdigest()
    buffers = {f"{name}.{own}": b.tolist() for name, part in parts.items() for own, b in part.named_buffers()}
    extra = None if loaded is None else loaded.extra
    dist.destroy_process_group()
    report = {"rank": topology.rank, "first": first, "losses": losses, "extra": extra}
    return {**report, "digests": digests, "values": values, "buffers": buffers, "warnings": warnings.texts}


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.stdout.write(json.dumps(train(Run(**json.loads(sys.argv[1])))) + "\n")

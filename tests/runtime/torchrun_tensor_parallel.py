"""Sharded models under real collectives on 4 or 8 ranks, compared with the one-process reference.

Every rank delivers its tensors late at random, each in its own way, so that the members of a group see other tasks
ready at the same moment. 4 ranks, with torchrun's variables: pp x tp, dp x tp and pp x dp; at the end one raises while
its like waits for it in a collective; prints one JSON line a rank. 8 ranks: the case `three_dims`, pp x dp x tp.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from on_device import on_double_if_asked
from runtime.late import Late
from runtime.sharded_gpt import LENGTH, VOCABULARY, WIDTH, build, largest_difference, shard
from runtime.tensor_parallel_cases import CASES, FEW, ON_DOUBLE, ONE_ON_DOUBLE
from runtime.toys import TOLERANCE
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import loss_parallel

import rrfp
from rrfp.compute.rng import replica_seed
from rrfp.compute.split import backward as split_backward
from rrfp.errors import ConfigError, PipelineAborted
from rrfp.model.placement import Placement
from rrfp.pipeline.faces import BlockingPipeline
from rrfp.testing.reference import reference

RANK = int(os.environ["RANK"])

#: Options of a case that are not the pipeline's.
OWN = ("model", "evaluate", "tokens", "chunks", "fully_shard")
STEPS = 2


@dataclass
class Batch:
    """The microbatches of one replica in one step, of different shapes; and their weights."""

    inputs: list[Tensor]
    targets: list[Tensor]
    weights: list[float] | None


def batch(case: dict[str, Any], replica: int, step: int) -> Batch:
    """What ``replica`` is given; each another number of microbatches."""
    generator = torch.Generator().manual_seed(10 * step + replica)
    count = 3 + 2 * replica
    lengths = [LENGTH - 2 * ((m + replica) % 2) for m in range(count)]
    is_bare = case.get("model") == "bare"

    def draw(length: int) -> Tensor:
        if is_bare:
            return torch.randn(2, length, WIDTH, dtype=torch.float64, generator=generator)
        return torch.randint(VOCABULARY, (2, length), generator=generator)

    weights = [float(length) for length in lengths] if case.get("tokens") else None
    return Batch([draw(length) for length in lengths], [draw(length) for length in lengths], weights)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Case:
    """One pipeline, its steps and what they must give.

    Args:
        mesh: pp, dp and tp.
        options: the case's.
    """

    def __init__(self, mesh: DeviceMesh, options: dict[str, Any]) -> None:
        self.mesh, self.case = mesh, options
        self.coordinate = ("tp", "dp") if options.get("fully_shard") else ("tp",)
        self.place = rrfp.Topology.from_mesh(mesh, self.coordinate)
        placement = Placement(self.place.stages, options.get("chunks", 1), options.get("placement", "looped"))
        mine = placement.virtual_stages(self.place.stage)
        model, count = options.get("model", "gpt"), placement.num_virtual_stages
        self.expected = build(model, count)
        stages = build(model, count)
        self.own, self.theirs = [stages[v] for v in mine], [self.expected[v] for v in mine]
        for stage in self.own if mesh["tp"].size() > 1 else ():
            shard(stage, mesh["tp"])
        for stage in self.own if options.get("fully_shard") else ():
            fully_shard(stage, mesh=mesh["dp"])
        self.loss_fn = nn.functional.mse_loss if model == "bare" else cross_entropy
        self.worst, self.disagreements = 0.0, 0

    def run(self) -> None:
        """Train some steps, gradients accumulating, and evaluate."""
        options = {name: value for name, value in self.case.items() if name not in OWN}
        options = {"transport": Late, **options, "coordinate": self.coordinate, "loss_fn": self.loss_fn}
        is_sharded_loss = self.case.get("model") == "sharded loss"
        with (
            loss_parallel() if is_sharded_loss else nullcontext(),
            rrfp.Pipeline(self.own, mesh=self.mesh, **options).blocking() as pipe,
        ):
            for step in range(STEPS):
                own = batch(self.case, self.place.replica, step)
                is_last = step == STEPS - 1
                result = pipe.step(own.inputs, own.targets, weights=own.weights, reduce_gradients=is_last)
                self._compare(result, self._expect(step))
            wanted = nn.utils.get_total_norm(
                [p.grad for v in self.expected for p in v.parameters() if p.grad is not None]
            )
            clipped = pipe.clip_grad_norm_(float("inf"))  # does nothing but tell the norm
            self.worst = max(self.worst, abs(clipped - float(wanted)), largest_difference(self.own, self.theirs))
            if self.case.get("evaluate"):
                self._evaluate(pipe)

    def _evaluate(self, pipe: BlockingPipeline) -> None:
        own = batch(self.case, self.place.replica, STEPS)
        result = pipe.evaluate(own.inputs, own.targets, weights=own.weights)
        with torch.no_grad():
            self._compare(result, self._expect(STEPS))

    def _expect(self, step: int) -> float:
        """What one process computes: the replicas' batches one after the other. Returns the loss."""
        batches = [batch(self.case, replica, step) for replica in range(self.place.replicas)]
        reduction, loss = self.case.get("reduction", "mean"), 0.0
        totals = [sum(each.weights or [1.0] * len(each.inputs)) for each in batches]
        for replica, (each, total) in enumerate(zip(batches, totals, strict=True)):
            share = total / sum(totals) if reduction == "mean" else 1.0
            wanted = reference(
                self.expected,
                each.inputs,
                each.targets,
                loss_fn=self.loss_fn,
                weights=each.weights,
                reduction=reduction,
                seed=replica_seed(0, replica),
                step=step,
                grad_scale=share,
            )
            assert wanted.loss is not None
            loss += share * wanted.loss
        return loss

    def _compare(self, result: rrfp.StepResult, loss: float) -> None:
        """The loss with the reference's, and what the ranks saw with each other."""
        assert result.loss is not None
        self.worst = max(self.worst, abs(result.loss - loss))
        tasks = sorted(result.trace.tasks, key=lambda span: span.start)
        arrivals = [message.arrived for message in result.trace.messages if message.arrived is not None]
        #: For each task that ran, how many messages had come before it.
        seen = [sum(arrived < span.start for arrived in arrivals) for span in tasks]
        told = (self.place.stage, self.place.replica, [str(span.task) for span in tasks], seen, result)
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, (*told[:4], result.loss, result.losses, result.peak_held))
        for stage, replica, order, theirs, total, losses, held in everyone:
            assert total == result.loss
            if replica == self.place.replica:
                assert (losses, held) == (result.losses, result.peak_held)
                if stage == self.place.stage:
                    assert order == told[2]
                    self.disagreements += sum(a != b for a, b in zip(seen, theirs, strict=True))

    def bits(self) -> list[Tensor]:
        """This rank's part of every gradient."""
        gradients = [parameter.grad for stage in self.own for parameter in stage.parameters()]
        return [torch.as_tensor(getattr(one, "_local_tensor", one)) for one in gradients]


def examine(mesh: DeviceMesh, options: dict[str, Any]) -> tuple[float, int]:
    """The largest difference to the reference, and how often members saw other tasks ready than this rank."""
    case = Case(mesh, options)
    case.run()
    if options.get("deterministic"):
        again = Case(mesh, options)
        again.run()
        assert all(map(torch.equal, case.bits(), again.bits()))
    return case.worst, case.disagreements


class Stumble(nn.Module):
    """Rank 1 raises where the others go on to their collective."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        if RANK == 1:
            raise ValueError("enough")
        out: Tensor = self.inner(x)
        return out


def abort_beside_a_collective(mesh: DeviceMesh) -> float:
    """Seconds until this rank has the error; rank 0 is left in a collective then, and must end all the same."""
    case = Case(mesh, {})
    own = batch({}, 0, 0)
    with_stumble = [Stumble(stage) for stage in case.own]
    began = time.monotonic()
    try:
        with rrfp.Pipeline(with_stumble, mesh=mesh, loss_fn=cross_entropy).blocking() as pipe:
            pipe.step(own.inputs, own.targets)
    except PipelineAborted as aborted:
        assert "ValueError: enough" in str(aborted), aborted  # noqa: PT017
        return time.monotonic() - began
    raise AssertionError("the step went through")


def refusal(mesh: DeviceMesh) -> str:
    """What is said to a model that is sharded over a dim which is not coordinated."""
    (stage,) = build("bare", 1)
    shard(stage, mesh["dp"])
    try:
        rrfp.Pipeline(stage, mesh=mesh, loss_fn=nn.functional.mse_loss)
    except ConfigError as error:
        return str(error)
    return ""


def say(report: dict[str, Any]) -> None:
    """In one piece, since the ranks share a pipe."""
    sys.stdout.write(json.dumps({"rank": RANK, **report}) + "\n")
    sys.stdout.flush()


def meshes(sizes: Sequence[tuple[int, int, int]]) -> dict[tuple[int, int, int], DeviceMesh]:
    return {size: init_device_mesh("cpu", size, mesh_dim_names=("pp", "dp", "tp")) for size in sizes}


def examine_all(
    known: Mapping[tuple[int, int, int], DeviceMesh], cases: Mapping[tuple[int, int, int], list[dict[str, Any]]] = CASES
) -> tuple[dict[str, float], int]:
    """The largest difference by case, and how often members saw other tasks ready than this rank."""
    split_backward.MIN_FLOPS = 0.0  # or nothing of this size would be deferred
    worst: dict[str, float] = {}
    disagreements = 0
    for size, mesh in known.items():
        for options in cases[size]:
            name = " ".join([*map(str, size), *(f"{key}={value}" for key, value in options.items())])
            worst[name], seen = examine(mesh, options)
            disagreements += seen if size[2] > 1 else 0
    return worst, disagreements


def three_dims(rank: int) -> None:
    """Eight ranks: all gradients are right; and it was no matter of members that saw the same."""
    worst, disagreements = examine_all(meshes([(2, 2, 2)]))
    assert len(worst) == 3
    assert {name: gap for name, gap in worst.items() if not gap < TOLERANCE} == {}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, disagreements)
    assert sum(everyone) > 0


def main(what: str) -> None:
    """Run the cases on this rank, of four: ``all``, ``few``, or for the device double ``double`` or ``one double``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if "double" in what:
        cases = ON_DOUBLE if what == "double" else ONE_ON_DOUBLE
        worst, disagreements = examine_all(meshes(list(cases)), cases)
        dist.destroy_process_group()
        return say({"worst": worst, "disagreements": disagreements})
    known = meshes([size for size in CASES if math.prod(size) == dist.get_world_size()])
    worst, disagreements = examine_all(known, FEW if what == "few" else CASES)
    refused = refusal(known[1, 2, 2])
    abort_s = abort_beside_a_collective(known[2, 1, 2])
    dist.destroy_process_group()
    say({"worst": worst, "disagreements": disagreements, "abort_s": abort_s, "refused": refused})


if __name__ == "__main__":
    with on_double_if_asked():
        main(sys.argv[1])

"""Programs of ranks in processes of their own, whose models are tied between stages."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fork_server import context
from on_device import on_double_if_asked
from runtime.tied_models import tied, words
from runtime.toys import loss_fn, placed
from torch import Tensor, nn

import rrfp
from rrfp.compute.rng import replica_seed
from rrfp.model.mesh import Mesh
from rrfp.pipeline.faces import BlockingPipeline
from rrfp.testing.reference import reference
from rrfp.transports.rendezvous import StoreRendezvous

MICROBATCHES = 5

#: The virtual stages of two looped chunks, beside the first, that use the tied weight: both are of the second stage.
LOOPED_HEADS = (1, 3)


@dataclass
class Rank:
    """What a program gets: its place, its modules, the weight that is tied, and a line to the test."""

    place: rrfp.Topology
    modules: list[nn.Module]
    weights: list[nn.Parameter]
    connection: Connection

    @property
    def is_last(self) -> bool:
        return self.place.stage == self.place.stages - 1


@dataclass
class End:
    """How a program ended, and when, by ``time.monotonic()``."""

    value: Any
    error: BaseException | None
    at: float


Program = Callable[[BlockingPipeline, Rank], Any]


class TiedProcesses:
    """Runs ``program`` on every rank of ``stages`` x ``replicas``, over zmq.

    Args:
        folder: where the ranks meet.
        stages: N. The first and the last virtual stage share a weight: with a V of two chunks, which are both on the
            first stage, as one object. With two stages of two looped chunks it is the first one, and the two of the
            second stage, which are one object.
        program: importable.
        replicas: copies of the pipeline.
        options: of the pipelines.
    """

    def __init__(self, folder: Path, stages: int, program: Program, replicas: int = 1, **options: Any) -> None:
        forked = context()
        self.lines: list[Connection] = []
        self.processes: list[Any] = []
        for rank in range(stages * replicas):
            here, there = forked.Pipe()
            process = forked.Process(target=_run, args=(str(folder), rank, stages, replicas, program, options, there))
            process.start()
            there.close()
            self.lines.append(here)
            self.processes.append(process)

    def hear(self, rank: int) -> Any:
        """What a rank's program says next, at last an `End`."""
        assert self.lines[rank].poll(30), f"rank {rank} says nothing"
        return self.lines[rank].recv()

    def kill(self) -> None:
        """Leave nothing behind."""
        for process in self.processes:
            process.kill()
            process.join(10)
        for line in self.lines:
            line.close()


def _run(
    folder: str, rank: int, stages: int, replicas: int, program: Program, options: dict[str, Any], line: Connection
) -> None:
    torch.set_num_threads(1)
    place = rrfp.Topology.at(rank, Mesh((("dp", replicas), ("pp", stages))))
    if replicas > 1:
        world = stages * replicas
        dist.init_process_group("gloo", rank=rank, world_size=world, init_method=f"file://{folder}/gloo")
    store = dist.FileStore(f"{folder}/store", stages * replicas)  # type: ignore[attr-defined]
    is_v, is_looped = (options.get("placement") == layout for layout in ("v", "looped"))
    parts, weights = tied(stages * (1 + (is_v or is_looped)), LOOPED_HEADS if is_looped else (), objects=is_v)
    own = placed(parts, stages, "v" if is_v else "looped")[place.stage]
    if is_looped and place.stage == 1:
        own[1][1].weight = own[0][1].weight  # type: ignore[index]
    mine = [weight for weight in weights if any(weight is p for part in own for p in part.parameters())]
    value, error = None, None
    try:
        with on_double_if_asked():
            pipeline = rrfp.Pipeline(
                own,
                topology=place,
                rendezvous=StoreRendezvous(store, run_id="tied"),
                loss_fn=loss_fn,
                ties={"embedding": mine} if mine and not is_v else None,
                **options,
            )
            with pipeline.blocking() as pipe:
                value = program(pipe, Rank(place, own, mine, line))
    except Exception as caught:
        error = caught
    line.send(End(value, error, time.monotonic()))
    line.close()


def three_steps(pipe: BlockingPipeline, rank: Rank) -> tuple[bool, float, list[list[float]]]:
    """Train three steps, gradients of two and then of one.

    Returns:
        Whether the gradients have the bits of the reference over all replicas, how far they are from them, and the
        tied weight after all steps.
    """
    stage, stages, replicas = rank.place.stage, rank.place.stages, rank.place.replicas
    is_looped = len(rank.modules) == 2 and len(rank.weights) == 1
    theirs, _ = tied(stages * len(rank.modules), LOOPED_HEADS if is_looped else (), objects=True)
    likes = placed(theirs, stages, "looped" if is_looped or len(rank.modules) == 1 else "v")[stage]
    optimizers = [_optimizer(rank.modules), _optimizer(theirs)]
    exact, worst = True, 0.0
    for number in range(3):
        pipe.step(*words(MICROBATCHES, 10 * rank.place.replica + number))
        for replica in range(replicas):
            batch, seed = words(MICROBATCHES, 10 * replica + number), replica_seed(0, replica)
            reference(theirs, *batch, loss_fn=loss_fn, step=number, seed=seed, grad_scale=1.0 / replicas)
        pairs = [(p.grad, q.grad) for p, q in _pairs(rank.modules, likes)]
        exact = exact and all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)
        worst = max(worst, *((a - b).abs().max().item() for a, b in pairs if a is not None and b is not None))
        if number > 0:
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return exact, worst, [weight.detach().flatten().tolist() for weight in rank.weights]


def hang_in_the_last_weight(pipe: BlockingPipeline, rank: Rank) -> None:
    """The last stage sends all input gradients, and never ends its last weight task."""
    _hang(pipe, rank, rank.is_last)


def hang_in_the_first_weight(pipe: BlockingPipeline, rank: Rank) -> None:
    """The first stage never ends its last weight task; the last one has given away its copy's gradient before."""
    _hang(pipe, rank, rank.place.stage == 0)


def _hang(pipe: BlockingPipeline, rank: Rank, is_victim: bool) -> None:
    seen: list[Tensor] = []

    def hang(parameter: Tensor) -> None:
        seen.append(parameter)
        if len(seen) == MICROBATCHES:
            rank.connection.send("hangs")
            time.sleep(60)

    if is_victim:
        rank.weights[0].register_post_accumulate_grad_hook(hang)  # type: ignore[no-untyped-call]
    pipe.step(*words(MICROBATCHES))


def _optimizer(modules: Sequence[nn.Module]) -> torch.optim.Optimizer:
    return torch.optim.SGD(dict.fromkeys(p for m in modules for p in m.parameters()), lr=0.5, momentum=0.9)


def _pairs(ours: Sequence[nn.Module], theirs: Sequence[nn.Module]) -> list[tuple[nn.Parameter, nn.Parameter]]:
    pairs = zip(ours, theirs, strict=True)
    return [pair for a, b in pairs for pair in zip(a.parameters(), b.parameters(), strict=True)]

"""Models, placements and the one-process reference of the tests of `ScheduleRRFP`. Runs on ranks of gloo."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

import rrfp
from rrfp.integrations.torch import ScheduleRRFP

WIDTH = 6
CPU = torch.device("cpu")

#: The most that a gradient may differ from the reference's, whose sums have another order.
CLOSE = 1e-12


class Block(nn.Module):
    """A residual block that takes keywords."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(x)))
        return y if scale is None else y * scale


def loss_fn(output: Tensor, target: Tensor, factor: float = 1.0) -> Tensor:
    return factor * (output - target).square().mean()


def blocks(count: int, make: Callable[[], nn.Module] = Block, seed: int = 0) -> list[nn.Module]:
    """The same modules on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return [make() for _ in range(count)]


def held(rank: int, ranks: int, chunks: int, vee: bool) -> list[int]:
    """The stages of a rank."""
    return [c * ranks + (ranks - 1 - rank if vee and c % 2 else rank) for c in range(chunks)]


def batch(step: int, rows: int, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    x, y = torch.randn(2, rows, 3, width, generator=generator)
    return x, y


class WeightsLast(rrfp.Hint):
    """Postpones the weight tasks of a step until its last backward, then takes them in the order of ``key``."""

    may_wait = True

    @staticmethod
    def key(task: rrfp.Task) -> int:
        """The smallest comes first."""
        raise NotImplementedError

    def choose(self, ready: rrfp.ReadySet, view: rrfp.View) -> rrfp.Task | None:
        if (task := ready.first(rrfp.Kind.B) or ready.first(rrfp.Kind.F)) is not None:
            return task
        if view.num_enqueued(rrfp.Kind.B) < view.microbatches * view.placement.chunks:
            return None
        return min(ready, key=self.key)


def only(condition: bool, **values: Any) -> dict[str, Any]:
    """The keyword arguments of the ranks for which ``condition`` holds."""
    return values if condition else {}


@dataclass
class Reference:
    """One process: the microbatches in order.

    Attributes:
        modules: of all stages.
        losses: by microbatch, of the last `run`.
        outputs: by microbatch.
    """

    modules: Sequence[nn.Module]
    losses: list[Tensor] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)

    def run(
        self,
        inputs: Iterable[tuple[Any, ...]],
        targets: Iterable[Any],
        *,
        loss: Callable[..., Tensor] = loss_fn,
        scales: bool = True,
        kwargs: Sequence[dict[str, Any]] | None = None,
    ) -> None:
        """Add the gradients of one step."""
        self.losses, self.outputs = [], []
        for m, (args, target) in enumerate(zip(inputs, targets, strict=True)):
            value: Any = args
            for module in self.modules:
                given = value if isinstance(value, tuple) else (value,)
                value = module(*given, **({} if kwargs is None else kwargs[m]))
            one = loss(value, target)
            torch.autograd.backward(one)
            self.losses.append(one.detach())
            self.outputs.append(value.detach() if isinstance(value, Tensor) else value)
        for module in self.modules if scales else ():
            for parameter in module.parameters():
                if parameter.grad is not None:
                    parameter.grad.div_(len(self.losses))


class Rank:
    """One rank of a pipeline of equal blocks, with a reference of its own.

    Args:
        chunks: stages of a rank.
        microbatches: M.
        vee: whether stages lie in a V.
        table: instead of ``chunks`` and ``vee`` the rank of each stage.
        make: makes a module.
        loss: of a microbatch; None for none.
        group: the process group of the stages; all ranks by default.
        wrap: changes a module before its stage is made.
        stage_options: of every `PipelineStage`.
        options: of the schedule.
    """

    def __init__(
        self,
        chunks: int = 1,
        microbatches: int = 4,
        *,
        vee: bool = False,
        table: Sequence[int] = (),
        make: Callable[[], nn.Module] = Block,
        loss: Callable[..., Tensor] | None = loss_fn,
        group: Any = None,
        wrap: Callable[[nn.Module], nn.Module] = lambda module: module,
        stage_options: Callable[[int], dict[str, Any]] = lambda v: {},
        **options: Any,
    ) -> None:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        self.virtual = len(table) or ranks * chunks
        self.mine = [v for v, other in enumerate(table) if other == rank] or held(rank, ranks, chunks, vee)
        self.modules = {v: module for v, module in enumerate(blocks(self.virtual, make)) if v in self.mine}
        self.reference = Reference(blocks(self.virtual, make))
        wrapped = {v: wrap(module) for v, module in self.modules.items()}
        self.stages = [
            PipelineStage(wrapped[v], v, self.virtual, CPU, group=group, **stage_options(v)) for v in self.mine
        ]
        self.is_first, self.is_last = 0 in self.mine, self.virtual - 1 in self.mine
        self.microbatches = microbatches
        self.schedule = ScheduleRRFP(self.stages, microbatches, loss, **options)

    def arguments(self, x: Any, y: Any, losses: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of `step` on this rank."""
        return (x,) if self.is_first else (), {"target": y, "losses": losses} if self.is_last else {}

    def error(self) -> float:
        """The largest difference between a gradient of this rank and the reference's; inf if one has none."""
        pairs = [
            pair
            for v in self.mine
            for pair in zip(self.modules[v].parameters(), self.reference.modules[v].parameters(), strict=True)
        ]
        return max(difference(own.grad, other.grad) for own, other in pairs)

    def zero_grad(self) -> None:
        for module in (*self.modules.values(), *self.reference.modules):
            module.zero_grad()

    def steps(self, count: int = 1, *, exact: bool = True) -> None:
        """Run steps, and compare gradients with the reference, and losses and outputs, to the bit if ``exact``."""
        for number in range(count):
            x, y = batch(number, 2 * self.microbatches)
            losses: list[Any] = []
            args, kwargs = self.arguments(x, y, losses)
            output = self.schedule.step(*args, **kwargs)
            self.reference.run(((part,) for part in x.chunk(self.microbatches)), y.chunk(self.microbatches))
            self.compare(output, losses, exact=exact)
            self.zero_grad()

    def compare(self, output: Any, losses: list[Any], close: float = CLOSE, *, exact: bool = True) -> None:
        """Gradients, and on the last rank losses and outputs, are the reference's."""
        assert self.error() <= close, self.error()
        if self.is_last:
            allowed = 0.0 if exact else CLOSE
            torch.testing.assert_close(losses, self.reference.losses, rtol=0, atol=allowed)
            torch.testing.assert_close(output, torch.cat(self.reference.outputs), rtol=0, atol=allowed)
        else:
            assert output is None
            assert losses == []


def difference(own: Tensor | None, other: Tensor | None) -> float:
    """The largest difference of two gradients, of which a DTensor is made full; inf if only one is there."""
    if own is None or other is None:
        return 0.0 if own is other else float("inf")
    full = own.full_tensor() if hasattr(own, "full_tensor") else own
    return (full - other).abs().max().item()
